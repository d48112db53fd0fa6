"""Golden bytes; README.md says of what."""
