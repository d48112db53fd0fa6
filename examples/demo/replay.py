"""Do again, through a router, what a usage trace says was done: how the advisor's predictions are put to the test.

with anabranch.open(config) as router:
    used = Replay().run(router, events)
    print(used.peak_bytes)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from anabranch import Message, Router
from anabranch.policies.advisor import CurrentConfig, UsageEvent
from anabranch.policies.errors import TraceError

LOOK_EVERY: Final = 10
"""Operations between two looks at the disk, where nothing else is said."""


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Journal files of all stores together, at their full size; pooled files are not counted."""

    peak_files: int
    peak_bytes: int
    end_files: int
    end_bytes: int
    operations: int
    split_transactions: int
    """Transactions whose destinations live in more than one store, replayed as one transaction in each."""


class Replay:
    """Turns events into calls, of one router after the other. Messages carry bodies of zeros, so that what is measured
    is what a body costs.

    Each `run` goes on where the one before ended: its router has to hold what the other's did when that was closed.
    """

    def __init__(self) -> None:
        self._pending: dict[str, dict[str, None]] = {}
        """Ids by destination that are not acked, in the order in which they took effect."""
        self._sent: dict[str, deque[str]] = {}
        """Likewise, those that this router has not received: in that order it will."""
        self._received: dict[tuple[str, str], Message] = {}

    @property
    def pending(self) -> int:
        """Messages that were sent and not acked."""
        return sum(map(len, self._pending.values()))

    def run(
        self,
        router: Router,
        events: Iterable[UsageEvent],
        progress: Callable[[int, int], None] | None = None,
        look: Callable[[Router], tuple[int, int]] | None = None,
        every: int = LOOK_EVERY,
    ) -> DiskUse:
        """Do queue events in order and watch the disk: `look` returns files and bytes, and is `disk_of` by default.

        Raises TraceError for topic events, which are not replayed.
        """
        look = look or disk_of
        events = list(events)
        last = {event.tx: position for position, event in enumerate(events) if event.tx is not None}
        open_transactions: dict[str, list[UsageEvent]] = {}
        self._sent = {destination: deque(ids) for destination, ids in self._pending.items()}
        self._received.clear()
        self._place_of = CurrentConfig(router.config).place_of
        peak_files = peak_bytes = files = size = split = 0
        for position, event in enumerate(events):
            if not event.destination.startswith("queue://"):
                raise TraceError(f"event {event.seq} is of {event.destination}; only queues can be replayed")
            if event.tx is None:
                split += self._do(router, [event])
            else:
                group = open_transactions.setdefault(event.tx, [])
                group.append(event)
                if last[event.tx] == position:
                    split += self._do(router, open_transactions.pop(event.tx))
            if position % every == 0 or position == len(events) - 1:
                files, size = look(router)
                peak_files, peak_bytes = max(peak_files, files), max(peak_bytes, size)
                if progress is not None:
                    progress(position + 1, len(events))
        return DiskUse(peak_files, peak_bytes, files, size, len(events), split)

    def _do(self, router: Router, events: list[UsageEvent]) -> bool:
        """One operation, or all of one transaction; whether that was split."""
        if len(events) == 1 and events[0].op == "send":
            event = events[0]
            router.queue(event.destination).send(_body(event))
            self._note(event)
            return False
        by_store: dict[tuple[str, str], list[UsageEvent]] = {}
        for event in events:
            by_store.setdefault(self._place_of(event.destination), []).append(event)
        for some in by_store.values():
            with router.transaction() as tx:
                for event in some:
                    if event.op == "send":
                        tx.send(event.destination, _body(event))
                        self._note(event)
                    elif (message := self._find(router, event)) is not None:
                        tx.ack(message)
                        del self._pending[event.destination][event.message_id]
        return len(by_store) > 1

    def _note(self, event: UsageEvent) -> None:
        self._pending.setdefault(event.destination, {})[event.message_id] = None
        self._sent.setdefault(event.destination, deque()).append(event.message_id)

    def _find(self, router: Router, event: UsageEvent) -> Message | None:
        """Receive up to the message that is acked; None for one that the trace never sent."""
        key = (event.destination, event.message_id)
        queue, sent = router.queue(event.destination), self._sent.get(event.destination, deque())
        while key not in self._received and event.message_id in sent:
            message = queue.receive()
            if message is None:
                return None
            self._received[event.destination, sent.popleft()] = message
        return self._received.pop(key, None)


def _body(event: UsageEvent) -> bytes:
    return bytes(event.body_size if event.body_size is not None else max(event.size, 0))


def disk_of(router: Router) -> tuple[int, int]:
    """Journal files of all its stores, and their bytes, once what can go has gone: the figures do not depend on how
    quick this machine's background threads are."""
    router.reclaim()
    stores = router.stats().stores.values()
    files = sum(count for store in stores for kind, count in store.segments.items() if kind != "pooled")
    return files, sum(store.capacity_bytes for store in stores)
