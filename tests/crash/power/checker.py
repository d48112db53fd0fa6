"""Is the directory right? Opened, compared with what was promised, walked by check(), opened without its indexes.

python -m tests.crash.power.checker NAME DIR MARKS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anabranch

from ..ledger import Contents, Operation, Prefix, body_of, compare, contents, violations
from .workloads import WORKLOADS, Workload, config

PROBE = "probe"


def verdict(name: str, directory: Path, marks: dict[str, Any]) -> list[str]:
    """What is wrong; empty if nothing is. Raises whatever opening raises, which is wrong too."""
    workload = WORKLOADS[name]
    setup = config(directory, workload.options)
    with anabranch.open(setup) as router:
        found = contents(router)
        wrong = _compare(workload, found, marks) + violations(router)
        router.queue(PROBE).send(body_of("p.0"))
    for index in directory.rglob("index.mdb"):
        index.unlink()
    with anabranch.open(setup) as router:
        again = contents(router)
        if again != {**found, PROBE: ["p.0"]}:
            wrong.append(f"without its index it holds {again}, with it {found}")
        wrong += violations(router)
    return wrong


def _compare(workload: Workload, found: Contents, marks: dict[str, Any]) -> list[str]:
    if not workload.prefix:
        return compare(found, marks["promised"], marks["maybe"])
    operations: list[Operation] = []
    floor = 0
    for line, _ in marks["marks"]:
        word, _, text = line.partition(" ")
        if word == "TRY":
            operations.append(json.loads(text))
        else:
            floor = len(operations)
    return Prefix(operations, floor).compare(found)


def judge(arguments: list[str]) -> list[str]:
    """The same, of the command line's NAME, DIR and MARKS."""
    name, directory, marks = arguments
    return verdict(name, Path(directory), json.loads(Path(marks).read_text()))


def main(arguments: list[str]) -> int:
    wrong = judge(arguments)
    print("; ".join(wrong[:5]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
