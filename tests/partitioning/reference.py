"""The retention model once more, written from its definition without regard to speed.

A store's segments are found one at a time, and the ack rule is iterated to its fixed point.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from anabranch.policies.partitioning import UsageEvent


def segments(
    events: Sequence[UsageEvent], stores: Sequence[set[str]], capacity: int, *, chains: bool
) -> list[tuple[int, float, float]]:
    """(store, start, end) of every segment."""
    finish = events[-1].ts
    result = []
    for number, store in enumerate(stores):
        mine = [event for event in events if event.destination in store]
        files: list[list[UsageEvent]] = []
        for event in mine:
            if not files or sum(min(e.size, capacity) for e in files[-1]) + min(event.size, capacity) > capacity:
                files.append([])
            files[-1].append(event)
        life = [max(_needed_until(files, i, mine), _next(files, i, finish)) for i in range(len(files))]
        life = [min(end, finish) for end in life]
        if chains:
            life = _fixed_point(files, life)
        result += [(number, file[0].ts, end) for file, end in zip(files, life, strict=True)]
    return result


def _needed_until(files: list[list[UsageEvent]], i: int, mine: Sequence[UsageEvent]) -> float:
    until = -math.inf
    for event in files[i]:
        if event.op == "send":
            acks = [a.ts for a in mine if a.op == "ack" and _key(a) == _key(event)]
            until = max(until, max(acks, default=event.ts) if len(acks) >= event.acks_needed else math.inf)
    return until


def _next(files: list[list[UsageEvent]], i: int, finish: float) -> float:
    return files[i + 1][0].ts if i + 1 < len(files) else finish


def _fixed_point(files: list[list[UsageEvent]], life: list[float]) -> list[float]:
    where = {_key(event): i for i, file in enumerate(files) for event in file if event.op == "send"}
    while True:
        after = list(life)
        for s, file in enumerate(files):
            for event in file:
                t = where.get(_key(event), s)
                if event.op == "ack" and t < s:
                    after[s] = max(after[s], life[t])
        if after == life:
            return life
        life = after


def _key(event: UsageEvent) -> tuple[str, str]:
    return event.destination, event.message_id


def peak(files: Sequence[tuple[int, float, float]]) -> int:
    """The most on disk at one moment."""
    return max(sum(start <= at <= end for _, start, end in files) for _, at, _ in files)
