"""A recommendation as one HTML file: it asks nothing of the network, runs no script, and can be printed.

    Path("report.html").write_text(render_html(answer))

`report.html.j2` says how it looks; here is what it says. Everything that a trace named is escaped by the template.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from math import ceil, floor, isinf, log10
from typing import Any
from unicodedata import category

import jinja2
import numpy as np
from markupsafe import Markup, escape

from ..text import count_of, human_bytes
from ..units import format_size
from . import svg
from .figures import ALONE, DestinationFigures, Figures, Picture
from .history import Bars
from .model import GIB, HOUR
from .recommendation import Candidate, Recommendation, StorePlan
from .render import (
    baseline,
    candidate_columns,
    candidate_note,
    cap_sentence,
    compaction_sentence,
    headline,
    rest_note,
)

COLOURS = 8
"""Of the palette in the template. What comes after them shares one grey."""
STORES_SHOWN = 60
LISTED = 8
LISTED_MAX = 200
NAME_SHORT = 48
_REST = "rest"
_MARKS = 5
_MARKED = 0.92
_LINEAR_MAX = 12.0
_NO_FIGURES: dict[str, Any] = {"histories": [], "lives": [], "told": [], "curve": None, "keeper_sentence": None}
_PARTS = {"histories": "disk over time", "lives": "who keeps which journal files", "told": "who keeps whose bytes"}
_NOT_TRIED = "not tried, since the trace is large"
_EPOCH_FROM = 946_684_800.0
"""2000-01-01: a trace's clock before it counts from somewhere else."""


def render_html(recommendation: Recommendation) -> str:
    """The whole file."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["visible"] = _visible
    environment.filters["breakable"] = _breakable
    environment.filters["shorter"] = _shorter
    template = environment.from_string((files(__package__) / "report.html.j2").read_text("utf-8"))
    return template.render(_content(recommendation)) + "\n"


def _visible(text: str) -> str:
    """Characters that cannot be seen, or that turn the order of others around, by their number."""
    return "".join(f"[U+{ord(c):04X}]" if category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def _breakable(name: str) -> Markup:
    """Escaped, with places to break a line where a name has joints."""
    return Markup(re.sub(r"([._-]+)", r"\1<wbr>", str(escape(_visible(name)))))


def _content(recommendation: Recommendation) -> dict[str, Any]:
    """What the template shows, by the names that it has for it."""
    best, base = recommendation.recommended, baseline(recommendation)
    figures = recommendation.figures
    scale = _Scale(recommendation)
    columns = candidate_columns(recommendation)
    shown = _figures(figures, scale) if figures else _NO_FIGURES
    return {
        **shown,
        "missing": [what for key, what in _PARTS.items() if not shown[key]],
        "name_short": NAME_SHORT,
        "headline": headline(recommendation),
        "cap": None if recommendation.cap_kept else cap_sentence(recommendation),
        "numbers": [
            (f"disk at the peak, {base.name}", human_bytes(base.peak_bytes)),
            ("disk at the peak, recommended", human_bytes(best.peak_bytes)),
            ("two-phase commits it brings", f"{best.spanning_transactions:,}"),
        ],
        "compaction_sentence": compaction_sentence(recommendation),
        "columns": [name for name, _ in columns],
        "candidates": [[cell(candidate) for _, cell in columns] for candidate in recommendation.candidates],
        "candidate_note": candidate_note(recommendation),
        "stores": [_store(store, figures, scale) for store in best.stores[:STORES_SHOWN]],
        "stores_left": max(len(best.stores) - STORES_SHOWN, 0),
        "rest_note": rest_note() if recommendation.has_rest else None,
        "findings": recommendation.findings,
        "parameters": _parameters(recommendation, scale),
    }


class _Scale:
    """Times and costs as the trace's clock has them: by order alone there are no hours, so costs are ratios."""

    def __init__(self, recommendation: Recommendation) -> None:
        self.timeless = recommendation.parameters["clock"] == "seq"
        self._rate = float(recommendation.parameters["operations_per_second"])
        self.best: Candidate = recommendation.recommended
        self.duration = float(recommendation.parameters["duration_seconds"])
        self.peaks = {candidate.name: candidate.peak_bytes for candidate in recommendation.candidates}

    def time(self, seconds: float) -> str:
        return count_of(round(seconds * self._rate), "operation") if self.timeless else human_duration(seconds)

    def marks(self, seconds: float) -> list[tuple[float, str]]:
        """Where on an axis of this length something is written, as a share of it, and what; nothing near its end, where
        it would not fit."""
        length = seconds * self._rate if self.timeless else seconds
        marks = svg.round_marks(length, _MARKS) if self.timeless else svg.time_marks(length, _MARKS)
        text = _count_mark if self.timeless else _duration_mark
        return [(mark / length, text(mark, marks[1])) for mark in marks if mark <= _MARKED * length]

    @property
    def axis(self) -> str:
        return "operations since the trace began" if self.timeless else "time since the trace began"

    def cost(self, cost: float) -> str:
        """J, and how it compares with the recommended one's."""
        ratio = cost / self.best.cost if self.best.cost else 1.0
        share = f"{ratio:,.1f} times" if ratio >= 2 else f"{ratio:.1%} of"
        return f"{share} the recommended" if self.timeless else f"{cost:.4g} GiB-hours, {share} the recommended"

    def change(self, change: float) -> str:
        """What is added to J."""
        share = change / self.best.cost if self.best.cost else 0.0
        return "no change" if abs(share) < 5e-5 else f"{share:+,.1%}" if share < 10 else f"J times {share + 1:,.0f}"

    def hours(self, change: float) -> str:
        """The same in GiB-hours, with a comma after it; nothing where there are no hours."""
        return "" if self.timeless else f"{change:+.3g} GiB-h, "


def human_duration(seconds: float) -> str:
    """`12 ms`, `4.5 s`, `2 h 10 min`, `3 d 4 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 60:
        return f"{seconds:.3g} s"
    for size, name, smaller, small in ((60, "min", 1, "s"), (3600, "h", 60, "min"), (86400, "d", 3600, "h")):
        whole, rest = divmod(round(seconds / smaller), size // smaller)
        if name == "d" or whole < (60 if name == "min" else 48):
            return f"{whole:,} {name}" + (f" {rest} {small}" if rest and whole < 100 else "")
    raise AssertionError("days have no end")


def _count_mark(count: float, step: float) -> str:
    """`0`, `20`, `20k`, `20M`: as short as an axis needs it."""
    if not count:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if step >= size:
            return f"{count / size:g}{letter}"
    return f"{count:g}"


def _duration_mark(seconds: float, step: float) -> str:
    """In one unit, that of the step."""
    if not seconds:
        return "0"
    for size, name in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if step >= size and step % size == 0:
            return f"{seconds / size:g} {name}"
    return human_duration(seconds)


def _listing(names: Sequence[str]) -> dict[str, Any]:
    return {
        "first": names[:LISTED],
        "more": names[LISTED:LISTED_MAX],
        "count": len(names),
        "left": max(len(names) - LISTED_MAX, 0),
    }


def _store(store: StorePlan, figures: Figures | None, scale: _Scale) -> dict[str, Any]:
    facts = [
        ("disk, mean", human_bytes(store.gib_hours * GIB * HOUR / scale.duration)),
        ("disk, peak", human_bytes(store.peak_bytes)),
        ("sync", store.sync),
    ]
    nearest = None
    found = next((one for one in figures.stores if one.name == store.name), None) if figures else None
    if found:
        facts += [
            ("messages", f"{found.sends:,}" + (f" ({found.pending:,} pending)" if found.pending else "")),
            ("written", human_bytes(found.bytes)),
            ("half are acked within", _acked(found.retention_p50, scale)),
            ("95 % are acked within", _acked(found.retention_p95, scale)),
        ]
        cost = found.merged_cost
        if found.nearest is not None:
            nearest = {
                "name": found.nearest,
                "cost": _NOT_TRIED if cost is None else scale.cost(cost),
            }
    return {
        "name": store.name,
        "destinations": _listing(store.destinations),
        "filters": _listing(store.filters),
        "facts": facts,
        "nearest": nearest,
    }


def _acked(seconds: float, scale: _Scale) -> str:
    return "not in the trace" if isinf(seconds) else scale.time(seconds)


def _parameters(recommendation: Recommendation, scale: _Scale) -> list[tuple[str, str]]:
    given = recommendation.parameters
    figures = recommendation.figures
    rows = [
        ("model", "our own journal" if given["model"] == "anabranch" else "ActiveMQ's KahaDB, with its ack rule"),
        ("clock", "order alone (seq)" if scale.timeless else "the trace's own (ts)"),
        ("operations in the trace", f"{given['operations']:,}"),
        ("length of the trace", scale.time(scale.duration)),
        ("journal file", format_size(given["segment_bytes"])),
        ("disk", f"{given['disk_gib']:g} GiB, {given['sync_rate']:g} syncs a second"),
    ]
    if figures and not scale.timeless and figures.begin >= _EPOCH_FROM:
        rows.insert(4, ("from", _date(figures.begin)))
        rows.insert(5, ("to", _date(figures.finish)))
    return rows


def _date(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{seconds:g}"


# Pictures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Colours:
    """Names with a colour of their own, those that matter most first; the others share one."""

    names: tuple[str, ...]

    def of(self, name: str) -> str:
        return f"c{self.names.index(name)}" if name in self.names else "rest"


def _figures(figures: Figures, scale: _Scale) -> dict[str, Any]:
    span = figures.finish - figures.begin
    marks = scale.marks(span)
    keepers = _keepers(figures)
    return {
        "axis": scale.axis,
        "marks": marks,
        "kinds": [picture.candidate for picture in figures.pictures],
        "histories": _histories(figures, scale, marks),
        "lives": [_lives(figures, picture, picture.bars, keepers) for picture in figures.pictures if picture.bars],
        "keeper_sentence": _keeper_sentence(figures),
        "told": [_destination(one, scale) for one in figures.told],
        "told_left": len(figures.destinations) - len(figures.told),
        "curve": _curve(figures, scale),
    }


def _histories(figures: Figures, scale: _Scale, marks: Sequence[tuple[float, str]]) -> list[dict[str, Any]]:
    """Both on one scale, so that their heights can be compared."""
    top = max(int(picture.history.total.max()) for picture in figures.pictures)
    levels = svg.round_marks(float(max(top, 1)))
    return [_history(picture, levels, figures, scale) for picture in figures.pictures]


def _history(picture: Picture, levels: Sequence[float], figures: Figures, scale: _Scale) -> dict[str, Any]:
    held = picture.history.held
    order = sorted(range(len(held)), key=lambda b: (-int(held[b].sum()), b))
    # The last colour but one may serve for one store alone; a grey for many would hide it.
    own = order if len(order) <= COLOURS else order[: COLOURS - 1]
    rows = [held[b] for b in own]
    # All in one store is a store that nobody has named.
    names = [picture.stores[b] for b in own] if len(held) > 1 else ["all in one store"]
    if len(own) < len(order):
        rows.append(held[order[len(own) :]].sum(axis=0))
        names.append(f"{len(order) - len(own)} other stores")
    low, high = svg.stacked(np.array(rows))
    total = picture.history.total
    peak = int(np.argmax(total))
    edges = picture.history.edges
    counted = scale.peaks.get(picture.candidate, 0)
    lasting = f" The peak above, {human_bytes(counted)}, counts only what lasts." if counted < total[peak] else ""
    columns = np.unique(np.linspace(0, len(total) - 1, 13).round().astype(int))
    return {
        "name": picture.candidate,
        "areas": [
            {"colour": f"c{i}" if i < len(own) else _REST, "name": name, "path": path}
            for i, name in enumerate(names)
            if (path := svg.steps(low[i].tolist(), high[i].tolist(), levels[-1])) or i < len(own)
        ],
        "levels": [(level / levels[-1], human_bytes(level)) for level in levels],
        "grid": svg.grid([level / levels[-1] for level in levels[1:-1]]),
        "text": f"At most {human_bytes(int(total[peak]))} on disk at one moment, about "
        f"{scale.time(float(edges[peak]) - figures.begin)} after the trace began; {human_bytes(int(total[-1]))} "
        f"towards its end; {count_of(len(held), 'store')}.{lasting}",
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


def _keepers(figures: Figures) -> _Colours:
    """The destinations that keep most, under whichever partitioning is shown."""
    ranked = sorted(figures.told, key=lambda one: (-sum(kept.file_bytes for kept in one.kept), one.name))
    return _Colours(tuple(one.name for one in ranked[:COLOURS] if any(kept.files for kept in one.kept)))


def _lives(figures: Figures, picture: Picture, drawn: Bars, keepers: _Colours) -> dict[str, Any]:
    span = figures.finish - figures.begin
    start, full, end = ((times - figures.begin) / span for times in (drawn.start, drawn.full, drawn.end))
    count = len(start)
    colour = [keepers.of(figures.destinations[h]) if h >= 0 else "" for h in drawn.holder.tolist()]
    paths = [{"colour": "writing", "path": svg.boxes(range(count), count, start, full)}]
    for name in [*(f"c{i}" for i in range(len(keepers.names))), _REST]:
        rows = np.array([i for i in range(count) if colour[i] == name and end[i] > full[i]], np.int64)
        if len(rows):
            paths.append({"colour": name, "path": svg.boxes(rows.tolist(), count, full[rows], end[rows])})
    at = figures.pictures.index(picture)
    told = [(one.name, one.kept[at]) for one in figures.told if one.kept[at].files]
    told.sort(key=lambda entry: (-entry[1].file_bytes, entry[0]))
    shown = {path["colour"] for path in paths}
    legend = [(f"c{i}", name) for i, name in enumerate(keepers.names) if f"c{i}" in shown]
    kept = sum(one.files for _, one in told)
    return {
        "name": picture.candidate,
        "paths": paths,
        "legend": legend,
        "has_rest": _REST in shown,
        "sampled": f"{count:,} of its {drawn.of:,} journal files are drawn, evenly chosen."
        if count < drawn.of
        else f"All {count_of(count, 'journal file')} {'is' if count == 1 else 'are'} drawn.",
        "text": f"{count_of(drawn.of, 'journal file')} in all, {kept:,} of them kept for messages after "
        f"{'it was' if kept == 1 else 'they were'} full" + (f", most by {_shorter(told[0][0])}." if told else "."),
        "rows": [(name, f"{one.files:,}", human_bytes(one.file_bytes)) for name, one in told[:LISTED]],
        "left": max(len(told) - LISTED, 0),
    }


def _shorter(name: str) -> str:
    """A long name without its middle: what names differ in is often at their end."""
    return name if len(name) <= NAME_SHORT else f"{name[: NAME_SHORT // 2]}…{name[1 - NAME_SHORT // 2 :]}"


def _keeper_sentence(figures: Figures) -> dict[str, str] | None:
    """Who keeps most under what the recommended one is compared with."""
    told = [one for one in figures.told if one.kept[0].files]
    if not told:
        return None
    worst = max(told, key=lambda one: (one.kept[0].file_bytes, one.name))
    kept = worst.kept[0]
    return {
        "candidate": figures.pictures[0].candidate,
        "name": worst.name,
        "files": count_of(kept.files, "journal file"),
        "bytes": human_bytes(kept.file_bytes),
    }


def _destination(one: DestinationFigures, scale: _Scale) -> dict[str, Any]:
    target = None
    if one.target is not None:
        target = {
            "alone": one.target == ALONE,
            "name": one.target,
            "cost": _NOT_TRIED if one.move_cost is None else scale.change(one.move_cost),
            "hours": "" if one.move_cost is None else scale.hours(one.move_cost),
        }
    return {
        "name": one.name,
        "store": one.store,
        "messages": count_of(one.sends, "message") + (f", {one.pending:,} pending" if one.pending else ""),
        "bytes": human_bytes(one.bytes),
        "kept": [
            {
                "by_others": human_bytes(kept.by_others) if kept.by_others else "none",
                "others": [(name, human_bytes(amount)) for name, amount in kept.others],
                "bytes": human_bytes(kept.file_bytes) if kept.files else "none",
                "files": count_of(kept.files, "file") if kept.files else "",
            }
            for kept in one.kept
        ],
        "target": target,
    }


def _share_scale(shares: Sequence[float]) -> tuple[list[tuple[float, str]], dict[float, float]]:
    """Levels to write at an axis, and each share's height on it; in powers of ten where the highest is far above."""
    if max(shares) <= _LINEAR_MAX:
        marks = svg.round_marks(max(shares))
        return [(mark / marks[-1], f"{mark:,.0%}") for mark in marks], {share: share / marks[-1] for share in shares}
    low, high = floor(log10(min(shares))), ceil(log10(max(shares)))
    step = ceil((high - low) / _MARKS)
    levels = [((power - low) / (high - low), f"{10.0**power:,.10g} times") for power in range(low, high + 1, step)]
    return levels, {share: (log10(share) - low) / (high - low) for share in shares}


def _curve(figures: Figures, scale: _Scale) -> dict[str, Any] | None:
    """J against the number of stores, as a share of the recommended one's."""
    points = figures.by_stores
    if len(points) < 2 or not scale.best.cost:
        return None
    chosen = len(scale.best.stores)
    shares = [cost / scale.best.cost for _, cost in points]
    levels, heights = _share_scale(shares)
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
