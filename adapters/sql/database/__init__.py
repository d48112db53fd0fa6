"""The database of SQL stores: connections, tables, statements, and what differs between databases."""
