"""One of several nodes over one database, as a process of its own; and how long it takes another to take over.

python -m tests.sql.node DIRECTORY EXPIRATION WAIT      the URL is in the environment; see `Node`
python -m tests.sql.node --measure 10 --expiration 2    seconds from the end of one node to the first send of another
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from anabranch.adapters.sql import SqlStore
from anabranch.policies.config.options import SqlOptions
from anabranch.policies.errors import AnabranchError
from anabranch.policies.names.destination import Destination

from .server import PATIENCE, PostgresServer

URL: Final = "ANABRANCH_NODE_URL"
QUEUE: Final = Destination.parse("q")


def options(url: str, expiration: float, wait: float, **more: Any) -> SqlOptions:
    given: dict[str, Any] = {"url": url, "lease_expiration": expiration, "lease_wait": wait, "pool_min": 0, **more}
    return SqlOptions(**given)


def work(directory: Path, settings: SqlOptions) -> int:
    """Send until stdin ends, and say what has been acknowledged, a JSON object a line: {"sent": name, "at": time}."""

    def say(**words: Any) -> None:
        print(json.dumps({**words, "at": time.time()}), flush=True)

    store = SqlStore(directory.name, directory, settings)
    try:
        if not directory.exists():
            SqlStore.create(directory.name, directory, settings)
        say(waits=True)
        store.open()
        say(opened=True)
        os.set_blocking(0, False)
        number = 0
        while sys.stdin.buffer.read(1) != b"":
            store.send(QUEUE, f"{directory.name}.{number}".encode())
            say(sent=f"{directory.name}.{number}")
            number += 1
        store.close()
        say(closed=True)
    except AnabranchError as error:
        say(error=type(error).__name__, text=str(error))
        return 3
    return 0


class Node:
    """A process that does `work`."""

    def __init__(self, directory: Path, url: str, expiration: float, wait: float) -> None:
        self._process: subprocess.Popen[str] = subprocess.Popen(
            [sys.executable, "-m", "tests.sql.node", str(directory), str(expiration), str(wait)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, URL: url},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        self.said: list[dict[str, Any]] = []

    @property
    def sent(self) -> list[str]:
        """Acknowledged, as far as it has been read."""
        return [words["sent"] for words in self.said if "sent" in words]

    def hear(self) -> dict[str, Any] | None:
        """The next words; None at the end."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return None
        self.said.append(json.loads(line))
        return self.said[-1]

    def until(self, key: str) -> dict[str, Any]:
        """Hear until it says this."""
        while (words := self.hear()) is not None:
            if key in words:
                return words
        raise AssertionError(f"it has ended without {key!r}: {self.said[-3:]}")

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def rest(self) -> Iterator[dict[str, Any]]:
        """What it says until its end."""
        while (words := self.hear()) is not None:
            yield words

    def finish(self) -> None:
        """It is to close its store."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> int:
        """Its exit code, whatever state it is in."""
        if self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self.signal(signal.SIGCONT)
        code = self._process.wait(PATIENCE)
        assert self._process.stdout is not None and self._process.stdin is not None
        self._process.stdout.close()
        self._process.stdin.close()
        return code


ENDS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "close": None}


def taken_over(url: str, directory: Path, expiration: float, how: str) -> float:
    """Seconds from the end of one node, by a kill, standing still, or a close, to the first send of the next."""
    first = Node(directory / "first", url, expiration, 0)
    first.until("sent")
    second = Node(directory / "second", url, expiration, PATIENCE)
    try:
        second.until("waits")
        for _ in range(20):
            first.until("sent")
        ended = time.time()
        number = ENDS[how]
        if number is None:
            first.finish()
        else:
            first.signal(number)
        return float(second.until("sent")["at"]) - ended
    finally:
        first.close()
        second.close()


def measure(count: int, expiration: float) -> None:
    with PostgresServer() as server:
        for how in ENDS:
            seconds = []
            for _ in range(count):
                with tempfile.TemporaryDirectory() as directory:
                    seconds.append(taken_over(server.new_schema(), Path(directory), expiration, how))
            print(
                f"{how}, lease of {expiration:g} s: take-over after {min(seconds):.2f} to {max(seconds):.2f} s, "
                f"median {statistics.median(seconds):.2f} s of {count}",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sql.node")
    parser.add_argument("node", nargs="*")
    parser.add_argument("--measure", type=int)
    parser.add_argument("--expiration", type=float, default=2.0)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.expiration)
        return 0
    directory, expiration, wait = given.node
    return work(Path(directory), options(os.environ[URL], float(expiration), float(wait)))


if __name__ == "__main__":
    sys.exit(main())
