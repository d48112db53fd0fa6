"""Room to finish (rule J10): a disk that is full to its last byte is emptied again by what users do to empty it, and by
nothing else; also by whoever opens the stores anew, after a kill as well."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.durability import Sync

from .ledger import body_of, contents, identity_of, violations
from .test_full_disk import fill_up

SYNCS = [Sync.ALWAYS, Sync.PERIODIC, Sync.NEVER]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def config(disk: Path, sync: Sync = Sync.NEVER, segment_size: int = 256 * 1024) -> anabranch.Config:
    journal = anabranch.JournalOptions(segment_size=segment_size, sync=sync)
    stores = [anabranch.StoreConfig("a", [">"], journal=journal), anabranch.StoreConfig("b", ["b.>"], journal=journal)]
    return anabranch.Config(disk / "data", stores)


def send_all(queue: anabranch.Queue, size: int) -> list[str]:
    """Fill the disk with messages of one queue, and what is left of it."""
    sent: list[str] = []
    try:
        while True:
            identity = f"s.{len(sent)}"
            queue.send(body_of(identity, size))
            sent.append(identity)
    except anabranch.StoreFullError as error:
        assert "store 'a'" in str(error)
        assert "free some space" in str(error)
    fill_up(Path(queue_directory(queue)) / "filler")
    with pytest.raises(anabranch.StoreFullError):
        queue.send(body_of("never.0", size))
    return sent


def queue_directory(queue: anabranch.Queue) -> Path:
    return DIRECTORY[0]


DIRECTORY: list[Path] = []


@pytest.fixture(autouse=True)
def _directory(disk: Path) -> None:
    DIRECTORY[:] = [disk]


def take(queue: anabranch.Queue) -> anabranch.Message:
    message = queue.receive()
    assert message is not None
    return message


def ack_all(queue: anabranch.Queue, sent: list[str]) -> None:
    for identity in sent:
        message = take(queue)
        assert identity_of(message.body) == identity
        message.ack()


@pytest.mark.parametrize("size", [20, 500, 20_000])
@pytest.mark.parametrize("sync", SYNCS)
def test_acks_alone_empty_it(disk: Path, sync: Sync, size: int) -> None:
    with anabranch.open(config(disk, sync)) as router:
        queue = router.queue("q")
        sent = send_all(queue, size)
        ack_all(queue, sent)
        assert violations(router) == []
        router.reclaim()
        assert shutil.disk_usage(disk).free > 500_000
        queue.send(body_of("again.0"))
    with anabranch.open(config(disk, sync)) as router:
        assert contents(router) == {"q": ["again.0"]}
        assert violations(router) == []
