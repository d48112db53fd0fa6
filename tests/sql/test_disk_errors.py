"""SQLite's files cannot be written for a while: calls say so, and all goes on by itself once they can be (rule W3)."""

from __future__ import annotations

import ctypes
import logging
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.sql.database import dialects
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, Parallel, bodies
from .disk import SqliteDisk, directory_of

CAPABILITIES_VERSION = 0x20080522
DAC_OVERRIDE, DAC_READ_SEARCH = 1 << 1, 1 << 2


class Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class Capabilities(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextmanager
def read_only(file: Path, directory: bool = False) -> Iterator[None]:
    """This thread may only read this file meanwhile, root too. SQLite may remove it and make it anew, unless it may not
    change the directory either."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = Header(CAPABILITIES_VERSION, 0), (Capabilities * 2)()
    assert libc.capget(ctypes.byref(header), data) == 0
    before = data[0].effective
    data[0].effective = before & ~(DAC_OVERRIDE | DAC_READ_SEARCH)
    assert libc.capset(ctypes.byref(header), data) == 0
    try:
        file.touch()
        file.chmod(0o444)
        if directory:
            file.parent.chmod(0o555)
        yield
    finally:
        file.parent.chmod(0o755)
        for made in file.parent.glob("store.db*"):
            made.chmod(0o644)
        data[0].effective = before
        assert libc.capset(ctypes.byref(header), data) == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SqliteDisk]:
    with SqliteDisk(tmp_path) as disk:
        yield disk


@pytest.mark.parametrize("victim", ["store.db", "store.db-wal", "store.db-shm"])
def test_a_file_that_could_not_be_written_at_first_is_opened_anew(disk: SqliteDisk, victim: str) -> None:
    """SQLite opens for reading what it cannot open for writing, one I/O error is enough, and stays so."""
    store = disk.create()
    store.send(A, b"before")
    store.close()
    with read_only(directory_of(store) / victim):
        store = disk.open(directory_of(store))
        assert bodies(store) == [b"before"]
    store.send(A, b"after")
    assert store.stats().failed is None
    assert bodies(store) == bodies(disk.crash(store)) == [b"before", b"after"]


def test_reclaiming_what_cannot_be_written_holds_up_no_other_store(tmp_path: Path) -> None:
    stores = [anabranch.StoreConfig(name, [f"queue://{name}"], sql=SqlOptions()) for name in ("a", "b")]
    config = anabranch.Config(tmp_path / "data", stores)
    with anabranch.open(config) as router:
        router.queue("a").send(b"x")
    first, second = (tmp_path / "data" / "stores" / name / "store.db-wal" for name in ("a", "b"))
    with anabranch.open(config) as router:
        with read_only(first):
            assert router.queue("a").depth() == 1
        router.queue("b").send(b"x")
        assert second.stat().st_size > 0
        with read_only(first, directory=True):
            with pytest.raises(StoreFailedError, match="each call tries again"):
                router.reclaim()
            assert second.stat().st_size == 0, "this one is well"
        router.reclaim()
        router.queue("a").send(b"y")
        assert router.queue("a").depth() == 2


def test_a_store_that_has_failed_does_not_say_that_it_tries_again(
    disk: SqliteDisk, caplog: pytest.LogCaptureFixture
) -> None:
    store = disk.create()
    store.send_many(A, [b"x" * 10_000] * 20)
    store.close()
    path = directory_of(store) / "store.db"
    store = disk.open(directory_of(store))
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(path.stat().st_size - 4096))
    with caplog.at_level(logging.ERROR), pytest.raises(StoreFailedError, match="close it and open it again") as caught:
        store.delete(A)  # a write that no read comes before
    assert "damaged" in str(caught.value) and "tries again" not in str(caught.value) + caplog.text


@pytest.mark.parametrize("how", ["reclaim", "compact"])
def test_giving_back_space_waits_for_nobody_who_reads(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup tool, say, which reads for hours. Who writes would wait with it."""
    monkeypatch.setattr(dialects, "BUSY_SECONDS", 3600.0)
    with SqliteDisk(tmp_path) as disk:
        store = disk.create()
        store.send(A, b"1")
        reader = sqlite3.connect(directory_of(store) / "store.db", isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM sqlite_master").fetchall()
        store.send(A, b"2")
        with Parallel(getattr(store, how)) as giving_back:
            giving_back.result()
        store.send(A, b"3")
        reader.close()
        assert getattr(store, how)() > 0
        assert bodies(store) == [b"1", b"2", b"3"]
