"""A repartition of which every call is spoiled, and every power failure (moving.py)."""

from __future__ import annotations

import pytest

from ..shares import Share
from .calls import KINDS


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ("--kind crash --kind eio --kind enospc --kind short", 144),
        ("--kind power", 1536),
        ("--joined --kind crash --kind eio --kind enospc --kind short", 288),
        ("--joined --kind power", 3072),
        *(pytest.param(f"--joined --kind {kind}", 1, marks=pytest.mark.campaign) for kind in (*KINDS, "power")),
        *(pytest.param(f"--kind {kind}", 1, marks=pytest.mark.campaign) for kind in (*KINDS, "power")),
    ],
)
def test_no_spoiled_call_and_no_power_failure_loses_what_moves(arguments: str, every: int, budget: Share) -> None:
    budget.run("tests.crash.moving", *arguments.split(), every=every)
