"""What a client and its owner hold of a call: there is one list of what each may do again."""

from __future__ import annotations

from anabranch.router.sharing.owner.calls import CALLS
from anabranch.router.sharing.protocol import LOOKS, ONCE


def test_what_is_said_of_calls_is_said_of_calls_that_there_are() -> None:
    assert CALLS.keys() >= LOOKS | ONCE
    assert not LOOKS & ONCE
