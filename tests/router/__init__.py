"""The router as its users hold it. Its transactions, messages and placement are in the folders of these names."""
