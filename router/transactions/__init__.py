"""Transactions over any stores: all or nothing, whatever crash comes.

    with router.transaction() as tx:                    # api/transaction.py: what its user holds
        tx.ack(order)
        tx.send("queue://packed,queue://audit", b"...")

Each is one `GlobalTransaction`, with a `Participant` for each store, in one `TransactionTable`. Its states and the
moves between them are written down in `states`, and nowhere else:

    active ---> preparing ---> prepared ---> in doubt ---> decided ---> done

| where | what |
|---|---|
| `states` | the state machine; what a crash leaves of each state |
| `global_transaction`, `participant` | one transaction; what it does in one store, and how it is prepared there |
| `table` | all that are known: by id, by xid, by age; limits and timeouts |
| `operations` | what an open transaction does, in order, before a store hears of it |
| `api/transaction` | what a user holds: sends, acks, savepoints, commit |
| `coordinator` | the two phases around a record in the decision log; what Ctrl-C has cut off |
| `primary` | a store that other processes may take over, whose own commit is the decision |
| `resolver` | `resolve`, which commit, reopening, retry and operator call: to the end that can be reached now |
| `outcomes` | what transaction managers (XA) and operators decide; what waits for them |
| `decision_cleanup` | decisions are forgotten once all their stores have them on disk |

A commit over several stores goes down, and calls nothing above it: `coordinator.commit`, `participant.prepare`,
`decision_log.decide`, `resolver.resolve`.

A crash loses nothing of what is in memory here: what is decided is in the decision log (`decision_log.py`), what
is prepared in the stores. docs/transactions.md says what survives what.
"""
