"""A disk that is really full: a file system of 8 MiB in memory (invariant 7, and what of rule J10 holds already)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import anabranch

from .ledger import body_of, contents, identity_of, violations

SIZE = "8m"
BODY = 20_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted tmpfs; see conftest.py."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def config(directory: Path) -> anabranch.Config:
    options = anabranch.JournalOptions(segment_size=512 * 1024, checkpoint_operations=50, pool_files=1)
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)])


def fill(queue: anabranch.Queue, start: int = 0) -> int:
    """Send until nothing more fits; the number of the first message that did not."""
    number = start
    while True:
        try:
            queue.send(body_of(f"s.{number}", BODY))
        except anabranch.StoreFullError as error:
            assert "free some space" in str(error)
            return number
        number += 1


def test_a_full_disk_is_emptied_and_used_again(disk: Path) -> None:
    spare = disk / "spare"
    spare.write_bytes(bytes(256 * 1024))
    with anabranch.open(config(disk / "data")) as router:
        queue = router.queue("q")
        sent = fill(queue)
        assert sent > 200
        with pytest.raises(anabranch.StoreFullError):
            queue.send(body_of("never.0", BODY))
        assert len(queue) == sent
        spare.unlink()  # until stores keep a reserve of their own, somebody has to find them some room
        for number in range(sent - 5):
            message = queue.receive()
            assert message is not None
            assert identity_of(message.body) == f"s.{number}"
            message.ack()
        assert router.reclaim() + sum(store.pool_bytes for store in router.stats().stores.values()) > 0
        again = fill(queue, sent)
        assert again > sent + 200
        expected = [f"s.{number}" for number in range(sent - 5, again)]
        assert contents(router) == {"q": expected}
        assert violations(router) == []
    with anabranch.open(config(disk / "data")) as router:
        assert contents(router) == {"q": expected}
        assert violations(router) == []


def test_a_store_opens_again_on_a_full_disk_once_there_is_some_room(disk: Path) -> None:
    spare = disk / "spare"
    spare.write_bytes(bytes(256 * 1024))
    with anabranch.open(config(disk / "data")) as router:
        sent = fill(router.queue("q"))
    try:
        with anabranch.open(config(disk / "data")) as router:
            assert len(router.queue("q")) == sent
    except anabranch.AnabranchError as error:
        assert "space" in str(error)
    spare.unlink()
    with anabranch.open(config(disk / "data")) as router:
        assert contents(router) == {"q": [f"s.{number}" for number in range(sent)]}
        assert violations(router) == []
