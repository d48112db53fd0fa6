"""What the advisor's tests share: one Spark session, the toy maker's real trace, and six shapes of workload."""

from __future__ import annotations

import os
import tarfile
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from anabranch import Config, JournalOptions, StoreConfig
from anabranch.adapters.kahadb import usage_trace
from anabranch.policies.advisor import CurrentConfig, Recommendation, UsageEvent, Workload, from_events, generate
from anabranch.policies.advisor.model.cost_model import CostModel, Partition, Retention, Segments, courses, segments
from anabranch.policies.advisor.model.engine import LocalEngine
from anabranch.policies.advisor.model.kernel import JournalRules
from anabranch.policies.advisor.statistics.operations import Operations
from anabranch.policies.names.destination import Destination
from anabranch.router.cli.app import app

from ..kernels import compiled  # noqa: F401  a fixture

os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
"""A Java that lives for seconds only loses by compiling well: it is most of what these tests cost."""

EXAMPLES = Path(__file__).parents[2] / "examples"
SEGMENT_BYTES = 64 << 10

_SHAPES = {
    "slow-among-fast": """
        destinations:
          - {name: queue://fast.a, arrival: {rate: 2/s}, size: 200, consumer: {lag: 2s}}
          - {name: queue://fast.b, arrival: {poisson: 2/s}, size: {min: 50, max: 500}, consumer: {lag: 5s}}
          - {name: queue://fast.c, arrival: {poisson: 1/s}, size: {mean: 300}, consumer: {lag: {mean: 10}}}
          - {name: queue://slow.a, arrival: {poisson: 0.2/s}, size: 900, consumer: {lag: {min: 10m, max: 40m}}}
          - {name: queue://slow.b, arrival: {poisson: 0.1/s}, size: 900, consumer: {lag: {mean: 900}}}
    """,
    "never-acked": """
        destinations:
          - {name: queue://work.a, arrival: {rate: 3/s}, size: 150, consumer: {lag: 3s, never: 0.0005}}
          - {name: queue://work.b, arrival: {poisson: 2/s}, size: 300, consumer: {lag: 8s}}
          - {name: queue://dead.a, arrival: {poisson: 0.02/s}, size: 600, consumer: {never: 1}}
          - {name: queue://dead.b, arrival: {poisson: 0.01/s}, size: 600, consumer: {never: 1}}
    """,
    "transactions": """
        destinations:
          - {name: queue://order, size: {min: 300, max: 1500}, consumer: {lag: 30s}}
          - {name: queue://audit, size: 180, consumer: {lag: 20m}}
          - {name: queue://bill, size: 400, consumer: {lag: 5m}}
          - {name: queue://ticks, arrival: {rate: 3/s}, size: 120, consumer: {lag: 1s}}
          - {name: queue://slow, arrival: {poisson: 0.1/s}, size: 1200, consumer: {lag: {min: 5m, max: 50m}}}
        transactions:
          - {name: buy, sends: [queue://order, queue://audit], arrival: {poisson: 0.5/s}}
          - {name: pay, sends: [queue://order, queue://bill, queue://audit], arrival: {poisson: 0.1/s}}
    """,
    "batches": """
        destinations:
          - {name: queue://hourly, arrival: {poisson: 1/s}, size: 300, consumer: {lag: 1s, batch: 30m}}
          - {name: queue://tenths, arrival: {poisson: 1/s}, size: 300, consumer: {lag: 1s, batch: 6m}}
          - {name: queue://now.a, arrival: {rate: 3/s}, size: 200, consumer: {lag: 1s}}
          - {name: queue://now.b, arrival: {poisson: 2/s}, size: 250, consumer: {lag: 2s}}
          - {name: queue://sleepy, arrival: {rate: 0.3/s}, size: 500,
             consumer: {lag: 1s, offline: [{from: 5m, to: 25m, every: 40m}]}}
    """,
    "bursts": """
        destinations:
          - {name: queue://plan.a, arrival: {burst: {every: 20m, count: 400, spacing: 100ms}},
             size: {min: 500, max: 2000}, consumer: {lag: {min: 1m, max: 19m}}}
          - {name: queue://plan.b, arrival: {burst: {every: 15m, count: 200, offset: 3m}}, size: 800,
             consumer: {lag: {min: 10s, max: 5m}}}
          - {name: queue://machine.a, arrival: {rate: 2/s}, size: 120, consumer: {lag: 3s}}
          - {name: queue://machine.b, arrival: {rate: 2/s}, size: 140, consumer: {lag: 4s}}
          - {name: queue://desk, arrival: {poisson: 0.5/s}, size: 900, consumer: {lag: {mean: 40}}}
          - {name: queue://dlq, arrival: {poisson: 0.01/s}, size: 900, consumer: {never: 1}}
    """,
    "topics": """
        destinations:
          - {name: topic://prices.eu, subscriptions: 3, arrival: {poisson: 1/s}, size: 180, consumer: {lag: {mean: 20}}}
          - {name: topic://prices.us, subscriptions: 2, arrival: {diurnal: {mean: 1/s, peak: 1h}}, size: 180,
             consumer: {lag: 5s, offline: [{from: 10m, to: 30m}]}}
          - {name: queue://prices.log, arrival: {rate: 2/s}, size: 90, consumer: {lag: 2s}}
          - {name: queue://report, arrival: {burst: {every: 30m, count: 50}}, size: 4000,
             consumer: {lag: {min: 1m, max: 25m}}}
    """,
}


def in_force(stores: dict[str, list[str]], compact_live_percent: int = 50) -> CurrentConfig:
    """A configuration of journals with defaults: names and patterns."""
    journal = JournalOptions(compact_live_percent=compact_live_percent)
    configured = [StoreConfig(name, patterns, journal=journal) for name, patterns in stores.items()]
    return CurrentConfig(Config("data", configured))


def told(
    steps: Iterable[Sequence[str]], times: Iterable[float] | None = None, body: int = 1000, size: int = 0
) -> pa.Table:
    """A trace of sends, with bodies of so many bytes, and acks: what, where, and the message's id; one a second."""
    return from_events(
        UsageEvent(seq, ts, op, name, identity, size, None, 1, None, body if op == "send" else None)
        for seq, ((op, name, identity), ts) in enumerate(zip(steps, times or count(0.0), strict=False))
    )


def alike() -> pa.Table:
    """Two queues of which nothing stays: there is nothing to gain."""
    steps = [(op, f"queue://q{n % 2}", str(n)) for n in range(400) for op in ("send", "ack")]
    return told(steps, count(0.0, 0.5), body=500, size=50)


def store_of(config: Config, name: str) -> StoreConfig:
    """The store that a destination is routed to."""
    match = config.routes().route(Destination.parse(name))
    assert match is not None
    return match.target


def run(*arguments: object) -> Result:
    """A command of `anabranch`, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def shape(name: str, duration: str = "1h") -> Workload:
    """One of the six, as a workload."""
    return Workload.parse(f"name: {name}\nseed: 3\nduration: {duration}\n" + textwrap.dedent(_SHAPES[name]))


@pytest.fixture(scope="session", autouse=True)
def kernels(compiled: None) -> None:  # noqa: F811
    """Have them compiled."""


@pytest.fixture(scope="session", params=sorted(_SHAPES))
def shaped(request: pytest.FixtureRequest) -> tuple[str, pa.Table]:
    """Each of the six workloads as a trace."""
    return request.param, generate(shape(request.param))


@pytest.fixture(scope="session")
def toymaker(tmp_path_factory: pytest.TempPathFactory) -> pa.Table:
    """The trace of a real ActiveMQ broker's journal, with all that it had archived: 512 KiB files."""
    to = tmp_path_factory.mktemp("toymaker")
    with tarfile.open(EXAMPLES / "toymaker" / "toymaker-kahadb.tar.xz") as tar:
        tar.extractall(to, filter="data")
    return from_events(usage_trace(next(path for path in to.iterdir() if path.is_dir())))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    from anabranch.policies.advisor.spark.session import spark_session

    session = spark_session("local[2]")
    session.conf.set("spark.sql.shuffle.partitions", 2)
    yield session
    session.stop()


def measure(operations: Operations, partition: Partition, costs: CostModel) -> Retention:
    """Work out the exact figures of a partitioning."""
    return LocalEngine(operations).measure([partition], costs)[0]


def simulate(operations: Operations, partition: Partition, rules: JournalRules) -> Segments:
    """Find the segments of a partitioning whose stores do not compact."""
    return segments(courses(operations, partition, rules), rules.segment_bytes)


def written(answer: Recommendation, out: Path) -> list[Path]:
    """Write the files of an answer into a directory of this machine."""
    paths: list[Path] = []
    for path in answer.write(out):
        assert isinstance(path, Path)
        paths.append(path)
    return paths
