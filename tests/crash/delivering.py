"""Workers that are killed at each step of receive, work and ack, and how often each message was delivered by then.

    python -m tests.crash.delivering [--share 1/10] [--seconds 60] [--kind journal] [--directory DIR]

Every child opens the directory, sends a message, and receives, notes and acks all there is; it dies by SIGKILL at the
k-th line of ours that it comes to, and some after it at the same. With `count_deliveries: on_receive` no message is
delivered more often than `max_deliveries` says, whatever k is, and each of them is acked, dead-lettered, or waits.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final

import anabranch
import anabranch.adapters.journal
import anabranch.adapters.sql  # here, not in each child

from ..contract.children import forked, reaped
from ..shares import Share, add_options, of_options

MOST: Final = 3
"""Deliveries."""
STEPS_MAX: Final = 5000
KINDS: Final = ("journal", "sqlite", "each")
OURS: Final = ("/adapters/", "/router/", __file__)


def config(directory: Path, kind: str) -> anabranch.Config:
    limited: dict[str, Any] = {"count_deliveries": "on_receive", "max_deliveries": MOST, "dead_letter": "dlq"}
    if kind == "sqlite":
        queue = anabranch.StoreConfig("q", ["q"], sql=anabranch.SqlOptions(**limited))
    else:
        options = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, **limited)
        queue = anabranch.StoreConfig("q", ["q"], per_destination=kind == "each", journal=options)
    dead = anabranch.StoreConfig("dlq", ["dlq"], journal=anabranch.JournalOptions(sync=anabranch.Sync.NEVER))
    return anabranch.Config(directory, [queue, dead])


def work(directory: Path, kind: str, at: int, turn: int, marks: Path) -> None:
    """The child's life."""
    file = os.open(marks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with anabranch.open(config(directory, kind)) as router:
        queue = router.queue("q")
        queue.send(b"%d.%d" % (at, turn))
        os.write(file, b"sent %d.%d\n" % (at, turn))
        left = at

        def trace(frame: FrameType, event: str, _argument: Any) -> Any:
            nonlocal left
            if not any(path in frame.f_code.co_filename for path in OURS):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        deliver(queue, file)
        sys.settrace(None)


def deliver(queue: anabranch.Queue, file: int) -> None:
    """What is traced, beside what it calls."""
    while (message := queue.receive()) is not None:
        os.write(file, b"delivered %s\n" % message.body)
        message.ack()
        os.write(file, b"acked %s\n" % message.body)


def verify(directory: Path, kind: str, marks: Path) -> list[str]:
    """What is wrong; empty if nothing is."""
    lines = [tuple(line.split()) for line in marks.read_text().splitlines()]
    sent, acked = ({body for what, body in lines if what == wanted} for wanted in ("sent", "acked"))
    delivered = Counter(body for what, body in lines if what == "delivered")
    wrong = [f"message {body} was delivered {count} times" for body, count in delivered.items() if count > MOST]
    with anabranch.open(config(directory, kind)) as router:
        router.sweep()
        waiting = {message.body.decode(): message.deliveries for message in router.queue("q").browse()}
        dead = {message.body.decode() for message in router.queue("dlq").browse()}
    wrong += [f"message {body} is lost" for body in sent - acked - dead - set(waiting) if not delivered[body]]
    wrong += [f"message {body} was acked and is there" for body in acked & (dead | set(waiting))]
    wrong += [
        f"message {body} was delivered {delivered[body]} times, and {count} are counted"
        for body, count in waiting.items() if delivered[body] > count
    ]  # fmt: skip
    wrong += [f"message {body} is dead after {delivered[body]}" for body in dead if delivered[body] > MOST]
    return wrong


def steps(kind: str, base: Path, share: Share, every: int) -> tuple[int, list[str]]:
    """Kill at one of every so many; how many were killed, and what is wrong."""
    place = base / kind
    place.mkdir()
    directory, marks = place / "data", place / "marks"
    kills, wrong = 0, list[str]()
    for at in share.of(range(1, STEPS_MAX), every):
        for turn in range(MOST + 1):  # so often, where it is always the same message that is in hand
            code = reaped(forked(partial(work, directory, kind, at, turn, marks)))
            kills += code == -signal.SIGKILL
            if code not in (0, -signal.SIGKILL):
                wrong.append(f"{kind}, step {at}: the worker ended with {code}")
        if wrong or (code == 0 and share.seconds == math.inf):
            break  # with seconds they come in any order
    if reaped(forked(partial(verify, directory, kind, marks))) != 0:
        wrong.append(f"{kind}: see above; kept in {place}")
    else:
        shutil.rmtree(place)
    return kills, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill workers at each step, and count deliveries.")
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--directory", type=Path)
    add_options(parser)
    arguments = parser.parse_args()
    base = arguments.directory or Path(tempfile.mkdtemp(prefix="delivering-"))
    share, every = of_options(arguments)
    kinds = arguments.kind or KINDS
    kills, wrong = 0, list[str]()
    for kind in kinds:
        some, complaints = steps(kind, base, share, every)
        kills, wrong = kills + some, wrong + complaints
    print(*wrong, f"{kills} workers killed over {', '.join(kinds)}, {len(wrong)} complaints", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
