"""A process that owns directories for a test: one process for all tests, so that a test costs no start of one.

A test asks it by name, over connections of its own, for what no client of a directory can ask for: to open one, to
close it, to leave a copy of it as a killed owner would, and to look into its store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, Final, cast

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.engine import lease_times
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.state import delivery
from anabranch.adapters.core.state.leases import LEASED
from anabranch.adapters.core.state.limits import Grant, cancel
from anabranch.adapters.core.store_types import Change
from anabranch.policies.names.destination import Destination
from anabranch.router.sharing.owner.server import Server
from anabranch.router.sharing.owner.session import Session
from anabranch.router.sharing.protocol import pack_error, pack_message, unpack_error

from ..children import CONTEXT
from ..contract.large import kept
from ..contract.when_full import waiting
from ..router.disk import crashed

STORE: Final = "s"
"""The name of the one store of a directory."""


class Owner:
    """The process, as tests see it. Threads: all."""

    def __init__(self) -> None:
        mine, its = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_run, args=(its,), daemon=True)
        self._process.start()
        its.close()
        self._address: str = mine.recv()
        self._alive = mine
        """Its end is the end of the process."""
        self._connections = threading.local()
        self._pid = os.getpid()

    def ask(self, name: str, *given: Any) -> Any:
        """Ask for something, and wait. Raises what it raised."""
        assert os.getpid() == self._pid, "a forked child asks the owner as a client alone"
        if not hasattr(self._connections, "mine"):
            self._connections.mine = Client(self._address)
        connection: Connection = self._connections.mine
        connection.send((name, given))
        ok, value = connection.recv()
        if not ok:
            raise unpack_error(value)
        return value

    def close(self) -> None:
        """End it."""
        self._alive.close()
        self._process.join()


def _run(alive: Connection) -> None:
    asked = _Asked()
    with Listener() as listener:
        threading.Thread(target=_accept, args=(listener, asked), daemon=True).start()
        alive.send(listener.address)
        try:
            alive.recv()
        except EOFError:
            os._exit(0)


def _accept(listener: Listener, asked: _Asked) -> None:
    while True:
        threading.Thread(target=_answer, args=(listener.accept(), asked), daemon=True).start()


def _answer(connection: Connection, asked: _Asked) -> None:
    try:
        while True:
            name, given = connection.recv()
            try:
                answer = (True, getattr(asked, name)(*given))
            except Exception as error:
                answer = (False, pack_error(error))
            connection.send(answer)
    except (EOFError, OSError):
        connection.close()


@dataclass
class _Owned:
    """A directory that is open."""

    router: anabranch.Router
    server: Server
    store: Store
    rooms: dict[int, Grant | None] = field(default_factory=dict)

    def session(self, client: str) -> Session:
        return next(one for one in self.server._sessions.values() if one.client == client)


def _sends(sends: list[tuple[str, Outgoing]]) -> list[tuple[Destination, Outgoing]]:
    return [(Destination.restored(text), message) for text, message in sends]


class _Asked:
    """What is asked for, each by the name of a method."""

    def __init__(self) -> None:
        self._owned: dict[Path, _Owned] = {}
        self._routers: dict[Path, anabranch.Router] = {}
        self._lock = threading.Lock()
        self._time, self._time_ns = time.time, time.time_ns

    def open(self, directory: Path, kind: str, options: dict[str, Any]) -> tuple[bytes, bool, bool]:
        """Own a directory, which is made if it is not there. Nobody but the test takes what is not delivered."""
        stores = [anabranch.StoreConfig(STORE, [">"], kind=kind, options=options)]
        router = anabranch.Router(anabranch.Config(directory, stores))
        router._sweeper.open = lambda: None  # type: ignore[method-assign]
        router.open()
        try:
            registry = router._registry
            row = registry.rows_by_name().get(STORE)
            if row is None:
                target = registry.config.stores[0]
                path = registry.directories.expected(target, Destination.queue("x"))
                row = registry._made(target, path, STORE)
            store = registry._stores.open(row)
            owned = _Owned(router, cast(Server, router.serve()), store)
        except BaseException:
            router.close()
            raise
        self._owned[directory] = owned
        return store.store_id, store.volatile, store.limited

    def close(self, directory: Path) -> None:
        """Close a directory, if it is open."""
        owned = self._owned.pop(directory, None)
        if owned is not None:
            owned.router.close()

    def open_router(self, config: anabranch.Config) -> None:
        """Own a directory, as it is configured."""
        router = anabranch.open(config)
        router.serve()
        self._routers[config.directory] = router

    def close_router(self, directory: Path) -> None:
        """Close a directory."""
        self._routers.pop(directory).close()

    def copy(self, directory: Path, target: Path) -> None:
        """Copy a directory as it is if its owner is killed now."""
        owned = self._owned.get(directory)
        if owned is not None:
            crashed(owned.router, target)

    def of_store(self, directory: Path, name: str, *given: Any) -> Any:
        """Call the store itself."""
        found = getattr(self._owned[directory].store, name)
        found = found(*given) if callable(found) else found
        return list(found) if isinstance(found, Iterator) else found

    def take_undelivered(self, directory: Path, client: str, limit: int) -> list[tuple[list[Any], Any]]:
        """Let a client hold what is not delivered."""
        owned = self._owned[directory]
        found = owned.store.take_undelivered(limit)
        held = owned.session(client).hold(message for message, _ in found)
        assert held is not None
        return list(zip(held, [reason for _, reason in found], strict=True))

    def count_expired(self, directory: Path, tokens: list[str]) -> None:
        owned = self._owned[directory]
        owned.store.count_expired([owned.store.leased(token) for token in tokens])

    def leased(self, directory: Path, client: str, token: str) -> list[Any]:
        owned = self._owned[directory]
        return pack_message(owned.store.leased(token), None, owned.session(client).add_body)

    # Branches, which are the coordinator's of the owner

    def reserve(
        self, directory: Path, sends: list[tuple[str, Outgoing]], tokens: list[str], since: float | None, wait: bool
    ) -> int | None:
        """Reserve room; returns a number of it."""
        owned = self._owned[directory]
        messages = [owned.store.leased(token) for token in tokens]
        room = owned.store.reserve(_sends(sends), messages, since, wait)
        if room is None:
            return None
        owned.rooms[id(room)] = room
        return id(room)

    def let_go(self, directory: Path, number: int) -> None:
        """Let go of room, if that was not used."""
        owned = self._owned.get(directory)
        if owned is not None:
            cancel(owned.rooms.pop(number, None))

    def prepare(
        self, directory: Path, client: str, name: bytes, participants: Sequence[bytes],
        sends: list[tuple[str, Outgoing]], tokens: list[str], sync: bool, number: int | None, changes: Sequence[Change],
    ) -> None:  # fmt: skip
        """Prepare a branch with what a client holds."""
        owned = self._owned[directory]
        store = owned.store
        messages = [store.leased(token) for token in tokens]
        for message in messages:
            store.claim(message)
        try:
            given = _sends(sends)
            room = None if number is None else owned.rooms.pop(number)
            store.prepare(name, participants, given, messages, sync, room, changes).wait()
        except BaseException:
            for message in messages:
                message._note.hold = LEASED  # the client has claimed it still
            raise
        owned.session(client).let_go(tokens)

    def commit_prepared(self, directory: Path, name: bytes) -> list[tuple[str, int, bool]]:
        receipts = self._owned[directory].store.commit_prepared(name).wait()
        return [(str(one.destination), one.seq, one.duplicate) for one in receipts]

    def rollback_prepared(self, directory: Path, name: bytes) -> bool:
        return self._owned[directory].store.rollback_prepared(name).wait()

    # Inside of it

    def kept(self, directory: Path) -> int:
        """How many large bodies the store has, once it has removed those that nobody needs."""
        return kept(self._owned[directory].store)

    def waiting(self, directory: Path) -> int:
        """How many wait for room."""
        return waiting(self._owned[directory].store)

    # Clocks

    def set_time(self, now_ns: int | None) -> None:
        """Let the wall clock stand at a time; None: let it go again."""
        time.time_ns = self._time_ns if now_ns is None else lambda: now_ns
        time.time = self._time if now_ns is None else lambda: now_ns / 1e9

    def set_ahead(self, seconds: float) -> None:
        """Let the clock of leases be so much ahead."""
        for module in (delivery, lease_times):
            vars(module)["monotonic"] = lambda: time.monotonic() + seconds

    def look(self) -> None:
        """Let the stores look which leases have run out."""
        for owned in list(self._owned.values()):
            owned.store._lease_times.run()
