"""The power-failure workloads and their checker, without a simulator: what they leave is right, and what is wrong is
seen."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ..children import run_module
from .ledger import acks_of, read_marks
from .power.checker import verdict
from .power.workloads import WORKLOADS


def run(name: str, place: Path) -> dict[str, Any]:
    """The marks of a workload that ran to its end."""
    path = place / "marks"
    data, environment = str(place / "data"), {"CRASHSIM_MARKS": str(path)}
    code, told = run_module("tests.crash.power.workloads", name, data, seconds=600, environment=environment)
    assert code == 0, told
    promised, maybe = read_marks(path)
    lines = [[line, True] for line in path.read_text().splitlines()]
    return {"promised": promised, "maybe": maybe, "marks": lines}


LONGEST = {
    "across-all",
    "across-memory",
    *(f"kills-{how}" for how in ("across", "before-sync", "lazily")),
    *(f"{name}-sqlite" for name in ("many", "removing", "topics", "transactions")),
}
"""Those which take their time, and of kills and SQLite's those of which others do the like."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.campaign] if name in LONGEST else []) for name in WORKLOADS]
)
def test_a_workload_that_ends_leaves_what_was_promised(name: str, tmp_path: Path) -> None:
    marks = run(name, tmp_path)
    assert len(marks["marks"]) > 20 or WORKLOADS[name].check
    assert verdict(name, tmp_path / "data", marks) == []


def test_what_is_wrong_is_seen(tmp_path: Path) -> None:
    marks = run("many", tmp_path)
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    lost = {"op": "send", "q": "bulk", "ids": ["m.9999"]}
    assert "lost" in verdict("many", tmp_path / "data", marks | {"promised": [*marks["promised"], lost]})[0]
    half = {"op": "send", "q": "bulk", "ids": ["m.9999", "m.190"]}
    wrong = verdict("many", tmp_path / "copy", marks | {"promised": marks["promised"][:-2], "maybe": [half]})
    assert wrong


def test_what_is_put_back_too_often_is_seen(tmp_path: Path) -> None:
    marks = run("requeued", tmp_path)
    requeues = [operation for operation in marks["promised"] if operation["op"] == "requeue"]
    assert requeues
    acked = {tuple(pair) for operation in marks["promised"] for pair in acks_of(operation)}
    still = next(one for one in requeues if tuple(one["ids"][0]) not in acked)
    wrong = verdict("requeued", tmp_path / "data", marks | {"promised": [*marks["promised"], still]})
    assert "was put back" in wrong[0]


def test_a_lazy_policy_is_held_to_what_close_promised(tmp_path: Path) -> None:
    marks = run("never", tmp_path)
    earlier = [mark for mark in marks["marks"] if "l.3" not in mark[0]]
    assert verdict("never", tmp_path / "data", marks | {"marks": earlier})
