"""Placement says which store a destination lives in: the record of that, open stores, directories, and reconciling with
the disk.

    registry.for_store(destination, lambda store: store.depth(destination))

| where | what |
|---|---|
| `registry` | finds, makes and records the store of a destination, and calls with it |
| `routing`, `near_names` | what the configuration says of a destination; what may be a slip |
| `record`, `bindings` | the durable record, and where it is |
| `open_stores`, `attempt` | which stores are open; how a call is tried again if one was closed meanwhile |
| `deferred_sends` | sends that must not wait until a store is open |
| `gates` | destinations that are about to move to another store |
| `removal` | destinations that go, with the stores that were theirs alone |
| `on_disk`, `reconcile`, `changed_kinds` | configuration, record and disk, compared at each open |

The record is synced before a store's first use (invariant 6).
"""
