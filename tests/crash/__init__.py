"""Crash tests: what was promised is there after any death (invariants 1 to 4, 7, 9).

    ledger.py          what a workload promised, compared with what a reopened directory holds
    sigkill.py         children that are killed at random moments      python -m tests.crash.sigkill --rounds 1000
    mixed.py           the same over all kinds of stores               python -m tests.crash.sigkill --mixed
    native.py          the same over journals, whose writes and syncs meet errors of the C library
                                                                       python -m tests.crash.native --seconds 3600
    sigint.py          storms of Ctrl-C; --across: over two stores     python -m tests.crash.sigint --signals 3000
    interrupts.py      Ctrl-C at every bytecode of one call, and the table of which calls
    faults.py          one system call of a scripted workload fails    python -m tests.crash.faults
    large.py           the same with large messages                    python -m tests.crash.large
    damage.py          one file of a directory of all kinds is damaged python -m tests.crash.damage
    transactions.py    the same, and all that a power failure may leave, of transactions over 2 to 4 stores
                                                                       python -m tests.crash.transactions
    moving.py          the same of a repartition                       python -m tests.crash.moving
    steps.py           transactions over a journal and SQLite, spoiled at each statement and commit
                                                                       python -m tests.crash.steps
    index.py           every bit and page of a journal store's index     python -m tests.crash.index
    damaging.py        the loop of those that damage files
    power/             workloads and a checker for a power-failure simulator; see its docstring

What they are made of: calls.py (system calls, counted and spoiled), spoiling.py (each of them, one after the other),
scripted.py (a workload that goes on whatever fails), disk.py (what a power failure may leave of them), programs.py
(steps of transactions, and what each was promised).

The `test_` modules run a share of all of it, and as campaigns the whole (`make test-all`, tests/shares.py). A workload
says what it does in *marks*, one line a write, to the file named by $CRASHSIM_MARKS: `TRY <json>` before it begins
something, `ACK <json>` once that is promised.
"""
