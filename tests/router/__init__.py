"""The router as its users hold it, and its record of what lies where."""
