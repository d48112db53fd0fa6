"""Destinations that are declared, beside others that are sent to and deleted: what returned is there after a power
failure, also where the store's own policy would forget it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anabranch

from ..ledger import Marks, violations
from .worker import Workload, config

TURNS = 5


def run(directory: Path, workload: Workload) -> None:
    marks = Marks()
    for life in range(2):
        with anabranch.open(config(directory, workload.options)) as router:
            for turn in range(TURNS):
                names = [f"{at}{life}.{turn}" for at in ("queue://", "queue://each.", "topic://", "map://")]
                for name in names:
                    holder = _of(router, name)
                    operation = {"op": "declare", "d": name}
                    marks.trying(operation)
                    holder.declare()
                    marks.promised(operation)
                router.queue(f"other.{life}.{turn}").send(b"x" * 300)
                if turn % 2:
                    operation = {"op": "delete", "d": names[turn // 2]}
                    marks.trying(operation)
                    router.delete(names[turn // 2])
                    marks.promised(operation)


def _of(router: anabranch.Router, name: str) -> Any:
    makers: dict[str, Any] = {"queue": router.queue, "topic": router.topic, "map": router.map}
    return makers[name.partition("://")[0]](name)


def check(directory: Path, workload: Workload, marks: dict[str, Any]) -> list[str]:
    """What is wrong: with the index, and without it."""
    deleted = {operation["d"] for operation in [*marks["promised"], *marks["maybe"]] if operation["op"] == "delete"}
    wanted = {operation["d"] for operation in marks["promised"] if operation["op"] == "declare"} - deleted
    wrong = []
    for _ in range(2):
        with anabranch.open(config(directory, workload.options)) as router:
            router.stats()  # all stores are open: what they do not know is not known any more
            missing = wanted - {*map(str, router.destinations())}
            wrong += [f"{sorted(missing)} were declared, and are gone"] if missing else []
            wrong += violations(router)
        for index in directory.rglob("index.mdb"):
            index.unlink()
    return wrong
