"""A damaged index is found out before anything is read from it, and made anew (invariant 9)."""

from __future__ import annotations

import pytest

from ..shares import Share


@pytest.mark.weight(12)
def test_no_damage_of_the_index_is_noticed(share: Share) -> None:
    share.run("tests.crash.index", every=14999)
    assert int(share.counts[0].split()[0]) > 50 or share.whole
