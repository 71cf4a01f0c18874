"""The command line as ``python -m slipcast.cli``."""

from slipcast.cli import main

main()
