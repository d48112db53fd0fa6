from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huey as library

from anabranch.hosts.huey import AnabranchHuey

from .working import note, send_and_work

BACKENDS = {
    "anabranch": 1000, "SqliteHuey fsync": 300, "SqliteHuey no sync": 1000, "FileHuey no sync": 500, "redis always": 500
}  # fmt: skip


def made(backend: str, directory: Path) -> Any:
    match backend:
        case "anabranch":
            return AnabranchHuey("bench", directory=directory / "data")
        case "SqliteHuey fsync" | "SqliteHuey no sync":
            return library.SqliteHuey("bench", filename=str(directory / "huey.db"), fsync=backend.endswith("fsync"))
        case "FileHuey no sync":
            return library.FileHuey("bench", path=str(directory / "files"))
    return library.PriorityRedisHuey("bench", url=os.environ["BENCH_REDIS"])


if "BENCH_BACKEND" in os.environ:
    app = made(os.environ["BENCH_BACKEND"], Path(os.environ["BENCH_DIRECTORY"]))

    @app.task()
    def add(first: int, second: int) -> int:
        note()
        return first + second


def run(backend: str, directory: Path, count: int) -> Iterator[tuple[str, float]]:
    command = ["-m", "huey.bin.huey_consumer", "tests.bench.hosts.huey.app", "-w", "4", "-q"]
    yield from send_and_work("huey", lambda: add(1, 2), command, count)
