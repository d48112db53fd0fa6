"""The log alone: no message, no store."""
