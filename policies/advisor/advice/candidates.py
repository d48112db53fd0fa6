"""Candidates made of partitionings, sets of numbers: names, filters, sync policies, and what a broker would add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ...config.durability import Sync
from ...names.destination import Destination
from ...names.routes import RouteTable
from ..model.broker import LOOK_SEGMENTS, broker_peak, expected_files
from ..model.cost_model import Partition, Retention, canonical, lasting_peak
from ..model.engine import Engine
from ..search.catch_all import catch_all_store
from ..search.patterns import filters
from .options import RecommendOptions
from .recommendation import Candidate, StorePlan, store_names
from .revision import names_beside

CHANGES_MAX = 50
"""Changed stores of which it is said what each brings by itself."""


def candidates_of(
    engine: Engine, partitions: Mapping[str, tuple[Partition, Retention]], options: RecommendOptions
) -> list[Candidate]:
    """Make the candidates, in the order given, which begins with `recommended`; `partitions` is by name."""
    peaks = _broker_peaks(engine, partitions, options)
    policies = policies_of(engine, options)
    candidates = [
        _candidate(engine, name, partition, figures, policies, peaks.get(name), options)
        for name, (partition, figures) in partitions.items()
    ]
    if options.current is not None:
        candidates[0] = _with_savings(candidates[0], engine, partitions, options)
    return candidates


def policies_of(engine: Engine, options: RecommendOptions) -> list[Sync]:
    """Tell how each destination is to sync."""
    table = RouteTable(list(options.durability.items()))
    matches = [table.route(Destination.parse(name)) for name in engine.destinations]
    current = options.current
    general = [(current.sync_of(name) if current else None) or Sync.ALWAYS for name in engine.destinations]
    return [match.target if match else sync for match, sync in zip(matches, general, strict=True)]


def _candidate(
    engine: Engine,
    name: str,
    partition: Partition,
    figures: Retention,
    policies: Sequence[Sync],
    files: _BrokerFiles | None,
    options: RecommendOptions,
) -> Candidate:
    weights = {total.name: total.bytes for total in engine.totals}
    destinations = [tuple(engine.destinations[d] for d in members) for members in partition]
    syncs = [policies[members[0]] for members in partition]
    crossed = engine.crossed
    own = [sync if crossed.isdisjoint(members) else None for sync, members in zip(syncs, partition, strict=True)]
    names = _store_names(name, destinations, own, weights, options)
    catch_all = _catch_all(destinations, own, weights, options)
    stores = tuple(
        StorePlan(
            name=names[i],
            destinations=destinations[i],
            filters=tuple(found),
            sync=syncs[i].value,
            gib_hours=figures.store_gib_hours[i],
            peak_bytes=figures.store_peak_bytes[i],
            written_bytes=figures.store_written_bytes[i],
            copied_bytes=figures.store_copied_bytes[i],
        )
        for i, found in enumerate(filters(destinations, catch_all))
    )
    beside = catch_all is None and len(partition) > 1
    broker = files and broker_peak(*files, len(partition), options.segment_bytes, catch_all_beside=beside)
    return Candidate(
        name=name,
        segment_bytes=options.segment_bytes,
        stores=stores,
        mean_bytes=figures.mean_bytes,
        peak_bytes=figures.peak_bytes,
        gib_hours=figures.gib_hours,
        spanning_transactions=figures.spanning_transactions,
        cost=figures.cost,
        written_bytes=figures.written_bytes,
        copied_bytes=figures.copied_bytes,
        most_copied=figures.most_copied,
        broker_peak=broker,
    )


def _catch_all(
    stores: Sequence[Sequence[str]], syncs: Sequence[Sync | None], weights: Mapping[str, int], options: RecommendOptions
) -> int | None:
    if options.current is not None:
        return None  # it says where the unseen goes
    return catch_all_store(
        stores,
        syncs,
        weights,
        model=options.model,
        stores_max=options.stores_max,
        durability=options.durability,
    )


def _store_names(
    candidate: str,
    stores: Sequence[Sequence[str]],
    syncs: Sequence[Sync | None],
    weights: dict[str, int],
    options: RecommendOptions,
) -> list[str]:
    names = store_names(stores, weights)
    if options.current is not None and candidate == "current":
        return [options.current.name_of(members[0]) for members in stores]
    if options.current is not None and candidate == "recommended":
        return names_beside(options.current, stores, syncs, names, weights)
    return names


class _BrokerFiles(NamedTuple):
    """Files at the peak: those expected to be seen, the most at any moment, and those without the ack rule."""

    expected: float
    most: int
    compacted: int


def _broker_peaks(
    engine: Engine, partitions: Mapping[str, tuple[Partition, Retention]], options: RecommendOptions
) -> dict[str, _BrokerFiles]:
    """Find what `broker_peak` goes by, by name, under ActiveMQ's model."""
    if options.model != "kahadb":
        return {}
    asked = [partition for partition, _ in partitions.values()]
    # By the trace's clock, at its mean pace; a trace that writes less is looked at all the same.
    interval = (engine.finish - engine.begin) * min(LOOK_SEGMENTS * options.segment_bytes / max(engine.bytes, 1), 0.5)
    compacted = engine.compacted_peaks(asked, options.segment_bytes)
    found = {}
    for name, segments, files in zip(partitions, engine.simulate(asked, options.segment_bytes), compacted, strict=True):
        most = lasting_peak(segments.start, segments.end, 0.0)
        found[name] = _BrokerFiles(expected_files(segments.start, segments.end, interval), most, files)
    return found


def _with_savings(
    recommended: Candidate,
    engine: Engine,
    partitions: Mapping[str, tuple[Partition, Retention]],
    options: RecommendOptions,
) -> Candidate:
    """Add what each store brings by itself: of the current configuration this one alone is changed."""
    current, before = partitions["current"]
    chosen, _ = partitions["recommended"]
    changed = [number for number, members in enumerate(chosen) if members not in current][:CHANGES_MAX]
    alone = [
        canonical([chosen[number], *(sorted(set(store).difference(chosen[number])) for store in current)])
        for number in changed
    ]
    stores = list(recommended.stores)
    for number, after in zip(changed, engine.measure(alone, options.costs), strict=True):
        stores[number] = replace(
            stores[number],
            saves_mean_bytes=before.mean_bytes - after.mean_bytes,
            saves_peak_bytes=before.peak_bytes - after.peak_bytes,
            saves_copied_bytes=before.copied_bytes - after.copied_bytes,
        )
    return replace(recommended, stores=tuple(stores))
