"""Hypothesis state machines: a store, and a router, beside plain lists. As campaigns they look harder."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from ..shares import Share

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""Where the stores lie: thousands of syncs are not what is looked at here."""


def check(machine: type[RuleBasedStateMachine], share: Share, few: int, many: int) -> None:
    """Run the machine: so few examples, always the same, or so many, others each time."""
    rounds = 0
    for _ in share.of(range(share.count(few, many) // few)):
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=few,
                stateful_step_count=40,
                deadline=None,
                derandomize=not share.whole,
                suppress_health_check=list(HealthCheck),
            ),
        )
        rounds += 1
    share.counts.append(f"{rounds * few} examples")
