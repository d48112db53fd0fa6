"""Forked children, waited for no longer than a test may take."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

HANGS_AFTER = 180
"""Seconds."""


def forked(run: Callable[[], list[str] | None]) -> int:
    """The pid of a child that does this; its exit code is 0 if it returned nothing to complain about."""
    pid = os.fork()
    if pid:
        return pid
    code = 4
    try:
        wrong = run()
        print(*(wrong or ())[:10], sep="\n", end="\n" if wrong else "", file=sys.stderr)
        code = 1 if wrong else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reaped(pid: int, seconds: float = HANGS_AFTER, begun: Callable[[], bool] = lambda: True) -> int | None:
    """Its exit code (negative: a signal); None if it has to be killed so many seconds after it has begun."""
    deadline = time.monotonic() + HANGS_AFTER
    working = False
    while time.monotonic() < deadline:
        if not working and begun():
            working = True
            deadline = time.monotonic() + seconds
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None
