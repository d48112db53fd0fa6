"""How true the advisor's figures are of our own journals, and whether who follows it is worse off.

    python -m tests.bench.advice                        # ten workloads, 256 KiB segments
    python -m tests.bench.advice --random 20            # and so many random ones, 128 KiB segments

Each workload is replayed through routers that have everything in one store, each destination in a store of its own, and
what is recommended. Journals compact in the background, as by default; behind each operation the replay waits until
that is done, as it is where a day's operations take a day. For each it prints, predicted / measured: bytes of
journal files at the peak and on average, and bytes copied; at last in how many cases the recommended one costs more, by
measurement, than the better of the other two, and by how much.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from examples.demo.replay import Replay
from examples.demo.watch import Watch

import anabranch
from anabranch.adapters.wal.files.copies import CopiesWriter
from anabranch.adapters.wal.format import HEADER_BYTES
from anabranch.adapters.wal.segment import Segment
from anabranch.policies.advisor import Candidate, RecommendOptions, UsageEvent, Workload, generate, recommend
from anabranch.policies.advisor.model.cost_model import GIB, HOUR
from anabranch.policies.units import KIB

SHOWN: Final = ("all-together", "all-separate", "recommended")

WORKLOADS: Final = {
    "slow": """
      - {name: queue://fast.a, arrival: {rate: 4/s}, size: 900, consumer: {lag: 2s}}
      - {name: queue://fast.b, arrival: {poisson: 3/s}, size: {min: 400, max: 1500}, consumer: {lag: 5s}}
      - {name: queue://slow, arrival: {poisson: 0.4/s}, size: 3000, consumer: {lag: {min: 10m, max: 40m}}}
    """,
    "never": """
      - {name: queue://work.a, arrival: {rate: 4/s}, size: 900, consumer: {lag: 3s, never: 0.002}}
      - {name: queue://work.b, arrival: {poisson: 3/s}, size: 1200, consumer: {lag: 8s}}
      - {name: queue://dead, arrival: {poisson: 0.2/s}, size: 2000, consumer: {never: 1}}
    """,
    "hourly": """
      - {name: queue://hourly, arrival: {poisson: 2/s}, size: 1500, consumer: {lag: 1s, batch: 30m}}
      - {name: queue://tenths, arrival: {poisson: 2/s}, size: 1500, consumer: {lag: 1s, batch: 6m}}
      - {name: queue://now, arrival: {rate: 4/s}, size: 900, consumer: {lag: 1s}}
    """,
    "bursts": """
      - {name: queue://plan.a, arrival: {burst: {every: 20m, count: 3000, spacing: 50ms}}, size: {min: 1000, max: 4000},
         consumer: {lag: {min: 1m, max: 19m}}}
      - {name: queue://plan.b, arrival: {burst: {every: 15m, count: 1500, offset: 3m}}, size: 1600,
         consumer: {lag: {min: 10s, max: 5m}}}
      - {name: queue://machine, arrival: {rate: 4/s}, size: 700, consumer: {lag: 3s}}
    """,
    "offline": """
      - {name: queue://a, arrival: {rate: 3/s}, size: 1000, consumer: {lag: 1s, offline: [{from: 5m, to: 45m}]}}
      - {name: queue://b, arrival: {rate: 3/s}, size: 1000, consumer: {lag: 1s}}
      - {name: queue://c, arrival: {poisson: 2/s}, size: 1500, consumer: {lag: {mean: 60}}}
    """,
    "ladder": """
      - {name: queue://l1, arrival: {poisson: 4/s}, size: 800, consumer: {lag: {mean: 1}}}
      - {name: queue://l2, arrival: {poisson: 2/s}, size: 1000, consumer: {lag: {mean: 10}}}
      - {name: queue://l3, arrival: {poisson: 1/s}, size: 1500, consumer: {lag: {mean: 100}}}
      - {name: queue://l4, arrival: {poisson: 1/s}, size: 1500, consumer: {lag: {mean: 1000}}}
    """,
    "alike": """
      - {name: queue://t1, arrival: {poisson: 2/s}, size: 1200, consumer: {lag: {mean: 300}}}
      - {name: queue://t2, arrival: {poisson: 2/s}, size: 1200, consumer: {lag: {mean: 300}}}
      - {name: queue://t3, arrival: {poisson: 2/s}, size: 1200, consumer: {lag: {mean: 300}}}
    """,
    "large": """
      - {name: queue://images, arrival: {poisson: 0.1/s}, size: {min: 20000, max: 120000}, consumer: {lag: {mean: 900}}}
      - {name: queue://orders, arrival: {poisson: 4/s}, size: 800, consumer: {lag: {mean: 20}}}
      - {name: queue://log, arrival: {poisson: 4/s}, size: 600, consumer: {lag: 1s}}
    """,
    "half": """
      - {name: queue://archive, arrival: {poisson: 4/s}, size: 1500, consumer: {lag: {min: 30m, max: 50m}}}
      - {name: queue://ticks, arrival: {poisson: 4/s}, size: 1300, consumer: {lag: 1s}}
    """,
    "orders": """
      - {name: queue://order, arrival: {poisson: 1/s}, size: {min: 900, max: 3000}, consumer: {lag: 30s}}
      - {name: queue://audit, arrival: {poisson: 1/s}, size: 900, consumer: {lag: 20m}}
      - {name: queue://bill, arrival: {poisson: 1/s}, size: 1400, consumer: {lag: {mean: 300}}}
      - {name: queue://ticks, arrival: {rate: 4/s}, size: 700, consumer: {lag: 1s}}
    """,
}


def random_workload(seed: int) -> Workload:
    """Up to 6 destinations of any habits."""
    chance = np.random.default_rng(seed)
    lines = [f"name: random{seed}\nseed: {seed}\nduration: 30m\ndestinations:"]
    for i in range(int(chance.integers(2, 7))):
        lag, size = float(np.exp(chance.uniform(0, 7))), int(np.exp(chance.uniform(5, 8)))
        never, rate = chance.choice([0, 0, 0.01, 1]), float(chance.uniform(0.05, 1.5))
        lines.append(
            f"  - {{name: queue://q{i}, arrival: {{poisson: {rate}}}, size: {{mean: {size}}}, "
            f"consumer: {{lag: {{mean: {lag}}}, never: {never}}}}}"
        )
    return Workload.parse("\n".join(lines))


@dataclass(slots=True)
class Measured:
    """What real stores took."""

    peak_bytes: int
    looks: list[int]
    """Bytes behind each operation."""
    copied_bytes: int


def measure(candidate: Candidate, events: list[UsageEvent], directory: Path) -> Measured:
    """Replay the events through the stores of a candidate."""
    journal = anabranch.JournalOptions(
        sync=anabranch.Sync.NEVER, segment_size=candidate.segment_bytes, pool_files=0, checkpoint_interval=3600
    )
    stores = [anabranch.StoreConfig(one.name, list(one.destinations), journal=journal) for one in candidate.stores]
    watch, copied = Watch(), 0
    finish = CopiesWriter.finish

    def counted(writer: CopiesWriter) -> Segment:
        nonlocal copied
        segment = finish(writer)
        copied += (segment.end or 0) - HEADER_BYTES
        return segment

    CopiesWriter.finish = counted  # type: ignore[method-assign,assignment]
    try:
        with anabranch.open(anabranch.Config(directory, stores)) as router:
            Replay().run(router, events, look=watch.look, every=1)
    finally:
        CopiesWriter.finish = finish  # type: ignore[method-assign]
    return Measured(watch.peak_bytes, watch.looks, copied)


def check(name: str, workload: Workload, segment_bytes: int) -> float:
    """Print one workload's lines. Returns what the recommended one costs, by measurement, beside the better of the
    others."""
    table = generate(workload)
    options = RecommendOptions(segment_bytes=segment_bytes, engine="local")
    answer = recommend(table, options)
    events = [UsageEvent(**row) for row in table.to_pylist()]
    times = np.array([event.ts for event in events])
    costs = {}
    for shown in SHOWN:
        candidate = answer.candidate(shown)
        with tempfile.TemporaryDirectory() as directory:
            found = measure(candidate, events, Path(directory) / "data")
        span = times[-1] - times[0]
        mean = float((np.array(found.looks)[:-1] * np.diff(times)).sum() / span)
        fixed = candidate.cost - candidate.gib_hours - options.costs.copy_price * candidate.copied_bytes
        costs[shown] = mean * span / GIB / HOUR + fixed + options.costs.copy_price * found.copied_bytes
        print(
            f"| {name} | {shown}, {len(candidate.stores)} | {_pair(candidate.peak_bytes, found.peak_bytes)} "
            f"| {_pair(candidate.mean_bytes, mean)} | {_pair(candidate.copied_bytes, found.copied_bytes)} |",
            flush=True,
        )
    return float(costs["recommended"] / min(costs["all-together"], costs["all-separate"]))


def _pair(predicted: float, measured: float) -> str:
    ratio = f"{predicted / measured:.2f}" if measured else "-"
    return f"{predicted / 1e6:.2f} / {measured / 1e6:.2f} | {ratio}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--random", type=int, default=0, help="so many random workloads beside")
    parser.add_argument("--only", default=None, help="one workload's name")
    options = parser.parse_args()
    print("| workload | division, stores | peak, MB | ratio | mean, MB | ratio | copied, MB | ratio |\n|" + "---|" * 8)
    worst = {}
    for name, destinations in WORKLOADS.items():
        if options.only in (None, name):
            text = f"name: {name}\nseed: 3\nduration: 2h\ndestinations:{destinations}"
            worst[name] = check(name, Workload.parse(text), 256 * KIB)
    for seed in range(options.random):
        worst[f"random{seed}"] = check(f"random{seed}", random_workload(seed), 256 * KIB)
    dearer = {name: share for name, share in worst.items() if share > 1}
    print(f"{len(worst)} workloads; the recommended one costs more than the better of the others in {len(dearer)}:")
    print(", ".join(f"{name} {share:.3f}" for name, share in dearer.items()) or "none")


if __name__ == "__main__":
    main()
