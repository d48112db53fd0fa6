"""Candidates made of partitionings, sets of numbers: names, filters, sync policies, and what a broker would add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ...config.durability import Sync
from ...names.destination import Destination
from ...names.routes import RouteTable
from ..model.broker import LOOK_SEGMENTS, BrokerPeak, broker_peak, expected_files
from ..model.cost_model import Partition, Retention, canonical, lasting_peak
from ..model.engine import Engine
from ..search.catch_all import catch_all_store
from ..search.patterns import filters
from ..search.search import Constraints, keeps
from .options import RecommendOptions
from .recommendation import Candidate, StorePlan, store_names
from .revision import names_beside

CHANGES_MAX = 50
"""Changed stores of which it is said what each brings by itself."""


def candidates_of(
    engine: Engine,
    constraints: Constraints,
    partitions: Mapping[str, tuple[Partition, Retention]],
    options: RecommendOptions,
) -> list[Candidate]:
    """Make the candidates, in the order given, which begins with `recommended`; `partitions` is by name."""
    peaks = broker_peaks(engine, [partition for partition, _ in partitions.values()], options)
    policies = policies_of(engine, options)
    candidates = [
        replace(
            _candidate(engine, name, partition, figures, policies, peaks.get(partition), options),
            possible=keeps(partition, constraints),
        )
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
    broker: BrokerPeak | None,
    options: RecommendOptions,
) -> Candidate:
    weights = {total.name: total.bytes for total in engine.totals}
    destinations = [tuple(engine.destinations[d] for d in members) for members in partition]
    syncs = [policies[members[0]] for members in partition]
    own = _own_syncs(engine, partition, policies)
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


def _own_syncs(engine: Engine, partition: Partition, policies: Sequence[Sync]) -> list[Sync | None]:
    """Tell how each store syncs; None for one that nodes share."""
    return [policies[members[0]] if engine.crossed.isdisjoint(members) else None for members in partition]


def _catch_all(
    stores: Sequence[Sequence[str]], syncs: Sequence[Sync | None], weights: Mapping[str, int], options: RecommendOptions
) -> int | None:
    if options.current is not None:
        return None  # it says where the unseen goes
    return catch_all_store(
        stores, syncs, weights, model=options.model, stores_max=options.stores_max, durability=options.durability
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


def broker_peaks(
    engine: Engine, partitions: Sequence[Partition], options: RecommendOptions
) -> dict[Partition, BrokerPeak]:
    """Find the disk that a broker takes at the peak of each partitioning, under ActiveMQ's model."""
    if options.model != "kahadb":
        return {}
    policies = policies_of(engine, options)
    weights = {total.name: total.bytes for total in engine.totals}
    size = options.segment_bytes
    # By the trace's clock, at its mean pace; a trace that writes less is looked at all the same.
    interval = (engine.finish - engine.begin) * min(LOOK_SEGMENTS * size / max(engine.bytes, 1), 0.5)
    simulated, compacted = engine.simulate(partitions, size), engine.compacted_peaks(partitions, size)
    found = {}
    for partition, segments, files in zip(partitions, simulated, compacted, strict=True):
        destinations = [tuple(engine.destinations[d] for d in members) for members in partition]
        catch_all = _catch_all(destinations, _own_syncs(engine, partition, policies), weights, options)
        found[partition] = broker_peak(
            expected_files(segments.start, segments.end, interval),
            lasting_peak(segments.start, segments.end, 0.0),
            files,
            len(partition),
            size,
            catch_all_beside=catch_all is None and len(partition) > 1,
        )
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
