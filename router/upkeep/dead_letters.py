"""Messages that are not delivered any more are dead-lettered: expired ones, and those that were given back too often.

Stores pass them over and lease them to this module, which looks once a second. One transaction acks the message and
sends it to its dead-letter queue, in whatever store that lives: it is in one of the two, after any crash (invariant 4).
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, cast

from ...adapters.core import Store
from ...adapters.core.engine.forwarding import follow
from ...adapters.core.messages import EXPIRED, REJECTED, Message, Outgoing, Reason, Undelivered, checked
from ...adapters.core.record.headers import pack_headers
from ...adapters.core.service.failures import Failure, failure_of
from ...adapters.core.state.limits import without_waiting
from ...adapters.system.background import shared
from ...adapters.system.conditions import unless_busy
from ...adapters.system.rare_warnings import RareWarnings
from ...policies.errors import (
    AnabranchError,
    DestinationError,
    MessageTooLargeError,
    StoreFullError,
    UnknownMessageError,
)
from ...policies.names.destination import Destination
from ...policies.text import count_of
from ..api.dead_letter import SOURCE, dead_letter_queue, delivered, labelled
from ..api.transaction import Transaction
from ..events import Event, Events, MessageDeadLettered, MessageDropped, MessageExpired
from ..placement.registry import StoreRegistry

log: logging.Logger = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 1.0
SWEEP_MAX: Final = 100
"""The number of messages that are dead-lettered in one transaction."""
SWEEP_BYTES: Final = 4 << 20
"""Bytes of bodies that are dead-lettered in one transaction; a longer one is dead-lettered alone."""
FINISH_SECONDS: Final = 1.0
"""How long closing the router waits for what is under way, before it closes the other stores."""
LOCKS_KEPT: Final = 64
REFUSED_SECONDS: Final = 60.0
"""Seconds until a message that was refused, by a limit of its dead-letter queue's store say, is tried again."""
_REFUSED: Final = (MessageTooLargeError, DestinationError, UnknownMessageError)
"""Errors of one message, and not of a store."""


class DeadLetterSweeper:
    """Dead-letters messages. Threads: all. One thread at a time puts a store's messages aside, so that a store whose
    disk hangs holds up no other. `_lock` guards the fields."""

    def __init__(self, registry: StoreRegistry, begin: Callable[[], Transaction], events: Events) -> None:
        self._registry, self._begin, self._events = registry, begin, events
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread
        self._locks: dict[bytes, threading.RLock] = {}
        """The lock of each store, held while its messages are dead-lettered; twice by a thread that looks first whether
        it is free."""
        self._under_way: set[bytes] = set()
        """The stores whose messages are being dead-lettered; after Ctrl-C perhaps more."""
        self._spent: dict[bytes, Store] = {}
        """Stores, by their ids, in which messages wait to be dead-lettered whose last failures only memory knows."""
        self.closed: bool = True
        self._turn = 0
        """Counts the times it was opened: work scheduled for an earlier time is skipped."""
        self._refused: OrderedDict[tuple[bytes, int], float] = OrderedDict()
        """Store id and seq of each message that was refused for what it is, and when it is tried again (monotonic): the
        soonest first."""
        self._deleted = RareWarnings(_warn_of_deleted)
        """Warnings by store and queue. An expired message is not counted: it was meant to go."""
        self.dead_lettered: int = 0
        """Messages that came into a dead-letter queue since open."""
        self.dropped: int = 0
        """Messages that were dropped since open."""

    def open(self) -> None:
        """Look now and then, until `close`."""
        self.closed = False
        self._turn += 1
        self._locks.clear()
        self._schedule(self._turn)

    def _schedule(self, turn: int) -> None:
        alive = weakref.ref(self)  # a timer must not keep alive, and locked, a router that nobody holds

        def look() -> None:
            sweeper = alive()
            if sweeper is not None:
                sweeper._run_in_background(turn)

        shared().schedule(SWEEP_SECONDS, look)

    def spent(self, store: Store) -> None:
        """Put messages aside that were given back for the last time, with a reason. This happens soon, in the
        background: a release does not wait for the store of the dead letters."""
        if not self.closed:
            self._spent[store.store_id] = store  # first: closing looks after it, if the background does not come to it
            shared().lead(partial(self._put_spent_aside, store))

    def _put_spent_aside(self, store: Store) -> None:
        if store.store_id in self._spent:
            try:
                self._sweep_unless_busy(store)
            except AnabranchError as error:
                log.debug("store %s: nothing is dead-lettered: %s", store.name, error)

    def reject(self, message: Message[Any], reason: Reason) -> None:
        """Put a leased message aside now. Raises what a transaction raises: the message is then free."""
        with self._begin() as transaction:
            transaction.reject(message, reason)

    def reject_within(self, transaction: Transaction, message: Message[Any], reason: Reason) -> None:
        """Put a leased message aside when a transaction commits, as Transaction.reject."""
        given = failure_of(reason)
        follow(message)
        store = cast(Store, message._store)
        # Words are its reason, beside which the failure before counts.
        said, failure = (given.text, None) if given.type is None else (REJECTED, given)
        letter = self._letter(store, self._registry.dead_letter_of(store), message, said, True, failure)
        target = None if letter is None else letter[0]
        events = list(_events_of(store, message, said, True, target)) if self._events else []

        def told() -> None:
            message._store.note_rejected(message)  # it may have moved meanwhile
            with self._lock:
                self.dead_lettered += letter is not None
                self.dropped += letter is None
            if letter is None:
                self._deleted.count([(store.name, message.destination)])
            for event in events:
                self._events.tell(event)

        transaction._reject(message, letter, told)

    def close(self) -> None:
        """Begin no more, and wait for the end of what is under way. For a store that takes longer than FINISH_SECONDS
        `finish` waits. Messages spent just before are put aside first: their store forgets why. Idempotent."""
        if self._spent and not self.closed:
            shared().for_each(list(self._spent.values()), self._put_spent_aside, FINISH_SECONDS)
        self.closed = True
        if self._under_way:
            shared().for_each(list(self._under_way), self.finish, FINISH_SECONDS)
        self._deleted.close()

    def finish(self, store_id: bytes) -> None:
        """Wait until no message of a store is being dead-lettered any more, after `close`."""
        with self._lock_of(store_id):
            pass

    def _lock_of(self, store_id: bytes) -> threading.RLock:
        with self._lock:
            return self._locks.setdefault(store_id, threading.RLock())

    def _run_in_background(self, turn: int) -> None:
        if not self.closed and turn == self._turn:
            self._schedule(turn)  # first: there is a next time while a store hangs, and whatever it is that fails
            self._forget_locks()
            self._run(self._sweep_unless_busy)
            if self._deleted.is_due:
                self._deleted.count()

    def _forget_locks(self) -> None:
        """Forget the locks of stores that are closed, or gone, if there are many."""
        with self._lock:
            opened = {store.store_id for store in self._registry.open_stores()}
            if len(self._locks) > 2 * len(opened) + LOCKS_KEPT:
                kept = opened | self._under_way
                self._locks = {store_id: lock for store_id, lock in self._locks.items() if store_id in kept}

    def run(self) -> int:
        """Dead-letter all that waits for it in open stores; returns how many messages. A store that fails holds up no
        other (invariant 7)."""
        return self._run(self._sweep)

    def _run(self, sweep: Callable[[Store], int]) -> int:
        count = 0
        for store, done, error in shared().for_each(self._registry.open_stores(), sweep):
            count += done or 0
            if isinstance(error, AnabranchError):
                log.debug("store %s: nothing is dead-lettered: %s", store.name, error)
            elif error is not None:
                raise error
        return count

    def _sweep_unless_busy(self, store: Store) -> int:
        """Sweep a store, unless another thread is at it: the store may be slow, or its disk hang."""
        return unless_busy(self._lock_of(store.store_id), lambda: self._sweep(store)) or 0

    def _sweep(self, store: Store) -> int:
        count = 0
        alone = False
        lock = self._lock_of(store.store_id)
        while True:
            with lock:
                if self.closed:
                    return count
                self._spent.pop(store.store_id, None)
                waiting: list[Undelivered] = []
                try:
                    self._under_way.add(store.store_id)
                    waiting += store.take_undelivered(SWEEP_MAX)
                    found = len(waiting)
                    if not found:
                        return count
                    refused = self._dead_letter_all(store, waiting, alone)
                finally:
                    left = len(waiting)
                    self._let_go(store, waiting)
                    self._under_way.discard(store.store_id)
            count += found - left
            if left == found and (alone or not refused):
                return count
            alone = refused

    def _dead_letter_all(self, store: Store, waiting: list[Undelivered], alone: bool) -> bool:
        """Dead-letter in transactions of a bounded size, or each message `alone`; those that are dead-lettered leave
        `waiting`. Returns whether a message was refused for what it is, or found no room: it must not hold up the
        others."""
        refused = False
        pattern = self._registry.dead_letter_of(store)
        full: set[Destination] = set()
        for some in _groups(self._to_do(store, waiting), 0 if alone else SWEEP_BYTES):
            first = some[0].message
            if first.destination in full:
                continue
            try:
                # This thread works for all stores; what finds no room is tried again.
                kept = without_waiting(partial(self._dead_letter, store, pattern, some))
            except (*_REFUSED, StoreFullError) as error:
                if not alone:
                    return True  # some of them may go, or find room
                if isinstance(error, StoreFullError):
                    self._wait("store %s: dead letters of %s wait: %s", store.name, first.destination, error)
                    full.add(first.destination)
                    continue
                refused = True
                with self._lock:
                    self._refused[store.store_id, first.seq] = time.monotonic() + REFUSED_SECONDS
                log.warning("store %s: %r cannot be dead-lettered, and waits: %s", store.name, first, error)
                continue
            except AnabranchError as error:
                self._wait("store %s: %d messages wait to be dead-lettered: %s", store.name, len(waiting), error)
                return False
            for one in some:
                waiting.remove(one)
            with self._lock:
                self.dead_lettered += kept
                self.dropped += len(some) - kept
            if pattern is None:
                self._deleted.count((store.name, message.destination) for message, reason in some if reason != EXPIRED)
        return refused

    def _to_do(self, store: Store, waiting: Sequence[Undelivered]) -> list[Undelivered]:
        """Return the messages that were not refused just before."""
        now = time.monotonic()
        with self._lock:
            while self._refused and next(iter(self._refused.values())) <= now:
                self._refused.popitem(last=False)
        return [one for one in waiting if (store.store_id, one.message.seq) not in self._refused]

    def _wait(self, text: str, *about: object) -> None:
        """Say that messages wait, which is nothing unusual while the router is being closed."""
        log.log(logging.DEBUG if self.closed else logging.WARNING, text, *about)

    def _dead_letter(self, store: Store, pattern: str | None, found: Sequence[Undelivered]) -> int:
        """Dead-letter in one transaction; returns how many went to a dead-letter queue. Raises AnabranchError, and then
        nothing was done."""
        kept = 0
        events: list[Event] = []
        transaction = self._begin()
        try:
            for message, reason in found:
                letter = self._letter(store, pattern, message, reason)
                if self._events:
                    events += _events_of(store, message, reason, False, None if letter is None else letter[0])
                if letter is not None:
                    transaction._carry(*letter)
                    kept += 1
            for message, _ in found:  # last: what is given back by a transaction counts as delivered
                transaction.ack(message)
            transaction.commit()
        except BaseException:
            if transaction.state == "open":
                transaction.rollback()
            raise
        for message in (message for message, reason in found if reason == EXPIRED):
            message._store.count_expired((message,))  # it may have moved meanwhile
        for event in events:
            self._events.tell(event)
        return kept

    def _letter(
        self, store: Store, pattern: str | None, message: Message, reason: str, rejected: bool = False,
        failure: Failure | None = None,
    ) -> tuple[Destination, Outgoing] | None:  # fmt: skip
        """Return the dead letter that a message becomes, and its queue; None: it is dropped. `rejected`: by its
        receiver, which counts as a delivery. `failure`: the reason, if it is not the one that the store knows."""
        if pattern is None:
            return None
        source, origin = message.destination, self._origin(message)
        target = dead_letter_queue(pattern, origin or source)
        if target == source and reason == EXPIRED and not rejected:
            return None
        known = origin is not None or (target == source and message.headers.get(SOURCE) is not None)
        headers = self._labelled(message, reason, known, rejected, target, failure or store.failure_of(message))
        lasting = message.persistent and not store.volatile
        return target, checked(message.content, headers, None, message.priority, 0, lasting, False)

    def _labelled(
        self, message: Message, reason: str, known: bool, rejected: bool, target: Destination, failure: Failure | None
    ) -> dict[str, Any]:
        """Return the headers of a dead letter; without the failure where its store would find the letter too large with
        it."""
        labels = labelled(message, reason, known, rejected, failure)
        if failure is not None:
            most = self._registry.option_for(target, "message_bytes_max")
            if most is not None and len(message.content) + len(pack_headers(labels)) > most:
                return labelled(message, reason, known, rejected)
        return labels

    def _origin(self, message: Message) -> Destination | None:
        """Return the source of a message that is in the dead-letter queue of its source; None for any other. The
        message has failed there once more, and goes where that source's dead letters go. Else a queue `dlq.{name}`
        would lead to `dlq.dlq.{name}`, and nothing would say where it came from."""
        name = message.headers.get(SOURCE)
        if not isinstance(name, str):
            return None
        try:
            origin = Destination.restored(name)
            pattern = getattr(self._registry.route(origin).target.options, "dead_letter", None)
            if pattern is None or dead_letter_queue(pattern, origin) != message.destination:
                return None
        except AnabranchError:  # a sender may put anything there
            return None
        return origin

    def _let_go(self, store: Store, left: Sequence[Undelivered]) -> None:
        """Free the messages that are leased still; nobody receives them, and the next sweep finds them."""
        for message, _ in left:
            try:
                store.release([message], delivered=False)
            except AnabranchError:
                pass  # the transaction has freed it, or acked it


def _warn_of_deleted(where: tuple[str, Destination], count: int) -> None:
    name, queue = where
    log.warning(
        "store %s: %s of %s deleted, rejected or given back too often: the store has no dead-letter queue; set "
        "`dead_letter: dlq` to keep such messages", name, count_of(count, "message"), queue,
    )  # fmt: skip


def _events_of(
    store: Store, message: Message, reason: str, rejected: bool, target: Destination | None
) -> Iterator[Event]:
    """Yield the events of a message that goes to a dead-letter queue, or away."""
    about = (store.name, message.destination, message.seq, message.message_id)
    if reason == EXPIRED and not rejected:
        yield MessageExpired(*about)
    deliveries = delivered(message, rejected)
    if target is None:
        yield MessageDropped(*about, reason, deliveries)
    else:
        yield MessageDeadLettered(*about, reason, deliveries, target)


def _groups(waiting: Sequence[Undelivered], size: int) -> list[list[Undelivered]]:
    """Return groups of messages, each of up to so many bytes of bodies, or of one message."""
    groups: list[list[Undelivered]] = []
    left = 0
    for one in waiting:
        left -= len(one.message.content)
        if left < 0 or not groups:
            groups.append([])
            left = size - len(one.message.content)
        groups[-1].append(one)
    return groups
