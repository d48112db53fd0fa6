"""The index of a journal store in LMDB: which messages there are and where. All of it can be made anew from the log.

| where | what |
|---|---|
| `index` | its tables; checkpoints |
| `rows`, `row_format` | its rows of messages; their bytes |
| `transaction_rows` | its rows of prepared and committed transactions |
| `states` | what it keeps of destinations and subscriptions |
| `file` | LMDB's environment, verified before LMDB gets it |
| `checksums`, `lmdb_format` | a checksum of each page; what the bytes of a page say |

A crash leaves the last checkpoint (rule X3).
"""
