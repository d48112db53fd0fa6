"""Messages of one queue become those of another: each is in one of the two, whatever happens (invariants 3 and 4)."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.errors import DestinationError, StoreFullError
from anabranch.router.api.transaction import Transaction
from anabranch.router.migration import moving
from anabranch.router.migration.moving import move_messages

from ..children import CONTEXT
from ..contract.disk import PATIENCE
from ..sql.disk import TableSets, table_sets
from ..thirdparty.disk import SITE

assert SITE.is_dir()  # the third party is installed
KINDS = ("journal", "sqlite", "postgresql", "memory", "onefile")
PAIRS = [
    pytest.param(
        one, other, marks=[] if (second - first) % len(KINDS) < 2 else [pytest.mark.campaign, pytest.mark.weight(0)]
    )
    for (first, one), (second, other) in itertools.product(enumerate(KINDS), enumerate(KINDS))
]
"""`make test` has each kind with itself and with the next one, so each in either place."""

sets = pytest.fixture(scope="module")(table_sets)


@pytest.fixture
def made(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., anabranch.Config]:
    """A store for the queues a.> and one for all others, of these kinds."""

    def store(name: str, match: list[str], kind: str, more: dict[str, Any]) -> anabranch.StoreConfig:
        options: dict[str, Any] = {kind: more}
        if kind == "journal":
            options = {kind: {"segment_size": "64KiB", "sync": "never", **more}}
        elif kind == "sqlite":
            options = {"sql": more}
        elif kind == "postgresql":
            sets: TableSets = request.getfixturevalue("sets")
            prefix = sets.take()
            request.addfinalizer(lambda: sets.give_back([prefix]))
            options = {"sql": {"url": sets.url, "schema_prefix": prefix, "pool_min": 0, **more}}
        return anabranch.StoreConfig(name, match, **options)

    def make(source: str = "journal", target: str = "journal", **more: Any) -> anabranch.Config:
        stores = [store("a", ["a.>"], source, {}), store("b", [">"], target, more)]
        return anabranch.Config(tmp_path / "data", stores)

    return make


def facts(messages: Iterator[Message]) -> list[Any]:
    return [(m.read(), m.headers, m.message_id, m.priority, m.expires_at_ms, m.deliveries) for m in messages]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=str)
def test_they_are_as_they_were(made: Callable[..., anabranch.Config], source: str, target: str) -> None:
    with anabranch.open(made(source, target)) as router:
        origin = router.queue("a.x")
        origin.send(b"1", {"n": 1}, "id-1", priority=7, expires_in=1e6)
        origin.send(BytesIO(b"large" * 500_000), {"n": 2}, "id-2")
        origin.send_many([b"%d" % number for number in range(5)])
        expected = facts(origin.browse())
        origin.send(b"later", deliver_in=3600)
        router.queue("b.x").send(b"first")
        told: list[tuple[int, int]] = []
        assert (
            move_messages(router._unlimited, origin, router.queue("b.x"), progress=lambda *given: told.append(given))
            == 7
        )
        assert facts(router.queue("b.x").browse())[1:] == expected
        assert ([m.body for m in origin.browse()], told[0]) == ([b"later"], (0, 7))
        assert move_messages(router._unlimited, router.queue("b.x"), router.queue("b.y"), limit=3) == 3
        assert [m.message_id for m in router.queue("b.y").browse()] == [None, "id-1", "id-2"]
        assert move_messages(router._unlimited, router.queue("b.y"), origin) == 3  # whatever its duplicate window knows
        assert [m.message_id for m in origin.browse()] == [None, None, "id-1", "id-2"]
        for store in router._registry.open_stores():
            assert list(store.check()) == []


def test_what_is_held_or_gone_stays(made: Callable[..., anabranch.Config]) -> None:
    with anabranch.open(made()) as router:
        origin, target = router.queue("a.x"), router.queue("b.x")
        origin.send_many([b"1", b"2", b"3"])
        held = origin.receive()
        assert held is not None
        assert move_messages(router._unlimited, origin, target) == 2
        assert [m.body for m in origin.browse()] == [b"1"]
        held.ack()
        assert (move_messages(router._unlimited, origin, target), target.depth()) == (0, 2)
        with pytest.raises(DestinationError, match=r"queue://a\.x is where its messages are already"):
            move_messages(router._unlimited, origin, origin)


def test_a_target_that_is_full_keeps_what_it_got(
    made: Callable[..., anabranch.Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "PAGE_MESSAGES", 4)
    with anabranch.open(made(max_messages=10)) as router:
        origin, target = router.queue("a.x"), router.queue("b.x")
        origin.send_many([b"%d" % number for number in range(20)])
        with pytest.raises(StoreFullError) as caught:
            move_messages(router._unlimited, origin, target)
        assert caught.value.__notes__ == ["8 messages of queue://a.x were moved before this."]
        assert [m.body for m in target.browse()] == [b"%d" % number for number in range(8)]
        assert [m.body for m in origin.browse()] == [b"%d" % number for number in range(8, 20)]
        assert origin.counts() == (12, 0, 0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_none_is_dropped_for_being_new(made: Callable[..., anabranch.Config], kind: str) -> None:
    with anabranch.open(made(target=kind, max_messages=2, when_full="drop_new")) as router:
        origin, target = router.queue("a.x"), router.queue("b.x")
        origin.send_many([b"1", b"2", b"3"])
        with pytest.raises(StoreFullError):
            move_messages(router._unlimited, origin, target)
        assert (origin.counts(), target.depth()) == ((3, 0, 0, 0), 0)
        assert move_messages(router._unlimited, origin, target, limit=2) == 2
        assert target.send(b"4").dropped


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("step", ["_carry", "ack", "commit"])
def test_interrupted_each_is_in_one_of_both(
    made: Callable[..., anabranch.Config], monkeypatch: pytest.MonkeyPatch, step: str, error: type[BaseException]
) -> None:
    monkeypatch.setattr(moving, "PAGE_MESSAGES", 4)
    real, calls = getattr(Transaction, step), itertools.count()

    def struck(self: Transaction, *given: Any) -> Any:
        if next(calls) == 2:
            raise error
        return real(self, *given)

    with anabranch.open(made()) as router:
        origin, target = router.queue("a.x"), router.queue("b.x")
        origin.send_many([b"%d" % number for number in range(20)])
        with monkeypatch.context() as patched, pytest.raises(error):
            patched.setattr(Transaction, step, struck)
            move_messages(router._unlimited, origin, target)
        found = [m.body for m in target.browse()] + [m.body for m in origin.browse()]
        assert found == [b"%d" % number for number in range(20)]
        left = origin.depth()
        assert move_messages(router._unlimited, origin, target) == left
        assert [m.body for m in target.browse()] == [b"%d" % number for number in range(20)]


def move(directory: Path, tells: Connection, pages: int) -> None:
    """Move all in pages, telling of each; behind so many it waits to be killed, lest it end before."""
    told = itertools.count(1)

    def tell(*_: int) -> None:
        tells.send_bytes(b".")
        if next(told) == pages:
            time.sleep(PATIENCE)

    setattr(moving, "PAGE_MESSAGES", 97)  # noqa: B010
    with anabranch.open(directory) as router:
        move_messages(router._unlimited, router.queue("a.x"), router.queue("b.x"), progress=tell)


@pytest.mark.parametrize(("source", "target"), [("journal", "journal"), ("journal", "sqlite"), ("sqlite", "onefile")])
def test_killed_at_any_moment_each_is_in_one_of_both(
    made: Callable[..., anabranch.Config], source: str, target: str
) -> None:
    total = left = 1500
    config = made(source, target)
    with anabranch.open(config) as router:
        router.queue("a.x").send_many([b"%d" % number for number in range(total)])
    for rounds in itertools.count(1):
        pages = 5 + rounds % 5
        hears, tells = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=move, args=(config.directory, tells, pages + 2))
        process.start()
        tells.close()
        with hears, suppress(EOFError):
            for _ in range(pages):  # somewhere in a page behind so many
                hears.recv_bytes()
            process.kill()
        process.join(PATIENCE)
        assert process.exitcode in (0, -signal.SIGKILL)
        with anabranch.open(config) as router:
            there = [int(m.body) for m in router.queue("b.x").browse()]
            here = [int(m.body) for m in router.queue("a.x").browse()]
        assert there + here == list(range(total)), (len(there), len(here))
        if not here:
            break
        assert len(here) < left
        left = len(here)
    assert rounds > 1
