"""The name of a commit is known exactly when the commit has taken effect: after a power failure at each call that the
disk is asked for, in each state that it may leave, and opened without its indexes too."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import anabranch
from anabranch.adapters.core.store_types import Pending
from anabranch.adapters.journal import JournalStore
from anabranch.policies.names.destination import Destination

from ..garbage import set_aside
from ..taking import take
from .calls import Faults, Jobs, simulated
from .disk import Recorder, State, build
from .transactions import Recording, _watched, distinct, scratch

QUEUES = ("s0.in", "s1.in")
COMMITS = {
    "one store": ("s0.out",),
    "two stores": ("s0.out", "s1.out"),
    "acks": (),
    "acks in two stores": (),
    "a map": ("map://s0.map",),
    "a topic": ("topic://s0.topic",),
}


@pytest.fixture(autouse=True)
def lean() -> Iterator[None]:
    """As in test_transactions.py."""
    set_aside()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def configured(directory: Path) -> anabranch.Config:
    """Two journals that wait for the disk."""
    options = anabranch.JournalOptions(
        sync="always", checkpoint_interval=3600.0, segment_size=64 * 1024, pool_files=1, checkpoint_operations=20
    )
    return anabranch.Config(
        directory,
        [
            anabranch.StoreConfig(name, [f"{kind}://{name}.>" for kind in ("queue", "topic", "map")], journal=options)
            for name in ("s0", "s1")
        ],
    )


def acked_by(name: str) -> tuple[str, ...]:
    """Return the queues of which a commit acks a message."""
    return QUEUES if "two" in name else QUEUES[:1]


def commit(router: anabranch.Router, name: str) -> None:
    """Commit one of them, under its name."""
    transaction = router.transaction()
    transaction._global.mark = name
    for queue in acked_by(name):
        transaction.ack(take(router.queue(queue)))
    for target in COMMITS[name]:
        if target.startswith("map"):
            transaction.put(target, name, b"v")
        else:
            transaction.send(target, name.encode())
    transaction.commit()


def run(directory: Path, recorder: Recorder, done: dict[str, int]) -> None:
    """Commit all of them, one after the other, with a restart and a checkpoint amid; `done` says when each returned."""
    for half in (list(COMMITS)[:3], list(COMMITS)[3:]):
        with anabranch.open(configured(directory)) as router:
            for name in half:
                for queue in acked_by(name):
                    router.queue(queue).send(name.encode())
            for name in half:
                commit(router, name)
                done[name] = recorder.now()


def found(router: anabranch.Router, name: str) -> tuple[set[bool], set[bool]]:
    """Whether each destination of a commit knows its name, and whether each effect of it is there."""
    known, effects = set(), set()
    for text in (*acked_by(name), *COMMITS[name]):
        destination = Destination.parse(text)
        marked = router._registry.for_held(destination, lambda store: store.marked(name, [], [destination]), None)  # noqa: B023
        known.add(marked is not None)
        if destination.name.endswith("out"):
            effects.add(name.encode() in [message.body for message in router.queue(text).browse()])
        elif destination.name.endswith("map"):
            effects.add(router.map(text).get(name) == b"v")
    return known, effects


def wrong_in(directory: Path, done: dict[str, int], point: int) -> list[str]:
    """What is wrong in a directory."""
    wrong = []
    with anabranch.open(configured(directory)) as router:
        left = {queue: [message.body.decode() for message in router.queue(queue).browse()] for queue in QUEUES}
        for name in COMMITS:
            known, effects = found(router, name)
            if len(known) > 1 or effects - known:
                wrong.append(f"{name}: known {known}, effects {effects}")
            if done.get(name, point + 1) <= point and known != {True}:
                wrong.append(f"{name}: forgotten")
            if known == {True} and any(name in left[queue] for queue in acked_by(name)):
                wrong.append(f"{name}: known, and its acks are undone")
        for store in router._registry.open_stores():
            wrong += list(store.check())
    return wrong


def record(base: Path, done: dict[str, int]) -> Recording:
    """Run it, and record all that the disk is asked for."""
    faults, recorder = Faults(base), Recorder(base)
    recording = Recording(None, recorder)  # type: ignore[arg-type]
    faults.watch = recorder.watch
    began: dict[bytes, int] = {}
    prepare = JournalStore.prepare

    def preparing(self: JournalStore, transaction: bytes, *arguments: Any) -> Pending[None]:
        began.setdefault(transaction, recorder.now())
        return prepare(self, transaction, *arguments)

    with (
        simulated(Jobs(), "record"),
        mock.patch.object(JournalStore, "prepare", preparing),
        _watched("decide", began, recording),
        faults.patched(),
    ):
        run(base / "data", recorder, done)
    shutil.rmtree(base / "data")
    return recording


def in_state(base: Path, recording: Recording, done: dict[str, int], state: State) -> list[str]:
    """What is wrong after this power failure, with the indexes that it leaves and without any."""
    place = base / "state"
    build(recording.recorder.calls, state, place)
    wrong = []
    try:
        for index in (True, False):
            with simulated(Jobs(), f"{state.point} {state.what}"):
                wrong += wrong_in(place / "data", done, state.point)
            if index:
                for path in place.rglob("index.mdb"):
                    path.unlink()
    except Exception as error:
        wrong.append(f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(place)
    return [f"{state.point}, {state.what}: {line}" for line in wrong]


@pytest.mark.parametrize("every", [150, pytest.param(1, marks=[pytest.mark.campaign, pytest.mark.weight(2)])])
def test_a_power_failure_keeps_the_name_with_the_commit(every: int) -> None:
    done: dict[str, int] = {}
    with scratch() as place:
        base = Path(place)
        recording = record(base, done)
        number, different = distinct(recording)
        assert len(recording.levels) == 2 and len(done) == len(COMMITS)
        wrong = [line for state in different[::every] for line in in_state(base, recording, done, state)]
        assert wrong == [], f"of {number} states, {len(different)} of them distinct"
