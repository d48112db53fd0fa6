"""A recommendation as plain text: one sentence, three numbers, the candidates, the stores, the findings."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from .recommendation import Candidate, Recommendation
from .trace import count_of

_LISTED_MAX = 12


def render_text(recommendation: Recommendation, width: int = 80) -> str:
    """The whole summary in lines of at most `width` columns, but for names that are longer; ends in a newline."""
    parts = [
        *([_cap(recommendation, width)] if not recommendation.cap_kept else []),
        _wrapped(_headline(recommendation), width),
        _numbers(recommendation),
        _table(recommendation, width),
        _stores(recommendation.recommended, width),
        _findings(recommendation, width),
    ]
    return "\n\n".join(parts) + "\n"


def human_bytes(count: float) -> str:
    """`9.2 KB`, `23.1 MB`: powers of a thousand, as disks are sold."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return count_of(round(count), "byte") if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _wrapped(text: str, width: int, indent: str = "", label: str = "") -> str:
    """At `width` columns; `label` stands before the first line, later ones begin below what follows it."""
    hanging = indent + " " * len(label)
    return textwrap.fill(
        text, max(width, 40), initial_indent=indent + label, subsequent_indent=hanging,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _cap(recommendation: Recommendation, width: int) -> str:
    cap, lowest = recommendation.parameters["peak_bytes_max"], recommendation.recommended.peak_bytes
    return _wrapped(
        f"The cap on the peak, {human_bytes(cap)}, cannot be kept: the lowest peak found is {human_bytes(lowest)}. "
        "What follows is the partitioning with that peak.",
        width,
    )


def _baseline(recommendation: Recommendation) -> Candidate:
    """What it is compared with: the current configuration where one was given."""
    names = {candidate.name for candidate in recommendation.candidates}
    return recommendation.candidate("current" if "current" in names else "all-together")


def _headline(recommendation: Recommendation) -> str:
    best, base = recommendation.recommended, _baseline(recommendation)
    shown = "as configured now" if base.name == "current" else "in one store"
    count = sum(len(store.destinations) for store in best.stores)
    what = "this destination" if count == 1 else f"these {count} destinations"
    if best.cost >= base.cost:
        return f"Leave {what} {shown}: no partitioning tried costs less."
    stores = "1 store" if len(best.stores) == 1 else f"{len(best.stores)} stores"
    saved = 1 - best.peak_bytes / base.peak_bytes
    change = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    return f"Put {what} into {stores}: at the peak the journals take {change} disk than {shown}."


def _numbers(recommendation: Recommendation) -> str:
    best, base = recommendation.recommended, _baseline(recommendation)
    return "\n".join(
        [
            f"  disk at the peak, {base.name:<12} {human_bytes(base.peak_bytes):>12}",
            f"  disk at the peak, {'recommended':<12} {human_bytes(best.peak_bytes):>12}",
            f"  two-phase commits it brings    {best.spanning_transactions:>12,}",
        ]
    )


def _table(recommendation: Recommendation, width: int) -> str:
    columns: list[tuple[str, Callable[[Candidate], str]]] = [
        ("candidate", lambda c: c.name),
        ("stores", lambda c: str(len(c.stores))),
        ("mean disk", lambda c: human_bytes(c.mean_bytes)),
        ("peak disk", lambda c: human_bytes(c.peak_bytes)),
        ("GiB-hours", lambda c: f"{c.gib_hours:.4g}"),
        ("spanning tx", lambda c: f"{c.spanning_transactions:,}"),
        ("cost J", lambda c: f"{c.cost:.4g}"),
    ]
    # By order alone a trace has no hours: figures in them would only look exact.
    timeless = recommendation.parameters["clock"] == "seq"
    if timeless:
        columns = [column for column in columns if column[0] not in ("GiB-hours", "cost J")]
    header = [name for name, _ in columns]
    rows = [[cell(candidate) for _, cell in columns] for candidate in recommendation.candidates]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    table = "\n".join(_line(row, widths) for row in [header, ["-" * w for w in widths], *rows])
    note = "spanning tx: transactions over several stores, which cost two-phase commits."
    if timeless:
        note += " The trace was taken by order alone, so there are no costs by the hour."
    else:
        note += " GiB-hours: disk held, times how long. cost J: that, with stores and spanning tx priced in."
    return table + "\n" + _wrapped(note, width)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()


def _stores(candidate: Candidate, width: int) -> str:
    lines = ["Stores recommended:"]
    for store in candidate.stores:
        lines.append(f"  {store.name}  (peak {human_bytes(store.peak_bytes)}, sync {store.sync})")
        lines.append(_wrapped(_listed(store.destinations), width, "    ", "destinations: "))
        lines.append(_wrapped(_listed(store.filters), width, "    ", "filters:      "))
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _findings(recommendation: Recommendation, width: int) -> str:
    if not recommendation.findings:
        return "The trace left nothing open."
    lines = ["What the trace could not tell:"]
    lines += [_wrapped(f"{f.count:,} {f.message} [{f.code}]", width, "  ") for f in recommendation.findings]
    return "\n".join(lines)
