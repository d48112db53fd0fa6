"""One row of a usage trace: what happened to a message, in the order in which it happened.

The row is the meeting point of everything that can give a trace (our own usage log, ActiveMQ's journals, a workload
generator) and of the advisor that reads it. It is plain Python, so that a trace source needs none of the advisor's
dependencies.
"""

from __future__ import annotations

from typing import NamedTuple

SIZE_BYTES_MAX = 1 << 40
"""No message is larger than 1 TiB: a size above it is a mistake, and sums of such sizes leave 64 bits."""
ACK_BYTES_DEFAULT = 100
"""An ack's bytes where a trace does not say."""
SEND_HEADER_BYTES_DEFAULT = 64
"""A send's bytes beside its body where a trace does not say."""


class UsageEvent(NamedTuple):
    """A send or an ack, at its place in the global order."""

    seq: int
    """Position in the global order, from 0, no two alike."""
    ts: float
    """Seconds since the epoch; where the source has no clock for it, interpolated from its neighbours."""
    op: str
    """`send` or `ack`."""
    destination: str
    """`queue://name` or `topic://name`."""
    message_id: str
    """Unique within its destination. An ack names the message that was sent."""
    size: int
    """Bytes that this operation put into the journal that the trace was read from, all its overhead included."""
    tx: str | None = None
    """The transaction that it was part of: equal text, same transaction. None: on its own."""
    acks_needed: int = 1
    """For a send: how many acks end the message's life (a topic message: one for each durable subscription)."""
    subscription: str | None = None
    """For an ack of a topic message: which subscription."""
    body_size: int | None = None
    """For a send: bytes of the message's body alone, where the source knows it."""
    node: str | None = None
    """The node on which it happened, in a trace of several."""


class NodeLog(NamedTuple):
    """One node's usage log among those of several, and its clock beside another's. Seconds; ahead is above 0."""

    node: str
    reference: str
    """The node whose clock it was compared with; itself, where no message says how they compare."""
    low_seconds: float | None
    """It is so far ahead of that clock at least; None where no message went that way. `high_seconds`: at most."""
    high_seconds: float | None
    moved_seconds: float = 0.0
    """Its times were taken for so much earlier."""
    sampled: float = 1.0
    """The part of its messages that was recorded."""
