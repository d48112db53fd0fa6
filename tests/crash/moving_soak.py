"""A soak: queues and a topic go back and forth between configurations while everybody uses them.

    python -m tests.crash.moving_soak --minutes 5                  one process: threads of every sort, nobody notices
    python -m tests.crash.moving_soak --minutes 5 --kill           a process that is killed, again and again

Without --kill (traffic.py) each message is seen once and in order, nobody gets an error, and it is told how long
senders have waited. With it a process sends, receives and acks while it moves, and writes to a file what has returned;
after a SIGKILL `anabranch repartition` finishes the move, and another process goes on: what was sent and not acked is
there, in order, what was acked is not, but for the one that was under way.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import anabranch
from anabranch.policies.errors import PlacementError
from anabranch.router.offline.repartition import repartition

from ..places import in_memory
from .ledger import violations
from .traffic import Traffic

KINDS: Final[dict[str, dict[str, Any]]] = {
    "journal": {"journal": {"segment_size": "256KiB", "sync": "never"}},
    "sql": {"sql": {}},
}
QUEUES: Final = ("a", "b", "c")
FULL: Final = 400
"""Messages in a queue, above which no more are sent."""


def configurations(directory: Path, kinds: tuple[str, str]) -> list[anabranch.Config]:
    """Three, in turn: all in one store, in two others, in a store for each destination."""
    first, second = (KINDS[kind] for kind in kinds)

    def config(*stores: tuple[str, list[str], dict[str, Any]]) -> anabranch.Config:
        return anabranch.Config(directory, [anabranch.StoreConfig(name, match, **more) for name, match, more in stores])

    stays = ("stays", ["stays"], first)
    return [
        config(stays, ("one", [">"], first)),
        config(stays, ("queues", ["queue://>"], second), ("topics", ["topic://>"], second)),
        config(stays, ("each", [">"], {**first, "per_destination": True})),
    ]


def soak(directory: Path, kinds: tuple[str, str], seconds: float) -> list[str]:
    """In this process; what is wrong."""
    turns = configurations(directory, kinds)
    until, messages = time.monotonic() + seconds, 0
    with anabranch.open(turns[0]) as router:
        with Traffic(router, pause=0.002) as traffic:
            quiet = time.monotonic() + min(5.0, seconds / 10)
            while time.monotonic() < quiet:
                time.sleep(0.05)
            before = dict(traffic.longest)
            traffic.longest = dict.fromkeys(traffic.longest, 0.0)
            for number in itertools.count(1):
                if traffic.errors or time.monotonic() > until:
                    break
                moved = router.repartition(turns[number % len(turns)])
                messages += sum(move.messages for move in moved.moves)
        wrong = traffic.wrong()
        wrong += violations(router)
    longest = traffic.longest
    print(
        f"{kinds}: {number - 1} moves of all, {messages} messages moved, {sum(traffic.sent.values())} sent. The "
        f"slowest send: {max(before.values()):.3f} s before any move; then {longest['stays']:.3f} s to the queue that "
        f"stays, {max(longest.values()):.3f} s to the others",
        flush=True,
    )
    return wrong


# Killed


def work(directory: Path, kinds: tuple[str, str], turn: int) -> None:
    """Until it is killed."""
    turns = configurations(directory, kinds)
    out = os.open(directory.parent / "told", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    router = anabranch.open(turns[turn % 3])

    def tell(*what: object) -> None:
        os.write(out, (" ".join(map(str, what)) + "\n").encode())

    def use(name: str) -> None:
        queue, chance = router.queue(name), random.Random()
        last = [int(message.body) for message in queue.browse()]
        number = last[-1] + 1 if last else next_number(directory.parent, name)
        held: list[anabranch.Message] = []
        while True:
            if queue.depth() < FULL and chance.random() < 0.6:
                tell("sends", name, number)
                queue.send(b"%d" % number)
                tell("sent", name, number)
                number += 1
            message = queue.receive()
            if message is not None:
                held.append(message)
            if len(held) > 5:
                message = held.pop(0)
                tell("acks", name, int(message.body))
                message.ack()
                tell("acked", name, int(message.body))

    for name in QUEUES:
        threading.Thread(target=use, args=(name,), daemon=True).start()
    for number in itertools.count(turn + 1):
        tell("turn", number)
        router.repartition(turns[number % 3])


def lines(place: Path) -> list[list[str]]:
    """What was told; the last line may be cut short."""
    told = place / "told"
    text = told.read_text() if told.exists() else ""
    return [line.split() for line in text[: text.rfind("\n") + 1].splitlines()]


def next_number(place: Path, name: str) -> int:
    """Behind all that were ever begun to be sent."""
    return max((int(line[2]) for line in lines(place) if line[:2] == ["sends", name]), default=-1) + 1


def verify(directory: Path, kinds: tuple[str, str]) -> tuple[int, list[str]]:
    """After a kill: bring the directory into one configuration; returns which, and what is wrong."""
    turns, told = configurations(directory, kinds), lines(directory.parent)
    if not (directory / "placement.records").exists():
        return 0, []  # it had not begun
    turn = max((int(line[1]) for line in told if line[0] == "turn"), default=0)
    finished = False
    for restart in (False, True):
        try:
            repartition(turns[turn % 3], turns[(turn - 1) % 3], restart=restart)
            finished = True
            break
        except PlacementError as error:
            if "another configuration" not in str(error):
                raise
    wrong = [] if finished else ["it cannot be finished"]
    with anabranch.open(turns[turn % 3]) as router:
        for name in QUEUES:
            of = {verb: {int(line[2]) for line in told if line[:2] == [verb, name]} for verb in
                  ("sends", "sent", "acks", "acked")}  # fmt: skip
            found = [int(message.body) for message in router.queue(name).browse()]
            if found != sorted(set(found)):
                wrong.append(f"{name} is out of order, or has some twice: {found}")
            if missing := of["sent"] - of["acks"] - set(found):
                wrong.append(f"{name} has lost {sorted(missing)}")
            if back := set(found) & of["acked"]:
                wrong.append(f"{name} has {sorted(back)}, which were acked")
            if strange := set(found) - of["sends"]:
                wrong.append(f"{name} has {sorted(strange)}, which nobody sent")
        wrong += violations(router)
    return turn, wrong


def killed(directory: Path, kinds: tuple[str, str], seconds: float) -> list[str]:
    """Rounds of a process and its end; what is wrong."""
    until, turn, rounds, chance = time.monotonic() + seconds, 0, 0, random.Random()
    directory.parent.mkdir(parents=True, exist_ok=True)
    while time.monotonic() < until:
        command = [sys.executable, "-m", "tests.crash.moving_soak", "--work", str(directory), "--turn", str(turn)]
        process = subprocess.Popen([*command, "--kinds", ",".join(kinds)], stderr=subprocess.PIPE, text=True)
        try:
            _, errors = process.communicate(timeout=1.5 + 3 * chance.random())
            return [f"the process has ended by itself: {errors}"]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        rounds += 1
        turn, wrong = verify(directory, kinds)
        if wrong:
            return wrong
    print(f"{kinds}: {rounds} kills, {turn} moves of all, {len(lines(directory.parent))} lines told", flush=True)
    return []


def main() -> int:
    parser = argparse.ArgumentParser(description="Move what is in use, for long.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--kinds", action="append", help="of the stores: journal,sql; all pairs without it")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turn", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    pairs = [
        tuple(text.split(",")) for text in given.kinds or ["journal,journal", "journal,sql", "sql,journal", "sql,sql"]
    ]
    if given.work is not None:
        work(given.work, pairs[0], given.turn)
    bad = 0
    for pair in pairs:
        with tempfile.TemporaryDirectory(prefix="moving-soak-", dir=in_memory()) as place:
            run = killed if given.kill else soak
            wrong = run(Path(place) / "of" / "data", pair, given.minutes * 60 / len(pairs))
        bad += bool(wrong)
        for line in wrong[:10]:
            print(line[:1000], flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
