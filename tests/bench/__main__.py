"""The command line of the benchmarks; the package's docstring is its manual."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import peers, report, runner
from .scenarios import SCENARIOS


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if not runner.is_on_disk(options.dir):
        return 2
    lines = []
    for name in options.scenario:
        for peer, lacking in runner.left_out(name, options.peers).items():
            print(f"{name}: left out {peer}, which has no {', no '.join(lacking)}", file=sys.stderr)
        for line in runner.runs(name, options.peers, options.dir, options.rounds, options.n, options.threads):
            print(json.dumps(line), flush=True)
            lines.append(line)
    print(report.table(lines), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Anabranch beside its peers.")
    parser.add_argument(
        "--scenario",
        type=names_of(SCENARIOS),
        default=["send-sync"],
        help=f"comma separated, or all: {', '.join(SCENARIOS)}",
    )
    parser.add_argument(
        "--peers",
        type=names_of(peers.MODULES),
        default=list(peers.MODULES),
        help=f"comma separated: {', '.join(peers.MODULES)}",
    )
    parser.add_argument("--n", type=positive, help="operations a run (default: the scenario's, some seconds' worth)")
    parser.add_argument("--threads", type=positive, default=1, help="for the scenarios of sends and acks")
    parser.add_argument("--rounds", type=positive, default=3, help="how often each peer runs")
    parser.add_argument(
        "--dir", type=Path, default=Path("build/bench"), help="where to make the directories; must be a disk"
    )
    return parser


def names_of(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a count of 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
