"""The end of `anabranch demo`: a router records how it is used, is advised from that, and its messages move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ...policies.text import count_of, human_bytes
from .output import working

if TYPE_CHECKING:
    from ...policies.config import Config
    from ...policies.partitioning import UsageEvent

FILE: Final = "stores.yaml"


@dataclass(frozen=True, slots=True)
class Loop:
    """What it came to. Files are those of journals."""

    directory: str
    operations: tuple[int, int]
    """Before and after the data moved."""
    files_before: int
    bytes_before: int
    """When the first half was done, all in one store."""
    stores: int
    """Of the configuration that was recommended."""
    moved_destinations: int
    moved_messages: int
    files_moved: int
    bytes_moved: int
    """When the data had moved."""
    peak_files: int
    peak_bytes: int
    """Of the second half, in the stores recommended."""
    pending: int
    """Messages in the stores at the end."""
    expected: int
    """Messages that were sent and not acked."""

    def lines(self) -> list[str]:
        """What a user would type, and what it says."""
        first, second = self.operations
        usage, advice = f"{self.directory}/data/usage", f"{self.directory}/advice"
        return [
            f"{first:,} operations went through one store with `usage: {{}}` in its {FILE}: "
            f"{_disk(self.files_before, self.bytes_before)} of journals.",
            f"anabranch recommend --usage {usage} --current {self.directory}/{FILE} --out {advice}",
            f"It recommends {self.stores} stores.",
            f"anabranch repartition --config {advice}/{FILE} {self.directory}/data",
            f"{count_of(self.moved_messages, 'message')} of {count_of(self.moved_destinations, 'destination')} moved: "
            f"{_disk(self.files_moved, self.bytes_moved)} of journals.",
            f"The other {second:,} operations went through these stores: at the peak "
            f"{_disk(self.peak_files, self.peak_bytes)}, and at the end {count_of(self.pending, 'message')} of "
            f"{self.expected:,} that were not acked.",
        ]


def _disk(files: int, size: int) -> str:
    return f"{count_of(files, 'file')}, {human_bytes(size)}"


def run_loop(config: Config, events: Sequence[UsageEvent]) -> Loop:
    """`config`: one store that records its use, in the file FILE beside its data directory."""
    from ...policies.config import load
    from ...policies.partitioning import CurrentConfig, RecommendOptions, recommend
    from ..repartition import repartition
    from ..replay import Replay, disk_of
    from ..router import open as open_router
    from .trace import usage_table

    home = config.directory.parent
    half = _half(events)
    replay = Replay()
    with working("Recording the first half") as progress, open_router(config) as router:
        before = replay.run(router, events[:half], progress)
    table, _ = usage_table((config.directory / "usage",))
    with working("Recommending from what was recorded") as progress:
        options = RecommendOptions(
            segment_bytes=CurrentConfig(config).segment_bytes, clock="seq", engine="local",
            current=CurrentConfig.load(home / FILE),
        )  # fmt: skip
        answer = recommend(table, options, progress.stage)
    answer.write(home / "advice")
    new = load(home / "advice" / FILE)
    with working("Moving the data") as progress:
        moved = repartition(new, config, progress=progress)
    with working("Going on in the new stores") as progress, open_router(new) as router:
        files, size = disk_of(router)
        after = replay.run(router, events[half:], progress)
        pending = sum(store.messages for store in router.stats().stores.values())
    return Loop(
        directory=str(home),
        operations=(half, len(events) - half),
        files_before=before.end_files,
        bytes_before=before.end_bytes,
        stores=len(new.stores),
        moved_destinations=len(moved.moves),
        moved_messages=sum(move.messages for move in moved.moves),
        files_moved=files,
        bytes_moved=size,
        peak_files=after.peak_files,
        peak_bytes=after.peak_bytes,
        pending=pending,
        expected=replay.pending,
    )


def _half(events: Sequence[UsageEvent]) -> int:
    """Where the second half begins, with no transaction across."""
    half = len(events) // 2
    while half < len(events) and events[half].tx is not None and events[half].tx == events[half - 1].tx:
        half += 1
    return half
