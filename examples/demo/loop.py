"""A router records how it is used, is advised from that, and its messages move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import anabranch
from anabranch.policies.advisor import CurrentConfig, RecommendOptions, UsageEvent, from_events, recommend
from anabranch.policies.advisor.advice.answer import headline
from anabranch.policies.config import Config, load
from anabranch.policies.text import count_of, human_bytes
from anabranch.router.cli.output import working
from anabranch.router.offline.repartition import repartition
from anabranch.router.usage.reading import usage_trace

from .replay import Replay, disk_of


@dataclass(frozen=True, slots=True)
class Loop:
    """What it came to. Files are those of journals."""

    operations: tuple[int, int]
    """Before and after the data moved."""
    before: tuple[int, int]
    """Files and bytes when the first half was done, all in one store."""
    advice: str
    moved_messages: int
    moved_destinations: int
    moved: tuple[int, int]
    """When the data had moved."""
    after: tuple[int, int]
    """At the peak of the second half, in the stores recommended."""
    pending: int
    """Messages in the stores at the end."""
    expected: int
    """Messages that were sent and not acked."""

    def sentences(self) -> list[str]:
        first, second = self.operations
        return [
            f"{first:,} operations went through one store with `usage: {{}}`: {disk(*self.before)}. {self.advice}",
            f"`anabranch repartition` moved {count_of(self.moved_messages, 'message')} of "
            f"{count_of(self.moved_destinations, 'destination')}: {disk(*self.moved)}. The other {second:,} "
            f"operations: {disk(*self.after)} at the peak, and at the end {count_of(self.pending, 'message')} of "
            f"{self.expected:,} that were not acked.",
        ]


def disk(files: int, size: int) -> str:
    return f"{count_of(files, 'file')}, {human_bytes(size)}"


def run_loop(config: Config, advice: Path, events: Sequence[UsageEvent]) -> Loop:
    """`config`: one store that records its use. The advice goes to a directory."""
    half = _half(events)
    replay = Replay()
    with working("Recording the first half") as progress, anabranch.open(config) as router:
        before = replay.run(router, events[:half], progress)
    usage = usage_trace([config.directory])
    table = from_events(usage)
    assert usage.remembered is not None
    current = CurrentConfig(usage.remembered.config)
    options = RecommendOptions(segment_bytes=current.segment_bytes, clock="seq", engine="local", current=current)
    with working("Recommending from what was recorded") as progress:
        answer = recommend(table, options, progress.stage)
    answer.write(advice)
    new = load(advice / "stores.yaml")
    with working("Moving the data") as progress:
        moved = repartition(new, config, progress=progress)
    with working("Going on in the new stores") as progress, anabranch.open(new) as router:
        now = disk_of(router)
        after = replay.run(router, events[half:], progress)
        pending = sum(store.messages for store in router.stats().stores.values())
    return Loop(
        operations=(half, len(events) - half),
        before=(before.end_files, before.end_bytes),
        advice=headline(answer),
        moved_messages=sum(move.messages for move in moved.moves),
        moved_destinations=len(moved.moves),
        moved=now,
        after=(after.peak_files, after.peak_bytes),
        pending=pending,
        expected=replay.pending,
    )


def _half(events: Sequence[UsageEvent]) -> int:
    """Where the second half begins, with no transaction across."""
    half = len(events) // 2
    while half < len(events) and events[half].tx is not None and events[half].tx == events[half - 1].tx:
        half += 1
    return half
