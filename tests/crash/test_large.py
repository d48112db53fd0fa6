"""Every system call that large messages make spoiled, one after the other (reference.py)."""

from __future__ import annotations

from ..shares import Share


def test_no_spoiled_call_loses_a_body_or_leaves_one(share: Share) -> None:
    share.run("tests.crash.large", every=480)
