"""Queues move between a store of one router's own and a shared one, both ways, while another router sends and receives
in the shared one: each message is in one of both, once."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

import anabranch
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import PlacementError
from anabranch.router.migration import draining
from anabranch.router.migration.plan import Move, plan_of
from anabranch.router.offline.repartition import repartition

from .server import PostgresServer

COUNT: Final = 100


class Machine:
    """A directory of its own, whose queue of work is in a journal or in the shared store."""

    def __init__(self, path: Path, url: str) -> None:
        self.path, self.url = path, url

    def config(self, shared: bool) -> anabranch.Config:
        options = SqlOptions(url=self.url, shared=True, pool_min=0)
        match = ["queue://shop.>", *(["queue://work"] if shared else [])]
        return anabranch.Config(
            self.path, [anabranch.StoreConfig("shop", match, kind="sql", options=options),
                        anabranch.StoreConfig("local", [">"])],
        )  # fmt: skip

    def open(self, shared: bool) -> anabranch.Router:
        return anabranch.open(self.config(shared))

    def move(self, shared: bool, **more: Any) -> tuple[Move, ...]:
        return repartition(self.config(shared), self.config(not shared), **more).moves


@pytest.fixture
def url(postgres: PostgresServer) -> str:
    if postgres.pid is None:
        postgres.start()
    return postgres.new_database()


def fill(machine: Machine, shared: bool) -> list[bytes]:
    with machine.open(shared) as router:
        bodies = [b"%03d" % number for number in range(COUNT)]
        for body in bodies:
            router.queue("work").send(body, headers={"a": 1}, message_id=body.decode())
    return bodies


def drained(router: anabranch.Router) -> list[bytes]:
    bodies = []
    while (message := router.queue("work").receive()) is not None:
        assert (message.headers, message.message_id) == ({"a": 1}, message.body.decode())
        bodies.append(message.body)
        message.ack()
    return bodies


@pytest.mark.parametrize("into", [True, False])
def test_a_queue_moves_in_order(tmp_path: Path, url: str, into: bool) -> None:
    machine = Machine(tmp_path, url)
    bodies = fill(machine, not into)
    machine.move(into)
    with machine.open(into) as router:
        assert drained(router) == bodies
        assert router.queue("work").depth() == 0
        assert {stats.messages for stats in router.stats().stores.values()} == {0}


@pytest.mark.parametrize("into", [True, False])
def test_while_another_router_sends_and_receives(
    tmp_path: Path, url: str, into: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "PAGE", 3)
    machine, other = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    bodies = fill(machine, not into)
    sent: list[bytes] = []
    received: list[bytes] = []
    stopped = threading.Event()

    with other.open(True) as router:

        def use() -> None:
            queue = router.queue("work")
            while not stopped.is_set():
                body = b"other %d" % len(sent)
                queue.send(body, headers={"a": 1}, message_id=body.decode())
                sent.append(body)
                message = queue.receive()
                if message is not None:
                    message.ack()
                    received.append(message.body)

        user = threading.Thread(target=use)
        user.start()
        try:
            machine.move(into)
        finally:
            stopped.set()
            user.join()
        left = drained(router)
    with machine.open(into) as router:
        left += drained(router)
    assert Counter(received + left) == Counter(bodies + sent)


@pytest.mark.parametrize("into", [True, False])
def test_cut_off_it_goes_on(tmp_path: Path, url: str, into: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "PAGE", 10)
    machine = Machine(tmp_path, url)
    bodies = fill(machine, not into)

    def cut(done: int, total: int) -> None:
        if done == 30:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.move(into, progress=cut)
    with pytest.raises(PlacementError, match="repartition"):
        machine.open(into)
    machine.move(into)
    with machine.open(into) as router:
        assert drained(router) == bodies


def test_back_to_the_former_configuration(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has moved into the shared store stays there, for all; what has moved out of it cannot be left half way."""
    monkeypatch.setattr(draining, "PAGE", 10)
    for into in (True, False):
        machine = Machine(tmp_path / str(into), url)
        bodies = fill(machine, not into)

        def cut(done: int, total: int) -> None:
            if done == 30:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            machine.move(into, progress=cut)
        if into:
            machine.move(not into, restart=True)
            with machine.open(False) as router, Machine(tmp_path / "c", url).open(True) as other:
                assert drained(router) + drained(other) == bodies[30:] + bodies[:30]
        else:
            with pytest.raises(PlacementError, match="run it again with the same configuration first"):
                machine.move(not into, restart=True)


def test_what_is_scheduled_stays_and_is_told(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, url)
    with machine.open(False) as router:
        router.queue("work").send(b"later", deliver_in=3600.0)
    with pytest.raises(PlacementError, match=r"(?s)nothing was changed.*work: 1 message .*waits for its time"):
        machine.move(True)
    with machine.open(False) as router:
        assert router.queue("work").counts().delayed == 1


def test_a_router_that_is_in_use_refuses(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, url)
    bodies = fill(machine, False)
    with machine.open(False) as router:
        with pytest.raises(PlacementError, match="close it, and run `anabranch repartition`"):
            router.repartition(machine.config(True))
        assert drained(router) == bodies


@pytest.mark.parametrize("into", [True, False])
def test_a_dry_run(tmp_path: Path, url: str, into: bool) -> None:
    machine = Machine(tmp_path, url)
    fill(machine, not into)
    (move,) = plan_of(machine.config(into), machine.config(not into))
    assert (str(move.destination), move.messages) == ("queue://work", COUNT)
    with machine.open(not into) as router:
        assert router.queue("work").depth() == COUNT


def test_a_machine_leaves_the_shared_store(tmp_path: Path, url: str) -> None:
    """It takes what is ready along. The others go on with the rest."""
    machine, other = Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)
    bodies = fill(machine, True)
    with other.open(True) as router:
        held = router.queue("work").receive()
        assert held is not None
        alone = anabranch.Config(machine.path, [anabranch.StoreConfig("local", [">"])])
        assert repartition(alone, machine.config(True)).removed == ("shop",)
        with anabranch.open(alone) as left:
            assert drained(left) == bodies[1:]
        assert router.queue("work").depth() == 1
        held.release()
        assert drained(router) == bodies[:1]


def test_a_topic_stays_where_it_is(tmp_path: Path, url: str) -> None:
    machine = Machine(tmp_path, url)
    with machine.open(False) as router:
        router.topic("news").subscribe("reader")
        router.topic("news").send(b"a train")
    config = machine.config(True)
    stores = [anabranch.StoreConfig("shop", ["queue://>", "topic://>"], kind="sql", options=config.stores[0].options)]
    with pytest.raises(PlacementError, match="topics move neither into"):
        repartition(anabranch.Config(tmp_path, stores), machine.config(False))
    with machine.open(False) as router:
        assert len(router.topic("news").subscriptions()) == 1
