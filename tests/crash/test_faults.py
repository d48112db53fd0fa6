"""Every system call of a scripted workload spoiled, one after the other (faults.py)."""

from __future__ import annotations

import pytest

from ..shares import Share
from .calls import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_spoiled_call_loses_doubles_or_hangs_anything(kind: str, share: Share) -> None:
    share.run("tests.crash.faults", "--kind", kind, every=150)
