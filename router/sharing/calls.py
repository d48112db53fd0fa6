"""What clients ask an owner for that is not on a hot path: each is a function of the router, on a thread of the
library. Arguments and results are what msgpack has; `remote_store.py` and `shared_router.py` make them the
library's objects again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ...adapters.core import Store
from ...adapters.core.messages import LargeBody, Message, Receipt
from ...adapters.core.service.subscriptions import unknown
from ...adapters.core.store_types import Change, StoreStats, Subscription, SubscriptionKey
from ...policies.config.writing import plain_data
from ...policies.errors import (
    ClosedError,
    DestinationError,
    OutcomeUnknownError,
    TransactionError,
    UnknownMessageError,
)
from ...policies.names.destination import Destination, Kind
from ..transactions.xid import Xid, as_xid
from .inspecting import INSPECTIONS, INSPECTIONS_OF_SESSION, LONG_INSPECTIONS
from .protocol import EVENTS, pack, pack_event, pack_message
from .session import PAGE_BYTES, Session, consumer_key, destination_of

if TYPE_CHECKING:
    from ...policies.config import Config
    from ..placement.registry import StoreRegistry
    from ..router import Router

PAGE: Final = 256
"""Messages of a browse, or values of a map, that go over at once."""
SLICE_SECONDS: Final = 1.0
"""For so long a call waits for a value before it looks whether its client is still there."""


def reason_of(kind: str | None, text: str) -> str | BaseException:
    """Return the reason of a release as the owner's router takes it: text, or an exception of that type's name."""
    if kind is None:
        return text
    module, _, name = kind.rpartition(".")
    kept: type[Exception] = type(name, (Exception,), {"__module__": module or "builtins", "__qualname__": name})
    return kept(text)


def subscription_of(given: list[Any]) -> Subscription:
    """Return the subscription that these are the fields of."""
    topic, *rest = given
    return Subscription(destination_of(topic), *rest)


def packed_subscription(subscription: Subscription) -> list[Any]:
    """Return the fields of a subscription."""
    return [str(subscription.topic), *subscription[1:]]


def mark_of(config: Config) -> str:
    """Return what tells a configuration from others of the directory: not of what `shared` and `control` say."""
    data = {name: value for name, value in plain_data(config).items() if name not in ("shared", "control")}
    return hashlib.sha256(repr(data).encode()).hexdigest()


# By destination


def _held(name: str, otherwise: Any = None, convert: Callable[[Any], Any] = lambda result: result) -> Any:
    """Return a call of the store that holds a destination; `otherwise` if none does."""

    def call(router: Router, registry: StoreRegistry, text: str, *given: Any) -> Any:
        destination = destination_of(text)
        found = registry.for_held(
            destination, lambda store: getattr(store, name)(destination, *_keys(given)), otherwise
        )
        return convert(found)

    return call


def _keys(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments in which a list is the key of a subscription."""
    return tuple(consumer_key(one) if isinstance(one, list) else one for one in given)


def _of_map(name: str, makes: bool, otherwise: Any = None) -> Any:
    """Return a call of the values of a map. `makes`: the map comes to be by it."""

    def call(router: Router, registry: StoreRegistry, text: str, *given: Any) -> Any:
        destination = destination_of(text)

        def of_store(store: Store) -> Any:
            return getattr(store.maps, name)(destination, *given)

        if makes:
            return registry.for_store(destination, of_store)
        return registry.for_held(_map(destination), of_store, otherwise)

    return call


def _map(destination: Destination) -> Destination:
    """Return a destination that is a map. Raises DestinationError."""
    if destination.kind is not Kind.MAP:
        raise DestinationError(f"{destination} is no map; name one as map://...")
    return destination


def _increment(
    router: Router, registry: StoreRegistry, text: str, key: str, by: list[Any], expires_at_ms: int, sync: bool
) -> str:
    """Add to the number of a key. Numbers have any size, so they go as text."""
    added = int(by[0]) if isinstance(by[0], str) else by[0]
    destination = destination_of(text)
    return str(
        registry.for_store(
            destination, lambda store: store.maps.increment(destination, key, added, expires_at_ms, sync)
        )
    )


def _items(router: Router, registry: StoreRegistry, text: str, prefix: str, after: str | None) -> list[Any]:
    """Return a page of a map's values."""
    destination = destination_of(text)

    def of_store(store: Store) -> list[Any]:
        page, size = [], 0
        for key, body in store.maps.items(destination, prefix, after):
            page.append([key, body])
            size += len(body)
            if len(page) >= PAGE or size >= PAGE_BYTES:
                break
        return page

    return registry.for_held(destination, of_store, [])


def _wait_in(destination: Destination, key: str, seconds: float, store: Store) -> bytes | None:
    return store.maps.wait(destination, key, seconds)


def _wait(router: Router, registry: StoreRegistry, text: str, key: str, timeout: float | None) -> bytes | None:
    """Return the value of a key as soon as it has one."""
    destination = destination_of(text)
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        left = SLICE_SECONDS if deadline is None else min(SLICE_SECONDS, max(deadline - time.monotonic(), 0))
        body = registry.for_store(destination, partial(_wait_in, destination, key, left))
        if body is not None or left < SLICE_SECONDS or not registry.opened:
            return body


def _declare(router: Router, registry: StoreRegistry, text: str) -> None:
    destination = destination_of(text)
    registry.for_store(destination, lambda store: store.declare(destination))


def _subscribe(router: Router, registry: StoreRegistry, given: list[Any], retroactive: bool) -> bool:
    subscription = subscription_of(given)
    return registry.for_store(subscription.topic, lambda store: store.subscribe(subscription, retroactive))


def _unsubscribe(router: Router, registry: StoreRegistry, text: str, key: list[str]) -> int:
    topic, of = destination_of(text), (key[0], key[1])
    return registry.for_store(topic, lambda store: store.unsubscribe(topic, of))


def _subscriptions_of(router: Router, registry: StoreRegistry, text: str) -> list[Any]:
    return [packed_subscription(one) for one in registry.subscriptions_of(destination_of(text))]


def _find(registry: StoreRegistry, session: Session, text: str, message_id: str) -> list[Any] | None:
    destination = destination_of(text)
    message = registry.for_held(destination, lambda store: store.find(destination, message_id), None)
    return None if message is None else pack_message(message, None, session.add_body)


def browse(
    registry: StoreRegistry, session: Session, destination: Destination, key: SubscriptionKey | None, limit: int,
    after: Any,
) -> list[Any]:  # fmt: skip
    """Return a page of a destination's messages, behind a message (its seq and priority) or a seq."""

    def of_store(store: Store) -> list[Any]:
        behind = after
        if isinstance(after, list):
            behind = Message(store, destination, after[0], b"", {}, None, 0, leased=False, priority=after[1])
        return session.page(store.browse(destination, min(limit, PAGE), behind, key))

    return registry.for_held(destination, of_store, [])


def receive(
    registry: StoreRegistry, session: Session, destination: Destination, key: SubscriptionKey | None, most: int,
    lease: float | None,
) -> list[Any] | None:  # fmt: skip
    """Return what can be received at once."""
    found: list[Message[Any]] | None = registry.for_held(
        destination, lambda store: store.receive_many(destination, most, 0, key, lease), None
    )
    if found is None and key is not None:
        raise unknown(destination, key)
    return session.hold(found or ())


# Large bodies


def _body_begin(registry: StoreRegistry, session: Session) -> int:
    """Begin to take a body, into a file that has no name."""
    return session.add_body(tempfile.TemporaryFile(dir=registry.config.directory))


def _body_more(registry: StoreRegistry, session: Session, number: int, data: bytes) -> None:
    session.bodies[number].write(data)


def _body_read(registry: StoreRegistry, session: Session, number: int, offset: int, size: int) -> bytes:
    body = session.bodies.get(number)
    if body is None:
        raise ClosedError("a large body is gone with the process that owned the directory before; receive it again")
    if not isinstance(body, LargeBody):
        body.flush()
        return os.pread(body.fileno(), size, offset)
    with body.open() as stream:
        stream.seek(offset)
        return stream.read(size)


def _bodies_end(registry: StoreRegistry, session: Session, numbers: list[int]) -> None:
    for number in numbers:
        session.bodies.pop(number, None)


def events(router: Router, session: Session) -> None:
    """Tell the client of events from now on."""
    if session.events is None:
        session.events = router.on_event(lambda event: session.send(pack(0, EVENTS, pack_event(event))))


def _repartition(
    router: Router, registry: StoreRegistry, path: str, restart: bool, prepared_seconds: float
) -> dict[str, Any]:
    report = router.repartition(path, restart=restart, prepared_seconds=prepared_seconds)
    plain: dict[str, Any] = msgspec.to_builtins(report)
    return plain


def _idle(router: Router, registry: StoreRegistry, text: str, seconds: float) -> None:
    router.queue(destination_of(text), expires_when_idle=seconds)


OF_SESSION: Final[Mapping[str, Callable[..., Any]]] = {
    "find": _find, "body_begin": _body_begin, "body_more": _body_more, "body_read": _body_read,
    "bodies_end": _bodies_end, "end_vote": lambda registry, session, *given: _end_vote(registry, session, *given),
    **INSPECTIONS_OF_SESSION,
}  # fmt: skip
"""By name: functions of the registry, the client's session and the arguments. More are in inspecting.py."""


# Transactions


def _xid(given: list[Any]) -> Xid:
    return as_xid(tuple(given))


def commit(
    router: Router, registry: StoreRegistry, session: Session, again: bool, xid: list[Any] | None, mode: str,
    sends: list[Any], acks: list[str], changes: list[Any],
) -> list[Any]:  # fmt: skip
    """Commit a whole transaction, or prepare it (`prepare`, `vote`); returns the receipts. `again`: it may have been
    committed before, which its sends and its acks tell, for they took effect together or not at all."""
    tokens = [session.now(token) for token in acks]
    known = [(destination_of(text), session.outgoing_of(fields)) for text, fields in sends]
    if again and mode == "prepare":
        if xid is not None and _xid(xid) in router.recover():
            session.let_go(acks)
            return []
    elif again:
        before = _committed_before(registry, session, known, tokens)
        if before is not None:
            return before
    transaction = router.transaction(None if xid is None else _xid(xid))
    try:
        for destination, message in known:
            transaction._carry(destination, message)
        for token in tokens:
            if token is None:
                raise UnknownMessageError("a message that this transaction acks is not leased any more")
            transaction.ack(store_of_lease(registry, token).leased(token))
        for given, subscribe, retroactive in changes:
            transaction._change(Change(subscription_of(given), subscribe, retroactive))
        if mode == "vote":
            transaction.vote()
            number = next(session.votes)
            session.voted[number] = transaction
            return [number]
        if mode == "prepare":
            transaction.prepare()
        receipts = transaction.commit() if mode == "commit" else []
    except BaseException:
        if transaction.state == "open":
            transaction.rollback()
        raise
    session.let_go(acks)
    return _packed_receipts(receipts)


def _end_vote(registry: StoreRegistry, session: Session, number: int, commit: bool, acks: list[str]) -> list[Any]:
    transaction = session.voted.pop(number, None)
    if transaction is None:
        raise TransactionError(
            "this transaction was rolled back with the process that owned the directory before; begin another"
        )
    session.let_go(acks)
    if not commit:
        transaction.rollback()
        return []
    return _packed_receipts(transaction.commit())


def _packed_receipts(receipts: Iterable[Receipt]) -> list[Any]:
    return [(str(one.destination), one.seq, one.duplicate) for one in receipts]


def store_of_lease(registry: StoreRegistry, token: str) -> Store:
    """Return the store that leased a message, whose UUID a token begins with. Raises UnknownMessageError."""
    try:
        store = registry.open_store(bytes.fromhex(token[:32]))
    except ValueError:
        store = None
    if store is None:
        raise UnknownMessageError(f"the message of token {token!r} is not leased here any more")
    return store


def _committed_before(
    registry: StoreRegistry, session: Session, sends: list[Any], tokens: list[str | None]
) -> list[Any] | None:
    """Return the receipts of a transaction that was committed before; None if it was not. A message tells, to which its
    client has given an id: other ids may be known from elsewhere. Raises OutcomeUnknownError where there is none, and
    an acked message is gone, which this transaction may have acked, or somebody else."""
    receipts = []
    own = f"{session.client}."
    is_known = tells = False
    for destination, message in sends:
        seq = None
        if destination.kind is not Kind.MAP:
            seq = registry.for_held(destination, methodcaller("seq_of", destination, message.message_id), None)
            if message.message_id.startswith(own):
                is_known |= seq is not None
                tells = True
        receipts.append((str(destination), seq or 0, False))
    if is_known or (tokens and not sends and None in tokens):
        return receipts
    if None in tokens and not tells:
        raise OutcomeUnknownError(
            "the process that owned the directory was lost before it had answered to a commit, and a message that this "
            "transaction acks is gone; look whether the others were sent"
        )
    return None


# The router


def _stats(router: Router, registry: StoreRegistry) -> list[Any]:
    stats = router.stats()
    stores = {name: _packed_stats(store) for name, store in stats.stores.items()}
    return [stores, stats.decision_syncs, stats.dead_lettered, stats.dropped, list(stats.unresponsive)]


def _packed_stats(stats: StoreStats) -> dict[str, Any]:
    fields = {name: getattr(stats, name) for name in StoreStats.__dataclass_fields__}
    fields["destinations"] = [[str(one), count] for one, count in stats.destinations.items()]
    fields["subscriptions"] = [[packed_subscription(one), count] for one, count in stats.subscriptions.items()]
    fields["segments"] = dict(stats.segments)
    return fields


CALLS: Final[Mapping[str, Callable[..., Any]]] = {
    "depth": _held("depth", 0),
    "counts": _held("counts", None, lambda counts: None if counts is None else [*counts, counts.oldest_ready_seconds]),
    "purge": _held("purge", 0),
    "declare": _declare,
    "delete": lambda router, registry, text: registry.removal.delete(destination_of(text)),
    "exists": lambda router, registry, text: destination_of(text) in registry.table.destinations,
    "destinations": lambda router, registry, prefix: [str(one) for one in router.destinations(prefix)],
    "subscribe": _subscribe,
    "unsubscribe": _unsubscribe,
    "subscriptions_of": _subscriptions_of,
    "subscriptions": lambda router, registry: [packed_subscription(one) for one in router.subscriptions()],
    "map_get": _of_map("get", makes=False),
    "map_pop": _of_map("pop", makes=False),
    "map_count": _of_map("count", makes=False, otherwise=0),
    "map_items": _items,
    "map_wait": _wait,
    "map_put": _of_map("put", makes=True),
    "map_put_if_absent": _of_map("put_if_absent", makes=True),
    "map_compare_and_set": _of_map("compare_and_set", makes=True),
    "map_increment": _increment,
    "stats": _stats,
    "sweep": lambda router, registry: router.sweep(),
    "reclaim": lambda router, registry: router.reclaim(),
    "compact": lambda router, registry, store: router.compact(store),
    "reopen": lambda router, registry, name: router.reopen(name),
    "requeue": lambda router, registry, text, limit: router.requeue(destination_of(text), limit),
    "commit_xid": lambda router, registry, xid, one_phase: router.commit(_xid(xid), one_phase),
    "rollback_xid": lambda router, registry, xid: router.rollback(_xid(xid)),
    "recover": lambda router, registry: [list(one) for one in router.recover()],
    "in_doubt": lambda router, registry: msgspec.to_builtins(router.in_doubt()),
    "resolve": lambda router, registry, transaction, outcome: router.resolve(transaction, outcome),
    "heuristics": lambda router, registry: msgspec.to_builtins(router.heuristics()),
    "forget": lambda router, registry, transaction: router.forget(transaction),
    "configuration": lambda router, registry: mark_of(router.config),
    "reopen_decisions": lambda router, registry: router.reopen_decisions(),
    "start_usage_log": lambda router, registry, options: router.start_usage_log(options),
    "stop_usage_log": lambda router, registry: router.stop_usage_log(),
    "expires_when_idle": _idle,
    "repartition": _repartition,
    "usage_stats": lambda router, registry: msgspec.to_builtins(router.usage_stats()),
    **INSPECTIONS,
}
"""By name: functions of the router, its registry and the arguments."""

LONG: Final = LONG_INSPECTIONS | {"repartition", "map_wait", "compact", "reclaim", "requeue"}
"""Those that may take long, which have a thread of their own."""
