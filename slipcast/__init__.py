"""slipcast."""
