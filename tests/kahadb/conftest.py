"""The journals that a real broker wrote, unpacked once a session. Tests that change files copy them first."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
TOYMAKER = Path(__file__).parents[2] / "examples" / "toymaker"


def _unpack(archive: Path, to: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
    return next(path for path in to.iterdir() if path.is_dir())


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _unpack(DATA / "kinds-kahadb.tar.xz", tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="session")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _unpack(DATA / "mixed-kahadb.tar.xz", tmp_path_factory.mktemp("mixed"))


@pytest.fixture(scope="session")
def toymaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _unpack(TOYMAKER / "toymaker-kahadb.tar.xz", tmp_path_factory.mktemp("toymaker"))
