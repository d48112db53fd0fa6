"""What a directory holds moves to where a new configuration routes it (rule J11, invariant 6)."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import Subscription
from anabranch.adapters.core import Store
from anabranch.adapters.core.migration import copying
from anabranch.policies.errors import CorruptionError, PlacementError, StoreFullError, StoreLockedError
from anabranch.policies.names.destination import Destination
from anabranch.router.migration import repartition as repartition_module
from anabranch.router.migration.plan import plan_of
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement import open_stores
from anabranch.router.placement.on_disk.repartition_progress import NAME, ProgressFile
from anabranch.router.placement.record import DestinationsTable

from ..shares import Share
from ..taking import take

JOURNAL = {"segment_size": "64KiB", "sync": "never"}
KINDS: dict[str, dict[str, Any]] = {"journal": {"journal": JOURNAL}, "sql": {"sql": {}}}
XID = anabranch.Xid(1, "g", "b")
TICKS = Destination.parse("topic://ticks")


def config(directory: Path, *stores: tuple[str, list[str]], **options: Any) -> anabranch.Config:
    """Journal stores of these names and patterns, or with these options."""
    given = options or KINDS["journal"]
    return anabranch.Config(directory, [anabranch.StoreConfig(name, match, **given) for name, match in stores])


def old(directory: Path, kind: str = "journal") -> anabranch.Config:
    return config(directory, ("all", [">"]), **KINDS[kind])


def new(directory: Path, kind: str = "journal") -> anabranch.Config:
    return config(directory, ("a", ["queue://a.>"]), ("ticks", ["topic://>"]), ("rest", [">"]), **KINDS[kind])


def fill(settings: anabranch.Config) -> None:
    """Messages, ids, counts of deliveries, subscriptions."""
    with anabranch.open(settings) as router:
        for name in ("a.x", "a.y", "b"):
            queue = router.queue(name)
            for number in range(20):
                queue.send(b"%d" % number, {"n": number}, f"{name}-{number}", priority=number % 10)
            for message in [queue.receive(), queue.receive()]:
                assert message is not None
                message.ack()
            back = take(queue)
            back.release()
        topic = router.topic("ticks")
        topic.subscribe("first", client_id="c", selector="n > 1", no_local=True)
        for number in range(5):
            topic.send(b"%d" % number, {"n": number})
        topic.subscribe("second")
        topic.send(b"for both")
        router.topic("idle").subscribe("nothing yet")
        router.queue("emptied").send(b"", message_id="e")
        message = take(router.queue("emptied"))
        message.ack()


def facts(settings: anabranch.Config) -> dict[str, Any]:
    """All that a user can see."""

    def of(messages: Any) -> list[Any]:
        return [
            (m.body, m.headers, m.message_id, m.priority, m.timestamp_ms, m.expires_at_ms, m.deliveries)
            for m in messages
        ]

    with anabranch.open(settings) as router:
        found: dict[str, Any] = {
            str(d): of(router.queue(d).browse()) for d in router.destinations() if d.kind is anabranch.Kind.QUEUE
        }
        for subscription in router.subscriptions():
            store = router._registry.store_for(subscription.topic)
            found[str(subscription)] = of(store.browse(subscription.topic, subscription=subscription.key))
        for store in router._registry.all_stores():
            assert list(store.check()) == []
    return found


def files(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else ""
        for p in sorted(directory.rglob("*"))
    }


def stores_of(settings: anabranch.Config) -> list[str]:
    with anabranch.open(settings) as router:
        return sorted(router.stats().stores)


@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_there_and_back(tmp_path: Path, source: str, target: str) -> None:
    before, after = old(tmp_path, source), new(tmp_path, target)
    fill(before)
    expected = facts(before)
    assert len(expected) == 7
    with pytest.raises(PlacementError, match=r"run `anabranch repartition --config FILE \S+` \(--dry-run shows"):
        anabranch.open(after)
    told: list[tuple[int, int]] = []
    done = repartition(after, before, progress=lambda *given: told.append(given))
    moves = {
        str(move.destination): (move.source, move.target, move.messages, move.subscriptions) for move in done.moves
    }
    assert moves == {
        "queue://a.x": ("all", "a", 18, 0), "queue://a.y": ("all", "a", 18, 0), "queue://b": ("all", "rest", 18, 0),
        "queue://emptied": ("all", "rest", 0, 0), "topic://idle": ("all", "ticks", 0, 1),
        "topic://ticks": ("all", "ticks", 6, 2),
    }  # fmt: skip
    assert (done.removed, (tmp_path / "stores" / "all").exists(), (tmp_path / NAME).exists()) == (
        ("all",),
        False,
        False,
    )
    assert told[0] == (0, 60) and told[-1] == (60, 60) and told == sorted(told)
    assert facts(after) == expected
    with anabranch.open(after) as router:
        assert router.queue("a.x").send(b"", message_id="a.x-0").duplicate
        assert router.queue("emptied").send(b"", message_id="e").duplicate
        assert Subscription(TICKS, "first", "c", "n > 1", True) in router.subscriptions()
    assert stores_of(after) == ["a", "rest", "ticks"]
    again = repartition(after)
    assert (again.moves, again.removed) == ((), ())
    assert len(repartition(before, after).moves) == 6
    assert facts(before) == expected
    assert stores_of(before) == ["all"]


def test_a_subscription_without_messages(tmp_path: Path) -> None:
    """A configuration that routes its topic elsewhere does not lose it, and it moves."""
    before, after = old(tmp_path), new(tmp_path)
    with anabranch.open(before) as router:
        router.topic("idle").subscribe("mine")
    with pytest.raises(PlacementError, match=r"topic://idle: 0 messages, 1 durable subscription in store 'all'"):
        anabranch.open(after)
    repartition(after)
    with anabranch.open(after) as router:
        router.topic("idle").send(b"1")
        message = router.topic("idle").subscribe("mine").receive()
        assert message is not None and message.body == b"1"


def test_a_store_for_each_destination(tmp_path: Path) -> None:
    before = old(tmp_path)
    each = anabranch.Config(tmp_path, [anabranch.StoreConfig("each", [">"], per_destination=True, journal=JOURNAL)])
    fill(before)
    expected = facts(before)
    repartition(each)
    assert facts(each) == expected
    done = repartition(before)
    assert facts(before) == expected
    assert len(done.removed) == 6
    assert sorted(p.name for p in (tmp_path / "stores").iterdir()) == ["all", "each"]
    assert list((tmp_path / "stores" / "each").iterdir()) == []


def test_a_store_of_that_name_becomes_one_for_each_destination(tmp_path: Path) -> None:
    """The new stores lie in the directory of the old one, which is not removed with them."""
    before = config(tmp_path, ("s", [">"]))
    each = anabranch.Config(tmp_path, [anabranch.StoreConfig("s", [">"], per_destination=True, journal=JOURNAL)])
    fill(before)
    expected = facts(before)
    repartition(each)
    assert all(path.is_dir() for path in (tmp_path / "stores" / "s").iterdir())
    assert facts(each) == expected


def test_some_stay(tmp_path: Path) -> None:
    """What is routed to where it is does not move, and its store stays."""
    before = config(tmp_path, ("rest", [">"]))
    after = config(tmp_path, ("a", ["queue://a.>"]), ("rest", [">"]))
    fill(before)
    expected = facts(before)
    done = repartition(after)
    assert ([str(move.destination) for move in done.moves], done.removed) == (["queue://a.x", "queue://a.y"], ())
    assert facts(after) == expected


def test_more_stores_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = anabranch.Config(tmp_path, [anabranch.StoreConfig("each", [">"], per_destination=True, journal=JOURNAL)])
    after = anabranch.Config(tmp_path, [anabranch.StoreConfig("other", [">"], per_destination=True, journal=JOURNAL)])
    fill(before)
    expected = facts(before)
    with monkeypatch.context() as patched:
        patched.setattr(open_stores, "OPEN_STORES_MAX", 3)
        assert len(repartition(after).removed) == 6
    assert facts(after) == expected


def test_decisions_name_no_store_that_is_gone(tmp_path: Path) -> None:
    before = config(tmp_path, ("a", ["a"]), ("b", [">"]))
    with anabranch.open(before) as router:
        router.send("queue://a,queue://b", b"1")
    after = old(tmp_path)
    assert repartition(after).removed == ("a", "b")
    assert set(facts(after)) == {"queue://a", "queue://b"}


class TestDryRun:
    def test_changes_nothing(self, tmp_path: Path) -> None:
        data = tmp_path / "data"
        before, after = old(data), new(data)
        fill(before)
        shutil.copytree(data, tmp_path / "kept")
        (data / "router.lock").write_text("1 somebody before\n")
        found = files(data)
        planned = plan_of(after)
        assert files(data) == found
        assert planned == repartition(after).moves
        assert plan_of(after) == ()

    def test_after_a_crash(self, tmp_path: Path) -> None:
        """What was not closed is recovered in the copy alone."""
        data = tmp_path / "data"
        before, after = old(data), new(data)
        with anabranch.open(before) as router:
            router.queue("a.x").send(b"1")
            shutil.copytree(data, tmp_path / "crashed" / "data")
        after = new(tmp_path / "crashed" / "data")
        found = files(after.directory)
        assert [(str(move.destination), move.messages) for move in plan_of(after)] == [("queue://a.x", 1)]
        assert files(after.directory) == found

    def test_a_full_temporary_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fill(old(tmp_path))
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
        with pytest.raises(StoreFullError, match=r"a copy of store 'all', .* has no room .* set TMPDIR"):
            plan_of(new(tmp_path))


class TestRefused:
    """Each with one message that says what to do; nothing moves, and all is open to the former configuration."""

    @pytest.fixture(autouse=True)
    def _filled(self, tmp_path: Path) -> None:
        fill(old(tmp_path))

    def refused(self, after: anabranch.Config, error: type[Exception], said: str, **given: Any) -> None:
        expected = facts(old(after.directory))
        with pytest.raises(error, match=said):
            repartition(after, **given)
        assert not (after.directory / NAME).exists()
        assert facts(old(after.directory)) == expected
        assert stores_of(old(after.directory)) == ["all"]

    def test_routed_nowhere(self, tmp_path: Path) -> None:
        after = config(tmp_path, ("a", ["queue://a.>"]))
        self.refused(after, PlacementError, r"queue://b: 18 messages in store 'all', routed to no store; add a")
        with pytest.raises(PlacementError, match=r"topic://idle: 0 messages, 1 durable subscription in store"):
            plan_of(after)

    def test_to_a_memory_store(self, tmp_path: Path) -> None:
        after = config(tmp_path, ("m", [">"]), memory={})
        self.refused(after, PlacementError, r"queue://a\.x: .* from store 'all' to 'm', a memory store, which keeps no")

    def test_a_directory_that_is_no_store(self, tmp_path: Path) -> None:
        (tmp_path / "stores" / "a").mkdir()
        (tmp_path / "stores" / "a" / "mine").touch()
        self.refused(new(tmp_path), PlacementError, r"stores/a exists and is no store; give it another directory")

    def test_an_open_router(self, tmp_path: Path) -> None:
        with anabranch.open(old(tmp_path)):
            for call in (repartition, plan_of):
                with pytest.raises(StoreLockedError, match="is open already, by this process"):
                    call(new(tmp_path))

    def test_no_data_directory(self, tmp_path: Path) -> None:
        for call in (repartition, plan_of):
            with pytest.raises(
                PlacementError, match=r"nowhere is no data directory: .*nowhere has no placement\.records"
            ):
                call(new(tmp_path / "nowhere"))
        assert not (tmp_path / "nowhere").exists()

    def test_another_data_directory_before(self, tmp_path: Path) -> None:
        self.refused(new(tmp_path), anabranch.ConfigError, "must be the same", before=old(tmp_path / "other"))

    def test_a_target_that_holds_some_of_it(self, tmp_path: Path) -> None:
        """The placement record was restored from an old backup, say."""
        after = new(tmp_path)
        repartition(after)
        with anabranch.open(after):
            shutil.copytree(tmp_path, tmp_path.parent / "crossed")
        crossed = new(tmp_path.parent / "crossed")
        fill(old(tmp_path.parent / "other"))
        shutil.copytree(tmp_path.parent / "other" / "stores" / "all", crossed.directory / "stores" / "all")
        table = DestinationsTable(crossed.directory / "placement.records")
        table.open()
        other = DestinationsTable(tmp_path.parent / "other" / "placement.records")
        other.open()
        (row,) = other.stores.values()
        table.record_store(row, list(other.destinations.values()))
        table.close()
        other.close()
        with pytest.raises(PlacementError, match=r"queue://a\.x: store 'a' holds 18 messages of it too"):
            repartition(crossed)


class Snapshots:
    """Copies of a directory before and after each step of a repartition, as a process that ends there leaves it; of
    those steps alone whose number is `wanted`."""

    def __init__(
        self, directory: Path, to: Path, monkeypatch: pytest.MonkeyPatch, wanted: Callable[[int], bool]
    ) -> None:
        self._directory, self._to, self._monkeypatch, self._wanted = directory, to, monkeypatch, wanted
        self.steps = 0
        self.paths: list[Path] = []
        for owner, name in (
            (ProgressFile, "write"), (ProgressFile, "remove"), (copying.Bringing, "page"), (copying.Bringing, "end"),
            (DestinationsTable, "record_destinations"), (DestinationsTable, "record_store"), (Store, "delete"),
            (DestinationsTable, "forget_store"), (repartition_module, "remove_directory"),
        ):  # fmt: skip
            self.watch(owner, name)

    def watch(self, owner: Any, name: str) -> None:
        """One more that is a step."""
        self._monkeypatch.setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self._take()
            result = real(*given, **named)
            self._take()
            return result

        return call

    def _take(self) -> None:
        path = self._to / f"{self.steps}"
        self.steps += 1
        while self._wanted(self.steps - 1):
            try:
                shutil.copytree(self._directory, path, ignore=shutil.ignore_patterns("*.lock"))
            except shutil.Error:  # a segment was released meanwhile
                shutil.rmtree(path)
            else:
                self.paths.append(path)
                break


@pytest.mark.parametrize(("source", "target"), [("journal", "sql"), ("sql", "journal"), ("sql", "sql")])
def test_ended_at_any_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, share: Share
) -> None:
    """Between stores of other kinds than journals, of which tests.crash.moving spoils every call. No router opens what
    is half way, and the next run moves the rest."""
    data = tmp_path / "data"
    before, after = old(data, source), new(data, target)
    fill(before)
    expected = facts(before)
    monkeypatch.setattr(copying, "PAGE", 7)
    with monkeypatch.context() as patched:
        snapshots = Snapshots(data, tmp_path / "copies", patched, lambda step: step % share.every(29) == 0)
        repartition(after)
    assert snapshots.steps > 60
    for path in share.of(snapshots.paths):
        settings = new(path, target)
        for early in (old(path, source), settings):
            try:
                assert facts(early) == expected
            except PlacementError:
                pass
        repartition(settings)
        assert facts(settings) == expected
        assert sorted(p.name for p in (path / "stores").iterdir()) == ["a", "rest", "ticks"]


class TestInterrupted:
    """An error half way; what it leaves is gone on with."""

    @pytest.fixture
    def before(self, tmp_path: Path) -> anabranch.Config:
        fill(old(tmp_path))
        return old(tmp_path)

    @pytest.fixture
    def stop(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
        """After so many pages the disk of the target is full."""
        real = copying.Bringing.page

        def after(count: int) -> None:
            left = [count]

            def page(self: copying.Bringing, items: Any) -> None:
                if not left[0]:
                    raise StoreFullError("the disk is full; free some space and try again")
                left[0] -= 1
                real(self, items)

            monkeypatch.setattr(copying.Bringing, "page", page)

        monkeypatch.setattr(copying, "PAGE", 4)
        return after

    @pytest.mark.parametrize("pages", [0, 2, 7, 13])
    def test_it_goes_on(
        self, before: anabranch.Config, stop: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, pages: int
    ) -> None:
        expected, after = facts(before), new(before.directory)
        stop(pages)
        with pytest.raises(StoreFullError):
            repartition(after, path="new.yaml")
        for settings in (before, after):
            with pytest.raises(PlacementError, match=r"was interrupted; run `anabranch repartition --config new.yaml"):
                anabranch.open(settings)
        with pytest.raises(PlacementError, match=r"to another configuration \(new\.yaml\), .* run it with --restart"):
            repartition(before)
        with pytest.raises(PlacementError, match=r"to another configuration \(new\.yaml\), .* run it with --restart"):
            plan_of(before)
        left = plan_of(after)
        stop(1000)
        assert repartition(after).moves == left
        assert facts(after) == expected
        assert stores_of(after) == ["a", "rest", "ticks"]

    @pytest.mark.parametrize("pages", [0, 2, 7, 13])
    def test_another_configuration_after_all(
        self, before: anabranch.Config, stop: Callable[[int], None], pages: int
    ) -> None:
        expected = facts(before)
        stop(pages)
        with pytest.raises(StoreFullError):
            repartition(new(before.directory))
        stop(1000)
        third = config(before.directory, ("third", [">"]))
        repartition(third, restart=True)
        assert facts(third) == expected
        stop(pages)
        with pytest.raises(StoreFullError):
            repartition(new(before.directory))
        stop(1000)
        repartition(third, new(before.directory), restart=True)
        assert facts(third) == expected
        assert stores_of(third) == ["third"]

    def test_a_copy_that_differs(self, before: anabranch.Config, monkeypatch: pytest.MonkeyPatch) -> None:
        """The old one stays, and the next run begins it anew."""
        expected, after = facts(before), new(before.directory)
        real = copying.Bringing.page
        with monkeypatch.context() as patched:
            patched.setattr(copying.Bringing, "page", lambda self, items: real(self, items[3:]))
            with pytest.raises(
                CorruptionError, match=r"copy of queue://a\.x in store 'a', 17 message.* holds, 18; the source is"
            ):
                repartition(after)
        assert len(repartition(after).moves) == 6
        assert facts(after) == expected

    def test_while_a_store_is_removed(self, before: anabranch.Config, monkeypatch: pytest.MonkeyPatch) -> None:
        expected, after = facts(before), new(before.directory)

        def crash(*_: Any) -> None:
            raise KeyboardInterrupt

        for name in ("remove_directory", "sync_directory"):
            with monkeypatch.context() as patched:
                patched.setattr(repartition_module, name, crash)
                patched.setattr(ProgressFile, "remove", crash)
                with pytest.raises(KeyboardInterrupt):
                    repartition(after)
        repartition(after)
        assert facts(after) == expected
        assert stores_of(after) == ["a", "rest", "ticks"]
        assert not (before.directory / NAME).exists()

    def test_a_progress_that_is_damaged(self, before: anabranch.Config, stop: Callable[[int], None]) -> None:
        stop(2)
        with pytest.raises(StoreFullError):
            repartition(new(before.directory))
        path = before.directory / NAME
        path.write_bytes(b"x" * 2000)
        with pytest.raises(CorruptionError, match="the progress of a repartition is damaged"):
            repartition(new(before.directory))
