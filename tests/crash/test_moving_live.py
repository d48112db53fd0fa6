"""A repartition of a router in use, of which every call is spoiled, and every power failure (moving_live.py)."""

from __future__ import annotations

import pytest

from ..shares import Share
from .calls import KINDS


@pytest.mark.parametrize(
    ("arguments", "every"),
    [
        ("--kind crash --kind eio --kind enospc --kind short", 288),
        ("--kind power", 3072),
        *(pytest.param(f"--kind {kind}", 1, marks=pytest.mark.campaign) for kind in (*KINDS, "power")),
    ],
)
def test_no_spoiled_call_and_no_power_failure_loses_what_moves(arguments: str, every: int, budget: Share) -> None:
    budget.run("tests.crash.moving_live", *arguments.split(), every=every)
