"""The traces of several nodes as one: which messages went from one node to another, and how their clocks compare.

A message has *crossed* that was sent on one node and acked on another: its destination needs a store that both share.
An id that several nodes have sent is no such message. Directories that were copied have such ids, and so have bridges
that forward messages under their own.

The ack of a message comes after its send, whatever the clocks say. So each message that crossed bounds how far one
clock can be ahead of the other, and messages both ways bound it from both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isinf

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from .arrays import Floats, Ints
from .events import NodeLog
from .table import codes

_US = 1e6
_LEAST = 1e-6
"""Seconds: an ack comes at least so long after its send."""


@dataclass(frozen=True, slots=True)
class NodeUse:
    """The use of destinations by node. Both are numbers, nodes into `nodes`."""

    nodes: tuple[str, ...]
    used: tuple[tuple[int, ...], ...]
    """For each destination the nodes on which it was sent to, or acked."""
    flows: Mapping[tuple[int, int, int], int]
    """Messages that crossed, by destination, node of their send, and node of an ack."""
    crossed: Mapping[int, int]
    """Messages that crossed, by destination: one that several nodes have acked counts once."""


def count_nodes(use: NodeUse | None) -> int:
    """Return how many nodes a trace is of."""
    return 1 if use is None else len(use.nodes)


def crossed_acks(message: Ints, node: Ints, is_send: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the rows of acks of messages that were sent on another node, and that node of each. `message`: a number of
    each, from 0."""
    sender = np.full(int(message.max()) + 1, -1, np.int64)
    sent, sent_on = message[is_send], node[is_send]
    sender[sent] = sent_on
    sender[sent[sender[sent] != sent_on]] = -1
    source = sender[message]
    acks = np.flatnonzero(~is_send & (source >= 0) & (source != node))
    return acks, source[acks]


def node_use(
    table: pa.Table, destination: npt.NDArray[np.int32], message: Ints, is_send: npt.NDArray[np.bool_]
) -> tuple[NodeUse | None, Ints | None]:
    """Tell where destinations were used, and in whose journal each row is: its node's number, or 0 where nodes have to
    share. Both are None where the trace is of one node. `message`: a number of each, from 0."""
    nodes = sorted(pc.unique(table.column("node")).to_pylist()) if "node" in table.column_names else []
    if len(nodes) < 2:
        return None, None
    node = pc.index_in(table.column("node"), value_set=pa.array(nodes)).to_numpy().astype(np.int64)
    pairs = np.unique(np.stack([destination, node], axis=1), axis=0)
    used = tuple(tuple(pairs[pairs[:, 0] == d, 1].tolist()) for d in range(int(destination.max()) + 1))
    acks, source = crossed_acks(message, node, is_send)
    # A topic's message may be acked several times on a node.
    each = np.unique(np.stack([message[acks], destination[acks], source, node[acks]], axis=1), axis=0)
    flows = Counter(map(tuple, each[:, 1:].tolist()))
    crossed = Counter(np.unique(each[:, :2], axis=0)[:, 1].tolist())
    use = NodeUse(tuple(nodes), used, dict(sorted(flows.items())), dict(sorted(crossed.items())))
    return use, np.where(np.isin(destination, list(crossed)), 0, node)


def merge_clocks(table: pa.Table, nodes: Sequence[str]) -> tuple[pa.Table, tuple[NodeLog, ...]]:
    """Return the trace of these nodes by one clock, as far as messages say how theirs compare. The order becomes that
    of the times; each node's own stays as it is."""
    node = pc.index_in(table.column("node"), value_set=pa.array(nodes)).to_numpy().astype(np.int64)
    texts, destination = codes(table.column("destination"))
    message, _ = pd.factorize(codes(table.column("message_id"))[1] * len(texts) + destination)
    is_send = pc.equal(table.column("op"), "send").to_numpy()
    time = np.rint(table.column("ts").to_numpy() * _US)
    sent = np.zeros(int(message.max()) + 1)
    sent[message[is_send][::-1]] = time[is_send][::-1]  # the first one stays
    acks, source = crossed_acks(message, node, is_send)
    lag = np.full((len(nodes), len(nodes)), inf)
    np.minimum.at(lag, (source, node[acks]), time[acks] - sent[message[acks]])
    logs = _compared(nodes, lag / _US)
    moved = np.array([round(log.moved_seconds * _US) for log in logs], np.float64)
    if moved.any():
        time -= moved[node]
        order = np.argsort(time, kind="stable")
        table = table.set_column(table.column_names.index("ts"), "ts", pa.array(time / _US)).take(order)
        table = table.set_column(0, table.schema.field("seq"), pa.array(np.arange(len(order))))
    return table, logs


def _compared(nodes: Sequence[str], lag: Floats) -> tuple[NodeLog, ...]:
    """Compare each clock with those that are compared already, the one first that is bounded best.

    `lag[a, b]`: the least time between a send on a and its ack on b, each by its own clock. So b is ahead of a by no
    more than that. A clock may be right as it is where the bounds allow it. Else it is taken to be ahead by their mean,
    or by no more than the only bound asks for.
    """
    found = {0: NodeLog(nodes[0], nodes[0], None, None)}
    while len(found) < len(nodes):
        bounds = []
        for b in set(range(len(nodes))).difference(found):
            high = min(log.moved_seconds + lag[a, b] for a, log in found.items())
            low = max(log.moved_seconds - lag[b, a] for a, log in found.items())
            # Clocks that drift contradict themselves in the end: one lies between what they say, about.
            bounds.append((abs(high - low), b, *sorted((float(low), float(high)))))
        _, b, low, high = min(bounds)
        moved = 0.0
        if not low <= 0 <= high:
            moved = high - _LEAST if isinf(low) else low + _LEAST if isinf(high) else (low + high) / 2
        by = next((log for a, log in found.items() if min(lag[a, b], lag[b, a]) < inf), None)
        found[b] = NodeLog(nodes[b], nodes[b] if by is None else by.reference, _known(low), _known(high), moved)
    return tuple(found[number] for number in range(len(nodes)))


def _known(bound: float) -> float | None:
    return None if isinf(bound) else bound
