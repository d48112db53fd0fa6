"""Crashes at chosen moments: what killed processes once left behind, made again by copying an open directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import anabranch
from anabranch.adapters.journal import JournalStore

from .ledger import body_of, contents, identity_of, violations


def config(directory: Path) -> anabranch.Config:
    options = anabranch.JournalOptions(segment_size=64 * 1024, checkpoint_interval=3600.0)
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)])


def as_killed(router: anabranch.Router, to: Path) -> anabranch.Config:
    """The directory as a SIGKILL now would leave it, under another name."""
    shutil.copytree(router.config.directory, to, ignore=shutil.ignore_patterns("*.tmp"))  # one may be renamed just now
    return config(to)


def checkpoint(router: anabranch.Router) -> None:
    (store,) = router._registry.open_stores()
    assert isinstance(store, JournalStore)
    store.checkpoint()


def test_a_segment_sealed_after_the_last_checkpoint_is_known_whole_ever_after(tmp_path: Path) -> None:
    """The index had seen the segment while it was written, and recovery did not tell it where it ended."""
    with anabranch.open(config(tmp_path / "data")) as router:
        queue = router.queue("q")
        queue.send(body_of("s.0", 40_000))
        checkpoint(router)
        queue.send(body_of("s.1", 40_000))
        killed = as_killed(router, tmp_path / "killed")
    for _ in range(2):
        with anabranch.open(killed) as router:
            assert contents(router) == {"q": ["s.0", "s.1"]}
            assert violations(router) == []


def test_what_lies_in_another_segment_than_its_neighbours_by_priority_is_browsed(tmp_path: Path) -> None:
    """A page's first and last message were in one segment, and those between were looked for there."""
    options = anabranch.JournalOptions(segment_size=64 * 1024, priorities=True)
    setup = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"], journal=options)])
    with anabranch.open(setup) as router:
        queue = router.queue("q")
        for number in range(43):
            queue.send(body_of(f"s.{number}", 5000), priority=9 if number in (40, 41) else 0)
        message = queue.receive()
        assert message is not None
        assert identity_of(message.body) == "s.40"
        message.ack()
    with anabranch.open(setup) as router:
        assert contents(router) == {"q": ["s.41", *(f"s.{number}" for number in range(40)), "s.42"]}
