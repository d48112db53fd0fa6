"""A destination that is deleted leaves nothing behind, and what is sent there meanwhile is never lost sight of
(invariant 6, rules D1, D2)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.messages import Outgoing
from anabranch.policies.errors import DestinationError
from anabranch.router.placement.record import DestinationRow, DestinationsTable, StoreRow

from ..children import CONTEXT
from ..contract.disk import PATIENCE, Parallel, eventually
from ..taking import take

KINDS: dict[str, dict[str, Any]] = {
    "journal": {"journal": anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)},
    "sql": {"sql": anabranch.SqlOptions()},
    "memory": {"memory": anabranch.MemoryOptions()},
}
SOON = 60.0


@pytest.fixture(params=KINDS)
def config(tmp_path: Path, request: pytest.FixtureRequest) -> anabranch.Config:
    """One store for each of each.>, one for two.>, one for all else."""
    stores = [
        anabranch.StoreConfig("each", ["each.>"], per_destination=True, **KINDS[request.param]),
        anabranch.StoreConfig("one", [">"], **KINDS[request.param]),
        anabranch.StoreConfig("two", ["two.>"], journal=anabranch.JournalOptions(segment_size=64 * 1024)),
    ]
    return anabranch.Config(tmp_path / "data", stores)


def rows(config: anabranch.Config) -> tuple[set[str], set[str]]:
    """The destinations and the stores in the record's file, which nobody has open."""
    placement = DestinationsTable(config.directory / "placement.records")
    placement.open()
    try:
        return {str(d) for d in placement.destinations}, {row.name for row in placement.stores.values()}
    finally:
        placement.close()


def answered(router: anabranch.Router, name: str) -> None:
    """A reply queue: made, used, deleted."""
    queue = router.queue(name)
    queue.send(b"x")
    message = take(queue)
    message.ack()
    assert queue.delete() == 0


def test_who_looks_too_late_makes_no_row(config: anabranch.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store was found, and the destination was deleted before it was asked."""
    with anabranch.open(config) as router:
        queue = router.queue("shared.q")
        queue.send(b"x")
        (store,) = router._registry.open_stores()

        def depth(*_: object) -> int:
            monkeypatch.undo()
            assert queue.delete() == 1
            raise anabranch.ClosedError("closed for being idle")

        monkeypatch.setattr(store, "depth", depth)
        assert queue.depth() == 0
        assert not router.exists("shared.q")


@pytest.mark.parametrize("where", ["each", "shared"])
def test_temporary_queues_leave_nothing(config: anabranch.Config, where: str) -> None:
    with anabranch.open(config) as router:
        router.queue("stays").send(b"x")
        for number in range(25):
            answered(router, f"{where}.{number}")
        router.queue(f"{where}.full").send_many([b"1", Outgoing(b"2", persistent=False)])
        assert router.delete(f"{where}.full") == 2
        assert router.destinations() == [router.queue("stays").destination]
        assert not router.exists(f"{where}.3")
        assert set(router.stats().stores) == {"one"}
        places, stores = router._registry, router._registry._stores
        assert len(places.table.stores) == 1
        for known in (stores._exclusive, stores._removing, stores._used_in, stores._found_in):
            assert len(known) <= 1
        assert list(config.directory.glob("stores/each/*")) == []
        assert list(config.directory.glob("stores/each/.*")) == []
    assert rows(config) == ({"queue://stays"}, {"one"})


@pytest.mark.parametrize("where", ["each", "shared"])
def test_a_deleted_queue_can_be_used_again(config: anabranch.Config, where: str) -> None:
    with anabranch.open(config) as router:
        for number in range(3):
            queue = router.queue(f"{where}.q")
            queue.send(str(number).encode())
            assert router.exists(f"{where}.q")
            assert [message.body for message in queue.browse()] == [str(number).encode()]
            assert queue.delete() == 1
            assert (queue.depth(), queue.receive(), queue.delete()) == (0, None, 0)
        queue.send(b"last")
    assert rows(config)[0] == {f"queue://{where}.q"}


def test_a_queue_that_somebody_waits_for_keeps_its_store(config: anabranch.Config) -> None:
    with anabranch.open(config) as router:
        queue = router.queue("each.q")
        queue.send(b"1")
        message = take(queue)
        message.ack()
        with Parallel(lambda: queue.receive(SOON)) as receiving:
            eventually(lambda: router.stats().stores["each:queue://each.q"].waiting == 1)
            queue.delete()
            queue.send(b"2")
            received = receiving.result()
        assert received is not None
        assert received.body == b"2"


@pytest.mark.parametrize("how", ["send", "send_many", "transaction", "transaction over two"])
def test_a_send_that_found_its_store_before_the_queue_was_deleted(
    config: anabranch.Config, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its message stays, and so does the row of its destination."""
    with anabranch.open(config) as router:
        queue = router.queue("q")
        queue.send(b"before")
        store = router._registry.store_for(queue.destination)
        late, deleted = threading.Event(), threading.Event()

        def stalled(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                late.set()
                assert deleted.wait(SOON)
                return real(*args, **options)

            return call

        for name in ("send", "send_many", "commit", "prepare"):
            monkeypatch.setattr(store, name, stalled(getattr(store, name)))

        def send() -> None:
            if how == "send":
                queue.send(b"late")
            elif how == "send_many":
                queue.send_many([b"late"])
            else:
                with router.transaction() as tx:
                    tx.send("q", b"late")
                    if how == "transaction over two":
                        tx.send("two.q", b"late")

        with Parallel(send) as sending:
            assert late.wait(SOON)
            assert queue.delete() == 1
            assert not router.exists("q")
            deleted.set()
            sending.result()
        assert router.exists("q")
        assert [message.body for message in queue.browse()] == [b"late"]
    assert "queue://q" in rows(config)[0]


def test_a_prepared_send_keeps_its_row(config: anabranch.Config) -> None:
    with anabranch.open(config) as router:
        router.queue("q").send(b"1")
        tx = router.transaction(anabranch.Xid(1, "a", "b"))
        tx.send("q", b"2")
        tx.send("two.q", b"2")
        tx.prepare()
        assert router.delete("q") == 1
        assert router.exists("q")
        router.commit(anabranch.Xid(1, "a", "b"))
        assert [message.body for message in router.queue("q").browse()] == [b"2"]


class TestRecord:
    def placement(self, path: Path) -> DestinationsTable:
        placement = DestinationsTable(path / "placement.records")
        placement.open()
        placement.record_store(StoreRow(b"i" * 16, "stores/a", "journal", "a"))
        return placement

    def row(self, name: str) -> DestinationRow:
        return DestinationRow(0, name, b"i" * 16, ">")

    def test_threads_that_declare_at_once_wait_for_the_disk_together(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        placement = self.placement(tmp_path)
        commits: list[int] = []
        real = DestinationsTable._write

        def write(placement: DestinationsTable, batches: Any) -> None:
            commits.append(len(batches))
            if len(commits) == 1:
                eventually(lambda: len(placement._waiting) == 20)
            real(placement, batches)

        monkeypatch.setattr(DestinationsTable, "_write", write)
        threads = [
            threading.Thread(target=placement.record_destinations, args=([self.row(str(n))],)) for n in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON)
        assert len(commits) == 2
        assert sum(commits) == 20
        placement.close()
        placement.open()
        assert len(placement.destinations) == 20
        placement.close()

    def test_one_that_fails_does_not_fail_the_others(self, tmp_path: Path) -> None:
        placement = self.placement(tmp_path)
        bad = DestinationRow(0, "\ud800", b"i" * 16, ">")
        with pytest.raises(DestinationError):
            placement.record_destinations([bad])
        placement.record_destinations([self.row("good")])
        assert len(placement.destinations) == 1
        assert not placement._waiting
        placement.close()

    def test_what_goes_leaves_the_file_with_the_next_commit(self, tmp_path: Path) -> None:
        placement = self.placement(tmp_path)
        rows = [self.row(str(n)) for n in range(3)]
        placement.record_destinations(rows)
        for row in rows:
            placement.let_go(row.destination)
        assert not placement.destinations
        placement.record_destinations([rows[1]])
        assert not placement._leaving
        assert list(placement.destinations) == [rows[1].destination]
        placement.close()
        placement.open()
        assert list(placement.destinations) == [rows[1].destination]
        placement.close()

    def test_a_row_that_another_thread_is_letting_go_meanwhile_leaves_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It stands still between its two steps while another's commit is made."""
        placement = self.placement(tmp_path)
        placement.record_destinations([self.row("q")])
        real = DestinationsTable._remove

        def remove(placement: DestinationsTable, gone: Any) -> None:
            monkeypatch.undo()
            placement.record_destinations([self.row("other")])
            real(placement, gone)

        monkeypatch.setattr(DestinationsTable, "_remove", remove)
        placement.let_go(self.row("q").destination)
        placement.close()
        placement.open()
        assert list(placement.destinations) == [self.row("other").destination]
        placement.close()

    def test_rows_go_while_another_thread_looks_at_what_is_leaving(self, tmp_path: Path) -> None:
        placement = self.placement(tmp_path)
        rows = [self.row(str(n)) for n in range(40)]
        placement.record_destinations(rows)
        leaves = [rows[0].destination]
        placement.let_go(leaves[0])

        class Stores(dict[bytes, StoreRow]):
            def __contains__(self, one: object) -> bool:
                if one == leaves[0]:
                    leaves.append(next(iter(placement.destinations)))
                    placement.let_go(leaves[-1])
                return super().__contains__(one)

        placement.stores = Stores(placement.stores)
        placement.record_destinations([self.row("new")])
        placement.close()
        placement.open()
        assert len(leaves) > 1
        kept = [row.destination for row in rows[len(leaves) :]]
        assert list(placement.destinations) == [*kept, self.row("new").destination]
        placement.close()

    def test_what_goes_leaves_the_file_by_itself(self, tmp_path: Path) -> None:
        placement = self.placement(tmp_path)
        placement.record_destinations([self.row("q")])
        placement.let_go(self.row("q").destination)
        eventually(lambda: not placement._leaving)
        placement.close()


@pytest.mark.parametrize("config", ["journal", "sql"], indirect=True)
def test_what_a_crash_left_behind_goes_once_the_store_is_opened(config: anabranch.Config) -> None:
    """A row without its destination, as from a kill between the deletion and the next commit; and a destination without
    its row, as from a kill between a late send and its second look."""
    with anabranch.open(config) as router:
        router.queue("kept").send(b"x")
        router.queue("lost").send(b"x")
        (kept, lost) = router.destinations()
    placement = DestinationsTable(config.directory / "placement.records")
    placement.open()
    row = placement.destinations[kept]
    placement.record_destinations([DestinationRow(0, "gone", row.store_id, ">")])
    placement.forget_destination(lost)
    placement.close()
    with anabranch.open(config) as router:
        assert [str(d) for d in router.destinations()] == ["queue://gone", "queue://kept"]
        assert router.queue("kept").depth() == 1
        assert router.destinations() == [kept, lost]
        assert router.queue("lost").depth() == 1


def test_many_new_destinations_of_one_transaction_are_one_commit(
    config: anabranch.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anabranch.open(config) as router:
        router.queue("first").send(b"x")
        commits: list[int] = []
        real = DestinationsTable._write

        def write(placement: DestinationsTable, batches: Any) -> None:
            commits.append(len(batches))
            real(placement, batches)

        monkeypatch.setattr(DestinationsTable, "_write", write)
        with router.transaction() as tx:
            for number in range(50):
                tx.send(f"new.{number}", b"x")
            assert not commits
        assert len(commits) == 1
        assert len(router.destinations()) == 51
        assert all(router.queue(f"new.{number}").depth() == 1 for number in range(50))
    assert len(rows(config)[0]) == 51


def test_destinations_by_prefix(config: anabranch.Config) -> None:
    with anabranch.open(config) as router:
        for name in ("orders.eu", "orders.us", "order", "each.a"):
            router.queue(name).send(b"x")
        router.topic("orders.eu").subscribe("s")
        closed = router._registry._stores
        for path in list(closed._open):
            closed.close_at(path)
        assert [str(d) for d in router.destinations("queue://orders.")] == ["queue://orders.eu", "queue://orders.us"]
        assert len(router.destinations()) == 5
        assert router.exists("orders.us")
        assert router.exists("topic://orders.eu")
        assert not router.exists("orders")
        assert not closed._open, "no store is opened for it"


def test_a_kill_while_a_store_is_removed_leaves_what_can_be_opened(config: anabranch.Config) -> None:
    """At any step: before its row has left the file, before its directory is put aside, before that is gone."""
    for step in ("flush", "rename", "rmtree"):
        # Not forked of this one: SQLite may be locked there for ever, by a thread that was at work in it.
        child = CONTEXT.Process(target=_die_at, args=(config, step), daemon=True)
        child.start()
        child.join(PATIENCE)
        assert child.exitcode == 77
        with anabranch.open(config) as router:
            queue = router.queue("each.q")
            if config.stores[0].kind != "memory":
                assert queue.receive() is None
            queue.send(step.encode())
            assert [message.body for message in queue.browse()] == [step.encode()]
            assert router.delete("each.q") == 1
            assert list(config.directory.glob("stores/each/*")) == []


def _die_at(config: anabranch.Config, step: str) -> None:
    import shutil

    def die(*_: Any, **__: Any) -> None:
        os._exit(77)

    router = anabranch.open(config)
    router.queue("each.q").send(b"x")
    if step == "flush":
        DestinationsTable.flush = die  # type: ignore[method-assign]
    elif step == "rename":
        Path.rename = die  # type: ignore[assignment,method-assign]
    else:
        shutil.rmtree = die  # type: ignore[assignment]
    router.queue("each.q").delete()
