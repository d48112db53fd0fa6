"""The calls of clients that are not on a hot path: each is a function of the client's session, on a thread of
the library, and says what it takes. Results are what msgspec has; the client makes them the library's objects again."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from ....adapters.core import Store
from ....adapters.core.messages import LargeBody, Message, Receipt
from ....adapters.core.service.leased_sending import not_leased
from ....adapters.core.state.leases import unknown_lease
from ....adapters.core.store_types import Subscription, SubscriptionKey
from ....policies.errors import ClosedError, DestinationError, UnknownMessageError
from ....policies.names.destination import Destination, Kind
from ...api.consumer import place_moved
from ...api.endpoint import kept
from ...inspection import newest_of
from ...migration.moving import move_page
from ...router import Router, RouterStats, inspection_of
from ...transactions.xid import Xid
from ..descriptors import Descriptor
from ..protocol import EVENTS, PAGE, OutgoingFields, destination_of, pack, pack_message
from ..socket_file import Identity, identity_of
from ..starting import mark_of
from .commits import end_vote, end_xid, store_of_lease
from .session import PAGE_BYTES, Session, slices

T = TypeVar("T")

Key = SubscriptionKey | None


class Called:
    """A function that clients call by name, and the types of what it takes behind the session."""

    def __init__(
        self, run: Callable[..., Any], *types: Any, is_long: bool = False, is_page: bool = False,
        look: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        """`types`: Any where the router itself says what is wrong with a value. `is_long`: it may take long, and has a
        thread of its own. `is_page`: it returns bodies or values, and waits until there is room for them. `look` does
        it with the store that holds the destination, and waits for nothing but that store."""
        self._run = run
        self.look = look
        self.is_long = is_long
        self.is_page = is_page
        fields = [(f"field{n}", str if one is Destination else one) for n, one in enumerate(types)]
        self._given = msgspec.defstruct("Given", fields, array_like=True, frozen=True, forbid_unknown_fields=True)
        self._places = [n for n, one in enumerate(types) if one is Destination]

    def with_(self, session: Session, given: Sequence[Any]) -> partial[Any]:
        """Return the call with the session and what a client has given. Raises TypeError."""
        try:
            taken = msgspec.convert(given, self._given, builtin_types=(bytes,))  # else text is taken for base64
        except msgspec.ValidationError as error:
            raise TypeError(str(error)) from error
        fields = list(msgspec.structs.astuple(taken))
        for place in self._places:
            fields[place] = destination_of(fields[place])
        return partial(self._run, session, *fields)


def _of_router(name: str, *types: Any, of: Callable[[Router], Any] = lambda it: it, is_long: bool = False) -> Called:
    """Return a call of the router's own method, or of one of its parts."""
    return Called(lambda session, *given: getattr(of(session.router), name)(*given), *types, is_long=is_long)


def _of_store(name: str, *types: Any) -> Called:
    """Return a call of the store that a destination lives in, which comes to be by it."""

    def run(session: Session, destination: Destination, *given: Any) -> Any:
        return session.registry.for_store(destination, lambda store: getattr(store, name)(destination, *given))

    return Called(run, Destination, *types)


def _of_held(name: str, *types: Any, otherwise: Any = None, convert: Callable[[Any], Any] | None = None) -> Called:
    """Return a call of the store that holds a destination; `otherwise` if none does."""

    def run(session: Session, destination: Destination, *given: Any) -> Any:
        found = session.registry.for_held(
            destination, lambda store: getattr(store, name)(destination, *given), otherwise
        )
        return found if convert is None or found is None else convert(found)

    return Called(run, Destination, *types)


def _of_map(name: str, *types: Any, makes: bool = True, otherwise: Any = None) -> Called:
    """Return a call of the values of a map. `makes`: the map comes to be by it."""

    def of_store(store: Store, destination: Destination, *given: Any) -> Any:
        return getattr(store.maps, name)(destination, *given)

    def run(session: Session, destination: Destination, *given: Any) -> Any:
        if makes:
            return session.registry.for_store(destination, lambda store: of_store(store, destination, *given))
        if destination.kind is not Kind.MAP:
            raise DestinationError(f"{destination} is no map; name one as map://...")
        return session.registry.for_held(destination, lambda store: of_store(store, destination, *given), otherwise)

    is_get = name == "get"
    return Called(run, Destination, *types, is_page=is_get, look=of_store if is_get else None)


# Maps


def _increment(
    session: Session, destination: Destination, key: str, by: list[Any], expires_at_ms: int, sync: bool
) -> str:
    """Add to the number of a key. Numbers have any size, so they go as text."""
    added = int(by[0]) if isinstance(by[0], str) else by[0]
    return str(
        session.registry.for_store(
            destination, lambda store: store.maps.increment(destination, key, added, expires_at_ms, sync)
        )
    )


def _get_many(session: Session, destination: Destination, keys: list[str]) -> list[bytes | None]:
    """Return the values of the first of these keys, at least one: a page."""
    return session.registry.for_held(
        destination, lambda store: _look_up(store, destination, keys), [None] * len(keys)
    )  # fmt: skip


def _look_up(store: Store, destination: Destination, keys: list[str]) -> list[bytes | None]:
    return _map_page(store.maps.get_many(destination, keys), lambda one: len(one or b""))


def _items(
    session: Session, destination: Destination, prefix: str, after: str | None, before: str | None
) -> list[tuple[str, bytes]]:
    """Return a page of a map's values."""
    return session.registry.for_held(
        destination,
        lambda store: _map_page(store.maps.items(destination, prefix, after, before), lambda one: len(one[1])), [],
    )  # fmt: skip


def _keys(session: Session, destination: Destination, prefix: str, after: str | None, before: str | None) -> list[str]:
    """Return a page of a map's keys."""
    return session.registry.for_held(
        destination, lambda store: list(islice(store.maps.keys(destination, prefix, after, before), PAGE)), []
    )


def _map_page(found: Iterator[T], size_of: Callable[[T], int]) -> list[T]:
    """Return the first of what is found, until a page is full."""
    page, size = list[T](), 0
    for one in found:
        page.append(one)
        size += size_of(one)
        if len(page) >= PAGE or size >= PAGE_BYTES:
            break
    return page


def _wait(
    session: Session, destination: Destination, key: str, unless: bytes | None, timeout: float | None
) -> bytes | None:
    """Return the value of a key as soon as it has one that is another than `unless`."""
    for left in slices(timeout):
        body = session.registry.for_store(destination, lambda store: store.maps.wait(destination, key, left, unless))  # noqa: B023
        if body is not None or session.is_over or not session.registry.opened:
            return body
    return None


# Messages and large bodies


def _browse(
    session: Session, destination: Destination, key: Key, limit: int, after: int | tuple[int, int, bytes | None],
    leased: bool,
) -> list[Any]:  # fmt: skip
    """Return a page of a destination's messages, behind a message (its seq, its priority and its store's id) or a seq.
    Raises ClosedError where the message was in another store."""

    def of_store(store: Store) -> Any:
        behind: int | Message = 0
        if isinstance(after, int):
            behind = after
        else:
            seq, priority, store_id = after
            behind = Message(store, destination, seq, b"", {}, None, 0, leased=False, priority=priority)
            if store_id not in (None, store.store_id):
                return behind
        return session.page(store.browse(destination, min(limit, PAGE), behind, key, leased))

    found: Any = session.registry.for_held(destination, of_store, [])
    if isinstance(found, Message):
        raise place_moved(destination, found)
    return found  # type: ignore[no-any-return]


def _newer(session: Session, destination: Destination, seq: int) -> list[Any]:
    """Return the first of the messages behind a seq, in order of theirs."""

    def of_store(store: Store) -> list[Any]:
        found = [one for one in store.browse(destination) if one.seq > seq]
        return session.page(sorted(found, key=lambda one: one.seq))

    return session.registry.for_held(destination, of_store, [])


def _newest(session: Session, destination: Destination, count: int) -> list[Any]:
    """Return the last so many messages, in order of their seqs, from the first of them on; no more than are browsed at
    once."""
    most = min(count, PAGE)
    return session.registry.for_held(
        destination, lambda store: session.page(newest_of(store.browse(destination), most)), []
    )


def _send_leased(
    session: Session, destination: Destination, fields: OutgoingFields, sync: bool, lease: float | None, number: int,
    again: bool,
) -> tuple[list[Any] | None, int, bool]:  # fmt: skip
    """Send a message that the client holds; returns it, or none, and the fields of its receipt. `again`: it may have
    been stored before, and the lease be gone with that connection, or with the owner before: the client gets another,
    if the message is there still and nobody else has it."""
    message = session.outgoing_of(fields, number)
    if not isinstance(message.body, bytes | LargeBody):
        message = message._replace(body=kept(session.registry, destination, message.body, None, True))

    def send(store: Store) -> Message[Any] | Receipt:
        sent = store.send_leased(destination, message, lease, sync)
        if isinstance(sent, Message) or sent.dropped or not again:
            return sent
        try:
            token = store.lease_again(destination, sent.seq, None, lease)
        except UnknownMessageError as error:
            raise not_leased(destination, error) from error
        if token is None:
            raise not_leased(destination, UnknownMessageError("somebody else has received and settled it"))
        return store.leased(token)

    found = session.registry.for_store(destination, send)
    if isinstance(found, Receipt):
        return [], found.seq, found.duplicate
    return session.hold([found]), found.seq, False


def _extend(session: Session, given: str, seconds: float | None) -> None:
    """Lease a message for longer."""
    token = session.now(given)
    if token is None:
        raise unknown_lease(given)
    store = store_of_lease(session.registry, token)
    store.extend(store.leased(token), seconds)


def _find(session: Session, destination: Destination, message_id: str) -> list[Any] | None:
    message = session.registry.for_held(destination, lambda store: store.find(destination, message_id), None)
    return None if message is None else pack_message(message, message._store.store_id, session.add_body)


def _body_file(session: Session, number: int) -> Identity:
    """Pass the client a descriptor of a body it has received: of its file, or of an unnamed copy. Returns which file
    that is."""
    body = session.bodies.get(number)
    if body is None:
        raise ClosedError("a large body is gone with the process that owned the directory before; receive it again")
    with suppress(ClosedError):
        return _passed(session, Descriptor(body.descriptor()))
    with tempfile.TemporaryFile(dir=session.registry.config.directory) as file:
        body.copy_into(file)
        file.flush()
        return _passed(session, Descriptor(os.dup(file.fileno())))


def _passed(session: Session, descriptor: Descriptor) -> Identity:
    while not session.pass_descriptor(descriptor.fd) and not session.is_closed:
        time.sleep(0.002)  # until it reads what it has asked for
    return identity_of(os.fstat(descriptor.fd))


# The router


def _events(session: Session) -> None:
    """Tell the client of events from now on."""
    if session.events is None:
        session.events = session.router.on_event(
            lambda event: session.send(pack(0, EVENTS, [type(event).__name__, event]))
        )


def _stats(session: Session) -> RouterStats:
    """Return the router's statistics, whose mappings by destinations and subscriptions go as pairs."""
    stats = session.router.stats()
    stores: dict[str, Any] = {
        name: dataclasses.replace(
            one,
            destinations=list(one.destinations.items()),  # type: ignore[arg-type]
            subscriptions=list(one.subscriptions.items()),  # type: ignore[arg-type]
        )
        for name, one in stats.stores.items()
    }
    return dataclasses.replace(stats, stores=stores)


def _expire_when_idle(session: Session, queue: Destination, seconds: float) -> None:
    session.router.queue(queue, expires_when_idle=seconds)


def _move(session: Session, source: Destination, target: Destination, most: int) -> int:
    """Move one page: who asks shows how far it is, and asks for the next one."""
    router = session.router
    return move_page(router._unlimited, router.queue(source), router.queue(target), most)


def _damage(session: Session) -> str | None:
    damage = inspection_of(session.router).decisions_damage
    return None if damage is None else str(damage)


CALLS: Final[Mapping[str, Called]] = {
    "depth": _of_held("depth", Key, otherwise=0),
    "counts": _of_held("counts", Key, convert=lambda counts: [counts, counts.oldest_ready_seconds]),
    "purge": _of_held("purge", Key, otherwise=0),
    "declare": _of_store("declare"),
    "delete": Called(lambda session, destination: session.registry.removal.delete(destination), Destination),
    "exists": Called(lambda session, destination: destination in session.registry.table.destinations, Destination),
    "browse": Called(_browse, Destination, Key, int, int | tuple[int, int, bytes | None], bool, is_page=True),
    "withdraw_credit": Called(Session.withdraw_credit, int, int),
    "send_leased": Called(_send_leased, Destination, OutgoingFields, bool, float | None, int, bool, is_page=True),
    "extend": Called(_extend, str, float | None),
    "find": Called(_find, Destination, str, is_page=True),
    "newer": Called(_newer, Destination, int, is_long=True, is_page=True),
    "newest": Called(_newest, Destination, int, is_long=True, is_page=True),
    "destinations": Called(lambda session: [str(one) for one in session.router.destinations()]),
    "subscribe": Called(
        lambda session, given, retroactive: session.registry.for_store(
            given.topic, lambda store: store.subscribe(given, retroactive)
        ),
        Subscription, bool,
    ),
    "unsubscribe": _of_store("unsubscribe", SubscriptionKey),
    "subscriptions_of": Called(lambda session, topic: session.registry.subscriptions_of(topic), Destination),
    "subscriptions": _of_router("subscriptions"),
    "body_file": Called(_body_file, int, is_long=True),
    "bodies_end": Called(Session.end_bodies, list[int]),
    "map_get": _of_map("get", str, makes=False),
    "map_pop": _of_map("pop", str, bool | None, makes=False),
    "map_count": _of_map("count", makes=False, otherwise=0),
    "map_get_many": Called(_get_many, Destination, list[str], is_page=True, look=_look_up),
    "map_items": Called(_items, Destination, str, str | None, str | None, is_page=True),
    "map_keys": Called(_keys, Destination, str, str | None, str | None),
    "map_touch": _of_map("touch", str, int, bool | None, makes=False, otherwise=False),
    "map_wait": Called(_wait, Destination, str, bytes | None, float | None, is_long=True),
    "map_put": _of_map("put", str, bytes, int, bool | None),
    "map_put_if_absent": _of_map("put_if_absent", str, bytes, int, bool | None),
    "map_compare_and_set": _of_map("compare_and_set", str, bytes | None, bytes | None, int, bool | None),
    "map_increment": Called(_increment, Destination, str, list[Any], int, bool | None),
    "end_vote": Called(end_vote, int, bool, list[str], list[str], list[tuple[str, OutgoingFields]], bool),
    "commit_xid": Called(lambda session, *given: end_xid(session, True, *given), Xid, bool, bool),
    "rollback_xid": Called(lambda session, *given: end_xid(session, False, *given), Xid, bool, bool),
    "recover": _of_router("recover"),
    "in_doubt": _of_router("in_doubt"),
    "resolve": _of_router("resolve", Any, Any),
    "heuristics": _of_router("heuristics"),
    "forget": _of_router("forget", Any),
    "reopen_decisions": _of_router("reopen_decisions"),
    "decisions_damage": Called(_damage),
    "events": Called(_events),
    "stats": Called(_stats),
    "sweep": _of_router("sweep"),
    "health": _of_router("health", is_long=True),
    "reclaim": _of_router("reclaim", is_long=True),
    "compact": _of_router("compact", Any, is_long=True),
    "reopen": _of_router("reopen", Any),
    "requeue": _of_router("requeue", Destination, Any, is_long=True),
    "configuration": Called(lambda session: mark_of(session.router.config)),
    "start_usage_log": _of_router("start_usage_log", Any),
    "stop_usage_log": _of_router("stop_usage_log"),
    "usage_stats": _of_router("usage_stats"),
    "expires_when_idle": Called(_expire_when_idle, Destination, float),
    "repartition": Called(
        lambda session, path, restart, seconds: session.router.repartition(
            path, restart=restart, prepared_seconds=seconds
        ),
        str, bool, float, is_long=True,
    ),
    "option": _of_router("option", Destination, str, of=inspection_of),
    "bytes_of": _of_router("bytes_of", Destination, of=inspection_of),
    "overview": _of_router("stores", of=inspection_of),
    "sessions": _of_router("sessions", of=inspection_of),
    "explain": _of_router("explain", is_long=True, of=inspection_of),
    "dead_letters": Called(
        lambda session, failed: [
            (*place, count) for place, count in inspection_of(session.router).dead_letters(failed).items()
        ],
        list[str], is_long=True,
    ),
    "backup": _of_router("backup", str, is_long=True, of=inspection_of),
    "move": Called(_move, Destination, Destination, int, is_long=True),
    "compact_recorded": Called(
        lambda session, names: inspection_of(session.router).compact(names, lambda done, total: None),
        list[str], is_long=True,
    ),
}  # fmt: skip
