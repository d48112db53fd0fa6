"""A damaged index is found out before anything is read from it, and made anew (invariant 9)."""

from __future__ import annotations

from pathlib import Path

from .index import campaign


def test_no_damage_of_the_index_is_noticed(tmp_path: Path) -> None:
    wrong: list[str] = []
    trials, bad = campaign(tmp_path, 4999, wrong.append)
    assert (wrong, bad) == ([], 0)
    assert trials > 50
