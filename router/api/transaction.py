"""Transactions are sends, acks and changes of subscriptions that take effect together or not at all, in one store or in
several.

    with router.transaction() as tx:
        tx.send("queue://audit", b"...")
        tx.ack(message)

All changes stay in memory until commit, so others see nothing of them before (rule X6: an acked message is CLAIMED). In
one store the commit is one batch of its journal, which a crash leaves there whole or not at all; over several the
coordinator makes it one (coordinator.py).

An external transaction, begun with the xid of a transaction manager, can be prepared first: it then survives restarts,
and waits until `Router.commit(xid)` or `Router.rollback(xid)`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Unpack, cast, overload

from ...adapters.core.messages import (
    DEFAULT_PRIORITY,
    REJECTED,
    Headers,
    LargeBody,
    Message,
    Outgoing,
    Readable,
    Reason,
    Receipt,
    T,
    checked,
    require_leased,
)
from ...adapters.core.record.keys import put_of, range_of, removal_of
from ...adapters.core.service.failures import failure_of
from ...adapters.core.service.subscriptions import require_same
from ...adapters.core.store_types import Change, Subscription
from ...adapters.system.background import shared
from ...adapters.system.conditions import Promise, unless_busy
from ...policies.errors import TransactionError
from ...policies.names.destination import Destination
from ..transactions.coordinator import Coordinator
from ..transactions.global_transaction import GlobalTransaction
from ..transactions.operations import Operations, Release
from ..transactions.states import ACTIVE, DONE, PREPARING, TransactionState
from ..transactions.xid import Xid
from .addresses import Address, map_of, resolve_all, topic_of
from .codecs import encode
from .dead_letter import mark_requeued, require_message
from .endpoint import Endpoint, SendOptions, due, expiry, kept
from .map import Map, V

if TYPE_CHECKING:
    from ..placement.registry import StoreRegistry
    from .topic import Subscriber

_UNKNOWN: Final = "of unknown outcome"

_STEPS: Final[dict[str, tuple[str, str]]] = {
    "prepared": ("is prepared", "say its outcome with router.commit(xid) or router.rollback(xid)"),
    "voted": ("has voted", "commit it or roll it back"),
}
"""The states in which something can be done about a transaction yet."""


class Transaction:
    """A transaction, used by one thread at a time. It ends with commit, rollback or its `with` block, or when its time
    is over."""

    _savepoints: Sequence[Savepoint] = ()
    """In order of the number of operations before each; no two have the same. Replaced, never changed."""
    _entered = False

    def __init__(
        self, coordinator: Coordinator, registry: StoreRegistry, xid: Xid | None = None, limited: bool = True
    ) -> None:
        """Begin a transaction. `limited`: by max_operations and max_bytes. Raises TransactionError at the limit of open
        transactions, and for an xid that is in use."""
        self.xid = xid
        self._coordinator, self._registry = coordinator, registry
        self._own_lock = threading.RLock()  # guards all below
        self._global = GlobalTransaction(xid)
        self._operations = Operations(coordinator.table.options, limited)
        self._moves = registry.gates.moves
        """The registry's `moves` when every operation was with the store that its destination is in."""
        self.receipts: list[Receipt] = []
        """The receipts that `commit` has returned, one for each send, in order; filled once it is committed."""
        coordinator.table.begin(self._global, self)

    @property
    def _lock(self) -> threading.RLock:
        """The transaction's lock. Raises RuntimeError in a signal handler that interrupted its own thread at this
        transaction (rule G3)."""
        if self._own_lock._is_owned():  # type: ignore[attr-defined]
            raise self._interrupted_itself()
        return self._own_lock

    @staticmethod
    def _interrupted_itself() -> RuntimeError:
        return RuntimeError(
            "a transaction was used amid another call of it in the same thread: by a signal handler, which has to do "
            "it later, or by a second task of an event loop, which has to await the first call; or use another one"
        )

    def __repr__(self) -> str:
        name = f" {self.xid}" if self.xid is not None else ""
        return f"<Transaction{name}, {self.state}, {len(self._operations)} operations>"

    def __enter__(self) -> Transaction:
        with self._lock:
            if self._global.state is not ACTIVE:
                self._require_active()
            if self._entered:
                raise TransactionError("this transaction is entered already; begin another for the inner block")
            self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            state = self._global.shown  # as `state`, less a call
            if kind is None and state in ("open", "voted", "timed out"):
                self.commit()  # which says so if its time was over
            elif kind is not None and state in ("open", "voted"):
                with suppress(TransactionError):  # its time was over just now: the block's own error says more
                    self._fail(error)
        except KeyboardInterrupt:
            if self.state in ("open", "voted"):  # it had not come so far as to end it
                self._interrupted(_UNKNOWN)
            raise

    def _fail(self, error: BaseException | None) -> None:
        """Roll back. The error is noted as the reason for which its messages are given back."""
        acked = self._operations.acked
        for message in acked if error is not None else ():
            message._store.note_failure([message], cast("BaseException", error))
        self.rollback()
        for message in acked:
            message._store.tell_spent([message])

    @property
    def state(self) -> TransactionState:
        """How far the transaction has come, as far as is known here. A prepared one stays `prepared`: its manager knows
        its outcome."""
        return self._global.shown

    @property
    def is_empty(self) -> bool:
        """True if the transaction has done nothing, or all of it was undone."""
        return not self._operations

    @overload
    def send(
        self,
        destination: Endpoint[T],
        body: T | Readable | LargeBody,
        headers: Headers | None = ...,
        message_id: str | None = ...,
        **options: Unpack[SendOptions],
    ) -> None: ...

    @overload
    def send(
        self,
        destination: str | Destination,
        body: bytes | Readable | LargeBody,
        headers: Headers | None = ...,
        message_id: str | None = ...,
        **options: Unpack[SendOptions],
    ) -> None: ...

    def send(
        self,
        destination: Address,
        body: Any,
        headers: Headers | None = None,
        message_id: str | None = None,
        *,
        priority: int = DEFAULT_PRIORITY,
        expires_in: float | None = None,
        persistent: bool = True,
        size: int | None = None,
        deliver_in: float | None = None,
        deliver_at: float | datetime | None = None,
        group: str | None = None,
    ) -> None:
        """Send at commit. A composite (`queue://a,topic://b`) is a send to each of its parts. A queue or topic that has
        a codec takes a value. The rest is as in Queue.send; `expires_in` and `deliver_in` count from now. A body that
        is a file is read now, into the store that it is for; it goes with a rollback.

        Raises what routing raises, TypeError and ValueError for what is no message, and TransactionError beyond the
        limits of a transaction; the transaction goes on without it either way.
        """
        expires_at_ms = 0 if expires_in is None else expiry(expires_in)
        if isinstance(destination, Endpoint):
            if destination._codec is not None:
                body, headers = encode(destination._codec, body, headers, destination.destination)
            destinations: tuple[Destination, ...] = (destination.destination,)
        else:
            destinations = resolve_all(destination)
        if type(body) is not bytes or size is not None:
            with self._lock:
                self._require_active()
            body = kept(self._registry, destinations[0], body, size, persistent)
        deliver_at_ms = 0 if deliver_in is deliver_at is None else due(deliver_in, deliver_at)
        message = checked(body, headers, message_id, priority, expires_at_ms, persistent, False, deliver_at_ms, group)
        self._send(destinations, message)

    def _carry(self, destination: Destination, message: Outgoing) -> None:
        """Send at commit a message that was one before, as it was. For callers that move messages; else as `send`."""
        self._send((destination,), self._kept(destination, message))

    def _kept(self, destination: Destination, message: Outgoing) -> Outgoing:
        if type(message.body) is bytes:
            return message
        return message._replace(body=kept(self._registry, destination, message.body, None, message.persistent))

    def _send(self, destinations: Sequence[Destination], message: Outgoing) -> None:
        lock = self._own_lock
        if lock._is_owned():  # type: ignore[attr-defined]  # as `_lock`, less a call
            raise self._interrupted_itself()
        with lock:
            if self._global.state is not ACTIVE or self._global.told is not None:
                self._require_active()
            self._operations.send(destinations, message, self._registry)

    def put(self, map: Map[V] | Address, key: str, value: V, *, ttl: float | None = None) -> None:
        """Give a key of a map a value at commit, whatever value it has by then; `ttl` counts from now. If one key is
        changed several times, the last change counts. `commit` returns a receipt for a put as for a send. Raises as
        Map.put, and TransactionError beyond the limits of a transaction."""
        expires_at_ms = 0 if ttl is None else expiry(ttl, "ttl")
        body = map._encoded(value) if isinstance(map, Map) else cast("bytes", value)
        self._send((_map_of(map),), put_of(key, body, expires_at_ms))

    def remove(self, map: Map[Any] | Address, key: str) -> None:
        """Remove a key of a map at commit, if it has a value by then. Otherwise as `put`."""
        self._send((_map_of(map),), removal_of(key))

    def remove_range(
        self, map: Map[Any] | Address, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> int:
        """Remove at commit the keys of a map that begin with `prefix`, come behind `after` and before `before`. These
        are the ones that have a value now, or are put by this transaction before; one that another puts later stays.
        Returns how many they are: each is an operation of the transaction. Otherwise as `put`."""
        with self._lock:
            self._require_active()
        destination, within = _map_of(map), range_of(prefix, after, before)
        there: list[str] = self._registry.for_held(
            destination, lambda store: list(store.maps.keys(destination, prefix, after, before)), []
        )
        with self._lock:
            self._require_active()
            return self._operations.remove_range(destination, there, within, self._registry)

    def ack(self, message: Message[Any]) -> None:
        """Ack a leased message at commit; on rollback it is free again, at its old place.

        Raises UnknownMessageError, and TransactionError beyond the limits of a transaction.
        """
        if not isinstance(message, Message):
            raise TypeError(f"a message that was received can be acked, not {type(message).__name__}: {message!r}")
        lock = self._own_lock
        if lock._is_owned():  # type: ignore[attr-defined]  # as `_lock`, less a call
            raise self._interrupted_itself()
        with lock:
            if self._global.state is not ACTIVE or self._global.told is not None:
                self._require_active()
            self._operations.claim(message, self._registry)

    def release(
        self, message: Message[Any], delivered: bool = True, delay: float | None = None, reason: Reason | None = None
    ) -> None:
        """Give a leased message back when the transaction ends, however it ends (with `prepare`: once that is done):
        the message is free then, as after Message.release, whose `delay` begins then. Until then nobody else has it.

        Raises as `ack`, and TypeError and ValueError for what is no time to wait, or no reason.
        """
        if not isinstance(message, Message):
            raise TypeError(f"a message that was received can be released, not {type(message).__name__}: {message!r}")
        with self._lock:
            self._require_active()
            message._store.delay_ms(delay)  # what is wrong with it is said now
            if reason is not None:
                failure_of(reason)
            self._operations.claim(message, self._registry, Release(message, delivered, delay, reason))

    def reject(self, message: Message[Any], reason: Reason = REJECTED) -> None:
        """Put a leased message into its store's dead-letter queue at commit, as Message.reject does: acked, and sent
        there, or dropped where there is none. On rollback it is free again, as after a release. `commit` returns no
        receipt of the dead letter. Statistics and events tell of it once it is committed, not of a transaction that was
        prepared under its xid.

        Raises as `ack`, TypeError for what is no reason, and what a send of the dead letter raises.
        """
        require_message(message)
        require_leased(message)
        self._registry.require_own(message)
        with self._lock:
            self._require_active()
        router: Any = message._store.owner
        router._reject_within(self, message, reason)

    def _reject(
        self, message: Message[Any], letter: tuple[Destination, Outgoing] | None, told: Callable[[], object]
    ) -> None:
        """Do `reject`, with the dead letter that the message becomes. `told` is called once it is committed."""
        if letter is not None:
            letter = letter[0], self._kept(*letter)
        with self._lock:
            self._require_active()
            self._operations.reject(message, letter, told, self._registry)

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
        for other in self._registry.subscriptions_of(subscription.topic):
            if other.key == subscription.key:
                require_same(other, subscription)
        self._change(Change(subscription, True, retroactive))
        return subscription

    def unsubscribe(self, subscription: Subscription | Subscriber[Any]) -> None:
        """End a durable subscription at commit, before the sends of this transaction; skipped if it is gone by
        then. Raises TransactionError beyond the limits of a transaction."""
        ended = subscription if isinstance(subscription, Subscription) else getattr(subscription, "subscription", None)
        if not isinstance(ended, Subscription):
            raise TypeError(f"a subscription can be ended, not {type(subscription).__name__}: {subscription!r}")
        self._change(Change(ended, False))

    def _change(self, change: Change) -> None:
        with self._lock:
            self._require_active()
            self._operations.change(change, self._registry)

    def savepoint(self) -> Savepoint:
        """Return a savepoint at this point of the transaction, to which it can be rolled back."""
        with self._lock:
            self._require_active()
            if not self._savepoints or self._savepoints[-1]._operations != len(self._operations):
                self._savepoints = [*self._savepoints, Savepoint(self, len(self._operations))]
            return self._savepoints[-1]

    def _roll_back_to(self, savepoint: Savepoint) -> None:
        """Roll back to a savepoint; see Savepoint.rollback."""
        with self._lock:
            self._require_active()
            if savepoint not in self._savepoints:
                raise TransactionError("this savepoint is gone: the transaction was rolled back to an earlier one")
            self._savepoints = self._savepoints[: self._savepoints.index(savepoint) + 1]
            try:
                self._operations.undo(savepoint._operations)
            except BaseException:  # half undone it must not be committed
                self._roll_back()
                self._ended()
                raise

    def _require_active(self) -> None:
        state = self.state
        if state != "open":
            what, step = _STEPS.get(state, (f"is {state}", "begin another"))
            if state == "timed out":
                what = f"timed out after {self._coordinator.table.options.timeout:g} s and rolled back"
            raise TransactionError(f"this transaction {what}; {step}")

    def commit(self) -> list[Receipt]:
        """Make the transaction durable, then visible. Returns a receipt for each send, in order; its `seq` is 0 where
        the store failed after the decision and carries it out later (Router.in_doubt).

        In one store it is as durable as that store's policy says; over several, power-failure durable whatever their
        policies, unless `transactions.sync` is `never`. Raises OutcomeUnknownError if the one store failed while it
        wrote (whether it took effect shows when it is opened again), TransactionInDoubt if the decision log did. Any
        other error: it was rolled back.
        """
        lock = self._own_lock
        if lock._is_owned():  # type: ignore[attr-defined]  # as `_lock`, less a call
            raise self._interrupted_itself()
        with lock:
            if self._global.told is not None or (self._global.state is not ACTIVE and self.state != "voted"):
                self._require_active()
            self._ending(self._commit)
            return self.receipts

    def commit_nowait(self) -> Future[list[Receipt]]:
        """Commit without waiting, on a thread of ours, on which the future resolves. The future raises the errors of
        `commit`. No more can be done with the transaction meanwhile, and leaving its `with` block waits for nothing.
        Two that are committed so may take effect in either order."""
        future: Future[list[Receipt]] = Promise()
        future.set_running_or_notify_cancel()
        job = partial(self._commit_in_background, future)
        try:
            with self._lock:
                if self.state not in ("open", "voted"):
                    self._require_active()
                self._global.told = "preparing"
            shared().lead(job)
        except KeyboardInterrupt:
            shared().lead(job)  # which does nothing if it was not begun, or is done
            raise
        return future

    def _commit_in_background(self, future: Future[list[Receipt]]) -> None:
        error: BaseException | None = None
        with self._lock:
            if self._global.told != "preparing":
                return
            self._global.told = None
            try:
                self._ending(self._commit)
            except BaseException as raised:
                error = raised
        shared().resolve([(future, self.receipts, error)])

    def _ending(self, end: Callable[[], None], interrupted: TransactionState = _UNKNOWN, is_last: bool = True) -> None:
        """Run the last step of the transaction, or the last but one. A signal handler's exception may strike anywhere
        in it: another thread then brings the transaction to its end."""
        try:
            try:
                end()
            except KeyboardInterrupt:
                raise
            except BaseException:
                self._ended()
                raise
            if is_last:
                self._ended()
        except KeyboardInterrupt:
            self._interrupted(interrupted)
            raise

    def _ended(self) -> None:
        """Free the released messages, and end the transaction in the table. May be done again."""
        self._operations.end()
        self._global.passing = False
        self._coordinator.table.begun.pop(self._global, None)

    def _interrupted(self, told: TransactionState) -> None:
        self._global.told = told
        if self._global.state is ACTIVE:
            self._global.move(PREPARING)  # its user can end it no more
        shared().schedule(0, self._clean_up)

    def _clean_up(self) -> None:
        try:
            self._hand_over()
            self._coordinator.take_over(self._global)
            if self._global.told == _UNKNOWN:
                self._global.told = None
        finally:
            self._ended()  # last: until then its xid is in use, though the log may not say so yet

    def _pass(self) -> None:
        """Hand the operations over to the participants. From now until it is `_ended` no destination that the
        transaction changes moves to another store. Operations on a destination that has moved are done in the other
        store; a move that is about to begin is waited for."""
        registry, transaction, gates = self._registry, self._global, self._registry.gates
        while transaction.state is ACTIVE:
            moves = gates.moves
            try:
                transaction.participants = self._operations.participants(None if moves == self._moves else registry)
            except Exception:
                self._roll_back()
                raise
            self._moves = moves
            if self._operations.has_acks:
                mark_requeued(transaction.participants.values())
            transaction.passing = True  # first: who closes a gate counts, and then looks who is passing
            if gates.moves == moves:
                return
            transaction.passing = False

    def _commit(self) -> None:
        self._pass()
        self._coordinator.commit(self._global)
        self.receipts = self._operations.receipts(self._global.participants.values())
        self._operations.tell_rejected()
        if self._global.state is DONE:
            self._global.let_go()

    def prepare(self) -> None:
        """Prepare an external transaction, the first phase: durable, unseen, held until its manager says
        `Router.commit(xid)` or `Router.rollback(xid)`. It is held over restarts too, even without any operations.
        Errors are as those of `commit`.

        Raises TransactionError for one that was begun without an xid.
        """
        with self._lock:
            self._require_active()
            if self.xid is None:
                raise TransactionError(
                    "only a transaction with an xid can be prepared, since nobody could name it after a restart; begin "
                    "it with router.transaction(xid=...)"
                )
            self._ending(partial(self._hold, self.xid))

    def _hold(self, xid: Xid) -> None:
        self._pass()
        self._coordinator.hold(self._global, xid)
        self._global.told = "prepared"

    def vote(self) -> None:
        """Prepare in all stores, be it only one, durable and unseen: the first phase alone, for callers that ask other
        resources before they commit. `commit` then fails for nothing but a broken disk, and the transaction does not
        time out. `rollback` undoes it, and so does whatever ends the process or closes the router before `commit`. A
        transaction that has to outlive those has an xid, and is prepared with `prepare`. Errors are as those of
        `commit`."""
        with self._lock:
            self._require_active()
            self._ending(self._vote, "rolled back", is_last=False)

    def _vote(self) -> None:
        self._pass()
        self._coordinator.prepare(self._global)
        self._global.passing = False  # what is prepared in a store keeps it where it is

    def rollback(self) -> None:
        """Forget the sends, free the acked messages."""
        with self._lock:
            if self._global.told is not None or (self._global.state is not ACTIVE and self.state != "voted"):
                self._require_active()
            self._ending(self._roll_back, "rolled back")

    def _roll_back(self) -> None:
        self._hand_over()
        self._coordinator.roll_back(self._global)

    def _hand_over(self) -> None:
        """Hand the operations over to the participants as they are, to be undone, unless they have them."""
        if not self._global.participants:
            self._global.participants = self._operations.participants()

    def _expire(self) -> None:
        """Roll the transaction back, since its time is over, unless it is just being committed."""
        if not self._own_lock._is_owned():  # type: ignore[attr-defined]
            unless_busy(self._own_lock, self._time_out)

    def _time_out(self) -> None:
        if self._global.state is ACTIVE and self._global.told is None:
            self._global.told = "timed out"
            self._roll_back()
            self._ended()


def _map_of(given: Map[Any] | Address) -> Destination:
    return given.destination if isinstance(given, Map) else map_of(given)


class Savepoint:
    """A point inside a transaction."""

    __slots__ = ("_operations", "_transaction")

    def __init__(self, transaction: Transaction, operations: int) -> None:
        self._transaction = transaction
        self._operations = operations
        """The number of operations that were done before it."""

    def rollback(self) -> None:
        """Undo what the transaction has done since. Sends are forgotten, acked messages free again at their old places.
        May be called again; savepoints made after this one are gone. Raises TransactionError for one that is gone, and
        when the transaction has ended."""
        self._transaction._roll_back_to(self)
