"""Power failures: workloads, and a checker that says whether a directory may look as it does.

They are made for a simulator that records what a workload does to a directory, builds the states in which a power
failure could have left it, and runs a checker on each of them. The three speak a plain protocol, so that any such
tool can drive them:

    python -m tests.crash.power.workloads NAME DIR      keeps its data in DIR, writes its marks to $CRASHSIM_MARKS
    python -m tests.crash.power.checker NAME DIR MARKS  exit 0: right; 1: violated, the last line says how

SQLite maps its `-shm` files into memory, and makes them anew after a crash: no state shall hold them.

MARKS is a JSON file with `promised` (the operations of all ACK marks), `maybe` (of TRY marks without an ACK) and
`marks` ([line, whether its write returned], in order). DIR is the checker's own, to change as it likes.

A checker takes 250 ms to start. With $ANABRANCH_CHECK_SERVER naming a socket, `python -S checker_client.py NAME DIR
MARKS` asks `python -m tests.crash.power.server SOCKET`, which forks a child for each state, and takes a tenth.
"""
