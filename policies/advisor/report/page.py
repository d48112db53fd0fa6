"""A recommendation as one HTML file: it asks nothing of the network, runs no script, and can be printed.

    Path("report.html").write_text(render_html(answer))

`report.html.j2` says how it looks; here, in `pictures` and in `answer` is what it says. Everything that a trace named
is escaped by the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from math import isinf
from typing import Any
from unicodedata import category

import jinja2
from markupsafe import Markup, escape

from ...activemq import write_mkahadb
from ...config import loads
from ...text import count_of, human_bytes
from ...units import format_size
from ..advice.answer import (
    baseline,
    cap_sentence,
    headline,
    is_compacting,
    moves,
    next_step,
    peak_bytes,
    rest_note,
    stays,
)
from ..advice.figures import ALONE, DestinationFigures, Figures
from ..advice.recommendation import FILES, Candidate, Recommendation, StorePlan
from ..model.cost_model import GIB, HOUR
from .pictures import LISTED, NAME_SHORT, Signs, pictures_of, shorter, signs_of
from .render import candidate_columns, candidate_note, render_text
from .scale import Scale
from .words import byte_hours

STORES_SHOWN = 60
MOVES_SHOWN = 15
LISTED_MAX = 200
_NO_FIGURES: dict[str, Any] = {
    "histories": [], "lives": [], "listed": [], "kinds": [], "holders": [], "curve": None, "holder_sentence": None,
}  # fmt: skip
_PARTS = {"histories": "disk over time", "lives": "who keeps which journal files", "listed": "each destination"}
_NOT_TRIED = "not tried, since the trace is large"
_EPOCH_FROM = 946_684_800.0
"""2000-01-01: a trace's clock before it counts from somewhere else."""


def render_html(recommendation: Recommendation, out: str | None = None) -> str:
    """Render the whole file. `out`: where its files are, for the command that it shows."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["visible"] = _visible
    environment.filters["breakable"] = _breakable
    environment.filters["shorter"] = shorter
    template = environment.from_string((files(__package__) / "report.html.j2").read_text("utf-8"))
    return template.render(_content(recommendation, out)) + "\n"


def render_files(recommendation: Recommendation, where: str) -> dict[str, str]:
    """Make the text of each of `Recommendation.write`'s files, by name. `where`: the place where they are to be, for
    the command that they show."""
    texts = (
        json.dumps(recommendation.to_json(), indent=2) + "\n",
        recommendation.stores_yaml(),
        render_text(recommendation, out=where),
        render_html(recommendation, out=where),
    )
    return dict(zip(FILES, texts, strict=True))


def _visible(text: str) -> str:
    """Show by their number the characters that cannot be seen, or that turn the order of others around."""
    return "".join(f"[U+{ord(c):04X}]" if category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") else c for c in text)


def _breakable(name: str) -> Markup:
    """Escape a name, with places to break a line where it has joints."""
    return Markup(re.sub(r"([._-]+)", r"\1<wbr>", str(escape(_visible(name)))))


def _content(recommendation: Recommendation, out: str | None) -> dict[str, Any]:
    """Tell what the template shows, by the names that it has for it."""
    best, figures = recommendation.recommended, recommendation.figures
    scale = Scale(recommendation.parameters, best.cost)
    signs = signs_of(figures) if figures else Signs()
    shown = _figures(figures, signs, scale, recommendation) if figures else _NO_FIGURES
    columns = _columns(recommendation, scale)
    command, note = next_step(recommendation, out) or (None, None)
    moved = [] if stays(recommendation) else moves(recommendation)
    return {
        **shown,
        "colour": signs.colour,
        "pattern": signs.pattern,
        "compacts": is_compacting(recommendation),
        "missing": [
            what
            for key, what in _PARTS.items()
            if not shown[key] and (key != "lives" or not is_compacting(recommendation))
        ],
        "name_short": NAME_SHORT,
        "headline": headline(recommendation),
        "cap": None if recommendation.cap_kept else cap_sentence(recommendation),
        "command": command,
        "command_note": note,
        "xml": _xml(recommendation),
        "moves": [_move(*move) for move in moved[:MOVES_SHOWN]],
        "moves_left": max(len(moved) - MOVES_SHOWN, 0),
        "has_sources": any(move.before is not None for move in moved),
        "sharing": recommendation.sharing,
        "numbers": _numbers(recommendation),
        "columns": [name for name, _ in columns],
        "candidates": [[cell(candidate) for _, cell in columns] for candidate in recommendation.candidates],
        "candidate_note": candidate_note(recommendation),
        "stores": [_store(store, figures, scale) for store in best.stores[:STORES_SHOWN]],
        "stores_left": max(len(best.stores) - STORES_SHOWN, 0),
        "rest_note": rest_note() if recommendation.has_rest else None,
        "findings": recommendation.findings,
        "parameters": _parameters(recommendation, scale),
    }


def _xml(recommendation: Recommendation) -> str | None:
    """Tell what goes into an activemq.xml, where the recommendation is for a broker."""
    if recommendation.parameters["model"] != "kahadb" or stays(recommendation):
        return None
    return write_mkahadb(loads(recommendation.stores_yaml(), ".", names_suffice=True)).xml


def _move(store: str, before: str | None, destinations: Sequence[str]) -> dict[str, Any]:
    left = max(len(destinations) - LISTED, 0)
    return {"store": store, "before": before, "first": destinations[:LISTED], "left": left}


def _numbers(recommendation: Recommendation) -> list[tuple[str, str]]:
    best, base = recommendation.recommended, baseline(recommendation)
    found = [(f"disk at the peak, {base.name}", human_bytes(peak_bytes(base)))]
    if not stays(recommendation):
        found.append(("disk at the peak, recommended", human_bytes(peak_bytes(best))))
    if is_compacting(recommendation):
        now = "" if stays(recommendation) else f", {human_bytes(base.copied_bytes)} {base.name}"
        found.append((f"copied by compaction{now}", human_bytes(best.copied_bytes)))
    return [*found, ("transactions over several stores", f"{best.spanning_transactions:,}")]


def _columns(recommendation: Recommendation, scale: Scale) -> list[tuple[str, Any]]:
    """Return the summary's columns, and disk over time where there are hours."""

    def hours(candidate: Candidate) -> str:
        return byte_hours(candidate.gib_hours)

    columns = list(candidate_columns(recommendation))
    return columns if scale.timeless else [*columns[:-1], ("disk over time", hours), columns[-1]]


def _listing(names: Sequence[str]) -> dict[str, Any]:
    return {
        "first": names[:LISTED],
        "more": names[LISTED:LISTED_MAX],
        "count": len(names),
        "left": max(len(names) - LISTED_MAX, 0),
    }


def _store(store: StorePlan, figures: Figures | None, scale: Scale) -> dict[str, Any]:
    facts = [
        ("disk, mean", human_bytes(store.gib_hours * GIB * HOUR / scale.duration)),
        ("disk, peak", human_bytes(store.peak_bytes)),
        ("sync", store.sync),
        *([("copied by compaction", human_bytes(store.copied_bytes))] if store.copied_bytes else []),
    ]
    nearest = None
    found = next((one for one in figures.stores if one.name == store.name), None) if figures else None
    if found:
        facts += [
            ("messages", f"{found.sends:,}" + (f" ({found.pending:,} pending)" if found.pending else "")),
            ("written", human_bytes(found.bytes)),
            _acked("half", found.retention_p50, scale),
            *([] if isinf(found.retention_p50) else [_acked("95 %", found.retention_p95, scale)]),
        ]
        cost = found.merged_cost
        if found.nearest is not None:
            nearest = {"name": found.nearest, "cost": _NOT_TRIED if cost is None else scale.cost(cost)}
    return {
        "name": store.name,
        "destinations": _listing(store.destinations),
        "filters": _listing(store.filters),
        "facts": facts,
        "nearest": nearest,
    }


def _acked(share: str, seconds: float, scale: Scale) -> tuple[str, str]:
    if isinf(seconds):
        return "acked in the trace", f"fewer than {share}"
    return f"{share} are acked within", scale.time(seconds)


def _parameters(recommendation: Recommendation, scale: Scale) -> list[tuple[str, str]]:
    given = recommendation.parameters
    figures = recommendation.figures
    percent = given["compact_live_percent"]
    ours = f"our own journal, {f'compacted where at most {percent} % lives' if percent else 'without compaction'}"
    ours += "; disk without the free files that pool_files keeps"
    rows = [
        ("model", ours if given["model"] == "anabranch" else "ActiveMQ's KahaDB, with its ack rule"),
        ("clock", "order alone (seq)" if scale.timeless else "the trace's own (ts)"),
        ("operations in the trace", f"{given['operations']:,}"),
        ("length of the trace", scale.time(scale.duration)),
        ("journal file", format_size(given["segment_bytes"])),
        (
            "disk",
            f"{given['disk_gib']:g} GiB, {given['sync_rate']:g} syncs a second, copies {given['copy_rate']:g} MiB/s",
        ),
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


def _figures(figures: Figures, signs: Signs, scale: Scale, recommendation: Recommendation) -> dict[str, Any]:
    return {
        **pictures_of(figures, signs, scale, len(recommendation.recommended.stores)),
        "holders": [picture.candidate for picture in figures.pictures if figures.listed and figures.listed[0].kept],
        "holder_sentence": _holder_sentence(figures),
        "listed": [_destination(one, scale) for one in figures.listed],
        "unlisted": len(figures.destinations) - len(figures.listed),
    }


def _holder_sentence(figures: Figures) -> dict[str, str] | None:
    """Say who keeps most under what the recommended one is compared with."""
    listed = [one for one in figures.listed if one.kept and one.kept[0].files]
    if not listed:
        return None
    worst = max(listed, key=lambda one: (one.kept[0].file_bytes, one.name))
    kept = worst.kept[0]
    return {
        "candidate": figures.pictures[0].candidate,
        "name": worst.name,
        "files": count_of(kept.files, "journal file"),
        "bytes": human_bytes(kept.file_bytes),
    }


def _destination(one: DestinationFigures, scale: Scale) -> dict[str, Any]:
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
