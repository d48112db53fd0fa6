"""One transaction: who takes part, how far it has come, and what its user is told."""

from __future__ import annotations

import pytest

from anabranch.router.transactions.global_transaction import GlobalTransaction
from anabranch.router.transactions.participant import Participant
from anabranch.router.transactions.states import ACTIVE, DECIDED, DONE, IN_DOUBT, PREPARED, PREPARING
from anabranch.router.transactions.xid import Xid

IDS = (b"a" * 16, b"b" * 16)
XID = Xid(1, "global", "branch")


def test_it_goes_where_it_may_and_nowhere_else() -> None:
    one = GlobalTransaction()
    for state in (PREPARING, PREPARED, IN_DOUBT, DECIDED, DONE):
        one.move(state)
    with pytest.raises(AssertionError, match="cannot become prepared"):
        one.move(PREPARED)
    assert one.state is DONE


@pytest.mark.parametrize("commit", [True, False])
def test_an_outcome_stands(commit: bool) -> None:
    one = GlobalTransaction()
    one.decide(commit)
    one.decide(not commit)
    assert (one.outcome, one.shown) == (("commit", "committed") if commit else ("rollback", "rolled back"))


def test_what_is_decided_waits_for_its_stores() -> None:
    one = GlobalTransaction.recovered(b"t" * 32, IDS, IN_DOUBT)
    assert (one.waiting, one.stores) == ([], [store_id.hex() for store_id in IDS])
    one.decide(True)
    assert one.waiting == list(IDS)
    one.participants[IDS[0]].carried_out = True
    assert one.waiting == [IDS[1]]


def test_what_its_user_is_told() -> None:
    one = GlobalTransaction(XID)
    assert one.state is ACTIVE
    told = [(one.shown, one.held)]
    for state in (PREPARING, PREPARED):
        one.move(state)
        told.append((one.shown, one.held))
    one.external, one.running = True, False
    told.append((one.shown, one.held))
    one.move(IN_DOUBT)
    told.append((one.shown, one.held))
    one.alone = Participant(IDS[0])
    told.append((one.shown, one.held))
    assert told == [
        ("open", False), ("preparing", False), ("voted", False), ("prepared", True), ("in doubt", False),
        ("of unknown outcome", False),
    ]  # fmt: skip
