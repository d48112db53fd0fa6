"""A recommendation as plain text: one sentence, three numbers, the candidates, the stores, the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from ..text import human_bytes
from ..units import format_size
from .catch_all import REST
from .recommendation import Candidate, Recommendation

_LISTED_MAX = 12
_COMPACTED = "compacted peak"
"""A heading, which is left out where there is no room for it: above the table is what matters most of it."""


def render_text(recommendation: Recommendation, width: int = 80) -> str:
    """The whole summary in lines of at most `width` columns, but for names that are longer; ends in a newline."""
    parts = [
        *([_wrapped(cap_sentence(recommendation), width)] if not recommendation.cap_kept else []),
        _wrapped(headline(recommendation), width),
        _numbers(recommendation),
        *([_wrapped(compacting, width)] if (compacting := compaction_sentence(recommendation)) else []),
        _table(recommendation, width),
        *([_sizes(recommendation)] if len(recommendation.parameters["segment_sizes"]) > 1 else []),
        _stores(recommendation, width),
        _findings(recommendation, width),
    ]
    return "\n\n".join(parts) + "\n"


def _wrapped(text: str, width: int, indent: str = "", label: str = "") -> str:
    """At `width` columns; `label` stands before the first line, later ones begin below what follows it."""
    hanging = indent + " " * len(label)
    return textwrap.fill(
        text, max(width, 40), initial_indent=indent + label, subsequent_indent=hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def cap_sentence(recommendation: Recommendation) -> str:
    """That the cap on the peak cannot be kept."""
    cap, lowest = recommendation.parameters["peak_bytes_max"], recommendation.recommended.peak_bytes
    return (
        f"The cap on the peak, {human_bytes(cap)}, cannot be kept: the lowest peak found is {human_bytes(lowest)}. "
        "What follows is the partitioning with that peak."
    )


def baseline(recommendation: Recommendation) -> Candidate:
    """What it is compared with: the current configuration where one was given."""
    names = {candidate.name for candidate in recommendation.candidates}
    return recommendation.candidate("current" if "current" in names else "all-together")


def headline(recommendation: Recommendation) -> str:
    """The answer in one sentence."""
    best, base = recommendation.recommended, baseline(recommendation)
    shown = "as configured now" if base.name == "current" else "in one store"
    count = sum(len(store.destinations) for store in best.stores)
    what = "this destination" if count == 1 else f"these {count} destinations"
    if {store.destinations for store in best.stores} == {store.destinations for store in base.stores}:
        return f"Leave {what} {shown}: no partitioning tried costs less."
    stores = "1 store" if len(best.stores) == 1 else f"{len(best.stores)} stores"
    saved = 1 - best.peak_bytes / base.peak_bytes
    change = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    spared = base.spanning_transactions - best.spanning_transactions
    commits = f", and {spared:,} fewer transactions go over several stores" if spared > 0 else ""
    return f"Put {what} into {stores}: at the peak the journals take {change} disk than {shown}{commits}."


def _numbers(recommendation: Recommendation) -> str:
    best, base = recommendation.recommended, baseline(recommendation)
    return "\n".join(
        [
            f"  disk at the peak, {base.name:<12} {human_bytes(base.peak_bytes):>12}",
            f"  disk at the peak, {'recommended':<12} {human_bytes(best.peak_bytes):>12}",
            f"  two-phase commits it brings    {best.spanning_transactions:>12,}",
        ]
    )


def compaction_sentence(recommendation: Recommendation) -> str | None:
    """What becomes of these figures where journals compact; None where that was not worked out."""
    best, base = recommendation.recommended, baseline(recommendation)
    if best.compacted is None or base.compacted is None:
        return None
    shown = "as configured now" if base.name == "current" else "in one store"
    return (
        f"All this is without compaction. With it, which is on by default, the journals take "
        f"{human_bytes(base.compacted.peak_bytes)} at the peak {shown} and {human_bytes(best.compacted.peak_bytes)} as "
        f"recommended; {human_bytes(base.compacted.copied_bytes)} are copied for that {shown}, and "
        f"{human_bytes(best.compacted.copied_bytes)} as recommended."
    )


def _compacted(candidate: Candidate) -> str:
    return human_bytes(candidate.compacted.peak_bytes) if candidate.compacted else ""


def candidate_columns(recommendation: Recommendation) -> list[tuple[str, Callable[[Candidate], str]]]:
    """Heading and cell of each column in the table of candidates."""
    columns: list[tuple[str, Callable[[Candidate], str]]] = [
        ("candidate", lambda c: c.name),
        ("stores", lambda c: str(len(c.stores))),
        ("mean disk", lambda c: human_bytes(c.mean_bytes)),
        ("peak disk", lambda c: human_bytes(c.peak_bytes)),
        (_COMPACTED, _compacted),
        ("in a broker", _in_a_broker),
        ("GiB-hours", lambda c: f"{c.gib_hours:.4g}"),
        ("spanning tx", lambda c: f"{c.spanning_transactions:,}"),
        ("cost J", lambda c: f"{c.cost:.4g}"),
    ]
    hidden = [] if recommendation.parameters["model"] == "kahadb" else ["in a broker"]
    if recommendation.recommended.compacted is None:
        hidden.append(_COMPACTED)
    # By order alone a trace has no hours: figures in them would only look exact.
    if recommendation.parameters["clock"] == "seq":
        hidden += ["GiB-hours", "cost J"]
    return [column for column in columns if column[0] not in hidden]


def _in_a_broker(candidate: Candidate) -> str:
    peak = candidate.broker_peak
    if peak is None:
        return ""
    return f"{human_bytes(peak.bytes)} ({human_bytes(peak.low_bytes)} to {human_bytes(peak.high_bytes)})"


def _table(recommendation: Recommendation, width: int) -> str:
    columns = candidate_columns(recommendation)
    widths, rows = _cells(recommendation, columns)
    if sum(widths) + 2 * len(widths) - 2 > width:
        columns = [column for column in columns if column[0] != _COMPACTED]
        widths, rows = _cells(recommendation, columns)
    header = [name for name, _ in columns]
    table = "\n".join(_line(row, widths) for row in [header, ["-" * w for w in widths], *rows])
    return table + "\n" + _wrapped(candidate_note(recommendation), width)


def _cells(
    recommendation: Recommendation, columns: Sequence[tuple[str, Callable[[Candidate], str]]]
) -> tuple[list[int], list[list[str]]]:
    """The width of each column, and the cells of each row."""
    rows = [[cell(candidate) for _, cell in columns] for candidate in recommendation.candidates]
    return [max(len(name), *(len(row[i]) for row in rows)) for i, (name, _) in enumerate(columns)], rows


def candidate_note(recommendation: Recommendation) -> str:
    """What the headings of that table mean."""
    note = "spanning tx: transactions over several stores, which cost two-phase commits."
    if recommendation.parameters["model"] == "kahadb":
        note += " in a broker: the peak that ActiveMQ is to be expected to have, and between which it lies."
    if recommendation.recommended.compacted is not None:
        note += " compacted peak: peak disk with compaction."
    if recommendation.parameters["clock"] == "seq":
        return note + " The trace was taken by order alone, so there are no costs by the hour."
    return note + " GiB-hours: disk held, times how long. cost J: that, with stores and spanning tx priced in."


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()


def _sizes(recommendation: Recommendation) -> str:
    lines = ["Sizes of a journal file that were tried:"]
    for tried in recommendation.parameters["segment_sizes"]:
        best = tried["segment_bytes"] == recommendation.parameters["segment_bytes"]
        peak, mean = human_bytes(tried["peak_bytes"]), human_bytes(tried["mean_bytes"])
        lines.append(
            f"  {format_size(tried['segment_bytes']):>8}  peak disk {peak}, mean disk {mean}"
            f"{', the one of least cost' if best else ''}"
        )
    return "\n".join(lines)


def _stores(recommendation: Recommendation, width: int) -> str:
    lines = ["Stores recommended:"]
    for store in recommendation.recommended.stores:
        lines.append(f"  {store.name}  (peak {human_bytes(store.peak_bytes)}, sync {store.sync})")
        lines.append(_wrapped(_listed(store.destinations), width, "    ", "destinations: "))
        lines.append(_wrapped(_listed(store.filters), width, "    ", "filters:      "))
    if recommendation.has_rest:
        lines.append(_wrapped(rest_note(), width, "  "))
    return "\n".join(lines)


def rest_note() -> str:
    """That `stores.yaml` has one more store."""
    return f"And 1 more, {REST}, for what the trace did not show; it takes no disk before that comes."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _findings(recommendation: Recommendation, width: int) -> str:
    if not recommendation.findings:
        return "The trace left nothing open."
    lines = ["What the trace could not tell:"]
    lines += [_wrapped(f"{f.count:,} {f.message} [{f.code}]", width, "  ") for f in recommendation.findings]
    return "\n".join(lines)
