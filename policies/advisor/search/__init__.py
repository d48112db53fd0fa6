"""The division of destinations into stores: the search, its exact judge, and the filters of what it finds."""
