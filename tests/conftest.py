"""What all tests share: the support package on the path, and the marker for machines with a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
