"""The placement record, and what a changed configuration may and may not do (invariant 6, rules D1, D2)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

import anabranch
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.wal.files.record_file import RecordFile
from anabranch.policies.errors import CorruptionError, PlacementError, StoreLockedError
from anabranch.policies.names.destination import Destination
from anabranch.router.placement.record import VERSION, DestinationRow, DestinationsTable, StoreRow

OPTIONS = anabranch.JournalOptions(segment_size=64 * 1024, sync=anabranch.Sync.NEVER)


def config(directory: Path, *stores: tuple[str, Sequence[str]], each: Sequence[str] = ()) -> anabranch.Config:
    """Stores of these names and patterns; those named in `each` are per_destination."""
    return anabranch.Config(
        directory,
        [anabranch.StoreConfig(name, match, per_destination=name in each, journal=OPTIONS) for name, match in stores],
    )


def held(router: anabranch.Router) -> dict[str, list[bytes]]:
    return {str(d): [m.body for m in router.queue(d).browse()] for d in router.destinations()}


class TestRecord:
    def test_rows_come_back(self, tmp_path: Path) -> None:
        path = tmp_path / "placement.records"
        placement = DestinationsTable(path)
        placement.open()
        store = StoreRow(b"i" * 16, "stores/a", "journal", "a")
        rows = [DestinationRow(kind, name, b"i" * 16, ">") for kind in (0, 1) for name in ("a", "ü" * 512)]
        placement.record_store(store)
        for row in rows:
            placement.record_destinations([row])
        placement.record_destinations([rows[0]])
        placement.close()
        placement.close()
        again = DestinationsTable(path)
        again.open()
        assert again.stores == {store.store_id: store}
        assert again.destinations == {row.destination: row for row in rows}
        again.forget_destination(rows[1].destination)
        again.close()
        again.open()
        assert set(again.destinations) == {rows[0].destination, rows[2].destination, rows[3].destination}
        again.close()

    def test_a_newer_version_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "placement.records"
        placement = DestinationsTable(path)
        placement.open()
        placement.close()
        RecordFile(path.with_name("newer"), VERSION + 1).create()
        path.with_name("newer").rename(path)
        with pytest.raises(PlacementError, match=rf"version {VERSION + 1}; this program reads {VERSION}"):
            placement.open()
        placement.close()

    def test_a_record_of_the_former_format_is_refused(self, tmp_path: Path) -> None:
        old = tmp_path / "placement.mdb"
        old.write_bytes(b"x")
        placement = DestinationsTable(tmp_path / "placement.records")
        with pytest.raises(PlacementError, match=rf"placement\.mdb has .*version {VERSION}: .* move the file away"):
            placement.open()
        assert list(tmp_path.iterdir()) == [old]
        old.unlink()
        placement.open()
        placement.close()

    def test_damage_that_a_commit_finds(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "placement.records"
        placement = DestinationsTable(path)
        placement.open()

        def fail(fd: int) -> None:
            raise OSError(5, "EIO")

        with monkeypatch.context() as patched, pytest.raises(OSError, match="EIO"):
            patched.setattr(os, "fdatasync", fail)
            placement.record_store(StoreRow(b"i" * 16, "stores/a", "journal", "a"))
        path.write_bytes(b"x" * 4096)
        with pytest.raises(CorruptionError, match="the placement record is damaged"):
            placement.record_store(StoreRow(b"i" * 16, "stores/a", "journal", "a"))
        placement.close()

    def test_a_signal_handler_within_a_commit_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It is not left waiting for itself (rule G3)."""
        placement = DestinationsTable(tmp_path / "placement.records")
        placement.open()
        store, real, refused = StoreRow(b"i" * 16, "stores/a", "journal", "a"), os.fdatasync, list[str]()

        def interrupted(fd: int) -> None:
            for call in (placement.close, lambda: placement.record_store(store)):
                with pytest.raises(RuntimeError, match="signal handler") as caught:
                    call()
                refused.append(str(caught.value))
            real(fd)

        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", interrupted)
            placement.record_store(store)
        assert len(refused) == 4
        placement.record_store(store)
        placement.close()

    @pytest.mark.parametrize("keep", [0, 10, 500, 1024, 2000])
    def test_a_cut_record_is_an_error(self, tmp_path: Path, keep: int) -> None:
        """It cannot be rebuilt, and must not kill the process."""
        settings = config(tmp_path / "data", ("all", [">"]))
        with anabranch.open(settings) as router:
            for n in range(50):
                router.queue(f"q{n}").send(b"x")
        path = tmp_path / "data" / "placement.records"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(CorruptionError, match=r"placement\.records") as caught:
            anabranch.open(settings)
        assert caught.value.path == str(path)


class TestReconcile:
    def test_the_same_configuration(self, tmp_path: Path) -> None:
        settings = config(tmp_path, ("a", ["queue://a.>"]), ("rest", [">"]))
        for n in range(3):
            with anabranch.open(settings) as router:
                router.queue("a.x").send(f"{n}".encode())
                router.queue("b").send(f"{n}".encode())
        with anabranch.open(settings) as router:
            assert held(router) == {"queue://a.x": [b"0", b"1", b"2"], "queue://b": [b"0", b"1", b"2"]}
            assert set(router.stats().stores) == {"a", "rest"}

    def test_a_change_that_hides_messages_is_refused(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("rest", [">"]))) as router:
            router.queue("orders.eu").send_many([b"1", b"2"])
            router.queue(anabranch.Destination.parse("orders.*")).send(b"3")
            router.queue("other").send(b"4")
            router.queue("empty").send(b"5")
            message = router.queue("empty").receive()
            assert message is not None
            message.ack()
        changed = config(tmp_path, ("orders", ["queue://orders.>", "queue://empty"]), ("rest", [">"]))
        for _ in range(2):
            with pytest.raises(PlacementError) as caught:
                anabranch.open(changed)
            text = str(caught.value)
            assert "queue://orders.eu: 2 messages in store 'rest', routed to store 'orders'" in text
            assert "add \"queue://orders.[*]\" to the match of store 'rest'" in text
            assert "2 destinations" in text
            assert "queue://other" not in text
            assert "queue://empty" not in text
        advised = config(
            tmp_path,
            ("orders", ["queue://orders.>", "queue://empty"]),
            ("rest", [">", "queue://orders.eu", "queue://orders.[*]"]),
        )
        with anabranch.open(advised) as router:
            assert held(router) == {
                "queue://orders.eu": [b"1", b"2"], "queue://orders.*": [b"3"], "queue://other": [b"4"],
            }  # fmt: skip
            router.queue("orders.us").send(b"6")
            assert router.stats().stores["orders"].messages == 1
            router.queue("empty").send(b"7")  # where it was it had nothing: it begins anew
            assert held(router)["queue://empty"] == [b"7"]

    def test_an_empty_destination_may_move(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("rest", [">"]))) as router:
            router.queue("a").send(b"x")
            router.queue("a").purge()
        with anabranch.open(config(tmp_path, ("a", ["queue://a"]), ("rest", [">"]))) as router:
            router.queue("a").send(b"y")
            assert router.stats().stores["a"].messages == 1
            assert held(router) == {"queue://a": [b"y"]}
            assert len(router.destinations()) == 1
        with pytest.raises(PlacementError):
            anabranch.open(config(tmp_path, ("rest", [">"])))

    def test_a_store_that_is_gone_from_the_configuration(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("a", ["queue://a"]), ("rest", [">"]))) as router:
            router.queue("a").send(b"x")
        with pytest.raises(PlacementError, match=r"1 message.* in store 'a', routed to store 'rest'"):
            anabranch.open(config(tmp_path, ("rest", [">"])))
        with pytest.raises(PlacementError, match="routed to no store"):
            anabranch.open(config(tmp_path, ("b", ["queue://b"])))

    def test_a_store_that_becomes_per_destination(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("rest", [">"]))) as router:
            router.queue("a").send(b"x")
        with pytest.raises(PlacementError, match="queue://a"):
            anabranch.open(config(tmp_path, ("rest", [">"]), each=["rest"]))
        with anabranch.open(config(tmp_path, ("rest", [">"]))) as router:
            assert held(router) == {"queue://a": [b"x"]}

    def test_a_renamed_store_directory(self, tmp_path: Path) -> None:
        """The store's name changes, and its directory with it: it is known by its id, and everything stays."""
        with anabranch.open(config(tmp_path, ("old", [">"]))) as router:
            router.queue("a").send(b"x")
        renamed = config(tmp_path, ("new", [">"]))
        with pytest.raises(PlacementError):
            anabranch.open(renamed)
        (tmp_path / "stores" / "old").rename(tmp_path / "stores" / "new")
        for _ in range(2):
            with anabranch.open(renamed) as router:
                assert held(router) == {"queue://a": [b"x"]}
        assert not (tmp_path / "stores" / "old").exists()

    def test_a_moved_data_directory(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path / "here", ("all", [">"]))) as router:
            router.queue("a").send(b"x")
        (tmp_path / "here").rename(tmp_path / "there")
        with anabranch.open(config(tmp_path / "there", ("all", [">"]))) as router:
            assert held(router) == {"queue://a": [b"x"]}

    def test_a_missing_store_is_never_made_anew(self, tmp_path: Path) -> None:
        """An unmounted disk looks just like that."""
        outside = tmp_path / "disk" / "store"
        settings = anabranch.Config(
            tmp_path / "data", [anabranch.StoreConfig("all", [">"], directory=outside, journal=OPTIONS)]
        )
        with anabranch.open(settings) as router:
            router.queue("a").send(b"x")
        (tmp_path / "disk").rename(tmp_path / "unmounted")
        for _ in range(2):
            with pytest.raises(PlacementError, match=r"is missing.*Mount.*; destinations in it: queue://a$"):
                anabranch.open(settings)
        assert not (tmp_path / "disk").exists()
        (tmp_path / "unmounted").rename(tmp_path / "disk")
        with anabranch.open(settings) as router:
            assert held(router) == {"queue://a": [b"x"]}

    def test_another_store_in_its_place(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            with anabranch.open(config(tmp_path / name, ("all", [">"]))) as router:
                router.queue("a").send(name.encode())
        shutil.rmtree(tmp_path / "one" / "stores" / "all")
        shutil.copytree(tmp_path / "two" / "stores" / "all", tmp_path / "one" / "stores" / "all")
        with pytest.raises(PlacementError, match="holds another store"):
            anabranch.open(config(tmp_path / "one", ("all", [">"])))

    def test_files_in_the_way(self, tmp_path: Path) -> None:
        place = tmp_path / "data" / "stores" / "all"
        place.mkdir(parents=True)
        (place / "file").write_text("x")
        with anabranch.open(config(tmp_path / "data", ("all", [">"]))) as router:
            with pytest.raises(PlacementError, match=r"stores/all exists and is no store.*nothing was changed"):
                router.queue("a").send(b"x")
            assert router.destinations() == []
        assert [path.name for path in place.iterdir()] == ["file"]

    def test_a_copy_of_a_store_in_the_way(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("one", [">"]))) as router:
            router.queue("a").send(b"x")
        shutil.copytree(tmp_path / "stores" / "one", tmp_path / "stores" / "two")
        with anabranch.open(config(tmp_path, ("one", [">"]), ("two", ["queue://b"]))) as router:
            with pytest.raises(PlacementError, match="two is a copy of store 'one'"):
                router.queue("b").send(b"y")
            assert held(router) == {"queue://a": [b"x"]}

    def test_a_store_that_was_made_but_not_recorded(self, tmp_path: Path) -> None:
        """The crash came between: an empty one is taken."""
        settings = config(tmp_path, ("all", [">"]))
        with anabranch.open(settings) as router:
            JournalStore.create("all", tmp_path / "stores" / "all", OPTIONS)
            router.queue("a").send(b"x")
            assert held(router) == {"queue://a": [b"x"]}
        with anabranch.open(settings) as router:
            assert held(router) == {"queue://a": [b"x"]}

    def test_a_row_is_there_before_the_first_message(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("all", [">"]))) as router:
            router.queue("a").send(b"x")
            shutil.copytree(tmp_path, tmp_path.with_name("crash"), ignore=shutil.ignore_patterns("*.lock"))
        placement = DestinationsTable(tmp_path.with_name("crash") / "placement.records")
        placement.open()
        assert list(placement.destinations) == [Destination.parse("a")]
        placement.close()


class TestLostRecord:
    """placement.records was never synced, removed, or restored from an old backup."""

    def filled(self, directory: Path) -> anabranch.Config:
        settings = config(directory, ("a", ["queue://a.>"]), ("each", ["queue://e.>"]), ("rest", [">"]), each=["each"])
        with anabranch.open(settings) as router:
            for name in ("a.1", "e.1", "e.2", "r"):
                router.queue(name).send_many([name.encode(), b"acked"])
                first = router.queue(name).receive()
                second = router.queue(name).receive()
                assert first is not None
                assert second is not None
                first.release()
                second.ack()
        return settings

    HELD: ClassVar = {f"queue://{name}": [name.encode()] for name in ("a.1", "e.1", "e.2", "r")}

    def test_everything_is_recorded_again(self, tmp_path: Path) -> None:
        settings = self.filled(tmp_path)
        (tmp_path / "placement.records").unlink()
        for _ in range(2):
            with anabranch.open(settings) as router:
                for name in self.HELD:
                    assert router.queue(name).depth() == 1
                assert held(router) == self.HELD
                assert set(router.stats().stores) == {"a", "rest", "each:queue://e.1", "each:queue://e.2"}

    def test_under_another_configuration_it_is_refused(self, tmp_path: Path) -> None:
        settings = self.filled(tmp_path)
        (tmp_path / "placement.records").unlink()
        changed = config(tmp_path, ("a", ["queue://x"]), ("other", ["queue://e.>"]), ("rest", [">"]), each=["other"])
        for _ in range(2):
            with pytest.raises(PlacementError) as caught:
                anabranch.open(changed)
            text = str(caught.value)
            assert "Restore placement.records from a backup" in text
            assert "3 destinations" in text
            assert "queue://a.1: 1 message in store 'a', routed to store 'rest'" in text
            assert "queue://e.2: 1 message in store 'queue.e.2', routed to store 'other'" in text
            assert "queue://r" not in text
        assert not (tmp_path / "stores" / "other").exists()
        with anabranch.open(settings) as router:
            assert held(router) == self.HELD

    def test_a_store_that_left_the_configuration_too(self, tmp_path: Path) -> None:
        settings = self.filled(tmp_path)
        (tmp_path / "placement.records").unlink()
        renamed = config(tmp_path, ("b", ["queue://a.>"]), ("each", ["queue://e.>"]), ("rest", [">"]), each=["each"])
        with pytest.raises(PlacementError, match=rf"store 'a' is not in .*directory: {tmp_path}/stores/a`"):
            anabranch.open(renamed)
        with anabranch.open(settings) as router:
            assert held(router) == self.HELD

    def test_an_old_backup(self, tmp_path: Path) -> None:
        settings = config(tmp_path / "data", ("all", [">"]))
        with anabranch.open(settings) as router:
            router.queue("old").send(b"1")
        shutil.copy(tmp_path / "data" / "placement.records", tmp_path / "backup")
        with anabranch.open(settings) as router:
            router.queue("new").send(b"2")
        shutil.copy(tmp_path / "backup", tmp_path / "data" / "placement.records")
        with anabranch.open(settings) as router:
            message = router.queue("new").receive()
            assert message is not None
            assert message.body == b"2"

    def test_an_old_backup_that_has_a_destination_elsewhere(self, tmp_path: Path) -> None:
        """Its messages lie in two stores: nobody but a person can say which is right."""
        both = config(tmp_path, ("one", [">"]), ("two", ["queue://b"]))
        with anabranch.open(both) as router:
            router.queue("a").send(b"1")
            router.queue("b").send(b"2")
        placement = DestinationsTable(tmp_path / "placement.records")
        placement.open()
        (one,) = [row for row in placement.stores.values() if row.name == "one"]
        (two,) = [row for row in placement.stores.values() if row.name == "two"]
        placement.record_destinations([DestinationRow(0, "b", one.store_id, ">")])
        placement.forget_store(two.store_id)
        placement.close()
        with pytest.raises(PlacementError, match=r"queue://b: 1 message.* in store 'two'.*recorded in store 'one'"):
            anabranch.open(both)

    def test_another_process_has_the_store(self, tmp_path: Path) -> None:
        """What it holds cannot be seen; it is left alone, and sending to it says who has it."""
        settings = self.filled(tmp_path)
        (tmp_path / "placement.records").unlink()
        store = JournalStore("a", tmp_path / "stores" / "a", OPTIONS)
        store.open()
        with anabranch.open(settings) as router:
            assert router.queue("r").depth() == 1
            with pytest.raises(StoreLockedError, match="store 'a'"):
                router.queue("a.1").send(b"x")
            store.close()
            router.queue("a.1").send(b"x")
            assert router.queue("a.1").depth() == 2


class TestRenamed:
    def test_the_advice_is_true(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("old", ["queue://a"]), ("each", [">"]), each=["each"])) as router:
            router.queue("a").send(b"x")
            router.queue("b").send(b"y")
        renamed = config(tmp_path, ("new", ["queue://a"]), ("every", [">"]), each=["every"])
        with pytest.raises(PlacementError) as caught:
            anabranch.open(renamed)
        text = str(caught.value)
        assert f"name it 'old' again, or keep the new name and give it `directory: {tmp_path}/stores/old`" in text
        assert f"name it 'each' again, or keep the new name and give it `directory: {tmp_path}/stores/each`" in text
        assert "to the match of" not in text
        advised = anabranch.Config(
            tmp_path,
            [
                anabranch.StoreConfig("new", ["queue://a"], directory=tmp_path / "stores" / "old", journal=OPTIONS),
                anabranch.StoreConfig(
                    "every", [">"], per_destination=True, directory=tmp_path / "stores" / "each", journal=OPTIONS
                ),
            ],
        )
        with anabranch.open(advised) as router:
            assert held(router) == {"queue://a": [b"x"], "queue://b": [b"y"]}
            assert {name: store.name for name, store in router.stats().stores.items()} == {
                "new": "new", "every:queue://b": "every:queue://b",
            }  # fmt: skip
            router.reopen("new")

    def test_a_store_may_take_the_name_of_another(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("a", ["queue://a"]), ("b", ["queue://b"]))) as router:
            router.queue("a").send(b"x")
            router.queue("b").send(b"y")
            router.queue("b").purge()
        stores = [anabranch.StoreConfig("b", [">"], directory=tmp_path / "stores" / "a", journal=OPTIONS)]
        with anabranch.open(anabranch.Config(tmp_path, stores)) as router:
            stats = router.stats().stores
            assert {name: store.messages for name, store in stats.items()} == {"b": 1, "b (stores/b)": 0}

    def test_a_store_that_nothing_lives_in_may_go(self, tmp_path: Path) -> None:
        with anabranch.open(config(tmp_path, ("a", ["queue://a"]), ("rest", [">"]))) as router:
            router.queue("a").send(b"x")
            router.queue("a").purge()
        rest = config(tmp_path, ("rest", [">"]))
        anabranch.open(rest).close()
        shutil.rmtree(tmp_path / "stores" / "a")
        with anabranch.open(rest) as router:
            assert router.stats().stores == {}

    def test_a_lost_store_id(self, tmp_path: Path) -> None:
        settings = config(tmp_path, ("all", [">"]))
        with anabranch.open(settings) as router:
            router.queue("a").send(b"x")
        file = tmp_path / "stores" / "all" / "store.id"
        text = file.read_text()
        for damaged in ("", "00", None):
            if damaged is None:
                file.unlink()
            else:
                file.write_text(damaged)
            with pytest.raises(PlacementError, match=f"write {text.strip()} into {file}"):
                anabranch.open(settings)
        file.write_text(text)
        with anabranch.open(settings) as router:
            assert held(router) == {"queue://a": [b"x"]}


def test_a_store_that_comes_while_others_are_looked_for_is_no_error(tmp_path: Path) -> None:
    """A live move may add one in another thread."""
    with anabranch.open(config(tmp_path, ("all", [">"]))) as router:
        router.queue("q").send(b"x")
        registry = router._registry
        stores: dict[bytes, Any] = registry.table.stores
        before = dict(stores)

        class Last:
            @property
            def kind(self) -> str:
                stores[b"new"] = StoreRow(b"new", "stores/new", "journal", "new")
                return "journal"

        stores[b"last"] = Last()
        assert registry._reconciler._by_id().keys() == before.keys()
        stores.clear()
        stores |= before


def test_unfinished_stores_are_swept(tmp_path: Path) -> None:
    """A crash came while they were made."""
    settings = config(tmp_path, ("all", ["queue://all"]), ("each", [">"]), each=["each"])
    with anabranch.open(settings) as router:
        router.queue("a").send(b"x")
    left = [tmp_path / "stores" / f".all.{'0' * 32}.tmp", tmp_path / "stores" / "each" / f".queue.b.{'f' * 32}.tmp"]
    others = [tmp_path / "stores" / f".other.{'0' * 32}.tmp", tmp_path / "stores" / ".all.tmp"]
    for path in left + others:
        (path / "journal").mkdir(parents=True)
    with anabranch.open(settings) as router:
        assert held(router) == {"queue://a": [b"x"]}
    assert [path.exists() for path in left + others] == [False, False, True, True]


def test_a_name_of_a_process_that_was_killed_is_made_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rule D2: its store and its decision log were whole, and their names perhaps in the page cache alone."""
    settings = config(tmp_path, ("a", ["queue://a"]), ("b", [">"]))
    for made in (tmp_path / "stores" / "a", tmp_path / "decisions"):
        JournalStore.create("made", made, OPTIONS)
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with anabranch.open(settings) as router:
        assert str(tmp_path) in synced
        assert str(tmp_path / "stores") in synced
        router.send("a,b", b"x")
        assert held(router) == {"queue://a": [b"x"], "queue://b": [b"x"]}
