"""The usage of each destination by itself, for programs that read the recommendation."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from .summary import Summary, retention_quantile


@dataclass(frozen=True, slots=True)
class DestinationUsage:
    """One destination in the trace."""

    name: str
    messages: int
    """Sends."""
    acks: int
    pending: int
    """Sends whose last ack the trace does not show."""
    bytes: int
    """The bytes that the destination's operations put into a journal."""
    retention_p50_seconds: float | None
    """Half of its messages were acked within this time, which begins with the summary's bucket of their send. None:
    fewer than half were acked."""
    retention_p95_seconds: float | None
    """The time within which 95 of 100 were acked, likewise."""


def destination_usage(summary: Summary) -> tuple[DestinationUsage, ...]:
    """Return the usage of each destination, in the summary's order. Under the clock `seq` the seconds are those of the
    order, not of any clock."""
    return tuple(
        DestinationUsage(
            total.name,
            total.sends,
            total.acks,
            total.pending,
            int(total.bytes),
            _seconds(summary, number, 0.5),
            _seconds(summary, number, 0.95),
        )
        for number, total in enumerate(summary.totals)
    )


def _seconds(summary: Summary, destination: int, quantile: float) -> float | None:
    if not len(summary.life_time[summary.lives_of(destination)]):
        return None  # nothing was sent to it
    found = retention_quantile(summary, destination, quantile)
    return found if isfinite(found) else None
