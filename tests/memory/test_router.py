"""Memory stores behind a router: found again, made anew, with nothing left of what was in them (rules D1, D2)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.units import KIB
from anabranch.router.placement import open_stores

STORE_DIRECTORY = Path("stores") / "scratch"


def config(directory: Path, per_destination: bool = False) -> anabranch.Config:
    memory = anabranch.MemoryOptions(max_bytes=256 * KIB)
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig("scratch", ["queue://scratch.>"], per_destination=per_destination, memory=memory),
            anabranch.StoreConfig("rest", [">"]),
        ],
    )


@pytest.mark.parametrize("per_destination", [False, True])
@pytest.mark.parametrize("left", ["as it was", "directory gone", "directory empty", "id gone", "all stores gone"])
def test_the_router_opens_whatever_is_left(tmp_path: Path, left: str, per_destination: bool) -> None:
    """Nothing was to survive, so nothing can be missing; the durable stores are asked as ever (invariant 6)."""
    for n in range(3):
        with anabranch.open(config(tmp_path, per_destination)) as router:
            for name in ("scratch.a", "scratch.b"):
                queue = router.queue(name)
                assert queue.depth() == 0
                queue.send_many([b"x" * 1000] * 500)
                assert queue.depth() == 500
            router.queue("durable").send(str(n).encode())
            assert router.queue("durable").depth() == n + 1
        place = tmp_path / STORE_DIRECTORY
        directories = sorted(place.iterdir()) if per_destination else [place]
        assert [path.name for directory in directories for path in directory.iterdir()] == ["store.id"] * len(
            directories
        )
        for directory in directories:
            if left == "directory gone":
                shutil.rmtree(directory)
            elif left in ("directory empty", "id gone"):
                (directory / "store.id").unlink()
        if left == "all stores gone":
            shutil.rmtree(place)


def test_what_else_lies_there_is_not_overwritten(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("scratch.a").send(b"x")
    (tmp_path / STORE_DIRECTORY / "store.id").unlink()
    (tmp_path / STORE_DIRECTORY / "precious").write_bytes(b"somebody's")
    with anabranch.open(config(tmp_path)) as router:
        with pytest.raises(anabranch.PlacementError, match="no store"):
            router.queue("scratch.a").send(b"x")
        router.queue("durable").send(b"x")
    assert (tmp_path / STORE_DIRECTORY / "precious").read_bytes() == b"somebody's"


def test_its_destinations_may_be_routed_elsewhere_next_time(tmp_path: Path) -> None:
    """They hold nothing by then, so nothing is misplaced."""
    with anabranch.open(config(tmp_path)) as router:
        router.queue("scratch.a").send(b"x")
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("rest", [">"])])) as router:
        router.queue("scratch.a").send(b"y")
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("rest", [">"])])) as router:
        assert [message.body for message in router.queue("scratch.a").browse()] == [b"y"]


def test_an_idle_one_is_not_closed_while_it_holds_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router keeps few stores open at once; closing this one would lose its messages."""

    monkeypatch.setattr(open_stores, "OPEN_STORES_MAX", 3)
    with anabranch.open(config(tmp_path, per_destination=True)) as router:
        for n in range(12):
            router.queue(f"scratch.{n}").send(str(n).encode())
        for n in range(12):
            (message,) = router.queue(f"scratch.{n}").browse()
            assert message.body == str(n).encode()
            router.queue(f"scratch.{n}").purge()
        router.queue("scratch.last").send(b"x")
        assert len(router._registry.open_stores()) == 3  # of 13, now that the others are empty


def test_what_is_not_persistent_leaves_no_file(tmp_path: Path) -> None:
    """Swapped while the router is open, gone when it closes, and when it is opened after a kill."""
    swap = tmp_path / "stores" / "rest" / "swap"
    for _ in range(2):
        with anabranch.open(config(tmp_path)) as router:
            queue = router.queue("durable")
            queue.purge()
            queue.send(b"first")
            large = b"x" * 30_000_000
            for _ in range(3):
                queue.send(large, persistent=False)
            assert list(swap.glob("*.swap"))
            assert [len(message.body) for message in queue.browse()] == [5, *[30_000_000] * 3]
        assert not swap.exists()
        swap.mkdir()
        (swap / "1.swap").write_bytes(b"what a killed process has left")
    with anabranch.open(config(tmp_path)) as router:
        assert [message.body for message in router.queue("durable").browse()] == [b"first"]
        assert not swap.exists()
