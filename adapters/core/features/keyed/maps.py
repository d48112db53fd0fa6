"""Keyed values: maps, whose messages are values and whose message ids are the keys (keyed.py).

    store.maps.put(results, "job-1", b"42")
    store.maps.get(results, "job-1")

V3  What is read is as of some moment in which all that had returned had taken effect. What depends on what is there
    (`put_if_absent`, `compare_and_set`, `pop`, `increment`, `touch`) takes effect at once, as if nobody else were
    there.
V4  A value whose time is over is not there, for everybody at once; its message goes with the next sweep.
V5  A value lives as long as its map: no duplicate window limits it, and nobody holds it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar, cast

from .....policies.errors import CorruptionError, DestinationError
from .....policies.names.destination import Destination, Kind
from ...engine.hooks import Feature
from ...messages import DEFAULT_PRIORITY, Outgoing
from ...operations.changes import Ack, Change, Send, acks_of
from ...record.encoding import body_of
from ...record.keys import key_bytes, range_of
from ...record.place import EXPIRES, OWN, SEQ, Place
from ...service.damaged import lose, readable
from ...state.leases import DestinationState, Receiver
from ...state.rows import KeyedRows
from ...state.sweep import wall_ms
from ..parts import Parts
from .keyed import KeyChangedError, Keys, Unchanged

T = TypeVar("T")

PAGE: Final = 64
"""Keys that are looked up together."""
DIGITS_MAX: Final = 1000
"""Digits of a number that is incremented."""
_TOO_LONG: Final = 10**DIGITS_MAX
_NUMBER: Final = re.compile(rb"-?[0-9]+")


class Value(NamedTuple):
    """The value of a key."""

    body: bytes
    place: Place

    @property
    def expires_at_ms(self) -> int:
        """Return when the value's time is over, 0: never."""
        expires: int = self.place[EXPIRES]
        return expires


class _Look(NamedTuple):
    """A look at one key."""

    state: DestinationState | None
    value: Value | None
    number: int
    """The number of the plan behind which it was so."""


class Maps(Feature):
    """The maps of one open store. Threads: all. A map is given as its destination. Each method raises DestinationError
    for what is no map, and what Store says."""

    def __init__(self, parts: Parts) -> None:
        self._engine = engine = parts.engine
        self._writer, self._sending = parts.writer, parts.sending
        self._keys = Keys()
        engine.sequencer.naming[Kind.MAP] = self._keys
        engine.maps = self
        self._rows = cast(KeyedRows, engine.backend)  # `_require_map` has looked
        self._keeps_maps = isinstance(engine.backend, KeyedRows)  # once: the question is slow

    # Reading

    def get(self, destination: Destination, key: str) -> bytes | None:
        """Return the value of a key; None if it has none."""
        value = self._look(destination, key_bytes(key)).value
        return value.body if value is not None else None

    def count(self, destination: Destination) -> int:
        """Return how many keys have a value; some whose time is over may still be among them."""
        self._require_map(destination)
        state = self._engine.asked(lambda: self._state(destination))
        return state.count if state is not None else 0

    def get_many(self, destination: Destination, keys: Iterable[str]) -> Iterator[bytes | None]:
        """Yield the value of each of these keys, None for one that has none. A page of them is held at a time; each is
        as it was when its page was read."""
        self._require_map(destination)
        names = [key_bytes(key) for key in keys]
        for at in range(0, len(names), PAGE):
            some = names[at : at + PAGE]
            page = self._engine.asked(lambda: self._page(destination, lambda state: self._rows.keyed(state, some)))  # noqa: B023
            found = dict(self._bodies(destination, page[0], list(page[1].items()))) if page is not None else {}
            yield from map(found.get, map(bytes.decode, some))

    def items(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the keys that begin with a prefix, behind `after` and before `before`, and their values. Keys come in
        the order of their bytes in UTF-8. A page of them is held at a time; each is as it was when its page was
        read."""
        for state, found in self._pages(destination, prefix, after, before):
            for name, body in self._bodies(destination, state, found):
                if body is not None:
                    yield name, body

    def keys(
        self, destination: Destination, prefix: str = "", after: str | None = None, before: str | None = None
    ) -> Iterator[str]:
        """Yield keys as `items` does, without looking at their values."""
        for _, found in self._pages(destination, prefix, after, before):
            yield from [name.decode() for name, place in found if _lives(place)]

    def _pages(
        self, destination: Destination, prefix: str, after: str | None, before: str | None
    ) -> Iterator[tuple[DestinationState, Sequence[tuple[bytes, Place]]]]:
        """Yield a map's state, and a page of its keys with their values' places, as of `items`."""
        self._require_map(destination)
        within = range_of(prefix, after, before)
        start = within.start
        while True:
            page = self._engine.asked(
                lambda: self._page(destination, lambda state: self._rows.keys(state, start, PAGE))  # noqa: B023
            )
            if page is None:
                return
            state, looked = page
            found = [one for one in looked if within.holds(one[0])]
            yield state, found
            if len(found) < PAGE:
                return
            start = found[-1][0] + b"\0"

    def _page(
        self, destination: Destination, look: Callable[[DestinationState], T]
    ) -> tuple[DestinationState, T] | None:
        """Return the state of a map, and what is found there; None: there is no such map. With the store's lock
        held."""
        state = self._state(destination)
        return (state, look(state)) if state is not None else None

    def _bodies(
        self, destination: Destination, state: DestinationState, found: Sequence[tuple[bytes, Place]]
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield keys with their values, which are at these places; None where there is none any more."""
        names, places = [name.decode() for name, _ in found], [place for _, place in found]
        records = readable(self._engine, state, places, names)
        for name, place, record in zip(names, places, records, strict=True):
            body = body_of(record) if record is not None and _lives(place) else None
            if record is None:  # it was put anew meanwhile, or is gone, or lost
                body = self.get(destination, name)
            yield name, body

    def wait(
        self, destination: Destination, key: str, timeout: float | None, unless: bytes | None = None
    ) -> bytes | None:
        """Return the value of a key once it has one, and another than `unless`; None if it has none in `timeout`
        seconds (None: for ever)."""
        engine, name = self._engine, key_bytes(key)
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            value = self._look(destination, name).value
            left = None if deadline is None else deadline - time.monotonic()
            if value is not None and value.body != unless:
                return value.body
            if left is not None and left <= 0:
                return None
            state = self._sending.state(destination)
            receiver = Receiver()
            receiver.prepare()
            try:
                engine.check()
                with engine.lock:
                    state.channel.receivers[receiver] = None  # first: what is taken in from now on wakes it
                    self._keys.waiting.setdefault((state.number, name), {})[receiver] = None
                    engine.current()
                    place = self._place(destination, name)
                    stays = engine.catalog.current(state) is state
                if stays and _seq(place) == (_seq(value.place) if value is not None else 0):
                    receiver.wait(left)
                engine.check()
            finally:
                self._leave(state, name, receiver)

    def _leave(self, state: DestinationState, name: bytes, receiver: Receiver) -> None:
        """End a consumer's wait. Idempotent."""
        state.channel.receivers.pop(receiver, None)
        key, waiting = (state.number, name), self._keys.waiting
        others = waiting.get(key)
        if others is not None:
            others.pop(receiver, None)
            if not others:
                with self._engine.lock:
                    if not others and waiting.get(key) is others:
                        waiting.pop(key, None)
        self._drop_unused(state)

    def _drop_unused(self, state: DestinationState) -> None:
        engine = self._engine
        if not state.declared and not state.channel.receivers and not engine.closed and not engine.forked:
            with engine.lock:
                engine.catalog.drop(state)

    # Writing

    def put(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool | None = None
    ) -> None:
        """Give a key a value, whatever it has. Durable and visible on return."""
        self._require_map(destination)
        key_bytes(key)
        sending = self._sending
        message = Outgoing(value, None, key, DEFAULT_PRIORITY, expires_at_ms)
        if self._engine.quotas is not None:
            sending.send_limited(destination, message, bool(sync))
            return
        ticket = sending.ticket(destination, message, sync)
        self._writer.submit(ticket)
        sending.wait(ticket)

    def put_if_absent(
        self, destination: Destination, key: str, value: bytes, expires_at_ms: int = 0, sync: bool = False
    ) -> bytes | None:
        """Put a value unless the key has one; returns that which it has, and None if it is put."""

        def decide(there: Value | None) -> tuple[bytes | None, int] | None:
            return (value, expires_at_ms) if there is None else None

        there = self._change(destination, key, decide, sync)
        return there.body if there is not None else None

    def compare_and_set(
        self, destination: Destination, key: str, expected: bytes | None, value: bytes | None,
        expires_at_ms: int = 0, sync: bool = False,
    ) -> bool:  # fmt: skip
        """Put a value if the key has the `expected` one; None in place of either is none. Returns whether it had."""

        def decide(there: Value | None) -> tuple[bytes | None, int] | None:
            return (value, expires_at_ms) if _body(there) == expected else None

        return _body(self._change(destination, key, decide, sync)) == expected

    def pop(self, destination: Destination, key: str, sync: bool = False) -> bytes | None:
        """Remove a key; returns the value that it had, None if it had none."""
        return _body(self._change(destination, key, lambda there: (None, 0), sync))

    def increment(
        self, destination: Destination, key: str, by: int = 1, expires_at_ms: int = 0, sync: bool = False
    ) -> int:
        """Add to the decimal number that a key has, 0 if it has none; returns the sum. A value that is there already
        keeps its time; `expires_at_ms` is for one that begins. Raises ValueError for what is no number."""
        total = 0

        def decide(there: Value | None) -> tuple[bytes | None, int] | None:
            nonlocal total
            before = 0 if there is None else _number(destination, key, there.body)
            total = before + by
            if abs(total) >= _TOO_LONG:
                raise ValueError(f"the number of {key!r} in {destination} would have more than {DIGITS_MAX} digits")
            return b"%d" % total, expires_at_ms if there is None else there.expires_at_ms

        self._change(destination, key, decide, sync)
        return total

    def touch(self, destination: Destination, key: str, expires_at_ms: int = 0, sync: bool = False) -> bool:
        """Give the value of a key another time, 0: none. Returns whether there is a value. It is put once more, with
        that time: nothing else in a store's files says when a message expires."""

        def decide(there: Value | None) -> tuple[bytes | None, int] | None:
            return None if there is None or there.expires_at_ms == expires_at_ms else (there.body, expires_at_ms)

        return self._change(destination, key, decide, sync) is not None

    def _change(
        self,
        destination: Destination,
        key: str,
        decide: Callable[[Value | None], tuple[bytes | None, int] | None],
        sync: bool,
    ) -> Value | None:
        """Replace the value of a key by what `decide` makes of it: a value (None: the key goes) and when it expires, or
        None: it stays. Returns what it had. `decide` may be called again, with what another has put meanwhile."""
        name = key_bytes(key)
        while True:
            state, there, number = self._look(destination, name)
            decided = decide(there)
            if decided is None:
                return there
            body, expires_at_ms = decided
            if body is None and there is None:
                return None
            state = state or self._sending.state(destination)
            change: Change
            if body is None:
                assert there is not None
                change = Ack(state, there.place[SEQ], 0, there.place if there.place[OWN] is not None else None)
            else:
                message = Outgoing(body, None, key, DEFAULT_PRIORITY, expires_at_ms)
                (change,) = self._sending.each(state, [message])
            grant = None
            if self._engine.quotas is not None and isinstance(change, Send):
                grant = self._engine.quotas.reserve([change])
            going = acks_of(grant.evicted) if grant is not None else []
            try:
                self._sending.write(
                    [Unchanged(self._keys, state, (name,), number), change, *going], sync, reservation=grant
                )
                return there
            except KeyChangedError:
                self._writer.flush()  # what has changed it is seen from now on

    # Looking

    def _look(self, destination: Destination, name: bytes) -> _Look:
        """Look at what a key has, with all that has returned applied."""
        self._require_map(destination)
        engine = self._engine
        while True:
            engine.check()
            with engine.lock:
                engine.current(drained=engine.applied < self._keys.recent.whole_at)
                number = engine.taken  # first: what is taken in from now on has a higher one
                state = self._state(destination)
                written = self._keys.recent.get((state.number, name)) if state is not None else None
                if written is not None and written.number > engine.applied:
                    value = self._written(written.send)
                    return _Look(state, value, number)
                place = self._rows.keyed(state, [name]).get(name) if state is not None else None
            if place is None or state is None or not _lives(place):
                return _Look(state, None, number)
            try:
                for record in engine.backend.bodies(state, [place]):
                    if record is not None:
                        return _Look(state, Value(body_of(record), place), number)
            except CorruptionError as error:
                lose(engine, state, place, error, name.decode())
                self._remove(state, name, place, number)
            # Another one has taken its place, or none, since.

    def _remove(self, state: DestinationState, name: bytes, place: Place, number: int) -> None:
        """Remove a key's value that is lost, unless the key has another since."""
        ack = Ack(state, place[SEQ], 0, place if place[OWN] is not None else None)
        try:
            self._sending.write([Unchanged(self._keys, state, (name,), number), ack])
        except KeyChangedError:
            self._writer.flush()  # what has changed it is seen from now on

    def _written(self, send: Send | None) -> Value | None:
        """Return the value in a message that may not be in the rows yet."""
        if send is None or 0 < send.expires_at_ms <= wall_ms():
            return None
        own = send.own if self._engine.backend.tells_places else None
        return Value(body_of(send.record), (send.order, send.seq, send.expires_at_ms, 0, own))

    def _place(self, destination: Destination, name: bytes) -> Place | None:
        """Return the place of a key's value, with the store's lock held and all that has returned applied."""
        state = self._state(destination)
        return self._rows.keyed(state, [name]).get(name) if state is not None else None

    def _state(self, destination: Destination) -> DestinationState | None:
        """Return a map's state, with the store's lock held and all that has returned applied. Raises MovedError if the
        map is on its way to another store, where a reader would see what was."""
        engine = self._engine
        if engine.sequencer.gates:
            engine.require_here(destination)
        state = engine.catalog.destinations.get(destination)
        return state if state is not None and state.declared else None

    def _require_map(self, destination: Destination) -> None:
        if destination.kind is not Kind.MAP:
            raise DestinationError(f"{destination} is no map; name one as map://...")
        if not self._keeps_maps:
            raise DestinationError(
                f"store {self._engine.name!r} is of a kind that keeps no maps, {self._engine.backend.kind!r}; route "
                f"{destination} to a store of another kind"
            )


def _lives(place: Place) -> bool:
    return not place[EXPIRES] or place[EXPIRES] > wall_ms()


def _seq(place: Place | None) -> int:
    """Return the seq of a value that lives; 0: there is none."""
    seq: int = 0 if place is None or not _lives(place) else place[SEQ]
    return seq


def _body(value: Value | None) -> bytes | None:
    return value.body if value is not None else None


def _number(destination: Destination, key: str, body: bytes) -> int:
    if len(body) > DIGITS_MAX or _NUMBER.fullmatch(body) is None:
        raise ValueError(
            f"the value of {key!r} in {destination} is no whole number in at most {DIGITS_MAX} decimal digits: "
            f"{body[:40]!r}; put one first"
        )
    return int(body)
