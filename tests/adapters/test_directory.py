"""A store's directory is made whole, and for good."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.memory.directory import StoreDirectory
from anabranch.adapters.system import directory
from anabranch.adapters.system.files import read_file, sync_directory
from anabranch.policies.errors import StoreFailedError
from anabranch.router.placement.on_disk import directories


def test_what_another_has_just_made_is_not_trusted_to_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads make the first stores of a data directory at once, or a process was killed while it did: the name of
    `stores/` is durable before a store in it is recorded. Else a power failure takes the store, and leaves the record.
    """
    synced: list[Path] = []

    def remember(path: Path) -> None:
        sync_directory(path)
        synced.append(path)

    monkeypatch.setattr(directory, "sync_directory", remember)
    stores = tmp_path / "stores"
    stores.mkdir()
    StoreDirectory("a", stores / "a").create()
    assert synced[-2:] == [stores, tmp_path]


def test_a_directory_above_that_is_not_ours_to_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def refuse(path: Path) -> None:
        if path == tmp_path:
            raise PermissionError(13, "Permission denied", str(path))
        sync_directory(path)

    monkeypatch.setattr(directory, "sync_directory", refuse)
    made = StoreDirectory("a", tmp_path / "stores" / "a")
    assert made.create() == made.identify()


def test_a_disk_that_fails_is_no_mistake_in_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anabranch.open(tmp_path) as router:
        router.queue("q").send(b"1")

    def fails(path: Path) -> bytes:
        if path.name == "store.id":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_file(path)

    with monkeypatch.context() as patched:
        patched.setattr(directories, "make_directory", lambda path, mode: fails(path / "store.id"))
        with pytest.raises(StoreFailedError, match=r"cannot be opened now: .*Input/output error.*try again"):
            anabranch.open(tmp_path)
    with anabranch.open(tmp_path) as router:
        with monkeypatch.context() as patched:
            patched.setattr(directory, "read_file", fails)
            with pytest.raises(StoreFailedError, match=r"Input/output error.*store.id.*see to the disk and try again"):
                router.queue("q").receive()
        assert router.queue("q").depth() == 1
