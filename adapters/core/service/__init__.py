"""The services of a store for its callers: send, receive, settle leases, transactions of one store, purge, statistics.

Each module is one of these, made by `store` and called through it.
"""
