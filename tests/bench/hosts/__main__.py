"""The command: it starts each run as a process of its own, which prints one line of JSON for each scenario."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from .. import report
from ..peers.brokers import Redis

HOSTS = ["celery", "kombu", "huey", "django", "scrapy"]


def lines_of(host: str, backend: str, count: int, place: Path) -> list[dict[str, Any]]:
    """Return what a run has come to."""
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as directory:
        environment = os.environ | {"BENCH_BACKEND": backend, "BENCH_DIRECTORY": directory, "BENCH_COUNT": str(count)}
        server = Redis(Path(directory), durable=True) if "redis" in backend else None
        if server is not None:
            environment["BENCH_REDIS"] = f"redis://127.0.0.1:{server.port}/0"
        try:
            command = [sys.executable, "-m", "tests.bench.hosts", "--run", host]
            ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            if server is not None:
                server.close()
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def run(host: str) -> None:
    """Run one host over the backend that the environment names."""
    backend, count = os.environ["BENCH_BACKEND"], int(os.environ["BENCH_COUNT"])
    directory = Path(os.environ["BENCH_DIRECTORY"])
    for scenario, seconds in import_module(f".{host}", __package__).run(backend, directory, count):
        line = {"peer": backend, "scenario": scenario, "n": count, "payload_bytes": 0, "threads": 1}
        line |= {"seconds": seconds, "per_second": count / seconds, "p50_us": None, "p99_us": None}
        print(json.dumps(line), flush=True)


def backends_of(host: str) -> dict[str, int]:
    """Return the backends that can be measured here, and how many tasks each gets."""
    try:
        found: dict[str, int] = import_module(f".{host}", __package__).BACKENDS
    except ImportError as error:
        print(f"left out {host}: {error}", file=sys.stderr)
        return {}
    if Redis.server is None:
        print(f"left out Redis for {host}: there is no redis-server", file=sys.stderr)
        return {backend: count for backend, count in found.items() if "redis" not in backend}
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.hosts", description=__doc__)
    parser.add_argument("--hosts", default=",".join(HOSTS))
    parser.add_argument("--backends", help="comma separated (default: all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--count", type=int, help="tasks a run (default: some seconds' worth)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp"))
    parser.add_argument("--run", choices=HOSTS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.run:
        run(options.run)
        return
    lines = []
    for host in options.hosts.split(","):
        wanted = options.backends and options.backends.split(",")
        backends = [(name, count) for name, count in backends_of(host).items() if not wanted or name in wanted]
        for _ in range(options.rounds):
            for backend, count in backends:
                for line in lines_of(host, backend, options.count or count, options.dir):
                    lines.append(line)
                    print(json.dumps(line), flush=True)
            backends = backends[1:] + backends[:1]
    print(report.table(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
