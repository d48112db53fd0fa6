"""How much resident memory a memory store takes: a program, so that it is measured in a process of its own.

    python -m tests.memory.resident BODY_BYTES MAX_BYTES TIMES [HOW]

Sends TIMES times MAX_BYTES of messages, in the way that HOW says, then receives all of them, and prints one line of
JSON: resident bytes when the store was open and empty, the most seen since, what the store says, and whether each
message came back in its order.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.memory import MemoryStore
from anabranch.policies.config.options import MemoryOptions
from anabranch.policies.names.destination import Destination

QUEUES = [Destination.parse(f"q.{n}") for n in range(50)]
TOPIC = Destination.parse("topic://t")
FAST, SLOW = Subscription(TOPIC, "fast"), Subscription(TOPIC, "slow")
SOME = 100
"""Messages between two looks at the process."""


def resident() -> int:
    """VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


class Watched:
    """The most that was resident."""

    def __init__(self) -> None:
        self.before = self.most = resident()

    def look(self) -> None:
        self.most = max(self.most, resident())


def body_of(number: int, size: int) -> bytes:
    """One that differs from the others."""
    return number.to_bytes(8, "big") + os.urandom(16) + b"." * (size - 24)


def run(directory: Path, size: int, max_bytes: int, times: int, how: str) -> dict[str, Any]:
    """What is printed."""
    options = MemoryOptions(max_bytes=max_bytes, max_leases=1000, duplicate_window=1000)
    MemoryStore.create("measured", directory, options)
    store = MemoryStore("measured", directory, options)
    store.open()
    store.send_many(QUEUES[0], [body_of(n, size) for n in range(2)])  # what is imported and kept on first use
    store.purge(QUEUES[0])
    count = max_bytes * times // size
    where = {"one": [QUEUES[0]], "many": QUEUES, "topic": [TOPIC], "big": [QUEUES[0]]}[how]
    if how == "topic":
        store.subscribe(FAST)
        store.subscribe(SLOW)
    watched, started = Watched(), time.monotonic()
    batch = max(1, min(50, 10_000 // size))
    sent, acked = dict.fromkeys(where, 0), 0
    for number in range(count // batch):
        destination = where[number % len(where)]
        first = sent[destination]
        store.send_many(
            destination,
            [Outgoing(body_of(first + n, size), expires_at_ms=0 if n % 10 else 1 << 62) for n in range(batch)],
        )
        sent[destination] += batch
        for _ in range(batch // 10 if how == "topic" else 0):
            message = store.receive(TOPIC, 0, FAST.key)
            assert message is not None
            assert int.from_bytes(message.body[:8], "big") == acked
            message.ack()
            acked += 1
        watched.look()
    sent_in, stats = time.monotonic() - started, store.stats()
    started, seen = time.monotonic(), 0
    for destination in where:
        expected = 0
        while (message := store.receive(destination, 0, SLOW.key if how == "topic" else None)) is not None:
            assert int.from_bytes(message.body[:8], "big") == expected, f"{expected} is not next in {destination}"
            assert len(message.body) == size
            expected += 1
            if expected % SOME == 0 or size > 10_000:
                watched.look()
            message.ack()
        assert expected == sent[destination]
        seen += expected
    received_in = time.monotonic() - started
    store.send_many(QUEUES[0], [Outgoing(b"x")])
    assert list(store.check()) == []
    left = store.stats()
    store.close()
    return {
        "messages": sum(sent.values()), "seen": seen, "before": watched.before, "most": watched.most,
        "grown": watched.most - watched.before, "max_bytes": max_bytes, "memory_bytes": stats.memory_bytes,
        "swap_bytes": stats.swap_bytes, "left_memory_bytes": left.memory_bytes, "left_swap_bytes": left.swap_bytes,
        "sends_a_second": round(sum(sent.values()) / sent_in), "receives_a_second": round(seen / received_in),
        "files_left": sorted(str(path.relative_to(directory)) for path in directory.rglob("*")),
    }  # fmt: skip


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="resident-") as place:
        body_bytes, max_bytes, times = (int(argument) for argument in sys.argv[1:4])
        how = sys.argv[4] if len(sys.argv) > 4 else "one"
        print(json.dumps(run(Path(place) / "store", body_bytes, max_bytes, times, how)))
