"""Transactions over several stores: every call spoiled, every power failure (transactions.py), scripted and random.

The scripted ones run here in part; as campaigns all of them do, in both orders of the stores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from anabranch.adapters.journal import JournalStore
from anabranch.router.transactions import decision_log

from ..garbage import set_aside
from ..shares import Share
from .calls import KINDS
from .programs import POINTS, Account, Ack, Die, Do, Entry, Send, Step, Tell, Tx, Xa
from .spoiling import Campaign
from .transactions import distinct, power_trial, record, scratch, spoil, trial


@pytest.fixture(autouse=True)
def lean() -> Iterator[None]:
    """Each trial collects what it made, and nothing else. No log is kept: its records would hold stores and their files
    until the test ends."""
    set_aside()
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ("--stores 2 --kind crash", 96),
        ("--stores 2 --kind eio --kind enospc --kind short", 576),
        ("--stores 3 --kind crash --kind eio --kind enospc --backward", 1536),
        ("--stores 4 --kind crash --kind eio --kind enospc", 2304),
        ("--stores 2 --kind power", 768),
        *(
            pytest.param(
                f"--stores {stores} --kind {kind}{order}", 1, marks=[pytest.mark.campaign, pytest.mark.weight(stores)]
            )
            for stores in (2, 3, 4)
            for kind in (*KINDS, "power")
            for order in ("", " --backward")
        ),
    ],
)
def test_no_spoiled_call_and_no_power_failure_leaves_a_part_of_a_transaction(
    arguments: str, every: int, budget: Share
) -> None:
    budget.run("tests.crash.transactions", *arguments.split(), every=every)


# Random programs


def _steps(stores: int) -> st.SearchStrategy[Step]:
    some = st.sets(st.integers(0, stores - 1), min_size=1).map(lambda found: tuple(sorted(found)))
    several = st.sets(st.integers(0, stores - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    size = st.sampled_from([10, 100, 3_000, 14_000])
    few = st.integers(0, 2)
    names = st.sampled_from(["a", "b"])
    return st.one_of(
        st.builds(Tx, several, sends=few, acks=few, size=size),
        st.builds(Tx, several, sends=few, acks=few, size=size),
        st.builds(Tx, some, sends=few, acks=few, size=size, commit=st.booleans()),
        st.builds(Xa, names, some, sends=few, acks=few, size=size),
        st.builds(Tell, names, st.booleans()),
        st.builds(Send, st.integers(0, stores - 1), size),
        st.builds(Ack, st.integers(0, stores - 1)),
        st.builds(Die, several, st.sampled_from(POINTS)),
        st.builds(Do, st.sampled_from(["jobs", "jobs", "checkpoint", "reclaim", "reopen"])),
    )


@st.composite
def _programs(draw: st.DrawFn) -> tuple[int, list[Step]]:
    stores = draw(st.integers(2, 4))
    return stores, [Send(store) for store in range(stores)] + draw(st.lists(_steps(stores), min_size=3, max_size=16))


def test_random_transactions_survive_any_fault(share: Share) -> None:
    tried, deadline = 0, time.monotonic() + share.seconds

    @settings(
        max_examples=share.count(6, 2000),
        derandomize=not share.whole,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a failing trial takes longer to shrink than to read
        suppress_health_check=list(HealthCheck),
    )
    @given(_programs(), st.sampled_from((*KINDS, "power", "power")), st.integers(0, 1 << 20), st.booleans())
    def survive(program: tuple[int, list[Step]], kind: str, where: int, backward: bool) -> None:
        nonlocal tried
        if time.monotonic() < deadline:
            tried += 1
            survives(*program, kind, where, backward)

    survive()
    share.counts.append(f"{tried} random programs")


def survives(stores: int, steps: list[Step], kind: str, where: int, backward: bool) -> None:
    with scratch() as place:
        base = Path(place)
        if kind == "power":
            recording = record(base, steps, stores, backward)
            _, different = distinct(recording)
            for number in range(3):
                state = different[(where + number * 7919) % len(different)]
                assert power_trial(base, recording, state) == []
        else:
            faults, wrong = trial(base, steps, stores, "", 0, backward)
            assert wrong == []
            assert trial(base, steps, stores, kind, 1 + where % faults.count, backward)[1] == []


# What is wrong is seen


def _lazily(self: Any, decision: Any, *_: Any) -> Any:
    self._write(decision_log.DECISION, decision_log._encode(decision), decision, unsynced=True)
    return decision


def _unsynced(self: Any, *arguments: Any) -> Any:
    *before, _, room, changes, mark, note = arguments
    return _PREPARE(self, *before, False, room, changes, mark, note)


_PREPARE: Any = JournalStore.prepare


@pytest.mark.parametrize(
    ("owner", "method", "instead", "kind"),
    [
        (decision_log.DecisionLog, "decide", _lazily, "power"),
        (JournalStore, "prepare", _unsynced, "power"),
        (JournalStore, "recover_prepared", lambda _: [], "crash"),
    ],
)
def test_a_rule_that_is_broken_is_seen(
    owner: type, method: str, instead: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, instead)
    assert spoil(3, Campaign([kind], lambda line: None, Share(), every=100, enough=1))


def test_the_account_sees_what_is_wrong() -> None:
    def entry(what: str, sends: list[str], acks: list[str], *outcomes: str, told: int) -> Entry:
        pairs = [(name.split(".")[0], name) for name in sends], [(name.split(".")[0], name) for name in acks]
        found = Entry(what, frozenset({0, 1}), *pairs)
        found.history, found.told, found.written = [(told, frozenset(outcomes))], told, told
        return found

    first = entry("first", ["a.1", "b.1"], [], "done", told=1)
    account = Account([first, entry("second", ["a.2", "b.2"], ["a.1"], "done", "undone", told=2)])
    for found, complaint in (
        ({"a": ["a.1"], "b": ["b.1"]}, ""),
        ({"a": ["a.2"], "b": ["b.1", "b.2"]}, ""),
        ({"a": ["a.1"]}, "half done: first"),
        ({}, "first is undone"),
        ({"a": ["a.1", "a.2"], "b": ["b.1", "b.2"]}, "half done: second"),
        ({"a": ["a.2"], "b": ["b.2", "b.1"]}, "out of order"),
        ({"a": ["a.1"], "b": ["b.1", "b.1"]}, "twice"),
        ({"a": ["a.1", "a.9"], "b": ["b.1"]}, "never sent"),
    ):
        wrong = account.judge(found, set())
        assert complaint in "; ".join(wrong) if complaint else not wrong, (found, wrong)
