"""Which store a destination lives in: the record of that, open stores, directories, and what agrees with the disk.

The record is synced before a store's first use (invariant 6).
"""
