"""The state machine of transactions: docs/transactions.md and the code say the same of it, and a crash in each state
leaves what they say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch
from anabranch.router.transactions.global_transaction import GlobalTransaction
from anabranch.router.transactions.states import State

from ..router.disk import Faults, bodies, config, copied, crashed, take

DOCUMENT = Path(__file__).parents[2] / "docs" / "transactions.md"
XID = anabranch.Xid(1, "global", "branch")
BEFORE, AFTER = [[b"1"], [], []], [[], [b"2"], [b"3"]]


def documented() -> dict[str, list[str]]:
    """The rows of the document's table of states, by their first cells."""
    rows = re.findall(r"^\| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    return {row[0]: row[1:] for row in cells if len(row) == 4 and row[0] in {state.label for state in State}}


def test_the_document_has_the_machine() -> None:
    machine = {
        state.label: [state.meaning, state.survives, ", ".join(following.label for following in state.successors)]
        for state in State
    }
    assert documented() == machine
    assert list(documented()) == [state.label for state in State]


@pytest.mark.parametrize("state", State)
def test_no_other_move_is_made(state: State) -> None:
    for following in State:
        transaction = GlobalTransaction()
        transaction.state = state
        if following in state.successors:
            transaction.move(following)
            assert transaction.state is following
        else:
            with pytest.raises(AssertionError, match=f"{state.label}> cannot become {following.label}"):
                transaction.move(following)


def state_of(tx: anabranch.Transaction) -> State:
    return tx._global.state


def begin(router: anabranch.Router, xid: anabranch.Xid | None = None) -> anabranch.Transaction:
    """It takes from a.in, and gives to b.out and c.out."""
    router.queue("a.in").send(b"1")
    tx = router.transaction(xid)
    tx.ack(take(router, "a.in"))
    tx.send("b.out", b"2")
    tx.send("c.out", b"3")
    return tx


def found(directory: Path) -> tuple[list[list[bytes]], list[anabranch.Xid]]:
    """What a process that opens the directory finds, in two openings; and what is held."""
    for _ in range(2):
        with anabranch.open(config(directory)) as router:
            held = router.recover()
            assert [waiting.xid for waiting in router.in_doubt()] == held
            contents = bodies(router, "a.in", "b.out", "c.out")
            assert all(list(store.check()) == [] for store in router._registry.open_stores())
    return contents, held


class TestAfterACrash:
    """The process is killed in a state: what the table says is what the next one finds."""

    @pytest.mark.parametrize(
        ("end", "state", "after"),
        [(None, State.ACTIVE, BEFORE), ("vote", State.PREPARED, BEFORE), ("prepare", State.PREPARED, BEFORE),
         ("commit", State.DONE, AFTER)],
    )  # fmt: skip
    def test_when_a_call_has_returned(
        self, cross: anabranch.Router, tmp_path: Path, end: str | None, state: State, after: list[list[bytes]]
    ) -> None:
        tx = begin(cross, XID if end == "prepare" else None)
        if end is not None:
            getattr(tx, end)()
        assert state_of(tx) is state
        assert found(crashed(cross, tmp_path / "copy")) == (after, [XID] if end == "prepare" else [])

    @pytest.mark.parametrize(("call", "store"), [("pwrite", "a"), ("fdatasync", "c")])
    def test_preparing(self, synced: anabranch.Config, faults: Faults, tmp_path: Path, call: str, store: str) -> None:
        with anabranch.open(synced) as router:
            tx = begin(router)
            self._copied_before(faults, call, f"/stores/{store}/", router, tmp_path, lambda: state_of(tx))
            tx.commit()
        assert self.state is State.PREPARING
        assert found(tmp_path / "copy") == (BEFORE, [])

    @pytest.mark.parametrize(("call", "after"), [("pwrite", BEFORE), ("fdatasync", AFTER)])
    def test_in_doubt(
        self, synced: anabranch.Config, faults: Faults, tmp_path: Path, call: str, after: list[list[bytes]]
    ) -> None:
        """Killed before the decision is written, and between that and its sync."""
        with anabranch.open(synced) as router:
            router.send("a.x,b.x", b"the log is made")
            tx = begin(router)
            self._copied_before(faults, call, "/decisions/", router, tmp_path, lambda: state_of(tx))
            tx.commit()
        assert self.state is State.IN_DOUBT
        assert found(tmp_path / "copy") == (after, [])

    def test_decided(self, synced: anabranch.Config, faults: Faults, tmp_path: Path) -> None:
        with anabranch.open(synced) as router:
            router.send("a.x,c.x", b"the log is made")
            tx = begin(router)
            faults.before("fdatasync", "/decisions/", lambda: faults.fail("pwrite", "/stores/b/"))
            tx.commit()
            assert state_of(tx) is State.DECIDED
            copy = crashed(router, tmp_path / "copy")
            faults.mend()
            router.reopen("b")
            assert state_of(tx) is State.DONE
        assert found(copy) == (AFTER, [])

    state: State

    def _copied_before(
        self,
        faults: Faults,
        call: str,
        part: str,
        router: anabranch.Router,
        path: Path,
        state: Callable[[], State],
    ) -> None:
        def act() -> None:
            self.state = state()
            copied(router, path / "copy")

        faults.before(call, part, act)
