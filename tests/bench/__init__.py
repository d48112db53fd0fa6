"""Benchmarks: Anabranch beside its peers, alternately, on one machine.

    python -m tests.bench --scenario send-sync --peers anabranch,sqlite3,raw --n 20000 --threads 1 --rounds 3
    python -m tests.bench --scenario all                    # every scenario, every peer, its default count
    python -m tests.bench.page                              # the table of docs/performance.md

Each run is a process of its own on a fresh directory of a real disk (`--dir`; tmpfs is refused, since a sync there
costs nothing). Within a round each peer runs once, and the order turns by one from round to round. Each run prints one
JSON line to stdout; at the end a table of medians and ratios goes to stderr. Quote medians of at least three rounds:
one run on a busy machine says nothing. No timing is ever an assertion.

A scenario (scenarios.py) drives a peer (peers/) through a handful of calls that it has; a peer that lacks one is left
out by name. The calls of a peer are its library's own bound methods wherever that is possible, so that the harness
adds nothing.

    send-sync              1 KiB, each send on disk before the call returns; latencies of each call
    send-sync-apart        the same, each thread to a store of its own, up to four
    send-nosync            100 B, each send handed to the operating system
    sql-send               1 KiB into tables, each send committed before the call returns; SQLite and PostgreSQL, with
                           and without batching, beside bare loops of insert and commit
    send-many              100 B, 1000 a call, not synced
    send+ack-nosync        100 B: one sent, one received and acked, in turn; counts pairs
    tx-single-store        10 sends of 1 KiB in one transaction, durable; counts transactions, latencies of commits
    tx-cross-store-2, -4   10 sends of 1 KiB over so many stores, atomic and durable; counts transactions
    recover-clean          a directory of n 1 KiB messages, closed: seconds from open to the first message in hand
    recover-rebuild-index  the same with the index deleted
    drain                  n messages of 1 KiB read in order
    toy-maker-disk         a factory's day replayed: the most files and bytes that were on disk at once
    stores-in-turn         100 B to each of n / 10 stores in turn, ten times, not synced
    route                  a destination that was routed before: which store is it? With the default count of a
                           million, seconds are microseconds a lookup

What the peers really give is in each module's docstring, and was counted with
`strace -f -c -e trace=fsync,fdatasync,msync python -m tests.bench ...`.
"""
