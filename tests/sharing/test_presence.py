"""Clients that go, or come again, while the owner takes up what they hold."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.adapters.core.service.settling import BegunAck
from anabranch.adapters.system.background import shared
from anabranch.router.api.settling import TokenSettler
from anabranch.router.api.transaction import Transaction
from anabranch.router.router import Router
from anabranch.router.sharing.client import connection as connections
from anabranch.router.sharing.client.connection import Connection
from anabranch.router.sharing.client.router import SharedRouter
from anabranch.router.sharing.clients import ClientFile
from anabranch.router.sharing.owner import presence as presences
from anabranch.router.sharing.owner import reading, rounds
from anabranch.router.sharing.owner import server as servers
from anabranch.router.sharing.owner import session as sessions
from anabranch.router.sharing.owner.presence import Presence
from anabranch.router.sharing.owner.server import Server
from anabranch.router.sharing.protocol import VERSION

from ..contract.disk import PATIENCE, eventually
from ..taking import take
from .peers import Op, Peer

CLIENT = f"{os.getpid():x}-abc"


@pytest.fixture
def router(tmp_path: Path) -> Iterator[Router]:
    with anabranch.open(tmp_path / "data") as router:
        yield router


@pytest.fixture
def server(router: Router) -> Server:
    server = router.serve()
    assert isinstance(server, Server)
    return server


def _greeting(router: Router) -> tuple[Any, ...]:
    """Return what a client says to a new owner that holds a message by a token of the one before."""
    seq = router.queue("q").send(b"x").seq
    return Op.HELLO, VERSION, CLIENT, os.getpid(), "before", [("a token", "queue://q", None, seq, None)]


def test_a_client_that_dies_while_it_is_greeted_leaves_nothing_leased(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, leased = threading.Event(), threading.Event(), threading.Event()
    lease_again = Store.lease_again

    def late(store: Store, *given: Any, **named: Any) -> str | None:
        begun.set()
        assert go_on.wait(PATIENCE)
        token = lease_again(store, *given, **named)
        leased.set()
        return token

    monkeypatch.setattr(Store, "lease_again", late)
    with Peer(router.config.directory, greets=False) as peer:
        peer.send(*_greeting(router))
        assert begun.wait(PATIENCE)
        (session,) = server._sessions.values()
    eventually(lambda: session.is_closed)
    go_on.set()
    assert leased.wait(PATIENCE)
    assert take(router.queue("q"), PATIENCE).body == b"x"


def test_what_a_client_holds_of_a_shared_sql_store_is_leased_to_it_again(tmp_path: Path, postgres_url: str) -> None:
    options = {"url": postgres_url, "shared": True, "pool_min": 0}
    stores = [anabranch.StoreConfig("all", ["queue://>"], kind="sql", options=options)]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        router.serve()
        with Peer(router.config.directory, greets=False) as peer:
            peer.send(*_greeting(router))
            eventually(lambda: router.queue("q").counts().leased)
        eventually(lambda: not router.queue("q").counts().leased)


def test_a_client_that_has_not_heard_the_greeting_comes_again_with_what_it_holds(
    router: Router, server: Server
) -> None:
    directory, greeting = router.config.directory, _greeting(router)
    file = ClientFile(directory, CLIENT)
    with Peer(directory, greets=False) as peer:
        peer.send(*greeting)
        eventually(lambda: [one["held"] for one in server.sessions()] == [1], server.sessions)
    eventually(lambda: not server.sessions(), server.sessions)
    with Peer(directory, greets=False) as peer:
        assert peer.ask(*greeting)[0]
        assert peer.ask(Op.ACK, ["a token"]) == (True, None)
        assert router.queue("q").depth() == 0
    file.close()


@pytest.mark.parametrize("how", ["ack", "release", "reject"])
def test_what_was_just_being_settled_as_a_connection_was_lost_is_settled_once_and_says_so(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Its client comes again, and asks for it once more, while it is under way."""
    monkeypatch.setattr(rounds, "SLOW_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()
    settled, wait = TokenSettler.settle_nowait, BegunAck.wait

    def late(call: Callable[[], Any]) -> Any:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE)
        return call()

    monkeypatch.setattr(BegunAck, "wait", lambda begun: late(lambda: wait(begun)))
    monkeypatch.setattr(
        TokenSettler, "settle_nowait",
        lambda *given: shared().call(lambda: late(lambda: settled(*given).result(PATIENCE))),
    )  # fmt: skip
    directory, (*greeting, _, _) = router.config.directory, _greeting(router)
    request = [Op.ACK] if how == "ack" else [Op.SETTLE]
    file = ClientFile(directory, CLIENT)
    with Peer(directory, greets=False) as peer:
        _, (generation, _) = peer.ask(*greeting, "", [])
        ((token, seq, *_),) = peer.ask(Op.RECEIVE, "queue://q", None, 1, 0, None)[1]
        more = [] if how == "ack" else [how, None if how == "release" else (None, "bad"), True, None]
        peer.send(*request, [token], *more)
        assert begun.wait(PATIENCE)
    eventually(lambda: not server.sessions(), server.sessions)
    with Peer(directory, greets=False) as peer:
        peer.send(*greeting, generation, [(token, "queue://q", None, seq, None)])
        eventually(lambda: [one["held"] for one in server.sessions()] == [1], server.sessions)
        go_on.set()
        assert peer.next()[1]
        assert peer.ask(*request, [token], *more) == (True, None)
        assert router.queue("q").counts()[:2] == ((1, 0) if how == "release" else (0, 0))
        assert [one["held"] for one in server.sessions()] == [0]
    file.close()


def test_a_vote_whose_store_hangs_holds_up_no_other_client_once_its_own_is_gone(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    roll_back = Transaction.rollback

    def late(transaction: Transaction) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)
        roll_back(transaction)

    monkeypatch.setattr(Transaction, "rollback", late)
    message = [b"x", None, None, 4, 0, True, False, 0]
    with Peer(router.config.directory) as other:
        with Peer(router.config.directory) as peer:
            assert peer.ask(Op.COMMIT, False, None, "vote", [["queue://q", message]], [], [])[0]
        assert begun.wait(PATIENCE)
        other.sock.settimeout(5)
        try:
            assert other.ask(Op.SEND, "queue://q", message, False)[0]
        finally:
            go_on.set()
    server.stop()
    assert router.queue("q").depth() == 1


def test_what_is_under_way_when_the_owner_ends_is_not_told_of_as_not_begun(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be begun once more, beside this one."""
    begun, go_on = threading.Event(), threading.Event()

    def reclaim(router: Router) -> None:
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Router, "reclaim", reclaim)
    with Peer(router.config.directory) as peer, Peer(router.config.directory) as other:
        peer.send(Op.CALL, "reclaim", [])
        other.send(Op.CALL, "map_wait", ["map://m", "k", None, None])
        assert begun.wait(PATIENCE)
        eventually(lambda: all(not one.in_hand and one.unanswered for one in server._sessions.values()))
        server.stop()
        goodbye = [0, None, None]
        assert goodbye not in peer.ended()
        assert goodbye in other.ended()
        go_on.set()


def test_an_owner_that_has_said_goodbye_leaves_what_comes_then_to_the_next(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Presence.end
    with anabranch.open(router.config.directory, shared=True) as client:
        assert isinstance(client, SharedRouter)
        counted, connection = client.map("n"), client._store.connection
        assert isinstance(connection, Connection)
        assert counted.increment("k") == 1
        counts: list[int] = []
        counting = threading.Thread(target=lambda: counts.append(counted.increment("k")))

        def late(presence: Presence) -> list[Future[Any]]:
            assert connection._link is not None
            connection._look(connection._link)  # it is in no request's way
            counting.start()
            eventually(lambda: any(asked.is_sent for asked in list(connection._unanswered.values())))
            return end(presence)

        monkeypatch.setattr(Presence, "end", late)
        server.stop()
        router.serve()
        counting.join(PATIENCE)
        assert counts == [2]


def test_an_owner_without_a_descriptor_takes_no_client_for_dead(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that lives, and has lost its connection, keeps what it holds."""
    router.queue("q").send(b"x")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with anabranch.open(router.config.directory, shared=True) as client:
        message = take(client.queue("q"))
        gone, lost = Presence.gone, threading.Event()
        others = list[anabranch.Message[bytes]]()
        listener = router.queue("q").listen(others.append)

        def gone_without(presence: Presence, session: sessions.Session) -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            try:
                gone(presence, session)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            monkeypatch.setattr(Presence, "gone", gone)
            lost.set()

        def slow_connect(exchange: Any) -> Any:
            assert lost.wait(PATIENCE)
            time.sleep(0.3)
            return connect(exchange)

        greeter = client._store.connection._greeter  # type: ignore[attr-defined]
        connect, greeter.connect = greeter.connect, slow_connect
        monkeypatch.setattr(presences, "GRACE_SECONDS", PATIENCE)
        monkeypatch.setattr(Presence, "gone", gone_without)
        (session,) = server._sessions.values()
        session.sock.shutdown(socket.SHUT_RDWR)
        assert lost.wait(PATIENCE)
        message.ack()
        assert not others
        listener.close()
        assert router.queue("q").counts()[:2] == (0, 0)


def test_a_client_that_closes_while_it_is_greeted_does_not_stay(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "FINISH_SECONDS", 0.01)
    with anabranch.open(router.config.directory, shared=True) as client:
        assert isinstance(client, SharedRouter)
        greeter, greeted, go_on = client._store.connection._greeter, threading.Event(), threading.Event()  # type: ignore[attr-defined]
        connect = greeter.connect

        def slow_connect(exchange: Any) -> Any:
            link = connect(exchange)
            greeted.set()
            assert go_on.wait(PATIENCE)
            return link

        monkeypatch.setattr(greeter, "connect", slow_connect)
        (session,) = server._sessions.values()
        session.sock.shutdown(socket.SHUT_RDWR)
        assert greeted.wait(PATIENCE)
        client.close()
        assert len(server._sessions) == 1
        go_on.set()
        eventually(lambda: not server._sessions)


def test_a_listener_that_is_ended_while_it_begins_takes_nothing(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As its client does where the next owner has yet to open the store."""
    begins, go_on, listen = threading.Event(), threading.Event(), Store.listen

    def late(store: Store, *given: Any, **named: Any) -> Any:
        begins.set()
        assert go_on.wait(PATIENCE)
        return listen(store, *given, **named)

    monkeypatch.setattr(Store, "listen", late)
    with Peer(router.config.directory) as peer:
        number = peer.send(Op.LISTEN, 1, "queue://q", None, 5, None, 5)
        assert begins.wait(PATIENCE)
        assert peer.ask(Op.UNLISTEN, 1) == (True, None)
        assert peer.ask(Op.CREDIT, 1, 9) == (True, None)
        go_on.set()
        assert peer.next() == [number, True, None]
        router.queue("q").send(b"x")
        assert take(router.queue("q"), PATIENCE).body == b"x"
        (session,) = server._sessions.values()
        assert not session.listeners and not session.granted


def test_listeners_of_a_client_that_reads_nothing_have_no_credit_until_it_does(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded, and others get the rest."""
    for module in (sessions, reading):
        monkeypatch.setattr(module, "UNREAD_MAX", 1 << 18)
    queue, total = router.queue("q"), 600
    with Peer(router.config.directory) as peer:
        for listener in (1, 2):
            assert peer.ask(Op.LISTEN, listener, "queue://q", None, 2 * total, None, 2 * total)[0]
        queue.send_many([bytes(1 << 14)] * total)
        (of_peer,) = server._sessions.values()
        eventually(lambda: sum(of_peer._withheld.values()) + queue.counts().leased == 4 * total, queue.counts)
        assert set(of_peer._withheld) == {1, 2} and queue.counts().leased < total // 2
        take(queue, PATIENCE).ack()
        assert of_peer.withdraw_credit(1, 10) == 10
        seqs = set[int]()
        while len(seqs) < total - 1:
            number, _, pushed = peer.next()
            seqs.update(seq for _, seq, *_ in (pushed if number == 0 else ()))
        assert queue.counts()[:2] == (0, total - 1)
        left = list[int]()

        def is_all_back() -> bool:
            left.extend(of_peer.withdraw_credit(listener, 4 * total) or 0 for listener in (1, 2))
            return sum(left) == 4 * total - 10 - len(seqs)

        eventually(is_all_back, lambda: str(left))


def test_receives_that_wait_of_a_client_that_reads_nothing_are_given_one_message_each(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sessions, reading):
        monkeypatch.setattr(module, "UNREAD_MAX", 1 << 18)
    queue = router.queue("q")
    with Peer(router.config.directory) as peer:
        for _ in range(100):
            peer.send(Op.RECEIVE, "queue://q", None, 100, None, None)
        eventually(lambda: server.sessions()[0]["waiting"] == 100, server.sessions)
        with router.transaction() as transaction:
            for _ in range(600):
                transaction.send(queue, bytes(1 << 14))
        eventually(lambda: not server.sessions()[0]["waiting"], server.sessions)
        assert 100 <= queue.counts().leased < 300


def test_a_client_that_reads_slowly_stays_and_one_that_reads_nothing_is_dropped(
    router: Router, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (sessions, servers):
        monkeypatch.setattr(module, "UNREAD_MAX", 1 << 18)
    router.queue("q").send(bytes(8 << 20))
    with Peer(router.config.directory) as peer:
        peer.send(Op.RECEIVE, "queue://q", None, 1, 0, None)
        (session,) = server._sessions.values()
        eventually(lambda: session.is_looked_at)
        before = session.taken

        def looked(taken: int) -> bool:
            done = threading.Event()
            server._loop.later(lambda: server._drop_slow(session, taken))
            server._loop.later(done.set)
            assert done.wait(PATIENCE)
            return session.is_looked_at

        peer.sock.recv(1 << 20, socket.MSG_WAITALL)
        eventually(lambda: session.taken > before)
        assert looked(before) and not session.is_closed
        eventually(lambda: not looked(session.taken))
        assert session.is_closed
