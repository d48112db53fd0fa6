"""Changes of a store as values, and the order in which they happen: changes, plans, branches of transactions.

A ticket holds the changes that take effect together; a plan gives them their seqs; a table applies them.
"""
