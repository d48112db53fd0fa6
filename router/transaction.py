"""Transactions: sends, acks and changes of subscriptions that take effect together or not at all, in one store or in
several.

    with router.transaction() as tx:
        tx.send("queue://audit", b"...")
        tx.ack(message)

What the transaction does stays in memory until commit, so others see nothing of it before (rule X6: an acked message
is CLAIMED). In one store the commit is one batch of its journal, which a crash leaves there whole or not at all; over
several the coordinator makes it one (coordinator.py).

An external transaction, begun with the xid of a transaction manager, can be prepared first: it then survives restarts,
and waits until `Router.commit(xid)` or `Router.rollback(xid)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from ..adapters.background import shared
from ..adapters.base import (
    DEFAULT_PRIORITY,
    Change,
    Headers,
    Message,
    Receipt,
    Store,
    Subscription,
    checked,
)
from ..adapters.subscriptions import require_same
from ..policies.destination import Destination
from ..policies.errors import (
    AnabranchError,
    OutcomeUnknownError,
    TransactionError,
    TransactionInDoubt,
)
from .addresses import Address, resolve_all, topic_of
from .endpoint import expiry
from .parts import Part, Work, unclaim
from .requeue import mark_requeued
from .xid import Xid

if TYPE_CHECKING:
    from .open_transactions import OpenTransactions
    from .router import Router
    from .topic import Subscriber

T = TypeVar("T")

UNKNOWN: Final = "of unknown outcome"
ACK: Final = -1
CHANGE: Final = -2
"""In place of a send's place."""

_STEPS: Final = {
    "prepared": ("is prepared", "say its outcome with router.commit(xid) or router.rollback(xid)"),
    "voted": ("has voted", "commit it or roll it back"),
}
"""The states in which something can be done about it yet."""


class Transaction:
    """One transaction, used by one thread at a time; ends with commit, rollback or its `with` block, or when its time
    is over."""

    def __init__(self, router: Router, opened: OpenTransactions, xid: Xid | None = None, limited: bool = True) -> None:
        """`limited`: by max_operations and max_bytes."""
        self.xid = xid
        self._limited = limited
        self._router = router
        self._opened = opened
        self._options = opened.options
        self._lock = threading.Lock()  # guards all below
        self._parts: dict[bytes, Part] = {}
        """By store id, since a store that was closed for being idle comes back as another object."""
        self._order: list[tuple[Part, int]] = []
        """Of each send: its part, and its place among the part's sends; of each ack: its part, and ACK; of each change
        of a subscription: its part, and CHANGE."""
        self._savepoints: list[Savepoint] = []
        """By the number of operations before each, which differ."""
        self._work: Work | None = None
        """Once it has voted."""
        self._bytes = 0
        self.receipts: list[Receipt] = []
        """Once it is committed: what `commit` has returned, a receipt for each send, in order."""
        self._state = "open"
        self._entered = False
        opened.add(self)

    def __repr__(self) -> str:
        name = f" {self.xid}" if self.xid is not None else ""
        return f"<Transaction{name}, {self._state}, {len(self._order)} operations>"

    def __enter__(self) -> Transaction:
        with self._lock:
            self._require_open()
            if self._entered:
                raise TransactionError("this transaction is entered already; begin another for the inner block")
            self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(kind is not None)
        except KeyboardInterrupt:
            if self._state in ("open", "voted"):  # it had not come so far as to end it
                self._interrupted()
            raise

    def _leave(self, failed: bool) -> None:
        """The block is over."""
        ended = self._state not in ("open", "voted")
        if ended and (failed or not self._state.startswith("timed out")):
            return
        if not failed:
            self.commit()
            return
        try:
            self.rollback()
        except TransactionError:
            pass  # its time was over just now: the block's own error is the one to hear of

    @property
    def state(self) -> str:
        """`open`, `voted`, `prepared`, `committed`, `rolled back`, `in doubt`, or what else became of it."""
        return self._state

    def send(
        self,
        destination: Address,
        body: bytes,
        headers: Headers | None = None,
        message_id: str | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None,
        persistent: bool = True,
    ) -> None:
        """Send at commit. A composite (`queue://a,topic://b`) is a send to each of its parts. The rest as Queue.send;
        `expires_in` counts from now.

        Raises what routing raises, TypeError and ValueError for what is no message, and TransactionError beyond the
        limits of a transaction; the transaction goes on without it either way.
        """
        expires_at_ms = 0 if expires_in is None else expiry(expires_in)
        parts = resolve_all(destination)
        message = checked(body, headers, message_id, priority, expires_at_ms, persistent)
        place = self._router.places.store_to_be if persistent else self._router.places.transient_for
        with self._lock:
            self._require_open()
            stores = [(destination, place(destination)) for destination in parts]
            size = len(parts) * len(message.body)
            self._require_room(len(parts), size)
            before = len(self._order), self._bytes
            try:
                self._bytes += size
                for destination, store in stores:
                    part = self._part(store, destination)
                    self._order.append((part, len(part.sends)))
                    part.sends.append((destination, message))
            except KeyboardInterrupt:
                self._take_back_sends(*before)
                raise

    def _take_back_sends(self, operations: int, size: int) -> None:
        """Leave nothing of a send that was interrupted anywhere: who catches that may commit what was there before."""
        for part, place in reversed(self._order[operations:]):
            del part.sends[place:]
        del self._order[operations:]
        self._bytes = size
        self._drop_empty_parts()

    def _drop_empty_parts(self) -> None:
        """A store in which nothing is done takes no part."""
        self._parts = {
            store_id: part for store_id, part in self._parts.items() if part.sends or part.acks or part.changes
        }

    def ack(self, message: Message) -> None:
        """Ack a leased message at commit; on rollback it is free again, at its old place.

        Raises UnknownMessageError, and TransactionError beyond the limits of a transaction.
        """
        if not isinstance(message, Message):
            raise TypeError(f"a message that was received can be acked, not {type(message).__name__}: {message!r}")
        with self._lock:
            self._require_open()
            self._require_room(1, 0)
            self._router.places.require_own(message)
            self._require_same(message)
            before = len(self._order)
            try:
                message.store.claim(message)
                part = self._part(message.store, message.destination)
                part.acks.append(message)
                self._order.append((part, ACK))
            except KeyboardInterrupt:
                self._take_back(message, before)
                raise

    def _take_back(self, message: Message, operations: int) -> None:
        """Leave nothing of an ack that was interrupted anywhere: the message is free, or leased still."""
        part = self._part(message.store, message.destination)
        part.acks = [acked for acked in part.acks if acked is not message]
        self._drop_empty_parts()
        del self._order[operations:]
        unclaim(message.store, [message])

    def subscribe(
        self,
        topic: Address,
        name: str,
        client_id: str = "",
        selector: str | None = None,
        no_local: bool = False,
        retroactive: bool = False,
    ) -> Subscription:
        """Begin a durable subscription at commit, before the sends of this transaction; as Topic.subscribe. If another
        has begun one of that client and name by then, that stays.

        Raises SubscriptionError, DestinationError for a queue, and TransactionError beyond the limits of a transaction.
        """
        subscription = Subscription(topic_of(topic), name, client_id, selector, no_local)
        there = self._router.places.for_store(subscription.topic, lambda store: store.subscriptions())
        for known in there:
            if known.topic == subscription.topic and known.key == subscription.key:
                require_same(known, subscription)
        self._change(Change(subscription, True, retroactive))
        return subscription

    def unsubscribe(self, subscription: Subscription | Subscriber) -> None:
        """End a durable subscription at commit, before the sends of this transaction; passed over if it is gone by
        then. Raises TransactionError beyond the limits of a transaction."""
        known = subscription if isinstance(subscription, Subscription) else getattr(subscription, "subscription", None)
        if not isinstance(known, Subscription):
            raise TypeError(f"a subscription can be ended, not {type(subscription).__name__}: {subscription!r}")
        self._change(Change(known, False))

    def _change(self, change: Change) -> None:
        topic = change.subscription.topic
        with self._lock:
            self._require_open()
            self._require_room(1, 0)
            part = self._part(self._router.places.store_for(topic), topic)
            before = len(self._order)
            try:
                self._order.append((part, CHANGE))
                part.changes.append(change)
            except KeyboardInterrupt:
                del self._order[before:]
                part.changes = [known for known in part.changes if known is not change]
                self._drop_empty_parts()
                raise

    def savepoint(self) -> Savepoint:
        """This point of the transaction, to which it can be rolled back."""
        with self._lock:
            self._require_open()
            if not self._savepoints or self._savepoints[-1].operations != len(self._order):
                self._savepoints.append(Savepoint(self, len(self._order)))
            return self._savepoints[-1]

    def roll_back_to(self, savepoint: Savepoint) -> None:
        """See Savepoint.rollback."""
        with self._lock:
            self._require_open()
            if not any(known is savepoint for known in self._savepoints):
                raise TransactionError("this savepoint is gone: the transaction was rolled back to an earlier one")
            while self._savepoints[-1] is not savepoint:
                self._savepoints.pop()
            try:
                self._undo(savepoint.operations)
            except BaseException:  # half undone it must not be committed
                self._roll_back("rolled back")
                raise

    def _undo(self, operations: int) -> None:
        """All but the first so many."""
        acked = [part for part, place in self._order[operations:] if place == ACK]
        for part in self._parts.values():  # first: what was interrupted before is in its part still
            count = sum(other is part for other in acked)
            if count:
                unclaim(part.store, part.acks[-count:])
        while len(self._order) > operations:
            part, place = self._order.pop()
            if place == ACK:
                part.acks.pop()
            elif place == CHANGE:
                part.changes.pop()
            else:
                self._bytes -= len(part.sends.pop()[1].body)
        self._drop_empty_parts()

    def _part(self, store: Store, destination: Destination) -> Part:
        part = self._parts.get(store.store_id)
        if part is None:
            part = self._parts[store.store_id] = Part(store, destination)
        elif part.store is not store and not part.acks:
            part.store = store  # opened again since
        return part

    def _require_same(self, message: Message) -> None:
        part = self._parts.get(message.store.store_id)
        if part is not None and part.acks and part.store is not message.store:
            raise TransactionError(
                f"store {part.store.name!r} was reopened since this transaction acked {part.acks[0]!r}, whose lease is "
                "gone with that; roll back and receive again"
            )

    def _require_room(self, operations: int, size: int) -> None:
        options = self._options
        for what, option, used, limit in (
            ("operations", "max_operations", len(self._order) + operations, options.max_operations),
            ("bytes of messages", "max_bytes", self._bytes + size, options.max_bytes),
        ):
            if used > limit and self._limited:
                raise TransactionError(
                    f"this transaction would hold {used} {what}; transactions.{option} is {limit}: commit it and go on "
                    "in another, or raise the limit"
                )

    def _require_open(self) -> None:
        if self._state != "open":
            what, step = _STEPS.get(self._state, (f"is {self._state}", "begin another"))
            raise TransactionError(f"this transaction {what}; {step}")

    def commit(self) -> list[Receipt]:
        """Make it durable, then visible. Returns a receipt for each send, in order; its `seq` is 0 where the store
        failed after the decision and carries it out later (Router.in_doubt).

        In one store it is as durable as that store's policy says; over several, power-failure durable whatever their
        policies, unless `transactions.sync` is `never`. Raises OutcomeUnknownError if the one store failed while it
        wrote (whether it took effect shows when it is opened again), TransactionInDoubt if the decision log did. Any
        other error: it was rolled back.
        """
        with self._lock:
            if self._state != "voted":
                self._require_open()
            try:
                return self._commit_and_end()
            except KeyboardInterrupt:
                self._interrupted()
                raise

    def _commit_and_end(self) -> list[Receipt]:
        self._state = "committing"
        self.receipts = self._ending(self._commit)
        self._state = "committed"
        return self.receipts

    def _ending(self, call: Callable[[], T]) -> T:
        """The last that is done here; if it fails, the state says what that means."""
        try:
            return call()
        except OutcomeUnknownError:
            self._state = UNKNOWN
            raise
        except TransactionInDoubt:
            self._state = "in doubt"
            raise
        except Exception:
            self._state = "rolled back"
            if self._work is not None:
                self._router.coordinator.abandon(self._work)
            raise
        finally:
            self._opened.remove(self)

    def _interrupted(self) -> None:
        """A signal handler's exception may have struck anywhere: another thread brings it to an end."""
        self._state = UNKNOWN
        shared().schedule(0, self._clean_up)

    def _clean_up(self) -> None:
        try:
            self._router.coordinator.take_over(list(self._parts.values()))
        finally:
            self._opened.remove(self)  # last: until then its xid is in use, though the log may not say so yet

    def _commit(self) -> list[Receipt]:
        parts = self._handed_over()
        if not parts:
            return []
        if self._work is not None:
            receipts = self._router.coordinator.finish(self._work)
        elif len(parts) > 1:
            receipts = self._router.coordinator.commit(parts)
        else:
            receipts = {id(parts[0]): parts[0].commit(self._router.places)}
        for part in parts:
            for change in part.changes:
                with suppress(AnabranchError):  # it is committed; who receives there finds out
                    self._router.places.mirror(change.subscription, change.subscribe)
        return [
            receipts[id(part)][place] if receipts.get(id(part)) else Receipt(part.sends[place][0], 0)
            for part, place in self._order
            if place >= 0
        ]

    def _handed_over(self) -> list[Part]:
        """What it does in each store, as the stores get it."""
        parts = list(self._parts.values())
        mark_requeued(parts)
        return parts

    def prepare(self) -> None:
        """The first phase of an external transaction: durable, unseen, held until its manager says
        `Router.commit(xid)` or `Router.rollback(xid)`, over restarts too. Errors are as those of `commit`; a
        transaction without any operations has nothing to prepare and is committed.

        Raises TransactionError for one that was begun without an xid.
        """
        with self._lock:
            self._require_open()
            if self.xid is None:
                raise TransactionError(
                    "only a transaction with an xid can be prepared, since nobody could name it after a restart; begin "
                    "it with router.transaction(xid=...)"
                )
            try:
                self._hold(self.xid)
            except KeyboardInterrupt:
                self._interrupted()
                raise

    def _hold(self, xid: Xid) -> None:
        parts = self._handed_over()
        self._state = "preparing"
        self._ending(lambda: self._router.coordinator.hold(parts, xid) if parts else None)
        self._state = "prepared" if parts else "committed"

    def vote(self) -> None:
        """The first phase alone, for who has to ask other resources before it commits: prepared, durable and unseen in
        all its stores, be it only one. `commit` then fails for nothing but a broken disk, and the transaction does not
        time out; `rollback` undoes it, and so does whatever ends the process or closes the router before `commit`. One
        that has to outlive those has an xid, and is prepared with `prepare`. Errors are as those of `commit`.
        """
        with self._lock:
            self._require_open()
            try:
                self._state = "voting"
                if self._parts:
                    self._work = self._router.coordinator.vote(self._handed_over())
                self._opened.keep(self)
                self._state = "voted"
            except Exception:
                self._state = "rolled back"
                self._opened.remove(self)
                raise
            except KeyboardInterrupt:
                self._interrupted()
                self._state = "rolled back"
                raise

    def rollback(self) -> None:
        """Forget the sends, free the acked messages."""
        with self._lock:
            if self._state != "voted":
                self._require_open()
            try:
                self._roll_back("rolled back")
            except KeyboardInterrupt:
                self._interrupted()
                self._state = "rolled back"
                raise

    def _roll_back(self, state: str) -> None:
        self._state = state
        self._opened.remove(self)
        if self._work is not None:
            self._router.coordinator.abandon(self._work)
            return
        for part in self._parts.values():
            part.unclaim()

    def expire(self) -> None:
        """Its time is over: rolled back, unless it is just being committed."""
        if self._lock.acquire(blocking=False):
            try:
                if self._state == "open":
                    self._roll_back(f"timed out after {self._options.timeout:g} s and rolled back")
            finally:
                self._lock.release()


class Savepoint:
    """A point inside a transaction."""

    __slots__ = ("_transaction", "operations")

    def __init__(self, transaction: Transaction, operations: int) -> None:
        self._transaction = transaction
        self.operations = operations
        """That were done before it."""

    def rollback(self) -> None:
        """Undo what the transaction has done since: sends are forgotten, acked messages free again at their old places.
        May be called again; savepoints made after this one are gone. Raises TransactionError for one that is, and when
        the transaction has ended."""
        self._transaction.roll_back_to(self)
