"""Checks many states quickly: listens at a socket and forks a child for each, so that nothing is imported twice.

python -m tests.crash.power.server SOCKET &
ANABRANCH_CHECK_SERVER=SOCKET python -S tests/crash/power/checker_client.py NAME DIR MARKS
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import traceback

import anabranch.adapters.journal  # routers load it late, each child anew
import anabranch.adapters.sql  # noqa: F401

from . import checker


def serve(path: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer(connection)
                os._exit(0)
            connection.close()


def answer(connection: socket.socket) -> None:
    """Read NAME, DIR and MARKS; write the exit code, then what a checker would have printed."""
    arguments = connection.makefile().readline().rstrip("\n").split("\t")
    with connection.makefile("w") as output:
        sys.stdout = output
        try:
            output.write("0\n" if not (wrong := checker.judge(arguments)) else "1\n" + "; ".join(wrong[:5]) + "\n")
        except BaseException:
            output.write("2\n" + traceback.format_exc())


if __name__ == "__main__":
    serve(sys.argv[1])
