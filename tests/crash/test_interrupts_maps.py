"""Ctrl-C at every bytecode of what is done to a map (rules G2, G3): each change is made or not, nothing else changes,
and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch

from ..shares import Share
from .interrupts import everywhere
from .ledger import violations

KINDS: dict[str, Any] = {
    "journal": anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, checkpoint_interval=3600.0),
    "memory": anabranch.MemoryOptions(),
}


@pytest.fixture(params=KINDS)
def values(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Map[bytes]]:
    stores = [anabranch.StoreConfig("all", [">"], **{request.param: KINDS[request.param]})]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        values = router.map("values")
        values.put("other", b"stays")
        yield values
        assert values.get("other") == b"stays"
        assert values.count() == len(list(values.items()))
        assert violations(router) == []


Change = Callable[[anabranch.Map[bytes], bytes], object]
CHANGES: dict[str, tuple[Change, Callable[[bytes, bytes], bytes | None]]] = {
    "put": (lambda values, new: values.put("key", new), lambda old, new: new),
    "pop": (lambda values, new: values.pop("key"), lambda old, new: None),
    "compare": (lambda values, new: values.compare_and_set("key", values.get("key"), new), lambda old, new: new),
    "touch": (lambda values, new: values.touch("key", 1e6), lambda old, new: old),
    "increment": (lambda values, new: values.increment("key", 1000), lambda old, new: b"%d" % (int(old) + 1000)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_made_or_not(values: anabranch.Map[bytes], change: str, share: Share) -> None:
    """In both cases what comes next finds the same as who looks."""
    act, changed = CHANGES[change]
    before = b""

    def prepare(at: int) -> Callable[[], object]:
        nonlocal before
        values.put("key", before := b"%d" % at)
        return lambda: act(values, b"%d" % (at + 500))

    def check(at: int, where: str) -> None:
        allowed = [changed(before, b"%d" % (at + 500))] + ([before] if where else [])
        found = values.get("key")
        assert found in allowed, (where, found)
        listed = dict(values.items()).get("key")
        assert listed == found or (where and listed in allowed), where
        assert values.pop("key") in allowed, where
        assert values.get("key") is None, where
        assert values.put_if_absent("key", b"next"), where

    assert everywhere(prepare, check, every=25, share=share) > 20


def test_a_transaction_puts_and_removes_all_or_nothing(values: anabranch.Map[bytes], share: Share) -> None:
    router: anabranch.Router = values._registry._owner  # type: ignore[assignment]

    def prepare(at: int) -> Callable[[], object]:
        values.put("a", b"old")
        values.pop("b")

        def run() -> None:
            with router.transaction() as tx:
                tx.remove_range(values, before="b")
                tx.put(values, "b", b"new")

        return run

    def check(at: int, where: str) -> None:
        values.put("other", b"stays")  # behind whatever was queued
        found = (values.get("a"), values.get("b"))
        assert found in [(b"old", None), (None, b"new")], (where, found)

    assert everywhere(prepare, check, every=60, share=share) > 50


def test_who_waits_and_is_interrupted_leaves_nothing(values: anabranch.Map[bytes], share: Share) -> None:
    router: anabranch.Router = values._registry._owner  # type: ignore[assignment]

    def check(at: int, where: str) -> None:
        (stats,) = router.stats().stores.values()
        assert stats.waiting == 0, where

    assert everywhere(lambda at: lambda: values.wait("never", 0.0001), check, every=10, share=share) > 20
