"""The cost of one store, from the summary: the inner step of the search, well under a millisecond.

`decay` says what a store that compacts would cost; here is one that does not, or that KahaDB writes. The members' bytes
are added by bucket and laid end to end into segments; a bucket belongs to the segment that its middle falls into, or,
where a burst made it longer than a segment, to all that it mostly fills. A segment loses, at its end, half an operation
on average (longer ones more often: the mean of the squares over the mean), so it holds that much less. Where a segment
begins inside a bucket, time is interpolated. Then the same sweep as in the exact model. Where segments are many, the
mean error against that is a fraction of a percent; a single message that never goes may keep another segment here than
it does there, which shows where they are few.

Costs are additive over stores, so sets of destinations are evaluated and remembered here, never whole partitionings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..statistics.operations import TransactionSet
from ..statistics.summary import Summary
from ..trace.arrays import Floats, Ints
from ..trace.nodes import count_nodes
from .cost_model import GIB, HOUR, CostModel
from .decay import decayed, life_bytes, written_by_bucket
from .jit import njit

_WALKED_BITS_MAX = 16
"""Members of a set that are found one by one; of more, numpy finds all at once."""


class SetCosts:
    """The cost J of any set of destinations as one store, in GiB-hours. A set is a bit mask over destination numbers.

    `retention_weight` above 1 makes disk dearer than it is, which leads the search to partitionings that need less.
    """

    def __init__(self, summary: Summary, costs: CostModel, retention_weight: float = 1.0) -> None:
        self.summary = summary
        self.costs = costs
        self.retention_weight = retention_weight
        self._known: dict[int, tuple[float, float, float, int]] = {}
        """GiB-hours, spanning transactions, bytes copied, journals."""
        rules = costs.rules(summary.sizes)
        self._limits = rules.limits()
        self._room = float(rules.capacity - rules.room)
        self._life_bytes = life_bytes(summary) if costs.compacts(summary.sizes.model) else None
        ahead = summary.sizes.sizes.segments_ahead
        self._ahead = ahead * costs.segment_bytes * summary.duration / GIB / HOUR
        self._overhead = costs.overhead_segments * costs.segment_bytes * summary.duration / GIB / HOUR
        self._spanning = SpanningCounts(summary.transactions, len(summary.destinations))

    @property
    def evaluated(self) -> int:
        """Count the sets that have been evaluated so far."""
        return len(self._known)

    def reweighted(self, retention_weight: float) -> SetCosts:
        """Return these costs with another weight; what was evaluated stays known to both."""
        other = SetCosts(self.summary, self.costs, retention_weight)
        other._known = self._known
        return other

    def cost(self, mask: int) -> float:
        """Return J of this store. It has retention, overhead, two syncs for every spanning transaction that touches it,
        and what compaction copies."""
        found = self._known.get(mask)
        if found is None:
            found = self._known[mask] = self._evaluate(mask)
        retained, shared, copied, journals = found
        disk = self.retention_weight * retained + journals * self._overhead
        return disk + 2 * self.costs.sync_price * shared + self.costs.copy_price * copied

    def retained(self, mask: int) -> float:
        """Return the GiB-hours that the store's segments stay on disk."""
        self.cost(mask)
        return self._known[mask][0]

    def copied(self, mask: int) -> float:
        """Return the bytes that the store's compaction copies."""
        self.cost(mask)
        return self._known[mask][2]

    def _evaluate(self, mask: int) -> tuple[float, float, float, int]:
        members, s = np.array(mask_members(mask), np.int64), self.summary
        own = members[~np.isin(members, list(s.elsewhere))] if s.elsewhere else members
        held, copied, journals, nodes = 0.0, 0.0, 0, count_nodes(s.use)
        for node in range(nodes):
            sites = own * nodes + node
            if (nodes == 1 and len(own)) or (s.byte_rows[sites] < s.byte_rows[sites + 1]).any():
                byte_seconds, copies = self._journal(sites)
                held, copied, journals = held + byte_seconds / GIB / HOUR + self._ahead, copied + copies, journals + 1
        return held, float(self._spanning.of(members)), copied, journals

    def _journal(self, sites: Ints) -> tuple[float, float]:
        """Return the byte-seconds of one journal, and the bytes that it copies."""
        s = self.summary
        written = s.byte_rows, s.byte_bucket, s.byte_sum, s.byte_squares
        lives = s.life_rows, s.life_send, s.life_ack, s.life_time
        if self._life_bytes is not None:
            return decayed(sites, *written, *lives, self._life_bytes, s.bucket_start, self._limits)
        chains = s.sizes.model == "kahadb"
        segment_bytes = float(self.costs.segment_bytes)
        return _retained(sites, *written, *lives, s.bucket_start, self._room, segment_bytes, chains), 0.0


class SpanningCounts:
    """Counts of the transactions that touch a set of destinations and others."""

    def __init__(self, groups: Sequence[TransactionSet], width: int) -> None:
        self._width = width
        self._members = np.array([m for group in groups for m in group.members], np.int64)
        self._sizes = np.array([len(group.members) for group in groups], np.int64)
        self._begins = np.cumsum(self._sizes) - self._sizes
        self._counts = np.array([group.count for group in groups], np.int64)

    def of(self, members: Ints | list[int]) -> int:
        """Count the transactions with a destination in the set and another outside it."""
        if not len(self._counts):
            return 0
        chosen = np.zeros(self._width, np.int64)
        chosen[members] = 1
        inside = np.add.reduceat(chosen[self._members], self._begins)
        return int(self._counts[(inside > 0) & (inside < self._sizes)].sum())


def mask_members(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    if mask.bit_count() > _WALKED_BITS_MAX:
        packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
        found: list[int] = np.flatnonzero(np.unpackbits(packed, bitorder="little")).tolist()
        return found
    members = []
    while mask:
        low = mask & -mask
        members.append(low.bit_length() - 1)
        mask ^= low
    return members


@njit
def _retained(
    members: Ints,
    byte_rows: Ints,
    byte_bucket: Ints,
    byte_sum: Floats,
    byte_squares: Floats,
    life_rows: Ints,
    life_send: Ints,
    life_ack: Ints,
    life_time: Floats,
    bucket_start: Floats,
    capacity: float,
    segment_bytes: float,
    chains: bool,
) -> float:
    """Add up the byte-seconds that the store's segments are on disk."""
    buckets = len(bucket_start) - 1
    finish = bucket_start[buckets]
    written, total, squares = written_by_bucket(members, byte_rows, byte_bucket, byte_sum, byte_squares, buckets)
    if total == 0.0:
        return 0.0
    room = max(capacity - squares / (2.0 * total), capacity / 2.0)
    count = max(math.ceil(total / room), 1)
    start, segment, last = _laid_out(written, bucket_start, room, count)
    end = np.empty(count)
    for s in range(count):
        end[s] = start[s + 1] if s + 1 < count else finish
    for m in members:
        for k in range(life_rows[m], life_rows[m + 1]):
            until = min(life_time[k], finish)
            for s in range(segment[life_send[k]], last[life_send[k]] + 1):
                end[s] = max(end[s], until)
    if chains:
        _sweep(members, life_rows, life_send, life_ack, segment, end)
    held = 0.0
    for s in range(count):
        held += end[s] - start[s]
    return held * segment_bytes


@njit
def _laid_out(written: Floats, bucket_start: Floats, room: float, count: int) -> tuple[Floats, Ints, Ints]:
    """Lay the bytes of buckets end to end into segments: when each of these begins, and which is the first, and the
    last, of each bucket."""
    buckets, finish = len(written), bucket_start[len(written)]
    start = np.empty(count)
    segment = np.zeros(buckets, np.int64)
    last = np.zeros(buckets, np.int64)
    before, born = 0.0, 0
    for b in range(buckets):
        if written[b] == 0.0:
            continue
        span = bucket_start[b + 1] - bucket_start[b]
        while born < count and born * room < before + written[b]:
            start[born] = bucket_start[b] + span * max(born * room - before, 0.0) / written[b]
            born += 1
        if written[b] <= room:
            segment[b] = last[b] = min(int((before + written[b] / 2.0) / room), count - 1)
        else:
            segment[b] = min(int(before / room + 0.5), count - 1)
            last[b] = min(max(int((before + written[b]) / room - 0.5), segment[b]), count - 1)
        before += written[b]
    for s in range(born, count):
        start[s] = finish
    return start, segment, last


@njit
def _sweep(members: Ints, life_rows: Ints, life_send: Ints, life_ack: Ints, segment: Ints, end: Floats) -> None:
    """Apply the ack rule, segment by segment. Edges hang in a linked list at the segment of their ack: no sort is
    needed."""
    edges = 0
    for m in members:
        edges += life_rows[m + 1] - life_rows[m]
    first = np.full(len(end), -1, np.int64)
    following = np.empty(edges, np.int64)
    source = np.empty(edges, np.int64)
    at = 0
    for m in members:
        for k in range(life_rows[m], life_rows[m + 1]):
            if life_ack[k] < 0:
                continue
            s, t = segment[life_ack[k]], segment[life_send[k]]
            if t < s:
                source[at], following[at] = t, first[s]
                first[s] = at
                at += 1
    for s in range(len(end)):
        edge = first[s]
        while edge >= 0:
            end[s] = max(end[s], end[source[edge]])
            edge = following[edge]
