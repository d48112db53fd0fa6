"""Which destinations should share a store: the search, its exact judge, and the filters of what it finds."""
