"""The garbage collector, in a process that runs thousands of tests."""

from __future__ import annotations

import gc


def set_aside() -> None:
    """Collections no longer walk through what there is now: those that follow cost what was made since, not what the
    libraries, the collected tests and the tests before have left. What is set aside and
    later becomes garbage in a cycle stays."""
    gc.collect()
    gc.freeze()
