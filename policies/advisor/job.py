"""The advisor from end to end: trace in, recommendation out.

    1 open        the trace is checked, here or by Spark             opening, engine
    2 summarise   it is reduced to a summary                         summary
    3 search      partitionings of least cost, by the summary        evaluate, search
    4 confirm     the finalists, exactly                             engine, model, confirm
    5 name        stores, and the fewest filters that make them      candidates, patterns

Every figure in a recommendation comes from the exact model.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TraceError
from ..names.destination import Destination
from ..names.pattern import Pattern
from ..text import human_bytes
from ..units import format_size
from .advice.candidates import broker_peaks, candidates_of, policies_of
from .advice.figures import Figures, build_figures, figures_of_courses
from .advice.opening import Source, open_engine
from .advice.options import RecommendOptions
from .advice.recommendation import PEAK_CAP, Candidate, Recommendation
from .advice.revision import revised_yaml
from .advice.sharing import sharing_of
from .model.cost_model import Partition, Retention, canonical
from .model.engine import Engine
from .model.evaluate import SetCosts
from .report.page import render_files
from .search.confirm import improve_exactly
from .search.current import CurrentConfig
from .search.search import Constraints, Progress, keeps, search
from .statistics.destination_usage import destination_usage
from .trace.events import NodeLog
from .trace.table import Finding

logger: logging.Logger = logging.getLogger(__name__)

_Finalist = tuple[Partition, Retention]
_SHARED = ("shared",)
"""The rule of destinations that come together in a store which the nodes share, and which is not there yet."""
_WEIGHTS = tuple(4.0**power for power in range(7))
"""How dear disk is made, step by step, while the peak is above its cap."""

SHORT_SECONDS = 3600
"""A trace of less tells little of what is to come."""
WORTH = 0.01
"""Part that a partitioning has to save of what is there, that it is worth to move messages."""
SEGMENTS_MAX = 10_000_000
"""Journal files that a trace may fill: each takes some dozens of bytes in every partitioning that is tried."""


def recommend(
    trace: Source, options: RecommendOptions | None = None, progress: Progress | None = None
) -> Recommendation:
    """Recommend which destinations should share a store.

    `trace`: an Arrow table as `trace.SCHEMA` says; the path of one (.parquet, .arrow, .csv, a directory of Parquet);
    the URL of Parquet in a file system that Spark reads; a workload. Raises TraceError where it cannot be used,
    ConfigError where the options contradict each other.
    """
    options = options or RecommendOptions()
    return recommend_best(trace, options, [options.segment_bytes], progress)


def recommend_best(
    trace: Source,
    options: RecommendOptions,
    segment_sizes: Sequence[int],
    progress: Progress | None = None,
    logs: Sequence[NodeLog] = (),
) -> Recommendation:
    """Recommend the best of several sizes of a journal file, in bytes. The cap on the peak comes first, then the cost.
    `parameters["segment_sizes"]` has what each came to. Raises as `recommend`. `logs`: of the nodes, how their clocks
    compare, for the answer. Without any size it is that of the journals in force which hold most.

    The trace is opened once, and what the report alone shows is worked out for the best alone."""
    if not segment_sizes and options.current is None:
        raise ConfigError(["segment_sizes is empty; give at least one size of a journal file, in bytes"])
    sized = [replace(options, segment_bytes=size) for size in dict.fromkeys(segment_sizes)]
    for each in sized:
        each.check()
    report = progress or (lambda stage, share: None)
    with open_engine(trace, options, report) as engine:
        current = None if options.current is None else _current(engine, options.current)
        sized = sized or [replace(options, segment_bytes=_sizes_in_force(engine, options)[0])]
        for each in sized:
            _check_segments(engine, each, str(trace) if isinstance(trace, (str, Path)) else "the trace")
        constraints = _constraints(engine, options)
        best = _choose(engine, constraints, current, sized[0], report)
        tried = [best.as_row()]
        for each in sized[1:]:
            # One beside the best at a time: each has what it found of some hundred thousand sets.
            choice = _choose(engine, constraints, current, each, report)
            tried.append(choice.as_row())
            best = min(best, choice, key=_Choice.order)
        return replace(
            _answer(engine, constraints, best, tried, report),
            sharing=sharing_of(engine, options.current, logs, options.clock == "ts"),
        )


@dataclass(frozen=True, slots=True)
class _Choice:
    """The partitionings found for one size of a journal file."""

    options: RecommendOptions
    set_costs: SetCosts
    partitions: dict[str, tuple[Partition, Retention]]
    """The partitionings to show, by name, the recommended one first."""
    findings: list[Finding]
    peak_bytes: int
    """The recommended one's peak that the cap is held against."""

    @property
    def recommended(self) -> Retention:
        return self.partitions["recommended"][1]

    @property
    def cap_kept(self) -> bool:
        return all(finding.code != PEAK_CAP for finding in self.findings)

    def order(self) -> tuple[bool, int, float]:
        """Return what is least of the best choice: above the cap the peak counts before the cost."""
        return not self.cap_kept, 0 if self.cap_kept else self.peak_bytes, self.recommended.cost

    def as_row(self) -> dict[str, Any]:
        """Tell what the choice comes to, for `parameters["segment_sizes"]`."""
        return {
            "segment_bytes": self.options.segment_bytes,
            "mean_bytes": self.recommended.mean_bytes,
            "peak_bytes": self.recommended.peak_bytes,
            "cost": self.recommended.cost,
        }


def _answer(
    engine: Engine, constraints: Constraints, choice: _Choice, tried: list[dict[str, Any]], report: Progress
) -> Recommendation:
    options, partitions = choice.options, choice.partitions
    candidates = candidates_of(engine, constraints, partitions, options)
    return Recommendation(
        recommended=candidates[0],
        candidates=tuple(candidates),
        findings=(*engine.findings, *choice.findings, *_unmatched(engine, options), *_short(engine, options)),
        parameters=_parameters(options, engine, tried),
        destinations=destination_usage(choice.set_costs.summary),
        figures=_figures(choice.set_costs, engine, constraints, partitions, candidates, options, report),
        render=render_files,
        revised=_revised(candidates[0], engine, options),
        directory=None if options.current is None or engine.use else str(options.current.config.directory),
    )


def _check_segments(engine: Engine, options: RecommendOptions, source: str) -> None:
    """Raise TraceError where there would be more journal files than can be simulated."""
    segments = engine.bytes / engine.sizes.capacity(options.segment_bytes)
    if segments > SEGMENTS_MAX:
        largest, seq = engine.largest
        raise TraceError(
            f"{source}: {human_bytes(engine.bytes)} in all fill {segments:,.0f} journal files of "
            f"{options.segment_bytes} bytes, and at most {SEGMENTS_MAX:,} can be simulated; the largest operation is "
            f"that of seq {seq}, of {largest} bytes; if the sizes are right, choose a larger --segment-size"
        )


def _sizes_in_force(engine: Engine, options: RecommendOptions) -> tuple[int, ...]:
    """Return the sizes of journal files in the configuration in force, those first that hold most."""
    weights = {total.name: total.bytes for total in engine.totals}
    return () if options.current is None else options.current.segment_sizes(weights)


def _size_findings(engine: Engine, options: RecommendOptions) -> list[Finding]:
    """Find what the figures, which are those of one size of a journal file, do not show."""
    size, found = format_size(options.segment_bytes), []
    sizes = _sizes_in_force(engine, options)
    if len(sizes) > 1:
        message = f"sizes of a journal file in force, {', '.join(map(format_size, sizes))}: all figures are of {size}"
        found.append(Finding("segment-sizes", len(sizes), message))
    largest, seq = engine.largest
    if largest > engine.sizes.capacity(options.segment_bytes):
        message = (
            f"bytes in the largest operation, that of seq {seq}: more than a journal file of {size}, as which it is "
            "counted; disk is above all figures, so choose a larger --segment-size"
        )
        found.append(Finding("large-operation", largest, message))
    return found


def _constraints(engine: Engine, options: RecommendOptions) -> Constraints:
    destinations = [Destination.parse(name) for name in engine.destinations]
    pinned = []
    for group in options.pinned:
        patterns = [Pattern.parse(text) for text in group]
        members = tuple(i for i, d in enumerate(destinations) if any(p.matches(d) for p in patterns))
        if members:
            pinned.append(members)
    current = options.current
    rules = [None if current is None else current.rules_of(name) for name in engine.destinations]
    pairs: list[object] = [*zip(policies_of(engine, options), rules, strict=True)]
    for number in engine.crossed:
        if current is None or not current.is_shared(engine.destinations[number]):
            pairs[number] = rules[number] = _SHARED
    number_of = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    groups = tuple(number_of[pair] for pair in pairs)
    places = dict.fromkeys(rule for rule in rules if isinstance(rule, tuple))
    pinned += [tuple(number for number, rule in enumerate(rules) if rule == place) for place in places]
    return Constraints(groups, tuple(pinned), options.stores_max)


def _unmatched(engine: Engine, options: RecommendOptions) -> list[Finding]:
    """Find the patterns that match nothing: mistyped, perhaps."""
    destinations = [Destination.parse(name) for name in engine.destinations]
    given = [*options.durability, *(pattern for group in options.pinned for pattern in group)]
    unmatched = [text for text in dict.fromkeys(given) if not any(map(Pattern.parse(text).matches, destinations))]
    if not unmatched:
        return []
    what = "pattern that matches" if len(unmatched) == 1 else "patterns that match"
    message = f"{what} no destination in the trace: {', '.join(unmatched)}"
    return [Finding("unmatched-patterns", len(unmatched), message)]


def _short(engine: Engine, options: RecommendOptions) -> list[Finding]:
    """Find that a trace covers too short a time."""
    seconds = ceil(engine.finish - engine.begin)
    if options.clock == "seq" or seconds >= SHORT_SECONDS:
        return []
    return [Finding("short-trace", seconds, "s is all that the trace covers; record some days")]


def _choose(
    engine: Engine, constraints: Constraints, current: Partition | None, options: RecommendOptions, report: Progress
) -> _Choice:
    report("summarise", 0.0)
    set_costs = SetCosts(engine.summary(options.segment_bytes), options.costs)
    report("summarise", 1.0)
    everything = range(len(engine.destinations))
    compared = {"all-together": canonical([everything]), "all-separate": canonical([[d] for d in everything])}
    if current is not None:
        compared["current"] = current
    finalists, known, peaks = _finalists(engine, set_costs, constraints, [*compared.values()], options, report)
    finalists, findings = _by_cap(finalists, peaks, options.peak_bytes_max)
    base = compared.get("current", compared["all-together"])
    left = _under([(base, known[base])], peaks, options.peak_bytes_max) if keeps(base, constraints) else []
    if left and not is_worth(finalists[0][1], known[base]):
        finalists = [*left, *(entry for entry in finalists if entry[0] != base)]
    named = {"recommended": finalists[0][0], **compared}
    others = [partition for partition, _ in finalists[1:] if partition not in named.values()]
    named.update(zip(("second", "third"), others, strict=False))
    partitions = {name: (partition, known[partition]) for name, partition in named.items()}
    findings += _size_findings(engine, options)
    return _Choice(options, set_costs, partitions, findings, peaks[named["recommended"]])


def _finalists(
    engine: Engine,
    set_costs: SetCosts,
    constraints: Constraints,
    compared: Sequence[Partition],
    options: RecommendOptions,
    report: Progress,
) -> tuple[list[_Finalist], dict[Partition, Retention], dict[Partition, int]]:
    """Search, with disk ever dearer while the peak is above its cap. Return the partitionings that may be recommended,
    the figures of these and of all `compared`, and the peaks of all that a cap is held against."""
    costs = options.costs
    known: dict[Partition, Retention] = {}
    peaks: dict[Partition, int] = {}
    # The summary may misjudge them, and no answer may cost more than what is there or anybody would think of.
    tried = [partition for partition in dict.fromkeys(compared) if keeps(partition, constraints)]
    finalists: list[_Finalist] = []
    for step, weight in enumerate(_WEIGHTS):
        weighted = set_costs.reweighted(weight)
        found = search(weighted, constraints, progress=report)
        tried += [*improve_exactly(engine, set_costs.summary, costs, constraints, found, weight), *found]
        report("confirm", 0.0)
        # Those to compare with go along with the first: through Spark what counts is how often is asked.
        unknown = [p for p in dict.fromkeys([*tried, *compared]) if p not in known]
        known.update(zip(unknown, engine.measure(unknown, costs), strict=True))
        # A broker's peak is shown, so the cap is for that.
        in_broker = broker_peaks(engine, unknown, options) if options.peak_bytes_max is not None else {}
        peaks.update((p, in_broker[p].bytes if in_broker else known[p].peak_bytes) for p in unknown)
        report("confirm", 1.0)
        finalists = [(partition, known[partition]) for partition in dict.fromkeys(tried)]
        if _under(finalists, peaks, options.peak_bytes_max):
            break
        logger.debug("no partitioning under the cap of the peak after %d of %d steps", step + 1, len(_WEIGHTS))
    logger.debug("evaluated %d sets", set_costs.evaluated)
    return finalists, known, peaks


def _by_cap(
    finalists: list[_Finalist], peaks: Mapping[Partition, int], peak_bytes_max: int | None
) -> tuple[list[_Finalist], list[Finding]]:
    """Sort by cost, those first that keep the cap on the peak; if none does, the one with the lowest peak."""
    finalists = sorted(finalists, key=lambda entry: (entry[1].cost, entry[0]))
    first, findings = _under(finalists, peaks, peak_bytes_max), []
    if not first and peak_bytes_max is not None:
        first = [min(finalists, key=lambda entry: (peaks[entry[0]], entry[1].cost, entry[0]))]
        cap = human_bytes(peak_bytes_max)
        message = f"cap on the peak, {cap}, that no partitioning found keeps; the one with the lowest is recommended"
        findings.append(Finding(PEAK_CAP, 1, message))
    return first + [entry for entry in finalists if entry not in first], findings


def is_worth(after: Retention, before: Retention) -> bool:
    """Tell whether a partitioning saves enough to be moved to: cost, or disk on average or at the peak."""
    return any(
        new <= old * (1 - WORTH)
        for new, old in (
            (after.cost, before.cost),
            (after.mean_bytes, before.mean_bytes),
            (after.peak_bytes, before.peak_bytes),
        )
    )


def _under(finalists: list[_Finalist], peaks: Mapping[Partition, int], peak_bytes_max: int | None) -> list[_Finalist]:
    return [entry for entry in finalists if peak_bytes_max is None or peaks[entry[0]] <= peak_bytes_max]


def _current(engine: Engine, current: CurrentConfig) -> Partition:
    current.require_all(engine.destinations)
    stores: dict[tuple[str, str], list[int]] = {}
    for number, name in enumerate(engine.destinations):
        stores.setdefault(current.place_of(name), []).append(number)
    engine.leave_out(n for n, name in enumerate(engine.destinations) if current.sync_of(name) is None)
    return canonical(list(stores.values()))


def _revised(recommended: Candidate, engine: Engine, options: RecommendOptions) -> str | None:
    if options.current is None:
        return None
    weights = {total.name: total.bytes for total in engine.totals}
    resized = options.segment_bytes if options.segment_bytes != _sizes_in_force(engine, options)[0] else None
    crossed = frozenset(engine.destinations[number] for number in engine.crossed)
    return revised_yaml(options.current, recommended.stores, weights, resized, crossed)


def _figures(
    set_costs: SetCosts,
    engine: Engine,
    constraints: Constraints,
    partitions: Mapping[str, tuple[Partition, Retention]],
    candidates: list[Candidate],
    options: RecommendOptions,
    report: Progress,
) -> Figures:
    """Tell what the report shows of the recommended partitioning and of what it is compared with."""
    names = {candidate.name: [store.name for store in candidate.stores] for candidate in candidates}
    base = "current" if "current" in partitions else "all-together"
    shown = [base, "recommended"] if partitions[base][0] != partitions["recommended"][0] else ["recommended"]
    pictured = {name: (partitions[name][0], names[name]) for name in shown}
    report("picture", 0.0)
    if engine.has_operations:
        figures = build_figures(engine.operations(), set_costs, constraints, options.costs, pictured)
    else:
        found = engine.courses([partition for partition, _ in pictured.values()], options.costs)
        stores_of = {name: stores for name, (_, stores) in pictured.items()}
        figures = figures_of_courses(engine, found, options.costs, stores_of)
    report("picture", 1.0)
    return figures


def _parameters(options: RecommendOptions, engine: Engine, tried: list[dict[str, Any]]) -> dict[str, Any]:
    values = {name: getattr(options, name) for name in options.__dataclass_fields__}
    values["durability"] = {pattern: sync.value for pattern, sync in options.durability.items()}
    values["pinned"] = [list(group) for group in options.pinned]
    values["current"] = options.current.to_json() if options.current is not None else None
    values["sizes"] = asdict(engine.sizes.sizes)
    values["compact_live_percent"] = options.costs.live_percent if options.model == "anabranch" else 0
    values["compact_min_segments"] = options.costs.min_segments
    values["segment_sizes"] = tried
    values["operations"] = engine.count
    values["duration_seconds"] = engine.finish - engine.begin
    return values
