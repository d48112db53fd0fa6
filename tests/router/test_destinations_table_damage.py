"""placement.mdb damaged: an error of ours each time, and the remedy that it names works (rule X5)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb
import msgspec
import pytest

import anabranch
from anabranch.adapters.files import LMDB_ENGINE
from anabranch.adapters.lmdb_file import read_commits
from anabranch.adapters.lmdb_format import NODE, LmdbDamagedError, node_offsets, read_meta
from anabranch.policies.errors import CorruptionError, StoreLockedError
from anabranch.router.destinations_table import MAP_BYTES, DestinationRow, DestinationsTable, StoreRow

from .disk import config, contents

FLIPS = """
import pathlib, random, sys
from anabranch.policies.errors import AnabranchError
from anabranch.router.destinations_table import DestinationRow, DestinationsTable
path = pathlib.Path(sys.argv[1])
good, dice = path.read_bytes(), random.Random(int(sys.argv[2]))
whole = DestinationsTable(path)
whole.open()
whole.close()
path.write_bytes(good)
more = DestinationRow(1, "more", next(iter(whole.stores)), ">")
used = [at for at in range(len(good)) if any(good[max(at - 3, 0) : at + 4])]
refused = 0
for at in dice.sample(used, 500):
    flipped = bytearray(good)
    flipped[at] ^= 1 << dice.randrange(8)
    path.write_bytes(flipped)
    placement = DestinationsTable(path)
    try:
        placement.open()
    except AnabranchError:
        refused += 1
        continue
    assert (placement.stores, placement.destinations) == (whole.stores, whole.destinations), at
    placement.record_destinations([more])
    placement.close()
    placement.open()
    assert placement.destinations == {**whole.destinations, more.destination: more}, at
    placement.close()
path.write_bytes(good)
print(refused)
"""


def filled(path: Path, destinations: int) -> DestinationsTable:
    """A closed record with rows that came and went."""
    placement = DestinationsTable(path)
    placement.open()
    for number in range(2):
        placement.record_store(StoreRow(bytes([number]) * 16, f"stores/{number}", "journal", f"s{number}"))
    rows = [DestinationRow(0, f"queue.{n}" + "x" * n, bytes([n % 2]) * 16, ">") for n in range(destinations)]
    for row in rows:
        placement.record_destinations([row])
    for row in rows[::3]:
        placement.forget_destination(row.destination)
    placement.close()
    return placement


@pytest.mark.parametrize("destinations", [1, 40])
def test_one_flipped_bit_is_an_error_of_ours_or_changes_nothing(tmp_path: Path, destinations: int) -> None:
    """In a process of its own, which no bit may kill."""
    path = tmp_path / "placement.mdb"
    filled(path, destinations)
    done = subprocess.run([sys.executable, "-c", FLIPS, str(path), "1"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > 50


@pytest.mark.parametrize("where", ["a row", "a page", "a meta page", "the end"])
def test_put_aside_it_is_recorded_again(tmp_path: Path, where: str) -> None:
    settings = config(tmp_path / "data")
    with anabranch.open(settings) as router:
        for name in ("a.x", "b.x", "each.x", "each.y"):
            router.queue(name).send(name.encode())
        store_id = next(iter(router.registry.open_stores())).store_id
    path = tmp_path / "data" / "placement.mdb"
    data = bytearray(path.read_bytes())
    if where == "a row":
        at = data.index(store_id)
        while at >= 0:
            data[at] ^= 1
            at = data.find(store_id, at + 1)
    elif where == "a page":
        data[8192 : len(data)] = b"\xff" * (len(data) - 8192)
    elif where == "a meta page":
        data[144] ^= 1
    else:
        del data[9000:]
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"put the file aside and open again") as caught:
            anabranch.open(settings)
        assert caught.value.path == str(path)
        assert path.read_bytes() == data  # it is left for who wants to look at it
    path.rename(path.with_suffix(".damaged"))
    for _ in range(2):
        with anabranch.open(settings) as router:
            assert [contents(router, name) for name in ("a.x", "b.x", "each.x", "each.y")] == [
                [b"a.x"], [b"b.x"], [b"each.x"], [b"each.y"],
            ]  # fmt: skip


def test_the_commit_before_the_last_does_not_pass_for_the_last(tmp_path: Path) -> None:
    """One flipped bit in a transaction's number makes the older meta page the newer one, or the newer the older."""
    path = tmp_path / "placement.mdb"
    filled(path, 5)
    good = path.read_bytes()
    for page in (0, 1):
        for bit in range(64):
            data = bytearray(good)
            data[page * 4096 + 144 + bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            with pytest.raises(CorruptionError):
                DestinationsTable(path).open()


def test_a_free_page_without_a_number(tmp_path: Path) -> None:
    """One flipped bit empties the key of a row of the tree of free pages, which is no number then."""
    path = tmp_path / "placement.mdb"
    filled(path, 5)
    good = path.read_bytes()
    metas = [read_meta(good[at:], at // 4096, at) for at in (0, 4096)]
    root = max(metas, key=lambda meta: meta.commit).free.root
    leaf = good[root * 4096 : (root + 1) * 4096]
    for offset in node_offsets(leaf):
        data = bytearray(good)
        data[root * 4096 + offset + NODE.size - 2] ^= 8
        path.write_bytes(data)
        with pytest.raises(CorruptionError, match="placement record is damaged"):
            DestinationsTable(path).open()


def test_a_record_of_the_first_version_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "placement.mdb"
    store, row = StoreRow(b"i" * 16, "stores/a", "journal", "a"), DestinationRow(0, "a", b"i" * 16, ">")
    env = lmdb.open(str(path), map_size=MAP_BYTES, subdir=False, lock=False, max_dbs=3, lib_version=LMDB_ENGINE)
    tables = [env.open_db(name) for name in (b"stores", b"destinations", b"meta")]
    with env.begin(write=True) as txn:
        txn.put(store.store_id, msgspec.msgpack.encode(store), db=tables[0])
        txn.put(b"k" * 32, msgspec.msgpack.encode(row), db=tables[1])
        txn.put(b"version", b"1", db=tables[2])
    env.close()
    for _ in range(2):
        placement = DestinationsTable(path)
        placement.open()
        assert (list(placement.stores.values()), list(placement.destinations.values())) == ([store], [row])
        placement.close()
    data = bytearray(path.read_bytes())
    at = data.rindex(b"stores/a")
    while at >= 0:
        data[at] ^= 2
        at = data.rfind(b"stores/a", 0, at)
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="sum"):
        placement.open()


def test_one_that_this_process_has_open_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "placement.mdb"
    placement = filled(path, 3)
    placement.open()
    other = DestinationsTable(path)
    with pytest.raises(StoreLockedError, match="open already, by this process"):
        other.open()
    other.close()
    placement.record_store(StoreRow(b"z" * 16, "stores/z", "journal", "z"))
    placement.close()


def test_what_lmdb_writes_is_read(tmp_path: Path) -> None:
    """Trees of several levels, long rows, freed pages: as LMDB itself says."""
    path = tmp_path / "file.mdb"
    env = lmdb.open(str(path), map_size=MAP_BYTES, subdir=False, lock=False, max_dbs=2, lib_version=LMDB_ENGINE)
    wanted: dict[bytes, dict[bytes, bytes]] = {b"many": {}, b"long": {}}
    tables = {name: env.open_db(name) for name in wanted}
    for turn in range(8):
        with env.begin(write=True) as txn:
            for n in range(turn * 300, turn * 300 + 900):
                key, row = b"%d %d" % (n * 7919 % 1000, n), b"%d" % turn * (n % 50)
                txn.put(key, row, db=tables[b"many"])
                wanted[b"many"][key] = row
            for n in range(turn, turn + 20):
                key, row = b"%d" % n, bytes([n]) * (turn * 1000 + n * 200)
                txn.put(key, row, db=tables[b"long"])
                wanted[b"long"][key] = row
            for key in sorted(wanted[b"many"])[turn::9]:
                txn.delete(key, db=tables[b"many"])
                del wanted[b"many"][key]
        last, before = read_commits(path)
        assert {name: dict(rows) for name, rows in last.tables.items()} == wanted
        assert last.transaction == before.transaction + 1
    env.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 4096 * 3)
    with pytest.raises(LmdbDamagedError, match="ends before page"):
        read_commits(path)
