"""Hypothesis state machines: a store, and a router, beside plain lists. MODEL_EXAMPLES=2000 looks harder."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

SETTINGS = settings(
    max_examples=int(os.environ.get("MODEL_EXAMPLES", "80")),
    stateful_step_count=int(os.environ.get("MODEL_STEPS", "40")),
    deadline=None,
    derandomize="MODEL_EXAMPLES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where the stores lie: thousands of syncs are not what is looked at here."""
