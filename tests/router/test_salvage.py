"""`anabranch salvage`: what can be read of a damaged data directory, as a new one (invariant 9)."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.router.cli.app import app
from anabranch.router.upkeep.salvage import salvage


def config(directory: Path) -> anabranch.Config:
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("a", ["a.>"]),
            anabranch.StoreConfig("b", ["b.>"], sql=anabranch.SqlOptions()),
            anabranch.StoreConfig("per", ["p.>"], per_destination=True),
        ],
    )


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with anabranch.open(config(tmp_path / "data")) as router:
        for number in range(40):
            router.queue("a.x").send(b"." * 500, message_id=f"id{number}")
            router.queue("p.1").send(b"." * 100)
        router.queue("b.x").send(b"row")
        with router.transaction() as tx:
            tx.send("a.x", b"of both")
            tx.send("p.1", b"of both")
        router.topic("a.t").subscribe("s")
    return tmp_path / "data"


def damage(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def segment(store: Path) -> Path:
    (found,) = (store / "journal").glob("*.seg")
    return found


def inside(path: Path) -> int:
    """The middle of some message's body."""
    return path.read_bytes().index(b"." * 500, 10_000) + 250


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_one_damaged_message_costs_that_message_and_the_original_stays_as_it_is(data: Path) -> None:
    damage(segment(data / "stores/a"), inside(segment(data / "stores/a")))
    damage(data / "stores/per/queue.p.1/store.id", 0)
    before = files(data)
    found = salvage(data, data.with_name("new"))
    assert files(data) == before
    (a,) = (store for store in found.stores if store.directory == "stores/a")
    assert a.loss is not None and not found.is_whole
    (lost,) = a.loss["messages"]
    assert lost["destination"] == "queue://a.x"
    assert any("store.id" in note for note in found.notes)
    data.rename(data.with_name("old"))
    data.with_name("new").rename(data)
    with anabranch.open(config(data)) as router:
        assert router.queue("a.x").depth() == 40
        assert router.queue("a.x").find(lost["message_id"]) is None
        assert router.queue("p.1").depth() == 41
        assert router.queue("b.x").depth() == 1
        assert len(router.topic("a.t").subscriptions()) == 1
    assert json.loads((data / "salvage.json").read_bytes())["stores"]


def test_a_whole_directory_is_whole(data: Path) -> None:
    found = salvage(data, data.with_name("new"))
    assert found.is_whole
    assert {store.directory: store.messages for store in found.stores} == {"stores/a": 41, "stores/per/queue.p.1": 41}


def test_a_value_is_named_by_its_key_and_a_body_by_its_file(tmp_path: Path) -> None:
    """Where that will be, not where it was while the copy was made."""
    options = anabranch.JournalOptions(large_message_size=1024)
    with anabranch.open(anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"], journal=options)])) as r:
        for number in range(40):
            r.map("m").put(f"key{number}", b"." * 500)
        r.queue("q").send(io.BytesIO(b"-" * 3000))
    store = tmp_path / "data/stores/a"
    damage(segment(store), inside(segment(store)))
    (body,) = (store / "large").iterdir()
    damage(body, 1000)
    found = salvage(tmp_path / "data", tmp_path / "new")
    (made,) = found.stores
    assert made.loss is not None
    (lost,) = made.loss["messages"]
    assert lost["destination"] == "map://m"
    assert lost["message_id"].startswith("key")
    (note,) = found.notes
    assert f"stores/a: message 41 of queue://q: {tmp_path / 'new/stores/a/large' / body.name}" in note
    again = salvage(tmp_path / "new", tmp_path / "again")
    assert "all is not well with it" in again.stores[0].text


def test_what_was_lost_before_is_not_told_again(data: Path) -> None:
    damage(segment(data / "stores/a"), inside(segment(data / "stores/a")))
    first = salvage(data, data.with_name("new"))
    assert not first.is_whole
    again = salvage(data.with_name("new"), data.with_name("again"))
    assert again.is_whole
    assert list((data.with_name("again") / "stores/a").glob("loss-*.json"))


def test_a_damaged_placement_record_is_out_of_the_way(data: Path) -> None:
    (data / "placement.records").write_bytes(b"nothing of ours" * 1000)
    salvage(data, data.with_name("new"))
    with anabranch.open(config(data.with_name("new"))) as router:
        assert router.queue("a.x").depth() == 41


def test_what_the_disk_does_not_read_is_lost_alone(data: Path) -> None:
    """A sector in the middle of a segment."""
    bad, real = segment(data / "stores/a"), os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if offset <= 8192 < offset + size and Path(f"/proc/self/fd/{fd}").readlink() == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    with mock.patch.object(os, "pread", pread):
        found = salvage(data, data.with_name("new"))
    assert found.unreadable == {str(bad.relative_to(data)): 4096}
    (a,) = (store for store in found.stores if store.directory == "stores/a")
    assert a.loss is not None
    assert 1 <= len(a.loss["messages"]) <= 9
    assert a.messages == 41 - len(a.loss["messages"])


def test_it_opens_a_store_that_says_so_in_the_configuration(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    damage(segment(data / "stores/a"), 20)
    with anabranch.open(config(data)) as router, pytest.raises(anabranch.CorruptionError, match="anabranch salvage"):
        router.queue("a.x").receive()
    options = anabranch.JournalOptions(on_corruption=anabranch.OnCorruption.SALVAGE)
    kinder = config(data)
    kinder = anabranch.Config(data, [anabranch.StoreConfig("a", ["a.>"], journal=options), *kinder.stores[1:]])
    with anabranch.open(kinder) as router:
        assert router.queue("a.x").depth() == 41
    assert list((data / "stores/a").glob("loss-*.json"))
    assert "all that can be read of it is salvaged (`on_corruption`)" in caplog.text
    assert "restore it from a backup" not in caplog.text


class TestCommand:
    def test_it_names_what_is_lost(self, data: Path) -> None:
        damage(segment(data / "stores/a"), inside(segment(data / "stores/a")))
        new = data.with_name("new")
        done = CliRunner().invoke(app, ["salvage", str(data), "--to", str(new)])
        assert done.exit_code == 0, done.output
        assert "stores/a: 40 messages; lost: 1 message" in done.output
        assert "of queue://a.x, id id" in done.output
        done = CliRunner().invoke(app, ["salvage", str(data / "stores/a"), "--to", f"{new}-a", "--json"])
        assert json.loads(done.stdout)["stores"][0]["messages"] == 40

    @pytest.mark.parametrize(
        ("target", "says"),
        [("data/inside", "is only read"), ("other", "is there already"), ("data", "is there already")],
    )
    def test_bad_targets(self, data: Path, target: str, says: str) -> None:
        (data.parent / "other").mkdir()
        (data.parent / "other/file").write_text("somebody's")
        done = CliRunner().invoke(app, ["salvage", str(data), "--to", str(data.parent / target)])
        assert done.exit_code == 2
        assert says in done.output

    def test_what_is_no_directory_of_ours(self, tmp_path: Path) -> None:
        done = CliRunner().invoke(app, ["salvage", str(tmp_path), "--to", str(tmp_path / "new")])
        assert done.exit_code == 2
        assert "no data directory" in done.output
        assert not (tmp_path / "new").exists()

    def test_an_open_directory_is_left_alone(self, data: Path) -> None:
        with anabranch.open(config(data)):
            done = CliRunner().invoke(app, ["salvage", str(data), "--to", str(data.with_name("new"))])
        assert done.exit_code == 1
        assert "is open" in done.output
        assert not data.with_name("new").exists()

    def test_without_room_it_says_so_at_once_and_leaves_nothing(
        self, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        new = data.with_name("new")
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", lambda path: mock.Mock(free=1000))
            done = CliRunner().invoke(app, ["salvage", str(data), "--to", str(new)])
        assert done.exit_code == 1
        assert "are free there; name a directory on another disk" in done.output
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch("anabranch.router.upkeep.salvage.mend", side_effect=full):
            done = CliRunner().invoke(app, ["salvage", str(data), "--to", str(new)])
        assert done.exit_code == 1
        assert "cannot be made" in done.output
        assert "nothing is left of it" in done.output
        assert [path.name for path in data.parent.iterdir()] == ["data"]
