"""Very many dead letters go back in bounded memory, and what was killed half way goes on."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest

import anabranch

from ..children import run_program
from ..contract.disk import PATIENCE
from ..router.disk import NEVER
from ..shares import Share

REASON = "it is wrong " * 10

PROGRAM = """
import os, signal, sys
import anabranch
from anabranch.router.upkeep import requeue
from tests.messages.test_requeue_many import config
from pathlib import Path

directory, kind, die_after = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
put_back, done = requeue._put_back, 0

def count(begin, letters, copies):
    global done
    put_back(begin, letters, copies)
    done += 1
    if done == die_after:
        os.kill(os.getpid(), signal.SIGKILL)

def peak_kib():  # not ru_maxrss, which begins with what the process took that started this one
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

requeue._put_back = count
with anabranch.open(config(directory, kind)) as router:
    router.queue("dlq").depth(), router.queue("q").depth()  # both are open
    before = peak_kib()
    print(router.requeue("dlq"), peak_kib() - before)
"""


def config(directory: Path, kind: str) -> anabranch.Config:
    stores = [
        anabranch.StoreConfig("all", [">"], journal=anabranch.JournalOptions(sync=NEVER, dead_letter="dlq")),
        anabranch.StoreConfig("dead", ["dlq"], journal=anabranch.JournalOptions(sync=NEVER))
        if kind == "journal"
        else anabranch.StoreConfig("dead", ["dlq"], sql=anabranch.SqlOptions()),
    ]
    return anabranch.Config(directory, stores, transactions=anabranch.TransactionOptions(sync=NEVER))


def requeued(directory: Path, kind: str, die_after: int) -> tuple[int, int]:
    """How many another process puts back, and how many KiB of memory that takes; (0, 0) if it is killed, after so many
    transactions."""
    code, told = run_program(PROGRAM, str(directory), kind, str(die_after), seconds=20 * PATIENCE)
    if code == -signal.SIGKILL:
        return 0, 0
    assert code == 0, told
    count, kib = told.split()
    return int(count), int(kib)


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_killed_half_way_it_goes_on(tmp_path: Path, share: Share, kind: str) -> None:
    """Each is put back once, in order, and says why it had been there."""
    count = share.count(1_000, 100_000)
    with anabranch.open(config(tmp_path / "data", kind)) as router:
        label: dict[str, str | int] = {
            "dead_letter_reason": REASON, "dead_letter_source": "queue://q", "dead_letter_deliveries": 3,
        }  # fmt: skip
        dead = router.queue("dlq")
        for first in range(0, count, 1000):
            dead.send_many(
                anabranch.Outgoing(b"%d" % number + bytes(500), {**label, "dead_letter_message_id": f"m-{number}"})
                for number in range(first, first + 1000)
            )
    half = count // 200
    assert requeued(tmp_path / "data", kind, die_after=half) == (0, 0)
    left, kib = requeued(tmp_path / "data", kind, die_after=0)
    assert 0 < left <= count - 100 * (half - 1)
    assert kib < 64 * 1024
    with anabranch.open(config(tmp_path / "data", kind)) as router:
        queue, seen = router.queue("q"), Counter[str]()
        last = -1
        for message in queue.browse():
            number = int(message.body.rstrip(bytes(1)))
            assert number > last
            last = number
            assert message.message_id == f"m-{number}"
            assert message.headers == {"requeued_reason": REASON, "requeued_count": 1, "requeued_deliveries": 3}
            seen[message.message_id] += 1
        assert (len(seen), seen.total(), router.queue("dlq").depth()) == (count, count, 0)
    share.counts.append(f"{kind}: {left} of {count} dead letters put back after a kill, {kib} KiB of memory")
