"""A recommendation as plain text: one sentence, three numbers, the candidates, the stores, the findings."""

from __future__ import annotations

from collections.abc import Sequence

from .recommendation import Candidate, Recommendation

_LISTED_MAX = 12


def render_text(recommendation: Recommendation) -> str:
    """The whole summary, lines ending in newlines."""
    parts = [
        _headline(recommendation),
        _numbers(recommendation),
        _table(recommendation),
        _stores(recommendation.recommended),
        _findings(recommendation),
    ]
    return "\n\n".join(parts) + "\n"


def human_bytes(count: float) -> str:
    """Three digits and a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _baseline(recommendation: Recommendation) -> Candidate:
    """What it is compared with: the current configuration where one was given."""
    names = {candidate.name for candidate in recommendation.candidates}
    return recommendation.candidate("current" if "current" in names else "all-together")


def _headline(recommendation: Recommendation) -> str:
    best, base = recommendation.recommended, _baseline(recommendation)
    shown = "as configured now" if base.name == "current" else "in one store"
    count = sum(len(store.destinations) for store in best.stores)
    if best.cost >= base.cost:
        return f"Leave these {count} destinations {shown}: no partitioning tried costs less."
    stores = "1 store" if len(best.stores) == 1 else f"{len(best.stores)} stores"
    saved = 1 - best.peak_bytes / base.peak_bytes
    change = f"{abs(saved):.0%} {'less' if saved >= 0 else 'more'}"
    return f"Put these {count} destinations into {stores}: at the peak the journals take {change} disk than {shown}."


def _numbers(recommendation: Recommendation) -> str:
    best, base = recommendation.recommended, _baseline(recommendation)
    return "\n".join(
        [
            f"  disk at the peak, {base.name:<12} {human_bytes(base.peak_bytes):>12}",
            f"  disk at the peak, {'recommended':<12} {human_bytes(best.peak_bytes):>12}",
            f"  two-phase commits it brings    {best.spanning_transactions:>12,}",
        ]
    )


def _table(recommendation: Recommendation) -> str:
    header = ("candidate", "stores", "mean disk", "peak disk", "GiB-hours", "spanning tx", "cost J")
    rows = [
        (
            c.name,
            str(len(c.stores)),
            human_bytes(c.mean_bytes),
            human_bytes(c.peak_bytes),
            f"{c.gib_hours:.4g}",
            f"{c.spanning_transactions:,}",
            f"{c.cost:.4g}",
        )
        for c in recommendation.candidates
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(_line(row, widths) for row in [header, tuple("-" * w for w in widths), *rows])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first = row[0].ljust(widths[0])
    return "  ".join([first, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]).rstrip()


def _stores(candidate: Candidate) -> str:
    lines = ["Stores recommended:"]
    for store in candidate.stores:
        lines.append(f"  {store.name}  (peak {human_bytes(store.peak_bytes)}, sync {store.sync})")
        lines.append(f"    destinations: {_listed(store.destinations)}")
        lines.append(f"    filters:      {_listed(store.filters)}")
    return "\n".join(lines)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LISTED_MAX
    return ", ".join(names[:_LISTED_MAX]) + (f" and {more} more" if more > 0 else "")


def _findings(recommendation: Recommendation) -> str:
    if not recommendation.findings:
        return "The trace left nothing open."
    lines = ["What the trace could not tell:"]
    lines += [f"  {finding.count:,} {finding.message} [{finding.code}]" for finding in recommendation.findings]
    return "\n".join(lines)
