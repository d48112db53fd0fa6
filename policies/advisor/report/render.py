"""A recommendation as plain text, a screen of it: the answer, the next command, what goes where, the candidates."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from ...text import human_bytes, listed, printable, table
from ...units import format_size
from ..advice.answer import cap_sentence, headline, is_compacting, moves, next_step, peak_bytes, rest_note
from ..advice.recommendation import Candidate, Recommendation
from .words import ratio

_STORES_MAX = 6
"""Stores listed at most, of those that destinations come into."""
_NAMES_MAX = 4
_FINDINGS_MAX = 3
_MEAN = "mean disk"
_SHOWN = ("recommended", "current", "all-together", "all-separate")
"""Candidates in the table; all are in recommendation.json and report.html."""


def render_text(recommendation: Recommendation, width: int = 80, out: str | None = None) -> str:
    """Render the summary in lines of at most `width` columns, but for longer names. The text ends in a newline. `out`:
    where its files are, for the command that it shows."""
    parts = [
        *([_wrapped(cap_sentence(recommendation), width)] if not recommendation.cap_kept else []),
        _wrapped(headline(recommendation), width),
        *_sharing(recommendation, width),
        *_next(recommendation, width, out),
        *_moves(recommendation, width),
        _table(recommendation, width),
        *([_sizes(recommendation)] if len(recommendation.parameters["segment_sizes"]) > 1 else []),
        _findings(recommendation, width),
    ]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str, width: int, indent: str = "", label: str = "") -> str:
    """Wrap a text at `width` columns. `label` stands before the first line; later ones begin below what follows it."""
    hanging = indent + " " * len(label)
    lines = textwrap.wrap(
        text, max(width, 40), initial_indent=indent + label, subsequent_indent=hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return "\n".join(map(printable, lines))


def _sharing(recommendation: Recommendation, width: int) -> list[str]:
    if recommendation.sharing is None:
        return []
    first, *more = recommendation.sharing.sentences()
    return ["\n".join([_wrapped(first, width), *(_wrapped(text, width, "  ") for text in more)])]


def _next(recommendation: Recommendation, width: int, out: str | None) -> list[str]:
    """Show the command that does as the answer says. It is to be copied, so it is not wrapped."""
    step = next_step(recommendation, out)
    return [] if step is None else [f"  {step[0]}\n{_wrapped(step[1], width, '  ')}"]


def _moves(recommendation: Recommendation, width: int) -> list[str]:
    found = moves(recommendation)
    if not found or len(recommendation.recommended.stores) == 1:
        return []
    room = max(len(move.store) for move in found[:_STORES_MAX])
    lines = []
    for move in found[:_STORES_MAX]:
        source = f" (from {move.before})" if move.before is not None else ""
        names = listed(tuple(map(printable, move.destinations)), _NAMES_MAX)
        lines.append(_wrapped(names + source, width, "  ", move.store.ljust(room + 2)))
    if len(found) > _STORES_MAX:
        lines.append(f"  and {len(found) - _STORES_MAX} more, in stores.yaml")
    if recommendation.has_rest:
        lines.append(_wrapped(rest_note(), width, "  "))
    return ["\n".join(lines)]


Columns = Sequence[tuple[str, Callable[[Candidate], str]]]


def candidate_columns(recommendation: Recommendation) -> Columns:
    """Return the heading and the cell of each column in the table of candidates."""
    best = recommendation.recommended
    columns: list[tuple[str, Callable[[Candidate], str]]] = [
        ("candidate", lambda c: c.name),
        ("stores", lambda c: str(len(c.stores))),
        (_MEAN, lambda c: human_bytes(c.mean_bytes)),
        ("peak disk", lambda c: human_bytes(peak_bytes(c))),
    ]
    if best.broker_peak is not None:
        columns.append(("between", _range))
    if is_compacting(recommendation):
        columns.append(("copied", lambda c: human_bytes(c.copied_bytes)))
    columns.append(("spanning tx", lambda c: f"{c.spanning_transactions:,}"))
    columns.append(("cost", lambda c: ratio(c.cost / best.cost) if best.cost and c is not best else ""))
    return columns


def _range(candidate: Candidate) -> str:
    peak = candidate.broker_peak
    if peak is None:
        return ""
    low, high = human_bytes(peak.low_bytes), human_bytes(peak.high_bytes)
    number, _, unit = low.rpartition(" ")
    return f"{number if high.endswith(unit) else low} to {high}"


def _table(recommendation: Recommendation, width: int) -> str:
    lines = _rows(recommendation, candidate_columns(recommendation))
    if max(map(len, lines)) > width:  # the peak matters more
        lines = _rows(recommendation, [one for one in candidate_columns(recommendation) if one[0] != _MEAN])
    return "\n".join([*lines, _wrapped(candidate_note(recommendation), width)])


def _rows(recommendation: Recommendation, columns: Columns) -> list[str]:
    shown = [candidate for candidate in recommendation.candidates if candidate.name in _SHOWN]
    rows = [[name for name, _ in columns], *([cell(candidate) for _, cell in columns] for candidate in shown)]
    head, _, *lines = table(rows, right=range(1, len(columns)))
    return [head, *lines]


def candidate_note(recommendation: Recommendation) -> str:
    """Tell what the headings of that table mean."""
    kahadb = recommendation.parameters["model"] == "kahadb"
    impossible = ", ".join(one.name for one in recommendation.candidates if not one.possible)
    beside = f" Not possible, but to compare with: {impossible}." if impossible else ""
    costs = f"disk over time, stores, spanning tx{'' if kahadb else ', copying'}"
    note = f"spanning tx: transactions over several stores. cost: {costs}.{beside}"
    if kahadb:
        return f"peak disk: what is to be expected of a broker, and between which it lies. {note}"
    if not is_compacting(recommendation):
        return f"Without compaction: compact_live_percent is 0. {note}"
    return f"copied: by compaction. {note}"


def _sizes(recommendation: Recommendation) -> str:
    lines = ["Sizes of a journal file that were tried:"]
    why = "least cost" if recommendation.cap_kept else "the lowest peak"
    for tried in recommendation.parameters["segment_sizes"]:
        best = tried["segment_bytes"] == recommendation.parameters["segment_bytes"]
        peak, mean = human_bytes(tried["peak_bytes"]), human_bytes(tried["mean_bytes"])
        lines.append(
            f"  {format_size(tried['segment_bytes']):>8}  peak disk {peak}, mean disk {mean}"
            f"{f', the one of {why}' if best else ''}"
        )
    return "\n".join(lines)


def _findings(recommendation: Recommendation, width: int) -> str:
    found = recommendation.findings
    if not found:
        return "The trace left nothing open."
    lines = [_wrapped(f"{f.count:,} {f.message} [{f.code}]", width) for f in found[:_FINDINGS_MAX]]
    more = len(found) - _FINDINGS_MAX
    return "\n".join([*lines, *([f"And {more} more, in report.html."] if more > 0 else [])])
