"""Knowledge that a store has without asking its backend: destinations, leases, order, seen ids. Imports record.

All of it is in memory, and made anew from the backend's rows when a store is opened; no crash can damage it.
"""
