"""The report's pictures, as the template draws them: disk over time, journal files, cost by number of stores.

One sign is one thing on the whole page: a destination has a colour, a store a pattern without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import numpy as np

from ...text import count_of, human_bytes
from ..advice.figures import Figures, Picture
from ..model.history import Bars
from ..trace.arrays import Ints
from . import svg
from .scale import Scale

COLOURS = 8
"""Colours of the template's palette, and its patterns. Names that come after them share one."""
LISTED = 8
NAME_SHORT = 48
ONE_STORE = "all in one store"
"""A store that nobody has named."""
_LINEAR_MAX = 12.0


@dataclass(frozen=True, slots=True)
class Signs:
    """Names that have a sign of their own, those that matter most first; the others share one."""

    destinations: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()

    def colour(self, destination: str) -> str:
        number = self.destinations.index(destination) if destination in self.destinations else None
        return "rest" if number is None else f"c{number}"

    def pattern(self, store: str) -> str:
        return f"p{self.stores.index(store)}" if store in self.stores else "p-rest"


def signs_of(figures: Figures) -> Signs:
    """Give colours to the destinations that keep most under any partitioning shown, patterns to the stores that hold
    most.

    A store that is there in both has the same pattern in both."""
    ranked = sorted(figures.listed, key=lambda one: (-sum(kept.file_bytes for kept in one.kept), one.name))
    holders = [one.name for one in ranked if any(kept.files for kept in one.kept)]
    held: dict[str, int] = {}
    for picture in figures.pictures:
        for name, row in zip(_names(picture), picture.history.held, strict=True):
            held[name] = held.get(name, 0) + int(row.sum())
    stores = sorted(held, key=lambda name: (-held[name], name))
    # The last sign but one may serve for one store alone; one for many would hide it.
    own = stores if len(stores) <= COLOURS else stores[: COLOURS - 1]
    return Signs(tuple(holders[:COLOURS]), tuple(own))


def _names(picture: Picture) -> Sequence[str]:
    return [ONE_STORE] if picture.candidate == "all-together" else picture.stores


def pictures_of(figures: Figures, signs: Signs, scale: Scale, chosen: int) -> dict[str, Any]:
    """Draw all pictures, by the template's names. `chosen`: the number of stores recommended."""
    marks = scale.marks(figures.finish - figures.begin)
    top = max(int(picture.history.total.max()) for picture in figures.pictures)
    # Both on one scale, so that their heights can be compared.
    levels = svg.round_marks(float(max(top, 1)))
    return {
        "axis": scale.axis,
        "marks": marks,
        "kinds": [picture.candidate for picture in figures.pictures],
        "histories": [_history(picture, levels, figures, signs, scale) for picture in figures.pictures],
        "lives": [_lives(figures, picture, picture.bars, signs) for picture in figures.pictures if picture.bars],
        "curve": _curve(figures, scale, chosen),
    }


def _history(picture: Picture, levels: Sequence[float], figures: Figures, signs: Signs, scale: Scale) -> dict[str, Any]:
    held, stores = picture.history.held, _names(picture)
    order = sorted(range(len(held)), key=lambda b: (-int(held[b].sum()), b))
    own = [b for b in order if stores[b] in signs.stores]
    rows, names = [held[b] for b in own], [stores[b] for b in own]
    if len(own) < len(order):
        rows.append(held[[b for b in order if b not in own]].sum(axis=0))
        names.append(count_of(len(order) - len(own), "other store"))
    total = picture.history.total
    peak = int(np.argmax(total))
    edges = picture.history.edges
    columns = np.unique(np.linspace(0, len(total) - 1, 13).round().astype(int))
    return {
        "name": picture.candidate,
        "areas": _areas(np.array(rows), names, signs, levels[-1]),
        "levels": [(level / levels[-1], human_bytes(level)) for level in levels],
        "grid": svg.grid([level / levels[-1] for level in levels[1:-1]]),
        "text": f"At most {human_bytes(int(total[peak]))} on disk at one moment, about "
        f"{scale.time(float(edges[peak]) - figures.begin)} after the trace began; {human_bytes(int(total[-1]))} "
        f"towards its end; {count_of(len(held), 'store')}.",
        "rows": [
            (
                scale.time(float(edges[c]) - figures.begin),
                [human_bytes(int(row[c])) for row in rows],
                human_bytes(int(total[c])),
            )
            for c in columns
        ],
        "names": names,
    }


def _areas(rows: Ints, names: Sequence[str], signs: Signs, top: float) -> list[dict[str, str]]:
    """Stack areas, the first at the bottom."""
    low, high = svg.stacked(rows)
    return [
        {"pattern": signs.pattern(name), "name": name, "path": path}
        for i, name in enumerate(names)
        if (path := svg.steps(low[i].tolist(), high[i].tolist(), top)) or signs.pattern(name) != "p-rest"
    ]


def _lives(figures: Figures, picture: Picture, drawn: Bars, signs: Signs) -> dict[str, Any]:
    span = figures.finish - figures.begin
    start, full, end = ((times - figures.begin) / span for times in (drawn.start, drawn.full, drawn.end))
    count = len(start)
    colour = [signs.colour(figures.destinations[h]) if h >= 0 else "" for h in drawn.holder.tolist()]
    paths = [{"colour": "writing", "path": svg.boxes(range(count), count, start, full)}]
    for name in [*(f"c{i}" for i in range(len(signs.destinations))), "rest"]:
        rows = np.array([i for i in range(count) if colour[i] == name and end[i] > full[i]], np.int64)
        if len(rows):
            paths.append({"colour": name, "path": svg.boxes(rows.tolist(), count, full[rows], end[rows])})
    at = figures.pictures.index(picture)
    listed = [(one.name, one.kept[at]) for one in figures.listed if one.kept[at].files]
    listed.sort(key=lambda entry: (-entry[1].file_bytes, entry[0]))
    shown = {path["colour"] for path in paths}
    kept = sum(one.files for _, one in listed)
    return {
        "name": picture.candidate,
        "paths": paths,
        "legend": [(f"c{i}", name) for i, name in enumerate(signs.destinations) if f"c{i}" in shown],
        "has_rest": "rest" in shown,
        "sampled": f"{count:,} of its {drawn.of:,} journal files are drawn, evenly chosen."
        if count < drawn.of
        else f"All {count_of(count, 'journal file')} {'is' if count == 1 else 'are'} drawn.",
        "text": f"{count_of(drawn.of, 'journal file')} in all, {kept:,} of them kept for messages after "
        f"{'it was' if kept == 1 else 'they were'} full" + (f", most by {shorter(listed[0][0])}." if listed else "."),
        "rows": [(name, f"{one.files:,}", human_bytes(one.file_bytes)) for name, one in listed[:LISTED]],
        "left": max(len(listed) - LISTED, 0),
    }


def shorter(name: str) -> str:
    """Shorten a long name by its middle: what names differ in is often at their end."""
    return name if len(name) <= NAME_SHORT else f"{name[: NAME_SHORT // 2]}…{name[1 - NAME_SHORT // 2 :]}"


def share_scale(shares: Sequence[float]) -> tuple[list[tuple[float, str]], dict[float, float]]:
    """Choose levels to write at an axis, and each share's height on it. They are powers of ten where the highest is far
    above."""
    if max(shares) <= _LINEAR_MAX:
        marks = svg.round_marks(max(shares))
        return [(mark / marks[-1], f"{mark * 100:,.0f} %") for mark in marks], {
            share: share / marks[-1] for share in shares
        }
    low, high = floor(log10(min(shares))), ceil(log10(max(shares)))
    step = ceil((high - low) / 5)
    levels = [((power - low) / (high - low), f"{10.0**power:,.10g} times") for power in range(low, high + 1, step)]
    return levels, {share: (log10(share) - low) / (high - low) for share in shares}


def _curve(figures: Figures, scale: Scale, chosen: int) -> dict[str, Any] | None:
    """Draw J against the number of stores, as a share of the recommended one's."""
    points = figures.by_stores
    if len(points) < 2 or not scale.best_cost:
        return None
    shares = [cost / scale.best_cost for _, cost in points]
    levels, heights = share_scale(shares)
    first, last = points[0][0], points[-1][0]
    xs = [(count - first) / (last - first) * 0.96 + 0.02 for count, _ in points]
    ys = [heights[share] for share in shares]
    marked = [i for i, (count, _) in enumerate(points) if count == chosen]
    step = ceil((last - first) / 6)
    return {
        "line": svg.line(xs, ys),
        "dots": svg.dots(xs, ys),
        "chosen": svg.dots([xs[i] for i in marked], [ys[i] for i in marked]) if marked else "",
        "grid": svg.grid([at for at, _ in levels[1:-1]]),
        "levels": levels,
        "marks": [(x, str(count)) for x, (count, _) in zip(xs, points, strict=True) if (count - first) % step == 0],
        "powers": max(shares) > _LINEAR_MAX,
        "text": f"From {first} to {count_of(last, 'store')}; lowest at {min(points, key=lambda p: (p[1], p[0]))[0]}, "
        f"recommended {chosen}.",
        "rows": [(str(count), scale.cost(cost), count == chosen) for count, cost in points],
    }
