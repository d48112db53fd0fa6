"""What a store knows without asking its backend: destinations, who holds what, order, seen ids. Imports record.

All of it is in memory, and made anew from the backend's rows when a store is opened; no crash can damage it.
"""
