"""The disk of a shared store's server is full: its files do not grow. Calls say so, nothing is half done, what is there
goes out, and all goes on by itself once there is room."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.policies.errors import AnabranchError, StoreFailedError, StoreFullError

from ..contract.disk import PATIENCE, A, B, Parallel, T, assert_whole, bodies, drain, eventually, take
from ..contract.preparing import claim, prepare, to, transaction
from ..places import in_memory
from .outages import insist
from .server import PostgresServer
from .shared import SharedDisk, SharedTables

SOURCE: Final = Path(__file__).with_name("full_disk.c")
BODY: Final = random.Random(1).randbytes(100_000)
"""Which gets no smaller if it is compressed."""
DESK: Final = Subscription(T, "desk")


class Room:
    """That of a server's disk."""

    def __init__(self, server: PostgresServer) -> None:
        self._flag = server.directory / "full"
        library = server.directory / "full_disk.so"
        command = [shutil.which("cc") or "gcc", "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"]
        subprocess.run(command, check=True)
        library.chmod(0o755)
        server.environment = {"LD_PRELOAD": str(library), "FULL_DISK": str(self._flag)}
        server.stop()
        server.start()

    def none(self, where: str) -> None:
        """No file of this directory grows."""
        self._flag.write_text(where)
        self._flag.chmod(0o644)

    def some(self) -> None:
        self._flag.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with PostgresServer(in_memory()) as server:
        yield server


@pytest.fixture(scope="module")
def room(server: PostgresServer) -> Room:
    return Room(server)


@pytest.fixture
def routers(tmp_path: Path, server: PostgresServer, room: Room) -> Iterator[tuple[Any, Any]]:
    """Two stores over one database."""
    sets = SharedTables(server.new_database())
    with SharedDisk(tmp_path, sets) as disk:
        first = disk.create(router_timeout=3600.0, outcome_timeout=0.5)
        yield first, disk.beside(first)
        room.some()
        sets.close()  # its connection may have gone with the server
    sets.close()


def sent_until_it_is_full(store: Any) -> list[bytes]:
    """Send to A until that fails; returns what was told to be there."""
    sent: list[bytes] = []
    with pytest.raises(AnabranchError) as raised:
        while len(sent) < 100_000:
            body = b"%d " % len(sent) + BODY[:1000]
            store.send(A, body, message_id=str(len(sent)))
            sent.append(body)
    assert isinstance(raised.value, StoreFullError), raised.value
    assert sent
    return sent


def test_where_the_tables_are(routers: tuple[Any, Any], room: Room) -> None:
    one, other = routers
    one.send_many(A, [b"first", b"claimed"])
    one.subscribe(DESK)
    one.send(B, b"b", message_id="b")
    take(one).release()  # now no table and no index is empty
    first, claimed = take(one), claim(one)
    room.none("/base/")
    sent = sent_until_it_is_full(one)
    big = BODY[:6000]
    calls: list[Callable[[], Any]] = [
        lambda: one.send(A, big),
        lambda: one.send(A, big, message_id="named"),
        lambda: one.send(A, big, {"group": "g"}),
        lambda: one.send_nowait(A, big).result(PATIENCE),
        lambda: one.send_many(A, [b"small", big]),
        lambda: one.send(T, big),
        lambda: one.commit([(B, Outgoing(b"small")), (A, Outgoing(big))], [claimed]),
        lambda: prepare(one, 1, to(A, BODY), [claimed]),
    ]
    for call in calls:
        with pytest.raises(StoreFullError, match=r"its database is full: .*No space left on device.*free some space"):
            call()
    for store in routers:
        assert bodies(store) == [b"first", b"claimed", *sent]
        assert (bodies(store, B), store.depth(T), store.recover_prepared()) == ([b"b"], 0, [])
    first.ack()
    one.unclaim([claimed])
    assert drain(other) == [b"claimed", *sent], "what is there goes out"
    room.some()
    with Parallel(lambda: other.receive(A, PATIENCE)) as waiting:
        eventually(other.waiting.count)
        assert not calls[1]().duplicate
        waiting.result().ack()
    for call in (calls[0], *calls[2:6]):
        call()
    message = claim(other, B)
    prepare(other, 1, to(A, BODY), [message])
    one.commit_prepared(transaction(1)).wait()
    assert [len(body) for body in drain(other)] == [len(big)] * 3 + [5, len(big), len(BODY)]
    assert (bodies(one, B), drain(other, T, DESK.key)) == ([], [big])
    assert_whole(one)


def test_where_the_servers_log_is(routers: tuple[Any, Any], room: Room, server: PostgresServer) -> None:
    """The server stops by itself, and does not start again before there is room: an outage as any other."""
    one, other = routers
    one.send(A, b"first")
    message = take(other)
    sent = [b"first"]
    room.none("/pg_wal/")
    with pytest.raises(StoreFailedError):
        for number in range(1000):
            body = b"%d " % number + BODY
            one.send(A, body, message_id=str(number))
            sent.append(body)
    room.some()

    def is_back() -> bool:
        if server.pid is None:
            server.start()
        with suppress(psycopg.OperationalError):
            server.connect().close()
            return True
        return False

    eventually(is_back)
    receipt = insist(lambda: one.send(A, body, message_id=str(number)))
    assert bodies(one) == [*sent, body], "what was told is there, and nothing twice"
    assert receipt.seq == next(reversed(list(other.browse(A)))).seq
    insist(message.ack)
    assert insist(lambda: drain(other)) == [*sent[1:], body]
    assert_whole(one)
