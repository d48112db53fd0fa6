"""A store whose disk hangs holds up its own clients alone."""

from __future__ import annotations

import io
import threading
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core import Store
from anabranch.policies.errors import ClosedError
from anabranch.router.sharing.owner import loop, reading, rounds
from anabranch.router.sharing.owner.server import Server

from ..contract.disk import PATIENCE, eventually
from ..taking import take
from .hanging import hang
from .peers import Op, Peer


def test_a_disk_that_hangs_holds_up_no_other_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [anabranch.StoreConfig("slow", ["slow"]), anabranch.StoreConfig("rest", [">"])]
    config = anabranch.Config(tmp_path / "data", stores)
    with ExitStack() as stack:
        stack.enter_context(anabranch.open(config)).serve()
        one, other = (stack.enter_context(anabranch.open(config, shared=True)) for _ in range(2))
        for router in (one, other):
            for name in ("slow", "q"):
                router.queue(name).send(b"first")
        go_on = hang(monkeypatch, "/stores/slow/")
        held_up = one.queue("slow").send_nowait(b"slow")
        for number in range(50):
            other.queue("q").send(b"%d" % number)
        again = other.queue("slow").send_nowait(b"slow, too")
        assert one.queue("q").send(b"from the same client").seq
        assert not held_up.done()
        go_on.set()
        assert held_up.result(PATIENCE).seq < again.result(PATIENCE).seq
        assert [message.body for message in one.queue("slow").browse()] == [b"first"] * 2 + [b"slow", b"slow, too"]
        assert other.queue("q").depth() == 53
        assert other.queue("slow").send(b"as before").seq


def test_what_one_client_sends_stays_in_order_while_a_store_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first send waits before it is queued, in a round with others of the same client."""
    monkeypatch.setattr(rounds, "SLOW_SECONDS", 0.05)
    begun, go_on = threading.Event(), threading.Event()
    begin_sends = Store.begin_sends

    def begin(store: Store, sends: Any, sync: bool = False) -> Any:
        if not begun.is_set() and any(destination.name == "q" for destination, _ in sends):
            begun.set()
            assert go_on.wait(PATIENCE)
        return begin_sends(store, sends, sync)

    with ExitStack() as stack:
        stack.enter_context(anabranch.open(tmp_path / "data")).serve()
        one, other = (stack.enter_context(anabranch.open(tmp_path / "data", shared=True)) for _ in range(2))
        for name in ("q", "others"):
            one.queue(name).send(b"0")
        monkeypatch.setattr(Store, "begin_sends", begin)
        sent = [one.queue("q").send_nowait(b"%d" % n) for n in range(1, 9)]
        assert begun.wait(PATIENCE)
        assert other.queue("others").send(b"1").seq  # another thread serves by now
        sent += [one.queue("q").send_nowait(b"%d" % n) for n in range(9, 20)]
        go_on.set()
        assert all(future.result(PATIENCE).seq for future in sent)
        assert [message.body for message in other.queue("q").browse()] == [b"%d" % n for n in range(20)]


def test_a_thread_whose_turn_is_over_leaves_all_else_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What others had left to it was a round that took long; behind that are more, and a request that has come."""
    with anabranch.open(tmp_path / "data") as router:
        server = router.serve()
        assert isinstance(server, Server)
        first, timers, due = server._thread, server._loop, threading.Event()
        waits, go_on = threading.Event(), threading.Event()

        def wait() -> None:
            waits.set()
            assert go_on.wait(PATIENCE)

        def take_long() -> None:
            server._rounds._busy_since = time.monotonic() - rounds.SLOW_SECONDS
            server._rounds._look_after()

        with Peer(router.config.directory) as peer:
            monkeypatch.setattr(server._rounds, "_go_on", lambda: None)  # the next begins below
            timers.later(lambda: timers.at(0, wait))
            assert waits.wait(PATIENCE)
            peer.send(Op.SEND, "queue://q", [b"x", None, None, 4, 0, True, False, 0], False)
            timers.later(take_long)
            timers.later(due.set)
            go_on.set()
            assert first is not None
            first.join(PATIENCE)
            assert router.queue("q").depth() == 0 and not due.is_set()
            server._serve()
            assert peer.next()[1]
            assert router.queue("q").depth() == 1 and due.is_set()


def test_a_receive_looks_once_however_short_its_time_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands in line when its time is over."""
    start = reading._Waiting.start

    def late(waiting: reading._Waiting) -> None:
        eventually(lambda: waiting._late)
        start(waiting)

    monkeypatch.setattr(reading._Waiting, "start", late)
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], kind="sql")])
    with anabranch.open(config) as router, anabranch.open(config, shared=True) as client:
        router.queue("q").send(b"x")
        assert take(client.queue("q"), 0.001).body == b"x"
        assert client.queue("q").receive(0.001) is None


def test_an_owner_keeps_nothing_of_receives_that_were_answered_before_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "SWEPT_AT", 16)
    with anabranch.open(tmp_path / "data") as router:
        server = router.serve()
        assert isinstance(server, Server)
        with Peer(router.config.directory) as peer:
            for n in range(100):
                numbers = {peer.send(Op.RECEIVE, "queue://q", None, 1, 3600, None) for _ in range(3)}
                eventually(lambda: [one["waiting"] for one in server.sessions()] == [3], server.sessions)
                router.queue("q").send_many([b"%d" % n] * 3)
                assert {peer.next()[0] for _ in range(3)} == numbers
        assert len(server._loop._timers) < 3 * 16


def test_timers_are_called_in_turn_whichever_are_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SWEPT_AT", 16)
    timers, called = loop.Loop(), list[int]()
    made = [timers.at(-1 - n if n % 3 else 3600, partial(called.append, n)) for n in range(300)]
    for one in made[::2]:
        one.call_off()
    assert timers.run_due(lambda: True)
    assert called == [n for n in range(299, 0, -2) if n % 3]
    assert len(timers._timers) == 50


def test_sends_of_one_thread_keep_their_order_whichever_are_synced_or_large(tmp_path: Path) -> None:
    with anabranch.open(tmp_path / "data") as owner:
        owner.serve()
        with anabranch.open(tmp_path / "data", shared=True) as client:
            queue = client.queue("q")
            futures = []
            for n in range(60):
                body: Any = io.BytesIO(bytes(3 << 20)) if n % 20 == 10 else b"%d" % n
                futures.append(queue.send_nowait(body, sync=n % 3 == 1))
            seqs = [future.result(PATIENCE).seq for future in futures]
            assert seqs == sorted(seqs)


def test_a_store_that_was_slow_once_is_prompt_again(tmp_path: Path) -> None:
    with anabranch.open(tmp_path / "data") as owner:
        server: Any = owner.serve()
        with anabranch.open(tmp_path / "data", shared=True) as client:
            client.queue("q").send(b"0")
            writes = server._rounds._writes
            for way in (lambda: client.queue("q").send(b"1"), lambda: client.queue("q").receive(0)):
                writes.slow.update(owner._registry.by_destination.values())
                way()
                eventually(lambda: not writes.slow)
            waiting = threading.Thread(target=lambda: client.queue("none").receive(PATIENCE))
            waiting.start()
            eventually(lambda: server.sessions()[0]["waiting"])
            writes.slow.update(owner._registry.by_destination.values())
            owner.queue("none").send(b"2")
            waiting.join()
            eventually(lambda: not writes.slow)


def test_nothing_is_left_of_a_receive_of_a_client_that_went_while_its_store_was_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "SLOW_SECONDS", 0.05)
    begun, go_on, page = threading.Event(), threading.Event(), reading._page

    def slow(*given: Any) -> Any:
        begun.set()
        go_on.wait(PATIENCE)
        return page(*given)

    with anabranch.open(tmp_path / "data") as owner:
        server: Any = owner.serve()
        owner.queue("q").declare()
        client = anabranch.open(tmp_path / "data", shared=True)
        assert client.queue("q").receive(0) is None
        monkeypatch.setattr(reading, "_page", slow)
        waiting = threading.Thread(target=_receive_until_closed, args=(client,))
        waiting.start()
        assert begun.wait(PATIENCE)
        eventually(lambda: server._rounds.turn)
        client.close()
        waiting.join()
        eventually(lambda: not server.sessions())
        store = owner._registry.by_destination[anabranch.Destination.parse("queue://q")]
        channel = store._engine.catalog.destinations[anabranch.Destination.parse("queue://q")].channel
        go_on.set()
        owner.queue("q").send(b"x")
        assert take(owner.queue("q"), PATIENCE).body == b"x"
        eventually(lambda: not (channel.listeners or channel.receivers))


def _receive_until_closed(client: anabranch.Router) -> None:
    with pytest.raises(ClosedError):
        client.queue("q").receive(None)
