"""What users hold of a destination: two that mean the same are equal."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.router.upkeep import idle_queues

from ..contract.disk import eventually
from ..router.disk import take
from .test_hosting import config


@dataclass
class Text:
    """A codec that compares by what it is made of, and has no hash."""

    charset: str
    content_type = "text/plain"

    def encode(self, value: str) -> bytes:
        return value.encode(self.charset)

    def decode(self, body: bytes) -> str:
        return body.decode(self.charset)


def handles(router: anabranch.Router, codec: Any = None) -> list[Any]:
    topic = router.topic("q", codec=codec)
    return [
        router.queue("q", codec=codec), router.queue("other", codec=codec), topic, router.map("q", codec=codec),
        topic.subscribe("desk"), topic.subscribe("desk", client_id="a"),
    ]  # fmt: skip


def test_those_that_mean_the_same_are_equal(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data", "memory")) as router:
        codecs: list[Any] = [None, "json", Text("utf-8"), Text("latin-1")]
        all_of_them = [handle for codec in codecs for handle in handles(router, codec)]
        again = [
            handle for codec in [None, "json", Text("utf-8"), Text("latin-1")] for handle in handles(router, codec)
        ]
        for place, handle in enumerate(all_of_them):
            assert [handle == other for other in again] == [place == other for other in range(len(again))], handle
            assert hash(handle) == hash(again[place])
        assert len({*all_of_them, *again}) == len(all_of_them)
        assert all_of_them[0] != all_of_them[0].destination
        assert router.topic("q").subscriptions() == all_of_them[4:6]
        with anabranch.open(config(tmp_path / "another", "memory")) as another:
            assert not set(handles(another)) & set(all_of_them)


def test_equal_ones_keep_an_idle_queue_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is gone: the queue still goes by itself for the other."""
    monkeypatch.setattr(idle_queues, "LOOK_SECONDS", 0.005)
    with anabranch.open(config(tmp_path / "data", "memory")) as router:
        first: Any = router.queue("q", expires_when_idle=0.02)
        second = router.queue("q", expires_when_idle=0.02)
        assert first == second
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None
        for _ in range(2):
            second.send(b"1")
            take(router, "q").ack()
            eventually(lambda: not router.exists("q"))
        assert second.destination in router._idle_queues._queues
