"""The answer in words: what to do, what that saves, what is typed next, and what goes where.

`render` and `report` show the same.
"""

from __future__ import annotations

import shlex
from typing import NamedTuple

from ...text import count_of, human_bytes
from ..search.catch_all import REST
from .recommendation import Candidate, Recommendation

_NOTABLE = 0.01
"""Part by which a figure has to be smaller to be a saving that is spoken of."""
DATA = "DIR"
"""The data directory, where nothing says which it is."""


class Move(NamedTuple):
    """Destinations that come into a store, and the store where they are now; None where none is known."""

    store: str
    before: str | None
    destinations: tuple[str, ...]


def baseline(recommendation: Recommendation) -> Candidate:
    """Return what the recommended one is compared with: the current configuration where one was given."""
    names = {candidate.name for candidate in recommendation.candidates}
    return recommendation.candidate("current" if "current" in names else "all-together")


def peak_bytes(candidate: Candidate) -> int:
    """Return the disk at the peak; in a broker where one is meant."""
    return candidate.peak_bytes if candidate.broker_peak is None else candidate.broker_peak.bytes


def stays(recommendation: Recommendation) -> bool:
    """Tell whether everything is to be left as it is."""
    best, base = recommendation.recommended, baseline(recommendation)
    if recommendation.sharing is not None and recommendation.sharing.missing:
        return False
    return {store.destinations for store in best.stores} == {store.destinations for store in base.stores}


def is_compacting(recommendation: Recommendation) -> bool:
    """Tell whether the figures are those of journals that compact."""
    return bool(recommendation.parameters["compact_live_percent"])


def headline(recommendation: Recommendation) -> str:
    """Say the answer in one sentence, with its figure."""
    best, base = recommendation.recommended, baseline(recommendation)
    peak = human_bytes(peak_bytes(best))
    in_force = base.name == "current"
    if stays(recommendation):
        leave = "Leave it as it is" if in_force else "Keep one store"
        copied = f", and {human_bytes(best.copied_bytes)} are copied by compaction" if best.copied_bytes else ""
        return f"{leave}: the journals take {peak} at the peak{copied}; {_alternative(recommendation)}."
    count = sum(len(store.destinations) for store in best.stores)
    what = "this destination" if count == 1 else f"these {count} destinations"
    into = f"Put {what} into {count_of(len(best.stores), 'store')}{_shared(recommendation)}"
    if not in_force and len({store.sync for store in best.stores}) > 1:
        into += ", so that what syncs less need not wait for what syncs more"
    shown = "as configured now" if in_force else "in one store"
    saved = _savings(best, base)
    if not saved:
        return f"{into}: the journals take {peak} at the peak, {human_bytes(peak_bytes(base))} {shown}."
    price = peak_bytes(best) - peak_bytes(base)
    more = f", for {human_bytes(price)} more disk at the peak" if price > peak_bytes(base) * _NOTABLE else ""
    return f"{into}: {' and '.join([', '.join(saved[:-1]), saved[-1]] if saved[1:] else saved)} than {shown}{more}."


def _shared(recommendation: Recommendation) -> str:
    """Say how many of the stores are for all nodes."""
    stores, sharing = recommendation.recommended.stores, recommendation.sharing
    shared = sum(sharing.is_shared(store.destinations) for store in stores) if sharing else 0
    return f", {'' if shared == len(stores) else f'{shared} of them '}shared by the nodes" if shared else ""


def _alternative(recommendation: Recommendation) -> str:
    """Say that none is better. One that costs notably less can only be one that is not possible, or above the cap."""
    limit = recommendation.recommended.cost * (1 - _NOTABLE)
    if all(other.cost >= limit for other in recommendation.candidates):
        return "no other division tried costs less"
    return "no other division that is possible costs less"


def _savings(best: Candidate, base: Candidate) -> list[str]:
    """Say what is less, a phrase each."""
    figures = [
        ("disk at the peak", peak_bytes(best), peak_bytes(base)),
        ("disk on average", best.mean_bytes, base.mean_bytes),
        ("copied by compaction", best.copied_bytes, base.copied_bytes),
    ]
    if peak_bytes(best) < peak_bytes(base) * (1 - _NOTABLE):
        del figures[1]
    found = []
    for what, after, before in figures:
        if after < before * (1 - _NOTABLE):
            less = f"{100 * (1 - after / before):.0f} % less"
            found.append(f"{less} {what} ({human_bytes(after)}, not {human_bytes(before)})")
    spared = base.spanning_transactions - best.spanning_transactions
    if spared > 0:
        found.append(f"{spared:,} fewer transactions over several stores, which sync twice in each")
    return found


def cap_sentence(recommendation: Recommendation) -> str:
    """Say that the cap on the peak cannot be kept."""
    cap, lowest = recommendation.parameters["peak_bytes_max"], peak_bytes(recommendation.recommended)
    return (
        f"The cap on the peak, {human_bytes(cap)}, cannot be kept: the lowest peak found is {human_bytes(lowest)}. "
        "What follows is the partitioning with that peak."
    )


def next_step(recommendation: Recommendation, out: str | None) -> tuple[str, str] | None:
    """Return the command that does as the answer says, and what is to be known of it; None where there is nothing to
    do. `out`: where its files are."""
    if stays(recommendation):
        return None
    stores = shlex.quote("stores.yaml" if out is None else f"{out.rstrip('/')}/stores.yaml")
    if recommendation.parameters["model"] == "kahadb":
        note = "It prints the <mKahaDB> for activemq.xml, in place of the <persistenceAdapter>; let it run empty first."
        return f"anabranch mkahadb --from-config {stores}", note
    directory, note = recommendation.directory, "It moves what is there; --dry-run only says what."
    if directory is None:
        whose = "your" if recommendation.sharing is None else "each node's own"
        note = (
            f"{DATA} is {whose} data directory; write it into the file's `directory:`. A new one needs the file alone."
        )
    where = DATA if directory is None else shlex.quote(directory)
    return f"anabranch repartition --config {stores} {where}", note


def moves(recommendation: Recommendation) -> list[Move]:
    """Tell what goes where: what changes where a configuration is in force, else everything."""
    base = baseline(recommendation)
    now = {name: store.name for store in base.stores for name in store.destinations} if base.name == "current" else {}
    found: list[Move] = []
    for store in recommendation.recommended.stores:
        by_source: dict[str | None, list[str]] = {}
        for name in store.destinations:
            if now.get(name) != store.name:
                by_source.setdefault(now.get(name), []).append(name)
        found += [Move(store.name, source, tuple(names)) for source, names in by_source.items()]
    return found


def rest_note() -> str:
    """Say that `stores.yaml` has one more store."""
    return f"And 1 more, {REST}, for what the trace did not show; it takes no disk before that comes."
