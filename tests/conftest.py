"""For all tests."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

from anabranch.adapters.core.engine import engine
from anabranch.router.placement import store_statistics

from . import browser
from .browser import chromium  # noqa: F401  a fixture
from .garbage import set_aside
from .places import in_memory
from .shares import Share
from .sharing.fixtures import owner  # noqa: F401  a fixture
from .sql import compiled, pooler, server
from .sql.server import postgres, postgres_url  # noqa: F401  fixtures

# Tests start hundreds of processes, each of which would compile the product, and each worker all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Ctrl-C is part of what is tested; a shell starts its background jobs without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are the same every time, as a share is (shares.py): what `make test` finds is the change's. Campaigns look
# for others. How long one takes says how busy the machine is.
settings.register_profile("anabranch", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("campaign", settings.get_profile("anabranch"), derandomize=False, max_examples=2000)
settings.load_profile("anabranch")

# On a busy machine a store may take long to answer. Tests of stores that do not answer say how long they wait.
engine.__dict__.update(COUNT_SECONDS=30.0)
store_statistics.__dict__.update(ANSWER_SECONDS=120.0)

HERE = Path(__file__).parent
SLOWEST = (HERE / "crash/test_transactions.py", HERE / "partitioning", HERE / "crash")
CRASHES_ON_DISK = ("delivering", "idle_damage", "isolation", "kinds", "recovery", "sigkill")
OF_THE_DISK = {path for path in (HERE / "journal").glob("test_*.py") if path.name != "test_checksums.py"} | {
    HERE / "crash" / f"test_{name}.py" for name in CRASHES_ON_DISK
}
"""Their files are on a real disk. All others ask nothing of what a disk does when it syncs, some at thousands of
places."""

collect_ignore = ["hosts"]  # make test-hosts: each needs an environment of its own

_numbers = itertools.count(1)
"""Of the tests that this process runs."""


def _missing() -> list[ModuleType]:
    """What tests ask for and this machine has not."""
    needed = ((server, server.binaries()), (browser, browser.binary()), (pooler, pooler.binary()))
    return [one for one, found in needed if found is None]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What needs a server of PostgreSQL, pgbouncer or Chromium is left out where there is none.

    Side by side (`-n 2 --dist worksteal`), a worker takes over what lies last with another: the slowest come first,
    so that none is begun when all others have ended, and one Spark session serves all tests that need one."""
    for missing in _missing():
        config.hook.pytest_deselected(items=[item for item in items if missing.asks_for_one(item)])
        items[:] = [item for item in items if not missing.asks_for_one(item)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((n for n, at in enumerate(SLOWEST) if item.path.is_relative_to(at)), 9))


def pytest_collection_finish() -> None:
    set_aside()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Where Ctrl-C strikes at each step, and what is damaged or killed, is the same whatever ran before. What hundreds
    of tests have left would be walked through by each test that collects garbage."""
    if next(_numbers) % 10 == 0:
        set_aside()
    compiled.share(not item.path.is_relative_to(HERE / "crash") and "interrupt" not in item.path.name)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--campaign-minutes", type=float, default=0, help="what all campaigns may take together; 0: what they need"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "campaign: the whole of what other tests do a share of; make test-all")
    config.addinivalue_line("markers", "weight(number): what a campaign gets of the minutes, 1 where nothing is said")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was left out; what the campaigns counted."""
    if missing := _missing():
        terminalreporter.section("left out")
        for one in missing:
            terminalreporter.write_line(one.LEFT_OUT)
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    told = [
        f"{report.nodeid}: {text}"
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "teardown" and "campaign" in report.keywords
        for name, text in report.user_properties
        if name == "counts"
    ]
    if told:
        terminalreporter.section("campaigns")
        terminalreporter.write("".join(f"{line}\n" for line in sorted(told)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: now and then a test waits, for a sync of the disk or a second of the
    clock's."""
    return (os.cpu_count() or 1) + 1


def _weight(item: pytest.Item) -> float:
    if item.get_closest_marker("campaign") is None:
        return 0.0
    mark = item.get_closest_marker("weight")
    return 1.0 if mark is None else float(mark.args[0])


def _seconds(request: pytest.FixtureRequest) -> float:
    """What this campaign may take; no end where no limit was given."""
    minutes: float = request.config.getoption("--campaign-minutes")
    weight = _weight(request.node)
    if not minutes or not weight:
        return math.inf
    workers: int = getattr(request.config, "workerinput", {"workercount": 1})["workercount"]
    return 60 * minutes * workers * weight / sum(_weight(item) for item in request.session.items)


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Iterator[Share]:
    """How much is done by a test that says itself whether it is a campaign."""
    share = Share(request.node.get_closest_marker("campaign") is not None, _seconds(request))
    yield share
    request.node.user_properties += [("counts", text) for text in share.counts]


@pytest.fixture(params=["share", pytest.param("whole", marks=pytest.mark.campaign)])
def share(budget: Share) -> Share:
    """How much of its enumeration a test does: once a share of it, once, as a campaign, the whole."""
    return budget


def _kept(config: pytest.Config) -> bool:
    """Whether --basetemp was given; a worker always has one."""
    given = config.workerinput["mainargv"] if hasattr(config, "workerinput") else config.invocation_params.args
    return any(str(argument).startswith("--basetemp") for argument in given)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """As pytest's own; in memory for those who wait for thousands of syncs and do not test them."""
    memory = in_memory()
    if memory is None or _kept(request.config) or request.path in OF_THE_DISK:
        yield tmp_path_factory.mktemp(re.sub(r"\W", "_", request.node.name)[:30])
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-test-", dir=memory) as place:
        yield Path(place)
