"""For all tests."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .places import in_memory
from .sql.server import postgres, postgres_url  # noqa: F401  fixtures

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Ctrl-C is part of what is tested; a shell starts its background jobs without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

HERE = Path(__file__).parent
SLOWEST = (HERE / "partitioning", HERE / "crash")
OF_THE_DISK = (HERE / "journal", HERE / "crash")
"""Their files are on a real disk."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side (`-n 2 --dist worksteal`), a worker takes over what lies last with another: the slowest come first,
    so that none is begun when all others have ended, and one Spark session serves all tests that need one."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((n for n, place in enumerate(SLOWEST) if place in item.path.parents), 9))


def _kept(config: pytest.Config) -> bool:
    """Whether --basetemp was given; a worker always has one."""
    given = config.workerinput["mainargv"] if hasattr(config, "workerinput") else config.invocation_params.args
    return any(str(argument).startswith("--basetemp") for argument in given)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """pytest's own; in memory for those who wait for thousands of syncs and do not test them."""
    memory = in_memory()
    if memory is None or _kept(request.config) or any(place in request.path.parents for place in OF_THE_DISK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-test-", dir=memory) as place:
        yield Path(place)
