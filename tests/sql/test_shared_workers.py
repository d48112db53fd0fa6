"""Eight routers over one database that are killed and cut off: nothing acknowledged is lost, nothing acked comes back,
nothing is there twice, and one who receives alone has what each sender has sent in its order (shared_workers.py)."""

from __future__ import annotations

import pytest

from ..shares import Share
from .server import PostgresServer


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.campaign)], ids=["one", "many"])
@pytest.mark.weight(3)
def test_many_routers_that_are_killed_and_cut_off(postgres: PostgresServer, budget: Share, whole: bool) -> None:
    """`postgres` only says whether there is a server to be had: this one is the campaign's own."""
    budget.run("tests.sql.shared_workers", "--rounds", str(budget.count(1, 100)), "--work", str(budget.count(6, 10)))
    assert " 0 wrong" in budget.counts[0]
