"""Destinations that are declared are there, empty, until they are deleted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.record import RECORD
from anabranch.router.upkeep.salvage import salvage

from ..children import run_program
from ..contract.disk import PATIENCE
from ..crash.interrupts import everywhere
from ..shares import Share
from ..thirdparty import disk as thirdparty  # installs its kind of store

NAMES = ["map://m", "queue://each.q", "queue://q", "topic://t"]
KINDS = ("journal", "sql", "memory", "onefile")
assert thirdparty


def store(name: str, match: str, kind: str, **options: Any) -> anabranch.StoreConfig:
    kinds: dict[str, Any] = {"kind": kind, "options": {}} if kind == "onefile" else {kind: {}}
    return anabranch.StoreConfig(name, [match], **kinds, **options)


def config(directory: Path, kind: str) -> anabranch.Config:
    return anabranch.Config(
        directory, [store("all", ">", kind), store("each", "queue://each.>", kind, per_destination=True)]
    )


def declare(router: anabranch.Router) -> None:
    for _ in range(2):
        for holder in (router.map("m"), router.queue("each.q"), router.queue("q", codec="json"), router.topic("t")):
            holder.declare()


def known(router: anabranch.Router) -> list[str]:
    """By the router, once all stores are open: each says then what it does not know."""
    router.stats()
    return [str(destination) for destination in router.destinations()]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def setup(tmp_path: Path, kind: str) -> anabranch.Config:
    return config(tmp_path / "data", kind)


@pytest.fixture
def declared(setup: anabranch.Config) -> Iterator[anabranch.Router]:
    with anabranch.open(setup) as router:
        declare(router)
        yield router


def test_they_are_there_over_restarts_until_they_are_deleted(setup: anabranch.Config, kind: str) -> None:
    with anabranch.open(setup) as router:
        declare(router)
        assert known(router) == NAMES
        assert router.queue("q").counts() == anabranch.Counts(0, 0)
    if kind == "memory":
        with anabranch.open(setup) as router:
            assert known(router) == []
        return
    for _ in range(2):
        with anabranch.open(setup) as router:
            assert known(router) == NAMES
            assert router.queue("q").receive() is None
    with anabranch.open(setup) as router:
        assert [router.delete(name) for name in NAMES] == [0] * len(NAMES)
        assert known(router) == []
    with anabranch.open(setup) as router:
        assert known(router) == []


def test_messages_are_not_in_the_way(declared: anabranch.Router) -> None:
    queue = declared.queue("q")
    queue.send(b"1")
    queue.declare()
    message = queue.receive()
    assert message is not None
    queue.declare()
    message.ack()
    queue.declare()
    assert (queue.depth(), known(declared)) == (0, NAMES)


def test_many_of_none_are_nothing(setup: anabranch.Config) -> None:
    with anabranch.open(setup) as router:
        assert router.queue("q").send_many([]) == router.queue("each.q").send_many(iter(())) == []
        assert known(router) == []
        assert router.stats().stores == {}
    with pytest.raises(anabranch.ClosedError):
        router.queue("q").send_many([])


def test_a_process_that_is_killed_right_behind_it(tmp_path: Path, kind: str) -> None:
    program = (
        "import os, signal, sys, anabranch\n"
        "from pathlib import Path\n"
        "from tests.placement.test_declaring import config, declare\n"
        "declare(anabranch.open(config(Path(sys.argv[1]), sys.argv[2])))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, told = run_program(program, str(tmp_path / "data"), kind, seconds=PATIENCE)
    assert code == -signal.SIGKILL, told
    with anabranch.open(config(tmp_path / "data", kind)) as router:
        assert known(router) == ([] if kind == "memory" else NAMES)


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("to", ["journal", "sql", "onefile"])
def test_they_move(tmp_path: Path, to: str, live: bool) -> None:
    """From a store for all to one for each, and back."""
    before = anabranch.Config(tmp_path / "data", [store("all", ">", "journal")])
    after = anabranch.Config(tmp_path / "data", [store("parts", ">", to, per_destination=True)])
    with anabranch.open(before) as router:
        declare(router)
        assert known(router) == NAMES
    for old, new in ((before, after), (after, before)):
        if live:
            with anabranch.open(old) as router:
                moved = router.repartition(new)
                assert known(router) == NAMES
        else:
            moved = repartition(new, old)
        assert sorted(str(move.destination) for move in moved.moves) == NAMES
        for _ in range(2):
            with anabranch.open(new) as router:
                assert known(router) == NAMES


def test_what_is_routed_elsewhere_without_a_move_is_not_known_any_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = anabranch.Config(tmp_path / "data", [store("all", ">", "journal")])
    after = anabranch.Config(tmp_path / "data", [store("all", ">", "journal"), store("q", "queue://q", "journal")])
    with anabranch.open(before) as router:
        declare(router)
    with caplog.at_level("INFO"), anabranch.open(after) as router:
        assert known(router) == [name for name in NAMES if name != "queue://q"]
        router.queue("q").declare()
    assert "1 destination without messages, routed to other stores now, not known any more: queue://q" in caplog.text
    with anabranch.open(after) as router:
        assert known(router) == NAMES


def test_they_survive_a_salvage_and_a_lost_record(tmp_path: Path) -> None:
    setup = config(tmp_path / "data", "journal")
    with anabranch.open(setup) as router:
        declare(router)
        router.queue("full").send(b"1")
    (tmp_path / "data" / RECORD).write_bytes(b"what?")
    found = salvage(tmp_path / "data", tmp_path / "new")
    assert found.is_whole
    with anabranch.open(config(tmp_path / "new", "journal")) as router:
        assert known(router) == sorted([*NAMES, "queue://full"])
    (tmp_path / "new" / RECORD).unlink()
    with anabranch.open(config(tmp_path / "new", "journal")) as router:
        assert known(router) == sorted([*NAMES, "queue://full"])


def test_an_idle_one_goes_all_the_same(declared: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.router.upkeep import idle_queues

    from ..contract.disk import eventually

    monkeypatch.setattr(idle_queues, "LOOK_SECONDS", 0.005)
    declared.queue("replies", expires_when_idle=0.02).declare()
    eventually(lambda: not declared.exists("replies"))
    assert known(declared) == NAMES


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_ctrl_c_anywhere_in_it(tmp_path: Path, kind: str, share: Share) -> None:
    """Said again it is done, and nothing is stuck."""
    with anabranch.open(config(tmp_path / "data", kind)) as router:

        def prepare(at: int) -> Callable[[], object]:
            return router.queue(f"each.{at}" if at % 2 else f"q.{at}").declare

        def check(at: int, where: str) -> None:
            queue = router.queue(f"each.{at}" if at % 2 else f"q.{at}")
            queue.declare()
            assert router.exists(queue.destination), where
            queue.send(b"1")
            assert queue.delete() == 1, where

        assert everywhere(prepare, check, 11, share) > 30
        assert known(router) == []
