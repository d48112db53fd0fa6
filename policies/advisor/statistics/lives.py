"""The life of each message: sends and acks told of each other, by one rule for this process and for Spark's workers.

They get `match` by value (see `spark.trace`), and so it needs nothing of this package but numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from ..trace.arrays import NEVER_POSITION, Ints
from ..trace.table import Finding

NONE = -1
SEND, REPEATED, SURPLUS = 1, 2, 4
"""Flags of an operation: it is a send, of an id sent again later, of a message acked more often than it needs."""


def match(message: Ints, position: Ints, needed: Ints) -> tuple[Ints, Ints, npt.NDArray[np.int32]]:
    """Tell the sends and the acks of each message of each other, in rows that ascend by position within a message.

    `message`: a number of each, from 0. `needed`: the acks that end a send, -1 for an ack. Return for each row the
    position of its partner, for an ack the last send of its message, else NONE; where a send's life ends, or an ack
    is; and the flags.
    """
    is_send = needed >= 0
    last_send = np.full(message.max() + 1, NONE, np.int64)
    last_ack = last_send.copy()
    # In order of position within a message: the last one stays.
    last_send[message[is_send]] = position[is_send]
    last_ack[message[~is_send]] = position[~is_send]
    acks = np.bincount(message[~is_send], minlength=len(last_ack))[message]
    ends = np.where(acks < needed, NEVER_POSITION, np.maximum(position, last_ack[message]))
    flags = np.where(is_send, SEND, 0)
    flags += np.where(is_send & (last_send[message] != position), REPEATED, 0)
    flags += np.where(is_send & (acks > np.maximum(needed, 1)), SURPLUS, 0)
    partner = np.where(is_send, NONE, last_send[message])
    return partner, np.where(is_send, ends, position), flags.astype(np.int32)


def life_findings(sends: int, acks: int, counts: Mapping[str, int]) -> list[Finding]:
    """Find what is wrong with a trace's messages, of so many sends and acks. `counts`: how many of each kind, by
    code."""
    counts = {"no-sends": int(sends == 0), "no-acks": int(acks == 0), **counts}
    return [
        Finding(code, counts[code], one if counts[code] == 1 else many)
        for code, one, many in (
            ("no-sends", "trace without any send: nothing in it retains a journal file", ""),
            ("no-acks", "trace without any ack: every message seems to stay for ever", ""),
            (
                "unknown-acks",
                "ack of a message sent before the trace began", "acks of messages sent before the trace began",
            ),
            (
                "early-acks",
                "ack that stands before its send in the order", "acks that stand before their send in the order",
            ),
            (
                "pending-sends",
                "send whose last ack the trace lacks: pending to its end",
                "sends whose last ack the trace lacks: pending to its end",
            ),
            (
                "repeated-sends",
                "send of a message id sent before: each copy lives to the last ack",
                "sends of a message id sent before: each copy lives to the last ack",
            ),
            (
                "surplus-acks",
                "message acked more often than it needs", "messages acked more often than they need",
            ),
        )
        if counts[code]
    ]  # fmt: skip
