"""The goal of the optimisation, and its rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal

from ...config.durability import Sync
from ...config.options import JournalOptions
from ...errors import ConfigError
from ..model.cost_model import COPY_RATE, CostModel
from ..search.current import CurrentConfig
from ..search.pattern_options import wrong_patterns
from ..statistics.operations import CLOCKS, Clock
from ..statistics.sizes import MODELS, JournalSizes, Model

EngineName = Literal["auto", "spark", "local"]
ENGINES: tuple[EngineName, ...] = ("auto", "spark", "local")
_OPTIONS = {"segment_bytes": "segment-size", "peak_bytes_max": "peak-max"}
"""Options of the command line whose names are not those of the fields; so that an error names both."""
_NOT_OPTIONS = ("operations_per_second", "overhead_segments")


def _named(field_name: str) -> str:
    if field_name in _NOT_OPTIONS:
        return field_name
    return f"{field_name} (--{_OPTIONS.get(field_name, field_name.replace('_', '-'))})"


@dataclass(frozen=True, slots=True)
class RecommendOptions:
    """The goal of the optimisation, and its rules."""

    model: Model = "anabranch"
    """Whose journal: our own, or ActiveMQ's with its ack rule."""
    segment_bytes: int = 32 << 20
    clock: Clock = "ts"
    """`seq` goes by order alone, for traces whose clock says little."""
    operations_per_second: float = 1000.0
    """The time that a position is worth, under clock `seq`."""
    disk_gib: float = 100.0
    sync_rate: float = 5000.0
    """Syncs a second that the disk can do. With `disk_gib` it prices the syncs that spanning transactions add."""
    overhead_segments: float = 0.5
    """Disk that a store costs by being there, in segments."""
    copy_rate: float = COPY_RATE
    """MiB a second that the disk can copy, each byte read once and written once. With `disk_gib` it prices what
    compaction copies."""
    compact_live_percent: int | None = None
    """Under which share of live bytes our own journals compact a file; 0: they do not. None: as `current` has it, else
    their default."""
    stores_max: int | None = None
    peak_bytes_max: int | None = None
    """A cap on all journals together; the cheapest partitioning found under it is recommended."""
    durability: Mapping[str, Sync] = field(default_factory=dict)
    """Pattern to sync policy; what matches none is `always`. Different policies never share a store."""
    pinned: tuple[tuple[str, ...], ...] = ()
    """Groups of patterns: what one group matches stays together."""
    current: CurrentConfig | None = None
    """The configuration in force: it is compared with, and what no pattern of `durability` matches syncs as it does
    there. Destinations in stores that are no journals stay in them."""
    sizes: JournalSizes | None = None
    """Our own journal's record overheads, where the defaults do not fit."""
    engine: EngineName = "auto"
    """The engine that works: `local` here, without Java; `spark` at any size; `auto` goes by the trace's size."""
    master: str | None = None
    """Spark's master, where no session is active; None: this machine."""

    def check(self) -> None:
        """Raise ConfigError with everything that is wrong."""
        above_0 = ("segment_bytes", "operations_per_second", "disk_gib", "sync_rate", "copy_rate")
        problems = [
            f"{_named(n)} is {getattr(self, n)!r}; it must be above 0, and finite"
            for n in above_0
            if not 0 < getattr(self, n) < inf
        ]
        if self.overhead_segments < 0:
            problems.append(f"overhead_segments is {self.overhead_segments!r}; it must be 0 or more")
        for name, allowed in (("model", MODELS), ("clock", CLOCKS), ("engine", ENGINES)):
            if getattr(self, name) not in allowed:
                problems.append(f"{_named(name)} is {getattr(self, name)!r}; it must be one of {', '.join(allowed)}")
        for name in ("stores_max", "peak_bytes_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                problems.append(f"{_named(name)} is {value!r}; it must be 1 or more, or left out")
        problems += wrong_patterns(self.durability, self.pinned)
        if 0 < self.segment_bytes < inf:
            try:
                JournalOptions(segment_size=int(self.segment_bytes))
            except ConfigError as error:
                named = f"{_named('segment_bytes')} is {self.segment_bytes}: "
                problems += [named + problem.message.removeprefix("segment_size: ") for problem in error.problems]
        if problems:
            raise ConfigError(problems)

    @property
    def costs(self) -> CostModel:
        journal = JournalOptions() if self.current is None else self.current.compaction
        percent = journal.compact_live_percent if self.compact_live_percent is None else self.compact_live_percent
        return CostModel(
            self.segment_bytes,
            self.overhead_segments,
            self.disk_gib,
            self.sync_rate,
            self.copy_rate,
            percent,
            journal.compact_min_segments,
        )
