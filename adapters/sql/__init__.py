"""The SQL store."""
