"""The table at the end: a peer's median, its spread, and how many times it Anabranch is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

REFERENCE = "anabranch"
COLUMNS = {"a second": 13, "slowest": 13, "fastest": 13, "seconds": 10, "p50 us": 9, "p99 us": 9, "ratio": 8}


def table(lines: Sequence[dict[str, Any]]) -> str:
    """One block for each scenario. A ratio of 2.00 in a peer's row: Anabranch does twice as many a second."""
    blocks = []
    for scenario in dict.fromkeys(line["scenario"] for line in lines):
        runs = [line for line in lines if line["scenario"] == scenario]
        reference = _median([run for run in runs if run["peer"] == REFERENCE], "per_second")
        first = runs[0]
        title = f"{scenario}: n {first['n']}, {first['payload_bytes']} bytes, {first['threads']} thread(s)"
        header = f"  {'peer':<28}" + "".join(f"{name:>{width}}" for name, width in COLUMNS.items())
        rows = [
            _row(peer, [run for run in runs if run["peer"] == peer], reference)
            for peer in dict.fromkeys(run["peer"] for run in runs)
        ]
        blocks.append("\n".join([title, header, *rows]))
    return "\n\n".join(blocks)


def _row(peer: str, runs: Sequence[dict[str, Any]], reference: float | None) -> str:
    speeds = [run["per_second"] for run in runs]
    speed = median(speeds)
    row = f"  {peer:<28}{speed:>13,.0f}{min(speeds):>13,.0f}{max(speeds):>13,.0f}"
    row += f"{median(run['seconds'] for run in runs):>10.4f}"
    row += "".join(_cell(_median(runs, key), 9, "g") for key in ("p50_us", "p99_us"))
    row += _cell(reference / speed if reference else None, 8, ".2f")
    if "peak_bytes" in runs[0]:
        files, size = _median(runs, "peak_files"), _median(runs, "peak_bytes")
        row += f"   peak {files:.0f} files, {size:,.0f} bytes"
    return row


def _median(runs: Iterable[dict[str, Any]], key: str) -> float | None:
    values = [run[key] for run in runs if run[key] is not None]
    return median(values) if values else None


def _cell(value: float | None, width: int, form: str) -> str:
    return f"{'' if value is None else format(value, form):>{width}}"
