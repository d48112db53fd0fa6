"""A value that is touched is never lost, and a range goes whole: after a power failure at each call that the disk is
asked for, in each state that it may leave, and opened without its index too."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch

from .calls import Faults, Jobs, simulated
from .disk import Recorder, State, build
from .test_marks import lean as lean
from .transactions import Recording, distinct, scratch

TTL = 1e6


def configured(directory: Path) -> anabranch.Config:
    """A journal that waits for the disk."""
    options = anabranch.JournalOptions(sync="always", checkpoint_interval=3600.0, segment_size=64 * 1024, pool_files=1)
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options)])


def filled(router: anabranch.Router) -> None:
    with router.transaction() as tx:
        for key in ("a", "b1", "b2", "b3"):
            tx.put("m", key, key.encode())


def cut(router: anabranch.Router) -> None:
    with router.transaction() as tx:
        assert tx.remove_range("m", "b", before="b3") == 2
        tx.put("m", "c", b"c")


STEPS: list[tuple[Callable[[anabranch.Router], object], dict[str, bool]]] = [
    (filled, {"a": False, "b1": False, "b2": False, "b3": False}),
    (lambda router: router.map("m").touch("a", TTL), {"a": True, "b1": False, "b2": False, "b3": False}),
    (cut, {"a": True, "b3": False, "c": False}),
    (lambda router: router.map("m").touch("b3", TTL), {"a": True, "b3": True, "c": False}),
    (lambda router: router.map("m").touch("a"), {"a": False, "b3": True, "c": False}),
]
"""What is done, and the keys that are there then, each with whether its value has a time."""


def found(router: anabranch.Router) -> dict[str, bool]:
    """Return the keys as STEPS has them."""
    values = router.map("m")
    assert all(value == key.encode() for key, value in values.items())

    def has_time(store: Any, key: str) -> bool:
        return bool(store.maps._look(values.destination, key.encode()).value.expires_at_ms)

    return {
        key: router._registry.for_held(values.destination, lambda store: has_time(store, key), False)  # noqa: B023
        for key, _ in values.items()
    }


def wrong_in(directory: Path, done: list[int], point: int) -> Iterator[str]:
    """Yield what is wrong in a directory."""
    count = sum(at <= point for at in done)
    allowed = [{}, *(keys for _, keys in STEPS)][count : count + 2]
    with anabranch.open(configured(directory)) as router:
        there = found(router)
        if there not in allowed:
            yield f"after {count} steps {there} is there"
        if "a" in there and not router.map("m").touch("a", TTL / 2):
            yield "a value that is there cannot be touched"
        for store in router._registry.open_stores():
            yield from store.check()


def in_state(base: Path, recorder: Recorder, done: list[int], state: State) -> list[str]:
    """Return what is wrong after this power failure, with the index that it leaves and without any."""
    wrong, place = list[str](), base / "state"
    for index in (True, False):
        build(recorder.calls, state, place)
        for path in place.rglob("index.mdb") if not index else ():
            path.unlink()
        with simulated(Jobs(), f"{state.point} {state.what}"):
            wrong += [f"{state.point}, {state.what}: {line}" for line in wrong_in(place / "data", done, state.point)]
        shutil.rmtree(place)
    return wrong


@pytest.mark.parametrize("every", [25, pytest.param(1, marks=[pytest.mark.campaign, pytest.mark.weight(2)])])
def test_a_power_failure_leaves_a_touch_and_a_range_whole(every: int) -> None:
    with scratch() as place:
        base, done = Path(place), list[int]()
        faults, recorder = Faults(base), Recorder(base)
        faults.watch = recorder.watch
        with simulated(Jobs(), "record"), faults.patched(), anabranch.open(configured(base / "data")) as router:
            for step, _ in STEPS:
                step(router)
                done.append(recorder.now())
        shutil.rmtree(base / "data")
        _, different = distinct(Recording(None, recorder))  # type: ignore[arg-type]
        wrong = [line for state in different[::every] for line in in_state(base, recorder, done, state)]
        assert wrong == [], f"of {len(different)} states"
        assert any(state.point >= done[0] for state in different[::every])
