"""Import of an export's lines (lines.py) into a data directory of any configuration.

    with open("data.jsonl", "rb") as file:
        imported = import_lines(config, file, "data.jsonl")

L11  Messages keep what the lines say of them. They come behind those that their destination holds already.
L12  A message whose id its destination remembered when the import came to that is not brought a second time, nor is an
     id. A transaction whose xid is in use is not prepared again.
L13  Lines are written in pages. At a line that is broken, or cannot be imported, all before it is made durable, and the
     error says with which line to go on. So does any other that ends the import, as Ctrl-C. Whoever goes on reads the
     lines before it for the destinations alone.
L14  A transaction is prepared once all its messages are there, the decision log last. If one that it acks was not
     brought by the same import, it is left out, and told.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from ...adapters.core import Store
from ...adapters.core.migration import copying, moved_branches
from ...adapters.core.operations.branches import payload_of, send_of
from ...adapters.core.operations.changes import Ack, Change
from ...adapters.core.operations.destination_changes import Subscribe, Unsubscribe
from ...adapters.core.record.encoding import HEAD, Parts, encode_parts, name_of
from ...adapters.core.record.headers import MESSAGE_ID_BYTES_MAX
from ...adapters.core.record.large import Sized
from ...adapters.system.background import unstruck
from ...policies.config import Config
from ...policies.errors import AnabranchError, ConfigError, DestinationError
from ...policies.names.destination import Destination
from ..migration.plan import is_volatile
from ..router import Router
from ..transactions.decision_log import External
from ..transactions.xid import Xid, as_xid
from .importing import quiet_router
from .lines import VERSION, Chunk, Claim, Held, Line, Named, Prepared, Seen, Start, decode, from_json


@dataclass(slots=True)
class Imported:
    """The number of things that were brought, and of those that were not."""

    lines: int = 0
    """Lines that were read."""
    messages: int = 0
    without_id: int = 0
    """Messages among them that would come again with another import."""
    known: int = 0
    """Messages and ids that were known already."""
    transactions: int = 0
    left_out: list[str] = field(default_factory=list)
    """Transactions that were not prepared, and why."""


class _WrongError(Exception):
    """Why a line cannot be imported."""


REFUSED: Final = (AnabranchError, ValueError, TypeError, msgspec.MsgspecError, _WrongError)
"""Errors that are a line's, or are met at it."""


def import_lines(config: Config, file: BinaryIO, name: str, from_line: int = 1, dry_run: bool = False) -> Imported:
    """Bring in the lines of a file; all is durable on return. `from_line`: the first whose messages are brought.
    `dry_run`: read and check all lines, and write none.

    Raises ConfigError for a line that is broken, or that the configuration has no place for, and as a store does, with
    a note: all before the line is imported then. Raises as Router.open, having done nothing.
    """
    reading = _Reading(file)
    with nullcontext() if dry_run else quiet_router(config) as router:
        importing = _Importing(config, router, reading, from_line)
        refused: Exception | None = None
        try:
            try:
                for line in reading.lines():
                    importing.take(line)
                importing.end()
            except REFUSED as error:
                refused = error
                importing.stop()
        except BaseException as error:  # Ctrl-C, or a disk that does not read
            importing.let_go()
            error.add_note(importing.told())
            raise
        finally:
            importing.let_go()
        if refused is not None:
            left = importing.told("mend it, and ")
            if isinstance(refused, AnabranchError) and not isinstance(refused, DestinationError):
                refused.add_note(left)
                raise refused
            raise ConfigError([f"{name}:{reading.number}: {refused}; {left}"]) from refused
    return importing.done


class _Reading:
    """The lines of a file, numbered from 1."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.number = 0
        """The number of the line that was read last."""
        self.first = 0
        """The line with which what is being imported began: of a large message its first."""

    def next(self) -> Line | None:
        """Return the next line; None at the end. Raises msgspec.MsgspecError."""
        text = self._file.readline()
        if not text:
            return None
        self.number += 1
        if not text.endswith(b"\n"):
            raise _WrongError("it is cut short")
        line: Line = decode(text)
        return line

    def lines(self) -> Iterator[Line]:
        """Yield the lines that are no chunks, which whoever takes a large message reads."""
        self.first = 1
        while (line := self.next()) is not None:
            if (self.number == 1) != isinstance(line, Start):
                raise _WrongError("an export begins with a line that says so; this is none, or it is not its first")
            yield line
            self.first = self.number + 1


class _Body:
    """The body of a large message, read from the chunks that follow it."""

    def __init__(self, reading: _Reading, size: int) -> None:
        self._reading, self._left, self._chunk = reading, size, memoryview(b"")

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes of the body."""
        if not self._chunk and self._left:
            line = self._reading.next()
            if not isinstance(line, Chunk) or not 0 < len(line.data) <= self._left:
                raise _WrongError(f"{self._left} bytes of a large body are to come, and it is no chunk of them")
            self._chunk, self._left = memoryview(line.data), self._left - len(line.data)
        end = len(self._chunk) if size < 0 else size
        part, self._chunk = bytes(self._chunk[:end]), self._chunk[end:]
        return part

    def skip(self) -> None:
        """Read the rest of it."""
        while self.read(1 << 20):
            pass


@dataclass(slots=True)
class _Transaction:
    line: Prepared
    changes: dict[bytes, list[Change]] = field(default_factory=dict)
    """By the ids of stores."""
    missing: int = 0
    """Sends that are to come yet."""


class _Importing:
    """One import."""

    def __init__(self, config: Config, router: Router | None, reading: _Reading, from_line: int) -> None:
        """Begin one; without a router lines are only looked at."""
        self._router, self._routes = router, config.routes()
        self._writing = threading.Lock()
        """Held while a page is written, by a thread that no signal strikes: what it has brought is known also where one
        strikes whoever waits for that."""
        self._is_over = False
        self._reading, self._from_line = reading, from_line
        self.done = Imported()
        self.next_line = 1
        """All before it is imported."""
        self._store: Store | None = None
        self._destination: Destination | None = None
        self._bringing: copying.Bringing | None = None
        self._known: set[bytes] = set()
        self._page: list[copying.Item] = []
        self._bytes = 0
        self._claims: dict[int, list[Claim]] = {}
        """Claims on the messages of the page, by the identity of these."""
        self._lines_behind: dict[int, int] = {}
        """The line behind each item of the page, likewise."""
        self._acks: dict[int, list[tuple[bytes, Ack]]] = {}
        """The acks of each transaction, with their stores' ids."""
        self._prepared = -1
        self._transaction: _Transaction | None = None

    def take(self, line: Line) -> None:
        """Take a line. Raises one of REFUSED."""
        if isinstance(line, Held):
            self._message(line)
        elif isinstance(line, Named):
            self._begin(line)
        elif isinstance(line, Prepared):
            self._end_of_destination()
            self._require_complete()
            self._prepared += 1
            self._transaction = _Transaction(line, missing=line.sends)
            self._subscriptions(self._transaction)
            self._end_of_transaction()
        elif isinstance(line, Seen):
            if self._destination is None:
                raise _WrongError("no destination is before it")
            name = _name(line.id)
            if not self._is_passed(name):
                self._add(copying.Seen(name))
        elif isinstance(line, Start):
            if line.version != VERSION:
                raise _WrongError(f"it is of version {line.version}; this program reads {VERSION}")
        else:
            raise _WrongError("no large message is before it")
        self.done.lines = self._reading.number

    def end(self) -> None:
        """End the import. Durable on return."""
        self._end_of_destination()
        self._require_complete()
        if not self.done.lines:
            raise _WrongError("it is empty")

    def _require_complete(self) -> None:
        if self._transaction is not None:
            raise _WrongError(f"{self._transaction.missing} messages of the prepared transaction before are to come")

    def stop(self) -> None:
        """Make what was taken durable, before an error is raised; another error is less than that one."""
        try:
            self._end_of_destination()
        except AnabranchError as error:
            self.done.left_out.append(str(error))

    def told(self, step: str = "") -> str:
        """Return a text that says what is imported, and how to go on; `step`: what is to be done before that."""
        if self._router is None or self.next_line <= self._from_line:
            return "nothing was imported"
        return f"all before line {self.next_line} is imported; {step}go on with --from-line {self.next_line}"

    def let_go(self) -> None:
        """Wait for what is being written. Nothing can be taken any more. Idempotent."""
        with self._writing:
            self._is_over = True

    # Destinations

    def _target(self, text: str) -> tuple[Destination, Store | None]:
        """Return a destination and its store, None in a dry run. Raises DestinationError."""
        destination = Destination.restored(text)
        match = self._routes.route(destination)
        if match is None:
            near = ", ".join(self._routes.nearest(destination))
            raise _WrongError(f"no pattern matches {destination}; the closest are {near}. Add one to the configuration")
        if is_volatile(match) or copying.shares(match.target.options):
            why = "keeps nothing over a restart; route it to another"
            if not is_volatile(match):
                why = "is used by other routers at once; route it to another, and move it there by `repartition`"
            raise _WrongError(f"{destination} goes to store {match.target.name!r}, which {why}")
        router = self._router
        return destination, None if router is None else router._registry.for_store(destination, lambda store: store)

    def _begin(self, line: Named) -> None:
        self._end_of_destination()
        if self._transaction is not None:
            raise _WrongError("destinations come before prepared transactions")
        destination, store = self._target(line.name)
        self._destination, self._store = destination, store
        if store is not None:
            self._known = copying.names(store, destination)
            wanted = [one.of(destination) for one in line.subscriptions]
            self._bringing = copying.Bringing(store, destination, wanted, self._placed)

    def _end_of_destination(self) -> None:
        if self._bringing is not None:
            self._write(self._bringing)
            bringing, self._bringing = self._bringing, None
            bringing.end()
        if self._destination is not None:
            self._destination, self.next_line = None, self._reading.first

    def _is_passed(self, name: bytes) -> bool:
        """Return whether a message, or an id, is not to be brought."""
        if self._reading.first < self._from_line:
            return True
        if name and name in self._known:
            self.done.known += 1
            return True
        return self._router is None

    def _add(self, item: copying.Item) -> None:
        if not self._page:
            self.next_line, self._bytes = self._reading.first, 0
        self._page.append(item)
        self._lines_behind[id(item)] = self._reading.number + 1
        self._bytes += len(item.record) if isinstance(item, copying.Stored) else len(item.name)
        if (len(self._page) >= copying.PAGE or self._bytes >= copying.PAGE_BYTES) and self._bringing is not None:
            self._write(self._bringing)
            self.next_line = self._reading.number + 1

    def _write(self, bringing: copying.Bringing) -> None:
        page, self._page = self._page, []

        def write() -> None:
            with self._writing:
                if not self._is_over:
                    bringing.page(page)

        try:
            if page:
                unstruck(write)
        except BaseException:
            self._destination = None  # it has not come as far as the line that is read
            raise
        self._claims.clear()
        self._lines_behind.clear()

    def _placed(self, item: copying.Item, seq: int) -> None:
        if isinstance(item, copying.Stored):
            self.done.messages += 1
            self.done.without_id += name_of(item.record) is None
        self.next_line = self._lines_behind[id(item)]
        store, destination = self._store, self._destination
        for claim in self._claims.get(id(item), ()):
            assert store is not None and destination is not None
            state = store._engine.catalog.destinations[destination]
            subscriber = state.subscriptions.get(claim.subscription) if claim.subscription is not None else None
            ack = Ack(state, seq, subscriber.number if subscriber is not None else 0, drops=claim.drops)
            self._acks.setdefault(claim.by, []).append((store.store_id, ack))

    # Messages

    def _message(self, line: Held) -> None:
        if line.to is not None:
            self._send(line)
            return
        if self._destination is None:
            raise _WrongError("no destination is before it")
        large = _Body(self._reading, line.large) if line.large is not None else None
        parts = _parts(line)
        if self._is_passed(parts.name) or self._store is None:
            if large is not None:
                large.skip()
            if self._router is None:
                encode_parts(parts, b"")
                self.done.messages += self._reading.first >= self._from_line
            return
        item = self._stored(self._store, line, parts, large)
        self._claims[id(item)] = line.claims
        self._add(item)

    def _stored(self, store: Store, line: Held, parts: Parts, large: _Body | None) -> copying.Stored:
        body = store.keep(Sized(large, line.large or 0)) if large is not None else _body(line)
        record = encode_parts(parts, body)  # type: ignore[arg-type]
        if len(record) - HEAD.size > store.backend.settings.message_bytes_max:
            raise _WrongError(f"the message is larger than the message_bytes_max of store {store.name!r}; raise that")
        waiting = {one.key: one.deliveries for one in line.waiting}
        untils = {one.key: one.until_ms for one in line.waiting if one.until_ms}
        kept = body if large is not None and not isinstance(body, bytes) else None
        return copying.Stored(record, line.deliveries, waiting, line.until_ms, untils, large=kept)  # type: ignore[arg-type]

    # Prepared transactions

    def _subscriptions(self, transaction: _Transaction) -> None:
        for one in transaction.line.subscriptions:
            topic, store = self._target(one.topic)
            if store is None:
                continue
            state = store._engine.asked(lambda: store._engine.catalog.state(topic))  # noqa: B023
            begun = Subscribe(state, store._engine.catalog.next_number(), one.of(topic), one.retroactive)
            change: Change = Unsubscribe(state, (one.client, one.name)) if one.ends else begun
            transaction.changes.setdefault(store.store_id, []).append(change)

    def _send(self, line: Held) -> None:
        transaction = self._transaction
        if transaction is None or not transaction.missing or line.to is None:
            raise _WrongError("no prepared transaction is before it that sends it")
        destination, store = self._target(line.to)
        large = _Body(self._reading, line.large) if line.large is not None else None
        if store is None:
            if large is not None:
                large.skip()
        else:
            item = self._stored(store, line, _parts(line), large)
            state = store._engine.asked(lambda: store._engine.catalog.state(destination))
            send = send_of(state, item.record, store.backend.settings.priorities)
            send.large = item.large
            send.wait_until(line.until_ms)
            transaction.changes.setdefault(store.store_id, []).append(send)
        transaction.missing -= 1
        self._end_of_transaction()

    def _end_of_transaction(self) -> None:
        """Prepare a transaction whose sends are all there."""
        transaction, router = self._transaction, self._router
        if transaction is None or transaction.missing:
            return
        self._transaction, acks = None, self._acks.pop(self._prepared, [])
        line = transaction.line
        if router is None:
            return
        why = _left_out(router, line, len(acks))
        if why is not None or line.xid is None:
            self.done.left_out.append(f"the prepared transaction {_shown(line)}: {why}")
            return
        for store_id, ack in acks:
            transaction.changes.setdefault(store_id, []).append(ack)
        log = router._coordinator.log
        name, participants = log.new_transaction(), sorted(transaction.changes)
        for store_id, changes in sorted(transaction.changes.items()):
            payload = payload_of(participants, changes)
            router._registry.with_id(store_id, lambda store: moved_branches.put(store, name, payload))  # noqa: B023
        log.hold(External(name, participants, Xid(*line.xid)), sync=True)
        router._coordinator.table.load()
        self.done.transactions += 1
        self.next_line = self._reading.number + 1


def _left_out(router: Router, line: Prepared, acks: int) -> str | None:
    """Return why a transaction is not to be prepared, of whose messages to be acked so many are here; None if it is."""
    if line.xid is None:
        return "it waits for no manager: its outcome was to be given by hand where it was exported"
    if router._coordinator.table.by_xid(as_xid(tuple(line.xid))) is not None:
        return "it is prepared here already"
    if acks != line.acks:
        return f"it acks {line.acks} messages, of which this import has brought {acks}; they can be received"
    return None


def _shown(line: Prepared) -> str:
    return "without an xid" if line.xid is None else str(Xid(*line.xid))


def _name(text: str) -> bytes:
    name = text.encode()
    if not 0 < len(name) <= MESSAGE_ID_BYTES_MAX:
        raise _WrongError(f"the id takes {len(name)} bytes; 1 to {MESSAGE_ID_BYTES_MAX} are allowed")
    return name


def _parts(line: Held) -> Parts:
    headers = {name: from_json(value) for name, value in line.headers.items()}
    if sum(one is not None for one in (line.body, line.data, line.large)) != 1:
        raise _WrongError("a message has either `body`, or `data`, or `large`")
    name = _name(line.id) if line.id is not None else b""
    return Parts(name, headers, line.priority, line.sent_at_ms, line.expires_at_ms)


def _body(line: Held) -> bytes:
    return line.body.encode() if line.body is not None else line.data or b""
