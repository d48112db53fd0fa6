"""What a memory store consists of, the lock that guards it, and how all of it changes at once.

    contents    what there is: destinations, chunks of messages, subscriptions      (contents.py, chunks.py)
    delivery    who holds which message and which comes next                        (adapters/delivery.py)
    residence   which chunks are in memory, which in the swap                       (residence.py, swap.py)

What changes is worked out first and then carried out in a way that can be done again (changes.py), so that Ctrl-C at
any point leaves it whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from ...policies.destination import Destination, Kind
from ...policies.errors import (
    ClosedError,
    DestinationError,
    StoreFailedError,
    StoreFullError,
)
from ...policies.options import MemoryOptions
from ..base import SubscriptionKey
from ..delivery import Delivery, Feed
from ..locking import fork_generation
from ..room import Amount, Room
from ..subscriptions import require_topic, unknown
from .branches import Branches
from .changes import Change, Steps
from .chunks import CHUNK_COST
from .contents import DESTINATION_COST, Contents, DestinationState, SubscriptionState
from .records import Encoded
from .residence import Residence
from .swap import Swap

T = TypeVar("T")


class Core:
    """Of one store. Every call on it is `require_open`, then, with the lock held, `enter`; the rest follows these."""

    def __init__(self, name: str, path: Path, options: MemoryOptions, position: Callable[[], int] | None) -> None:
        self.name, self.options = name, options
        self._path, self._position = path, position
        self.lock = threading.RLock()
        """Taken by `with` itself, so that Ctrl-C cannot leak it. Guards all that `begin` makes."""
        self.accepting = False
        """Whether the store is open."""
        self.failed: StoreFailedError | None = None
        """Why it has stopped, if it has."""
        self.generation = fork_generation()
        """Of the process that opened it."""
        self.begin()

    def begin(self) -> None:
        """What there is in a store that holds nothing."""
        options = self.options
        self.contents = Contents(options.priorities, options.duplicate_window)
        self.delivery = Delivery(self.name, options.max_leases, options.max_deliveries)
        self.steps = Steps()
        self.swap = Swap(self._path, options.roll_over_size, options.file_mode)
        self.residence = Residence(self.name, self.contents, self.swap, self.steps, options.max_bytes)
        self.room = Room(
            self.name, options.max_messages, options.max_stored_bytes, self._held, "max_stored_bytes"
        )  # fmt: skip
        self.branches = Branches()
        self.sends = self.acks = self.batches = self.dropped = 0

    def _held(self) -> Amount:
        return self.contents.messages, self.contents.live_bytes

    def require_open(self) -> None:
        """Before taking the lock: in a forked child another thread's hold on it would last for ever."""
        if self.generation != fork_generation():
            raise ClosedError(f"store {self.name!r} was opened by the parent process; a forked child cannot use it")
        self._require_accepting()
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self.name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def enter(self) -> None:
        """With the lock held, first of all."""
        self._require_accepting()
        self.steps.finish()

    def _require_accepting(self) -> None:
        if not self.accepting:
            raise ClosedError(f"store {self.name!r} is closed")
        if self.failed is not None:
            raise StoreFailedError(
                f"store {self.name!r} has stopped after an error: {self.failed}; close it and open it again"
            ) from self.failed

    def asked(self, question: Callable[[], T]) -> T:
        self.require_open()
        with self.lock:
            self.enter()
            return question()

    # Finding

    def feed(self, destination: Destination, key: SubscriptionKey | None, make: bool = False) -> Feed | None:
        """What is received from. None for a queue that is not there. Raises DestinationError, UnknownSubscription-
        Error."""
        state, subscription = self.owners(destination, key)
        if subscription is not None:
            return subscription.feed
        if destination.kind is Kind.TOPIC:
            raise DestinationError(f"{destination} is a topic: receive for one of its subscriptions")
        if state is None:
            if not make:
                return None
            state = DestinationState(self.contents.next_number(), destination)
            made, memory = state, self.contents.memory + DESTINATION_COST

            def add() -> None:
                self.contents.states[destination] = made
                self.contents.memory = memory

            self.steps.do(add)
        return state.feed

    def owners(
        self, destination: Destination, key: SubscriptionKey | None
    ) -> tuple[DestinationState | None, SubscriptionState | None]:
        """Of what is known by these. Raises DestinationError for a queue's subscription, UnknownSubscriptionError."""
        state = self.contents.states.get(destination)
        if key is None:
            return state, None
        require_topic(destination)
        subscription = state.subscriptions.get(key) if state is not None else None
        if subscription is None:
            raise unknown(destination, key)
        return state, subscription

    # Changing

    def room_for(self, sends: Iterable[Encoded]) -> Amount:
        """What these take of the store's room; those that are stored already, nothing."""
        contents = self.contents
        messages = size = 0
        for message in sends:
            state = contents.states.get(message.destination)
            key = (state.number, message.name) if state is not None and message.name is not None else None
            if key is None or message.requeued or contents.window.get(key) is None:
                messages += 1
                size += message.size
        return messages, size

    def make_room(self, messages: Sequence[Encoded], required: bool = True) -> None:
        """In memory, for these. Raises StoreFullError and StoreFailedError if `required`."""
        more = sum(message.cost for message in messages) + (DESTINATION_COST + CHUNK_COST) * (1 + len(messages) // 64)
        try:
            self.residence.make_room(more)
        except (StoreFullError, StoreFailedError):
            if required:
                raise

    def change(self) -> Change:
        """One that is to be worked out."""
        position = self._position() if self._position is not None else None
        return Change(self.contents, self.delivery, self.residence.chunk_bytes, position)

    def carry_out(self, change: Change, required: bool = True, more: Callable[[], object] | None = None) -> None:
        """All of it takes effect, with `more` (which may be done again); or it raises, and nothing does. What is not
        `required` to keep its limits raises nothing."""
        if required and self.room.limited:
            self.room.require((change.added, change.added_bytes))
        change.finish()
        written = self.residence.add(change, required)
        sends, acks, batches = self.sends + change.sends, self.acks + change.acks, self.batches + 1
        dropped = self.dropped + change.unwanted

        def carry_out() -> None:
            change.apply()
            self.residence.take(change)
            if more is not None:
                more()
            self.sends, self.acks, self.batches, self.dropped = sends, acks, batches, dropped

        try:
            self.steps.do(carry_out)
        except BaseException:
            if self.batches != batches:
                self.residence.drop(written)
            raise
