"""One transaction over every pair of kinds of stores: all of it or nothing, whatever happens (invariant 4, rule T7)."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Message
from anabranch.policies.config.options import SqlOptions

from ..router.disk import SYNCED, contents, copied, still, take
from ..sql.disk import TableSets, table_sets
from ..thirdparty.disk import SITE

CAMPAIGN = [pytest.mark.campaign, pytest.mark.weight(0)]
KINDS = ("journal", "sqlite", "postgresql", "memory", "onefile")
PAIRS = [
    pytest.param((one, other), marks=[] if (second - first) % len(KINDS) < 2 else CAMPAIGN)
    for (first, one), (second, other) in itertools.product(enumerate(KINDS), enumerate(KINDS))
]
"""`make test` has each kind with itself and with the next one, so each in either place."""
NEIGHBOURS = list(zip(KINDS, KINDS[1:] + KINDS[:1], strict=True))
XID = anabranch.Xid(1, "over two kinds")

State = dict[str, list[bytes]]
BEFORE: dict[str, State] = {
    "a": {"in": [b"1", b"2"], "out": [], "desk": [b"t"]},
    "b": {"in": [b"1", b"2"], "out": [], "desk": [b"t"]},
}
AFTER: dict[str, State] = {
    "a": {"in": [b"2"], "out": [b"x"], "desk": [b"t", b"new"], "late": [b"new"]},
    "b": {"in": [b"2"], "out": [b"y"], "desk": []},
}
NOTHING: State = {"in": [], "out": []}

assert SITE.is_dir()  # the third party is installed: stores of kind `onefile` are found by their entry point

sets = pytest.fixture(scope="module")(table_sets)


class World:
    """Two stores, `a` and `b`, each with the queues <name>.in and <name>.out and the topic <name>.t, which a desk has
    subscribed to; and what a killed process would have left of them at some moments."""

    def __init__(self, path: Path, kinds: tuple[str, str], sets: TableSets | None) -> None:
        self._path, self._sets = path, sets
        self._prefixes: list[str] = []
        self.kinds = dict(zip("ab", kinds, strict=True))
        self.durable = [name for name, kind in self.kinds.items() if kind != "memory"]
        self.config, self._tables = self._made(path / "data")
        self.snapshots: list[tuple[str, anabranch.Config]] = []

    def _made(self, directory: Path) -> tuple[anabranch.Config, dict[str, str]]:
        """A configuration with tables of its own on the server; which, by store."""
        tables, stores = {}, []
        for name, kind in self.kinds.items():
            options: dict[str, Any] = {kind: None}
            if kind == "journal":
                options = {"journal": SYNCED}
            elif kind == "sqlite":
                options = {"sql": SqlOptions()}
            elif kind == "postgresql":
                assert self._sets is not None
                tables[name] = self._sets.take()
                self._prefixes.append(tables[name])
                options = {"sql": SqlOptions(url=self._sets.url, schema_prefix=tables[name], pool_min=0)}
            stores.append(anabranch.StoreConfig(name, [f"queue://{name}.>", f"topic://{name}.>"], **options))
        return anabranch.Config(directory, stores), tables

    def snapshot(self, router: anabranch.Router, when: str) -> None:
        """What is left if the process is killed now."""
        directory = self._path / f"copy-{len(self.snapshots)}"
        config, tables = self._made(directory)
        with still(router):
            copied(router, directory)
            for name, prefix in tables.items():
                assert self._sets is not None
                self._sets.copy(self._tables[name], prefix)
        self.snapshots.append((when, config))

    def close(self) -> None:
        if self._sets is not None:
            self._sets.give_back(self._prefixes)
        for _, config in self.snapshots:
            shutil.rmtree(config.directory)

    def as_after_restart(self, expected: dict[str, State]) -> dict[str, State]:
        """Of memory stores nothing is left, not even their subscriptions."""
        return {name: state if name in self.durable else NOTHING for name, state in expected.items()}


@pytest.fixture(params=PAIRS, ids="-".join)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    sets = request.getfixturevalue("sets") if "postgresql" in request.param else None
    world = World(tmp_path, request.param, sets)
    yield world
    world.close()


def states(router: anabranch.Router) -> dict[str, State]:
    """What the two stores hold."""
    found = {}
    for name in "ab":
        found[name] = {part: contents(router, f"{name}.{part}") for part in ("in", "out")}
        for desk in router.topic(f"{name}.t").subscriptions():
            found[name][desk.subscription.name] = [message.body for message in desk.browse()]
    return found


def begun(router: anabranch.Router, xid: anabranch.Xid | None = None) -> tuple[anabranch.Transaction, list[Message]]:
    """A transaction that receives, sends and subscribes, with messages of queues and of a topic."""
    for name in "ab":
        router.queue(f"{name}.in").send_many([b"1", b"2"])
        router.topic(f"{name}.t").subscribe("desk", client_id="c")
        router.topic(f"{name}.t").send(b"t")
    desk = router.topic("b.t").subscribe("desk", client_id="c")
    last = desk.receive()
    assert last is not None
    messages = [take(router, "a.in"), take(router, "b.in"), last]
    tx = router.transaction(xid)
    for message in messages:
        tx.ack(message)
    tx.send("a.out", b"x")
    tx.subscribe("a.t", "late")
    tx.send("topic://a.t", b"new")
    tx.send("b.out", b"y")
    assert states(router) == BEFORE
    return tx, messages


def test_committed_or_rolled_back_it_is_the_same_in_both(world: World) -> None:
    with anabranch.open(world.config) as router:
        tx, messages = begun(router)
        tx.rollback()
        assert states(router) == BEFORE
        for message in messages:
            with pytest.raises(anabranch.UnknownMessageError):
                message.ack()
        again = take(router, "a.in")
        assert (again.body, again.deliveries) == (b"1", 2)
        tx = router.transaction()
        tx.ack(again)
        tx.ack(take(router, "b.in"))
        desk = router.topic("b.t").subscribe("desk", client_id="c").receive()
        assert desk is not None
        tx.ack(desk)
        tx.subscribe("a.t", "late")
        tx.send("topic://a.t,queue://a.out", b"new")
        tx.send("b.out", b"y")
        receipts = tx.commit()
        assert [str(receipt.destination) for receipt in receipts] == ["topic://a.t", "queue://a.out", "queue://b.out"]
        expected = {**AFTER, "a": {**AFTER["a"], "out": [b"new"]}}
        assert states(router) == expected
        assert router.in_doubt() == []
    with anabranch.open(world.config) as router:
        assert states(router) == world.as_after_restart(expected)


def test_prepared_for_a_manager_it_is_committed_after_a_restart(world: World) -> None:
    decided_after_a_restart(world, commit=True)


@pytest.mark.parametrize("world", NEIGHBOURS, indirect=True, ids="-".join)
def test_prepared_for_a_manager_it_is_rolled_back_after_a_restart(world: World) -> None:
    decided_after_a_restart(world, commit=False)


def decided_after_a_restart(world: World, commit: bool) -> None:
    """Its manager is heard even if no more than memory took part, and nothing of that is left."""
    with anabranch.open(world.config) as router:
        tx, _ = begun(router, XID)
        tx.prepare()
        assert states(router) == BEFORE
        world.snapshot(router, "killed")
        assert router.recover() == [XID]
    for config in (world.config, world.snapshots[0][1]):
        with anabranch.open(config) as router:
            assert states(router) == world.as_after_restart(BEFORE)
            assert router.recover() == [XID]
            for name in world.durable:
                assert take(router, f"{name}.in").body == b"2"  # the first is the transaction's
            (router.commit if commit else router.rollback)(XID)
            assert states(router) == world.as_after_restart(AFTER if commit else BEFORE)
            assert router.recover() == []
        with anabranch.open(config) as router:
            assert states(router) == world.as_after_restart(AFTER if commit else BEFORE)
            for store in router._registry.open_stores():
                assert list(store.check()) == []


def test_killed_at_any_step_it_is_all_or_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the decision nothing of it is left, afterwards nothing is lost."""
    with anabranch.open(world.config) as router:
        tx, _ = begun(router)

        def noted(step: str, original: Callable[..., Any]) -> Callable[..., Any]:
            def call(store: Any, *given: Any, **named: Any) -> Any:
                world.snapshot(router, step)
                return original(store, *given, **named)

            return call

        with monkeypatch.context() as patches:
            for adapter in {type(store) for store in router._registry.open_stores()}:
                for step in ("prepare", "commit", "commit_prepared"):
                    patches.setattr(adapter, step, noted(step, getattr(adapter, step)))
            tx.commit()
        assert states(router) == AFTER
        world.snapshot(router, "committed")
    steps = [when for when, _ in world.snapshots]
    if len(world.durable) == 2:
        assert steps == ["prepare"] * 2 + ["commit_prepared"] * 2 + ["committed"]
    elif world.durable:
        assert steps == ["prepare", "commit", "commit_prepared", "committed"]  # one decides alone (rule T7)
    for when, config in world.snapshots:
        expected = BEFORE if when in ("prepare", "commit") else AFTER
        with anabranch.open(config) as router:
            assert states(router) == world.as_after_restart(expected), when
            assert router.in_doubt() == []
            if expected is BEFORE:
                for name in world.durable:
                    assert take(router, f"{name}.in").body == b"1"
