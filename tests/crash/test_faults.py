"""Every system call of faults.py's script fails once, in one life of the store."""

from __future__ import annotations

import pytest

from .faults import KINDS, campaign


@pytest.mark.parametrize("kind", KINDS)
def test_no_single_failing_call_loses_or_hangs_anything(kind: str) -> None:
    lines: list[str] = []
    trials, bad = campaign([kind], lines.append, lives=1)
    assert trials > 30
    assert not bad, lines
