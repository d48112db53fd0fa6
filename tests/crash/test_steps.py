"""Steps of transactions over a journal and SQLite, spoiled one after the other (steps.py)."""

from __future__ import annotations

import pytest

from ..shares import Share
from .steps import KINDS


def test_a_share_of_the_steps_of_all_kinds(budget: Share) -> None:
    budget.run("tests.crash.steps", every=2640)


@pytest.mark.campaign
@pytest.mark.weight(4)
@pytest.mark.parametrize("kind", KINDS)
def test_no_spoiled_step_leaves_a_part_of_a_transaction(kind: str, budget: Share) -> None:
    budget.run("tests.crash.steps", "--kind", kind)
