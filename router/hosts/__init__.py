"""Interfaces of other people's: managers of the `transaction` package, and Python's DB-API. Imports the api alone."""
