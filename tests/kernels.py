"""The advisor's kernels, which numba compiles for half a minute in a fresh clone: one process does, the others read."""

from __future__ import annotations

import fcntl

import pytest

from anabranch.policies.advisor import RecommendOptions, UsageEvent, from_events, recommend


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Compile them, or wait for the process that does."""
    with (tmp_path_factory.getbasetemp().parent / "anabranch-compiled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sends = [
            UsageEvent(2 * i, float(i), "send", f"queue://q{i % 2}", str(i), 500, None, 1, None, 500) for i in range(9)
        ]
        acks = [UsageEvent(2 * i + 1, i + 0.5, "ack", f"queue://q{i % 2}", str(i), 50) for i in range(9)]
        for model in ("anabranch", "kahadb"):
            recommend(from_events(sends + acks), RecommendOptions(engine="local", model=model))
