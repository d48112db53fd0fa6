"""What a caller asks of the thread that writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

# What an operation begins with; behind it comes what it is about.
SEND: Final = 1
ACK: Final = 2
DELIVERED: Final = 3
PREPARE: Final = 4
COMMIT: Final = 5
ROLLBACK: Final = 6
FORGET: Final = 7
SUBSCRIBE: Final = 8
UNSUBSCRIBE: Final = 9
PURGE: Final = 10
DELETE: Final = 11

ALONE: Final = frozenset((SUBSCRIBE, UNSUBSCRIBE, PURGE, DELETE))
"""These are run alone in their database transaction: what they do depends on all that was before."""

Operation = tuple[int, Any]


class Ticket:
    """Operations that take effect together. `done` is locked until `error` or `outcomes` says what came of it."""

    __slots__ = ("alone", "done", "error", "future", "last", "operations", "outcomes", "size", "told")

    def __init__(self, operations: list[Operation], size: int = 0, alone: bool = False, last: bool = False) -> None:
        """`size`: bytes of what it sends. `alone`: in a database transaction of its own. `last`: nothing is written
        after it."""
        self.last = last
        self.operations = operations
        self.size = size
        self.alone = alone or last or any(operation[0] in ALONE for operation in operations)
        self.done = threading.Lock()
        self.done.acquire()
        self.error: BaseException | None = None
        self.outcomes: list[Any] = []
        self.future: tuple[Future[Any], Callable[[Ticket], Any]] | None = None
        self.told = False
        """Nobody waits for it any more."""
