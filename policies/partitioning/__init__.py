"""The partition advisor: reads how destinations are used and says which of them should share a store.

In one shared append-only journal a slow destination's old messages keep whole segments alive, however quick the others
are. The advisor replays a trace of what was sent and acked against a model of the journal, for any way to divide the
destinations, and finds the division that costs least:

    from anabranch.policies.partitioning import RecommendOptions, recommend, render_text

    answer = recommend("trace.parquet", RecommendOptions(segment_bytes=32 << 20))
    print(render_text(answer))
    answer.write("out")            # recommendation.json, stores.yaml, summary.txt, report.html

A trace is rows of `UsageEvent`; `trace` says which files hold one. `from_events` makes a table of any source of
events, such as an ActiveMQ journal directory read by `anabranch.adapters.kahadb`; `workload` makes one from a
description. The cost of a division is in GiB-hours of disk, with the syncs that transactions over several stores add
priced in.

Where things are: `events` and `trace` the input, `operations` and `summary` what is made of it, `sizes` bytes of an
operation, `kernel` one store's journal, operation by operation, `model` the exact figures made of it, `evaluate` and
`decay` their quick form, `search` the optimiser, `confirm` exact figures, `patterns` and `catch_all` filters,
`candidates` from sets to stores, `recommendation` and `render` the output, `job` all of it; `report` the page for a
browser, of `figures`, `pins` and `history`, drawn by `svg`; `current` the configuration in force, `revision` what
changes in it; `opening` and `engine` who knows a trace: this process, or Spark at any size (`spark_engine`,
`spark_trace`, and `workers` on its workers); `session`, `cluster`, `jvm` and `java` are how Spark is started,
`executors` what becomes of its workers; `hadoop` and `workload_files` write to URLs.

It needs `pip install 'anabranch[recommend]'`, or without Spark `'anabranch[recommend-local]'`; importing this package
does not. Apart from what writes by its name, nothing here touches a disk but Spark's scratch space, and a copy of the
trace for Spark in the directory for temporary files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError
from .events import UsageEvent

if TYPE_CHECKING:
    from .current import CurrentConfig
    from .generator import generate
    from .job import RecommendOptions, recommend, recommend_best
    from .opening import choose_engine
    from .recommendation import Candidate, Recommendation, StorePlan, check_place
    from .render import render_text
    from .report import render_html
    from .sizes import JournalSizes
    from .trace import Finding, from_events, read_trace, write_trace
    from .workload import Workload

_HOMES = {
    "Candidate": "recommendation",
    "CurrentConfig": "current",
    "Finding": "trace",
    "JournalSizes": "sizes",
    "RecommendOptions": "job",
    "Recommendation": "recommendation",
    "StorePlan": "recommendation",
    "Workload": "workload",
    "check_place": "recommendation",
    "choose_engine": "opening",
    "from_events": "trace",
    "generate": "generator",
    "read_trace": "trace",
    "recommend": "job",
    "recommend_best": "job",
    "render_html": "report",
    "render_text": "render",
    "write_trace": "trace",
}

__all__ = [
    "Candidate",
    "CurrentConfig",
    "Finding",
    "JournalSizes",
    "RecommendOptions",
    "Recommendation",
    "StorePlan",
    "UsageEvent",
    "Workload",
    "check_place",
    "choose_engine",
    "from_events",
    "generate",
    "read_trace",
    "recommend",
    "recommend_best",
    "render_html",
    "render_text",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    """Imports what was asked for only now: the core must not need the advisor's dependencies."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{home}", __name__)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == __name__.partition(".")[0]:
            raise
        raise MissingExtraError(
            f"the advisor needs {error.name}, which is not installed; run: pip install 'anabranch[recommend]', or "
            "'anabranch[recommend-local]' without Spark"
        ) from error
    return getattr(module, name)
