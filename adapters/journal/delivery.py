"""Who holds which message, and which message is delivered next (rule X6).

D1  A message that nobody holds is in exactly one place: beyond its destination's cursor, in `ready`, or in `returned`;
    in a second one after an interruption, or if it came back before it was fetched: `lease` gives it once.
D2  A message that somebody holds is in none of them: LEASED by a receiver, CLAIMED by a transaction, or LEAVING while
    its ack or its return is under way.
D3  Holds are memory alone: restoring the index does not touch them.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from ...policies.errors import StoreFullError, UnknownMessageError
from ..base import Message, Store, require_leased
from . import format as f
from .batch import Entry, Operation
from .destinations import DestinationState, Place
from .index import Index

LEASED: Final = 1
CLAIMED: Final = 2
LEAVING: Final = 3

FETCH: Final = 64
"""How many messages a receive looks up ahead."""


class Delivery:
    """Of one store. `held` changes under `_lock`, what a destination has fetched under the index lock."""

    def __init__(self, name: str, max_leases: int) -> None:
        self._name = name
        self._max_leases = max_leases
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self.held: dict[int, tuple[DestinationState, int]] = {}
        """seq -> whose message it is, and how it is held."""
        self.waiting = 0
        """Threads that wait for a message."""

    def lease(self, state: DestinationState, index: Index) -> Place | None:
        """Take the first message that nobody holds. Under the index lock, all that is pending applied unless
        something is ready. Raises StoreFullError at the limit of leases.

        A message leaves its place only once it is held: Ctrl-C in between makes it seen twice here, not passed over.
        """
        if state.purging:
            return None  # what is free is about to go
        held, ready, returned = self.held, state.ready, state.returned
        while True:
            if not ready and not self._fetch(state, index) and not returned:
                return None
            if returned and (not ready or returned[0] < ready[0]):
                place = returned[0]
                # An interrupted ack of it may have been under way when it was released.
                free = place[0] not in held and index.place(state, place[0]) == place
                if free:
                    held[place[0]] = (state, LEASED)
                heapq.heappop(returned)
            else:
                place = ready[0]
                free = place[0] not in held
                if free:
                    held[place[0]] = (state, LEASED)
                ready.popleft()
            if free:
                return place

    def require_room(self) -> None:
        """Raise StoreFullError at the limit of leases."""
        if len(self.held) >= self._max_leases:
            raise StoreFullError(
                f"{len(self.held)} messages of store {self._name!r} are leased; max_leases is {self._max_leases}: "
                "ack or release some"
            )

    def at_limit(self) -> bool:
        return len(self.held) >= self._max_leases

    def _fetch(self, state: DestinationState, index: Index) -> bool:
        """Look some ahead; False if nobody holds none. What a transaction prepared before this open has claimed is
        passed over: a rollback brings it back, after a commit nothing would tell that it is dead."""
        held = self.held
        while places := index.fetch(state, state.cursor, FETCH):
            state.ready.extend(place for place in places if place[0] not in held)
            state.cursor = places[-1][0]
            if state.ready:
                return True
        return False

    def take(self, store: Store, messages: Sequence[Message], before: int, after: int) -> list[Operation]:
        """Move all from one hold to another, or none. Returns their acks. Raises UnknownMessageError."""
        operations: list[Operation] = []
        held = self.held
        with self._lock:
            for message in messages:
                state, seq = message.note, message.seq
                if message.store is not store or not message.leased or held.get(seq) != (state, before):
                    for _, undo, again in operations:
                        held[again] = (undo, before)
                    require_leased(message)
                    raise UnknownMessageError(
                        f"{message!r} is not {'leased' if before == LEASED else 'claimed'} here any more: it was "
                        "acked, released or claimed by a transaction"
                    )
                held[seq] = (state, after)
                operations.append((f.ACK, state, seq))
        return operations

    def put_back(self, messages: Iterable[Message], hold: int) -> None:
        """What was LEAVING and is still there is held again: its ack has failed, or was interrupted."""
        with self._lock:
            for message in messages:
                if self.held.get(message.seq) == (message.note, LEAVING):
                    self.held[message.seq] = (message.note, hold)

    def give_back(self, messages: Iterable[Message], index: Index) -> None:
        """What was LEAVING is free, each at its old place. Under the index lock, all that is pending applied.

        Who gave a message back cannot do anything with it any more, be it held again by somebody else.
        """
        for message in messages:
            if message.note is not None:
                self._free(message.note, message.seq, index)
                message.note = None

    def unlease(self, state: DestinationState, place: Place, index: Index) -> None:
        """Whoever leased it was interrupted before the message was read: it is free, at its old place."""
        self._free(state, place[0], index)

    def _free(self, state: DestinationState, seq: int, index: Index) -> None:
        place = index.place(state, seq)
        if place is not None:
            heapq.heappush(state.returned, place)
        self.held.pop(seq, None)
        state.wake()

    def restore(self, acks: Iterable[tuple[DestinationState, int]]) -> None:
        """At open: what a prepared transaction acks is claimed, before anybody can receive (rule X6)."""
        for state, seq in acks:
            self.held[seq] = (state, CLAIMED)

    def settle(self, entries: Iterable[Entry], index: Index) -> None:
        """These operations take effect now, for the first time. Under the index lock."""
        for entry in entries:
            kind = entry[0]
            if kind == f.ACK:
                self.held.pop(entry[2], None)
            elif kind == f.ROLLBACK:
                for state, seq in entry[2].acks:
                    self._free(state, seq, index)
                for message in entry[2].messages:  # as in give_back: an interrupted rollback is done once more
                    message.note = None
            elif kind == f.DESTINATION_GONE:
                state = entry[1]
                state.ready.clear()
                state.returned.clear()
                for seq in [seq for seq, (holder, _) in list(self.held.items()) if holder is state]:
                    del self.held[seq]

    def purged(self, state: DestinationState, last: int, index: Index) -> None:
        """All free messages up to seq `last` are dead. Under the index lock, the purge applied."""
        state.cursor = max(state.cursor, last)
        state.ready = type(state.ready)(p for p in state.ready if index.place(state, p[0]) == p)
        state.returned = [p for p in state.returned if index.place(state, p[0]) == p]
        heapq.heapify(state.returned)

    def claimed(self, state: DestinationState) -> int:
        """How many messages of a destination transactions have claimed."""
        return sum(holder is state and hold == CLAIMED for holder, hold in list(self.held.values()))

    def free_ranges(self, state: DestinationState, index: Index, page: int) -> tuple[list[tuple[int, int]], int]:
        """The seqs of a destination that nobody holds, as ranges between those that somebody holds, and how many."""
        ranges: list[tuple[int, int]] = []
        count, after, start, last = 0, 0, 0, 0
        while places := index.fetch(state, after, page):
            for seq, *_ in places:
                if seq in self.held:
                    if start:
                        ranges.append((start, last))
                    start = 0
                else:
                    start, last, count = start or seq, seq, count + 1
            after = places[-1][0]
        if start:
            ranges.append((start, last))
        return ranges, count

    def wait(self, state: DestinationState, deadline: float | None, anything: Callable[[], bool]) -> bool:
        """Wait for a message, a release, a failure or close; False when the time is over.

        `anything` looks whether there is a message, after the waiter is in place: who sends from then on sees the
        waiter, who sent before is seen.
        """
        waiter: Any = threading.Lock()
        waiter.acquire()
        with self._lock:
            self.waiting += 1
        try:
            state.waiters.append(waiter)
            if anything():
                return True
            if deadline is None:
                waiter.acquire()
                return True
            left = deadline - time.monotonic()
            return left > 0 and bool(waiter.acquire(timeout=left))
        finally:
            with self._lock:
                self.waiting -= 1
            try:
                state.waiters.remove(waiter)
            except ValueError:
                pass  # who woke it took it out
