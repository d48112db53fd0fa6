"""Which destinations should share a store: the search, and the filters and names of what it finds."""
