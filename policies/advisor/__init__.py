"""The partition advisor: reads how destinations are used and says which of them should share a store.

In one shared append-only journal a slow destination's old messages keep whole segments alive, however quick the others
are. The advisor replays a trace of what was sent and acked against a model of the journal, for any way to divide the
destinations, and finds the division that costs least:

    from anabranch.policies.advisor import RecommendOptions, recommend, render_text

    answer = recommend("trace.parquet", RecommendOptions(segment_bytes=32 << 20))
    print(render_text(answer))
    answer.write("out")            # recommendation.json, stores.yaml, summary.txt, report.html

A trace is rows of `UsageEvent`; `trace` says which files hold one. `from_events` makes a table of any source of
events, such as an ActiveMQ journal directory read by `anabranch.adapters.kahadb`; `workload` makes one from a
description. The cost of a division is in GiB-hours of disk, with the syncs that transactions over several stores add
priced in.

The way of a trace: `trace` is the input, `workload` makes one of a description, `statistics` is what is made of it;
`model` has the exact figures and their quick form, `search` the optimiser, `recommend` the answer and its names,
`report` what people read; `job` goes all of it. Imports point the other way. `spark` stands beside and gives the same
figures of a trace of any size.

It needs `pip install 'anabranch[recommend]'`, or without Spark `'anabranch[recommend-local]'`; importing this package
does not. Apart from what writes by its name, nothing here touches a disk but Spark's scratch space, and a copy of the
trace for Spark in the directory for temporary files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..errors import MissingExtraError
from .trace.events import UsageEvent

if TYPE_CHECKING:
    from .advice.opening import choose_engine
    from .advice.options import RecommendOptions
    from .advice.recommendation import Candidate, Recommendation, StorePlan, check_place
    from .job import recommend, recommend_best
    from .report.page import render_html
    from .report.render import render_text
    from .search.current import CurrentConfig
    from .statistics.sizes import JournalSizes
    from .trace.table import Finding, from_events, read_trace, write_trace
    from .workload.generator import generate
    from .workload.workload import Workload

_HOMES = {
    "advice.opening": ("choose_engine",),
    "advice.options": ("RecommendOptions",),
    "advice.recommendation": ("Candidate", "Recommendation", "StorePlan", "check_place"),
    "job": ("recommend", "recommend_best"),
    "report.page": ("render_html",),
    "report.render": ("render_text",),
    "search.current": ("CurrentConfig",),
    "statistics.sizes": ("JournalSizes",),
    "trace.table": ("Finding", "from_events", "read_trace", "write_trace"),
    "workload.generator": ("generate",),
    "workload.workload": ("Workload",),
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
    """Import what was asked for only now: the core must not need the advisor's dependencies."""
    home = next((home for home, names in _HOMES.items() if name in names), None)
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
