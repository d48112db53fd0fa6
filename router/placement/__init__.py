"""Placement says which store a destination lives in: the record of that, open stores, directories, and reconciling with
the disk.

The record is synced before a store's first use (invariant 6).
"""
