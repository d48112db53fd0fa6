"""Keyed values: maps, whose messages are values and whose message ids are the keys."""
