"""Atoms that behave alike, put into cells: what makes a search among thousands of destinations short.

Destinations are bound to a store by how long their messages stay, then by how much they write. Each atom is a point:
logarithms of its 50 %, 95 % and largest retention, and of its bytes. A cell is split in two where that takes away most
of the squared distance of its atoms from their mean, the cell that gains most first, until there are as many as wanted.
Atoms weigh by what they write, so that a busy one is soon alone. (Wu's colour quantisation, 1991, on other points.)

Nothing is random, and ties go to what comes first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from ..statistics.summary import Summary, retention_quantile
from ..trace.arrays import Floats, Ints

QUANTILES = (0.5, 0.95, 1.0)
BYTES_SCALE = 0.5
"""The weight of a factor between the bytes of two atoms beside one between their retentions."""


def cells(summary: Summary, atoms: Sequence[Sequence[int]], group: Sequence[int], most: int) -> list[list[int]]:
    """Return the atom numbers by cell, ascending; cells in the order of their first atom.

    `atoms`: the destinations of each. Atoms of different `group` are in different cells, however many that makes;
    else there are at most `most`.
    """
    points = np.array([_point(summary, members) for members in atoms])
    written = np.array([sum(summary.totals[d].bytes for d in members) for members in atoms], np.float64)
    weights = 1.0 + written / max(float(written.mean()), 1.0)
    found: list[Ints] = [np.flatnonzero(np.array(group) == number) for number in dict.fromkeys(group)]
    heap = [(*_best_split(points, weights, cell), number) for number, cell in enumerate(found)]
    heapq.heapify(heap)
    while len(found) < most and heap[0][0] < 0.0:
        _, feature, cut, number = heapq.heappop(heap)
        order = _along(points, found[number], feature)
        found[number] = np.sort(order[:cut])
        found.append(np.sort(order[cut:]))
        for part in (number, len(found) - 1):
            heapq.heappush(heap, (*_best_split(points, weights, found[part]), part))
    return sorted(cell.tolist() for cell in found)


def _point(summary: Summary, members: Sequence[int]) -> list[float]:
    # Shorter than a bucket is not told from a bucket; what never goes stays longer than all that does.
    least = max(summary.duration / len(summary.bucket_start), 1e-9)
    stays = [max(retention_quantile(summary, d, quantile) for d in members) for quantile in QUANTILES]
    never = math.e * max(summary.duration, least)
    written = sum(summary.totals[d].bytes for d in members)
    return [math.log(min(max(stay, least), never)) for stay in stays] + [BYTES_SCALE * math.log(max(written, 1.0))]


def _along(points: Floats, cell: Ints, feature: int) -> Ints:
    """Sort the cell's atoms by one coordinate."""
    ordered: Ints = cell[np.argsort(points[cell, feature], kind="stable")]
    return ordered


def _best_split(points: Floats, weights: Floats, cell: Ints) -> tuple[float, int, int]:
    """Find the best split: minus the squared distance that it takes away, its coordinate, and the atoms below it."""
    best = (0.0, 0, 0)
    if len(cell) < 2:
        return best
    for feature in range(points.shape[1]):
        order = _along(points, cell, feature)
        values = points[order, feature] - points[order, feature].mean()
        mass, moment = np.cumsum(weights[order]), np.cumsum(weights[order] * values)
        below, above = mass[:-1], mass[-1] - mass[:-1]
        gain = moment[:-1] ** 2 / below + (moment[-1] - moment[:-1]) ** 2 / above - moment[-1] ** 2 / mass[-1]
        gain[values[:-1] == values[1:]] = 0.0  # alike to the last digit: no place to cut
        cut = int(np.argmax(gain))
        best = min(best, (-float(gain[cut]), feature, cut + 1))
    return best
