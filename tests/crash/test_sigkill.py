"""The SIGKILL campaign of sigkill.py with small counts, and its ledger held against contents that are wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..shares import Share
from ..sql.server import binaries
from .ledger import Contents, Operation, Prefix, compare

SENDS: list[Operation] = [{"op": "send", "q": "q", "ids": [f"p.{n}"]} for n in range(4)]


def test_kills_lose_nothing(tmp_path: Path, share: Share) -> None:
    share.run("tests.crash.sigkill", "--rounds", str(share.count(6, 1000)), "--directory", str(tmp_path))
    assert "0 directories wrong" in share.counts[0]


@pytest.mark.weight(3)
def test_kills_over_all_kinds_of_stores_lose_nothing(tmp_path: Path, share: Share) -> None:
    kinds = "--mixed" if binaries() is None else "--postgres"
    share.run("tests.crash.sigkill", kinds, "--rounds", str(share.count(4, 1000)), "--directory", str(tmp_path))
    assert "0 directories wrong" in share.counts[0]


@pytest.mark.parametrize(
    ("found", "promised", "maybe", "complaint"),
    [
        ({"q": ["p.0", "p.2", "p.3"]}, SENDS, [], "lost: p.1 of q"),
        ({"q": ["p.0", "p.1", "p.3", "p.2"]}, SENDS, [], "out of order: p.2"),
        ({"q": ["p.0", "p.0"]}, SENDS[:1], [], "twice: p.0"),
        ({"q": ["p.0", "p.1"]}, SENDS[:1], [], "never sent: p.1"),
        ({"q": ["p.0"]}, [*SENDS[:1], {"op": "ack", "q": "q", "ids": ["p.0"]}], [], "came back: p.0"),
        ({"q": ["p.1"]}, [], [{"op": "send", "q": "q", "ids": ["p.0", "p.1"]}], "no prefix"),
        ({"q": ["p.0"]}, SENDS[:1], [{"op": "tx", "send": [["r", "t.0"]], "ack": []}], ""),
        (
            {"r": ["t.0"], "q": ["p.0"]},
            SENDS[:1],
            [{"op": "tx", "send": [["r", "t.0"]], "ack": [["q", "p.0"]]}],
            "half",
        ),
    ],
)
def test_the_ledger_sees_what_is_wrong(
    found: Contents, promised: list[Operation], maybe: list[Operation], complaint: str
) -> None:
    wrong = compare(found, promised, maybe)
    assert complaint in "; ".join(wrong) if complaint else not wrong


def test_a_prefix_is_told_from_a_gap() -> None:
    assert Prefix(SENDS, 2).compare({"q": ["p.0", "p.1", "p.2"]}) == []
    assert Prefix(SENDS, 2).compare({"q": ["p.0"]})
    assert Prefix(SENDS, 0).compare({"q": ["p.0", "p.2"]})
