"""The exchange between the log and its owner: tickets in, write batches out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from ...policies.config.durability import Sync
from ..system.background import shared
from .segment import Segment


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The options for how a log keeps its files and when it syncs them."""

    segment_bytes: int
    """Bytes of one file, its header included, unless one ticket needs more."""
    sync: Sync = Sync.ALWAYS
    sync_interval: float = 1.0
    """Seconds, under `periodic`."""
    pool_files: int = 2
    """Released files that are kept for use again. -1: all."""
    advice: str = ""
    """Advice that errors give to one whose outcome is unknown."""
    room_advice: str = ""
    """Advice that errors give where the disk is full."""
    min_files: int = 0
    """Files of a log that there are at least, those of the pool included: made ahead, and kept."""


OWED: Final = 0
SHRINKS: Final = 1
GROWS: Final = 2
"""The effect of a ticket on a log, for the case that the disk is full: as many spare files (reserve.py) it has to
leave. GROWS: the log holds more, and it is refused first. SHRINKS: less is needed after it than before. OWED: room was
promised to it, or it is what releases segments."""


_NONE: Final[list[Any]] = []
"""No outcomes; it is replaced, never changed."""


class Ticket:
    """The content that goes into the log together, in one batch, and its outcome."""

    __slots__ = (
        "batch", "content", "done", "error", "future", "held", "outcomes", "promise", "size", "sync", "unsynced",
        "waiter",
    )  # fmt: skip

    def __init__(self, content: Any, size: int, sync: bool = False, unsynced: bool = False) -> None:
        self.content: Any = content
        """The encoder's alone; () in one that only waits for those before it."""
        self.size: int = size
        """At most so many bytes its records take."""
        self.sync: bool = sync
        """True if the ticket counts only once it is synced, whatever the policy."""
        self.unsynced: bool = unsynced
        """Need not be synced even under `always`: what it says is known elsewhere, and would be written again."""
        self.done: bool = False
        self.error: BaseException | None = None
        self.outcomes: list[Any] = _NONE
        """Set by the encoder."""
        self.waiter: Any = None
        self.future: tuple[Future[Any], Callable[[Any], Any]] | None = None
        """Resolved once it is done, with what the function makes of the ticket."""
        self.held: Any = None
        """Something of the owner's that is let go of once it is done."""
        self.promise: int = 0
        """Bytes that are kept free for what must follow it, until the owner says otherwise (Encoder.promised)."""
        self.batch: WriteBatch | None = None
        """What it has become, once it is queued and until it is done."""

    def finish(self, error: BaseException | None) -> None:
        """Finish the ticket, well or not. May be called again with the same by who makes up for an interrupted
        thread."""
        if error is not None:
            self.error = error
        self.held = None
        future = self.future
        if future is not None and not self.done:
            result = None if self.error is not None else future[1](self)
            shared().resolve([(future[0], result, self.error)])
        self.done = True
        self.batch = None  # which holds all behind it
        if self.waiter is not None:
            self.wake()

    def wake(self) -> None:
        """Let the thread that waits for it look, if one does."""
        try:
            self.waiter.release()
        except (AttributeError, RuntimeError):
            pass  # nobody waits, or it was awake already

    def wait(self, seconds: float) -> None:
        """Wait until the ticket may be done, or so long. One thread waits for it at a time."""
        if self.waiter is None:
            waiter = threading.Lock()
            waiter.acquire()
            self.waiter = waiter
        if not self.done:
            self.waiter.acquire(timeout=seconds)


class Tail(NamedTuple):
    """The end of the log: what has been written."""

    segment: Segment
    offset: int
    lsn: int
    counter: int
    """A number of the owner's that never falls; the header of each new segment carries it."""


class WriteBatch:
    """The bytes of a ticket, and their place in the log. An encoder may return a subclass that remembers more."""

    __slots__ = (
        "data", "delivered", "filled", "next", "number", "offset", "segment", "sync", "sync_number", "tail", "ticket",
        "unsynced",
    )  # fmt: skip

    def __init__(self, start: Tail, tail: Tail, ticket: Any, data: bytes) -> None:
        self.segment: Final = start.segment
        self.offset: Final = start.offset
        self.tail: Tail = tail
        """The end of the log once it is written."""
        self.ticket: Any = ticket
        """Whose bytes it holds; None: it is a mark."""
        self.data: bytes = data
        """Empty if there is nothing to write."""
        self.sync: bool = ticket is None or ticket.sync
        self.unsynced: bool = ticket is not None and ticket.unsynced
        self.next: WriteBatch | None = None
        """The batch behind it. It is set once, in one step: by it that one is in the log."""
        self.delivered: bool = False
        """Its owner has been told of it, and its ticket; or it is lost."""
        self.number: int = 0
        """One more than that of the batch before it."""
        self.filled: int = 0
        """The number of the last one up to it that has bytes."""
        self.sync_number: int = 0
        """It is not delivered before all up to this one is on disk."""


class Encoder(Protocol):
    """The owner of a log, as the log sees it. All but `stopped` and `deliver` is called by who plans, one at a time;
    nothing here may call the log. An exception that `encode` raises is for the ticket that it was given."""

    @property
    def promised(self) -> int:
        """Return how many bytes have been promised to what is written, and are not used yet (Ticket.promise)."""

    @property
    def spare_bytes(self) -> int:
        """Return how many bytes a spare file of the reserve has to hold beside tickets that make room: a snapshot."""

    def leaves(self, ticket: Any) -> int:
        """Return OWED, SHRINKS or GROWS. Asked where the disk is full."""

    def needed_bytes(self, segment: Segment) -> int | None:
        """Return how much of a segment is needed still, as far as is known now; None where that is not counted. Asked
        where the disk is full."""

    def reserve(self, size: int) -> None:
        """Keep the room that so many bytes will need elsewhere: they may be written until this is asked next. Raises
        OSError if there is none; then what GROWS is refused."""

    @property
    def snapshot_at(self) -> tuple[int, int]:
        """Return the segment and the offset of the latest snapshot's batch, (0, 0) without one; each new segment's
        header says it."""

    def encode(self, tail: Tail, ticket: Any, watermark: int) -> WriteBatch:
        """Build the batch of a ticket after `tail`; of None an empty one, a mark. `watermark`: the LSN known to be on
        disk. Changes nothing but the ticket's outcomes, so that it may be done again."""

    def accept(self, batch: Any) -> None:
        """Build on what a batch says, which is in the log from now on: the next one is encoded after it. May be called
        again for the last one."""

    def deliver(self, batch: Any) -> None:
        """Deliver a batch that is, with all before it, as durable as the policy asks: it counts. In order, by one
        thread at a time, after `accept`. May be called again for the same."""

    def rest(self) -> None:
        """Forget what was encoded last, if it is not in the log: its thread was interrupted."""

    def stopped(self) -> None:
        """Wake, once the log has failed, whoever waits for what it would have brought. Any thread."""
