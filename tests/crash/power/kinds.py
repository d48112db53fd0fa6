"""Workloads of what messages can do, and of stores of several kinds: journals `j` and `k`, SQLite `s` and `t`, memory
`m`.

They are made of the steps of mixed.py, and its marks. Dead letters of `j` go to `s` and the other way round.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anabranch

from ...contract.disk import eventually
from ..ledger import Marks, read_marks
from ..mixed import MOST, Hand, prepare, retry
from .cross import held, opened
from .worker import SEGMENT, Workload


def config(directory: Path, options: dict[str, Any]) -> anabranch.Config:
    """`stores`: which of them there are; the other options are the journals'."""
    journal = {name: value for name, value in options.items() if name != "stores"}
    names: str = options["stores"]
    dead = {"j": "s.dead", "k": "j.dead", "s": "j.dead", "t": "k.dead", "m": "j.dead"}
    found = []
    for name in names:
        letters = dead[name] if dead[name][0] in names else f"{name}.dead"
        common: dict[str, Any] = {"priorities": name in "js", "dead_letter": letters, "max_deliveries": MOST}
        common["large_message_size"] = 2048
        if name in "jk":
            chosen = anabranch.JournalOptions(**{"segment_size": SEGMENT} | journal | common)
            found.append(anabranch.StoreConfig(name, [f"{name}.>"], journal=chosen))
        elif name == "m":
            memory = anabranch.MemoryOptions(max_bytes=64 * 1024, roll_over_size=64 * 1024, **common)
            found.append(anabranch.StoreConfig(name, [f"{name}.>"], memory=memory))
        else:
            found.append(
                anabranch.StoreConfig(name, [f"{name}.>"], sql=anabranch.SqlOptions(chunk_size=4096, **common))
            )
    return anabranch.Config(directory, found)


def in_turn(
    steps: Sequence[Callable[[Hand], object]], lives: int, turns: int, names: Sequence[str] = ("a",)
) -> Callable[[Path, Workload], None]:
    """In each of some lives some threads do each of these steps in each of some turns."""

    def run(directory: Path, workload: Workload) -> None:
        marks = Marks()
        for life in range(lives):
            with opened(config(directory, workload.options)) as router:
                prepare(router)
                hands = [Hand(router, marks, f"{name}{life}t", random.Random(f"{name} {life}")) for name in names]
                hands[0].end_left(held(), 0.3)
                failed: list[BaseException] = []
                threads = [threading.Thread(target=_turns, args=(hand, steps, turns, failed)) for hand in hands]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                if failed:
                    raise failed[0]

    return run


def _turns(hand: Hand, steps: Sequence[Callable[[Hand], object]], turns: int, failed: list[BaseException]) -> None:
    try:
        for _ in range(turns):
            for step in steps:
                step(hand)
    except BaseException as error:
        failed.append(error)


def send(hand: Hand) -> None:
    hand.send(hand.somewhere())


def ack(hand: Hand) -> None:
    hand.ack(hand.somewhere())


def release(hand: Hand) -> None:
    hand.release(hand.somewhere())


def to_topic(hand: Hand) -> None:
    hand.send(f"topic://{hand.chance.choice(hand.stores)}.t")


def of_topic(hand: Hand) -> None:
    hand.ack(f"topic://{hand.chance.choice(hand.stores)}.t")


def until_spent(hand: Hand) -> None:
    """Of one queue; what was released once comes first again."""
    queue = f"{hand.chance.choice(hand.stores)}.r"
    for _ in range(MOST):
        hand.release(queue)


def reject(hand: Hand) -> None:
    hand.reject(hand.somewhere())


def put_back(hand: Hand) -> None:
    hand.put_back(hand.chance.choice([store for store in hand.stores if store != "m"]))


def aside(hand: Hand) -> None:
    hand.router.sweep()


def drain(hand: Hand) -> None:
    hand.drain(hand.chance.choice([store for store in hand.stores if store != "m"]))


def reclaim(hand: Hand) -> None:
    hand.router.reclaim()


def external(hand: Hand) -> None:
    """Prepared; two of three are told their outcome."""
    prepared = hand.prepare()
    if prepared and hand.chance.random() < 0.66:
        hand.end(prepared, hand.chance.random() < 0.6)


def killed_at_work(directory: Path, workload: Workload, turn: int, die: Callable[[], None]) -> None:
    """Two threads at work when a timer ends it all; every other time while it opens, most likely."""
    fuse = threading.Timer((0.2, 0.1, 0.4, 0.3, 0.15, 0.5)[turn], die)
    fuse.daemon = True
    if turn % 2:
        fuse.start()
    marks = Marks()
    known = held()
    promised, maybe = read_marks(marks.path)
    with opened(config(directory, workload.options)) as router:
        prepare(router)
        first = Hand(router, marks, f"k{turn}t", random.Random(turn))
        first.end_left(known, 0.3)
        retry(first, promised, maybe)
        others = [Hand(router, marks, f"k{turn}t{name}", random.Random(f"{turn} {name}")) for name in "ab"]
        before = marks.path.stat().st_size
        threads = [threading.Thread(target=hand.run, daemon=True) for hand in others]
        for thread in threads:
            thread.start()
        if not turn % 2:  # a busy machine may come to it late
            eventually(
                lambda: marks.path.stat().st_size >= before + 1000 or not all(thread.is_alive() for thread in threads)
            )
            fuse.start()
        for thread in threads:
            thread.join()


TOPICS = (to_topic, to_topic, of_topic, of_topic, of_topic, Hand.subscriptions, reclaim)
ORDER = (send, send, release, ack, send, until_spent, aside, drain, reclaim)
ALONE = (send, to_topic, ack, release, Hand.subscriptions, of_topic, ack, until_spent, aside, drain)
ACROSS = (send, send, Hand.transaction, Hand.transaction, ack, external)
OUTBOX = (send, Hand.within, Hand.within, release, ack, Hand.within, to_topic)
LETTERS = (send, send, until_spent, aside, to_topic, drain, ack)
REQUEUED = (send, until_spent, aside, put_back, send, reject, put_back, ack, release, put_back)

KINDS = {
    "subscriptions": Workload(in_turn(TOPICS, 2, 9), {"stores": "j", "checkpoint_operations": 7}, setup=config),
    "deliveries": Workload(in_turn(ORDER, 2, 9), {"stores": "j", "checkpoint_operations": 9}, setup=config),
    "sqlite": Workload(in_turn(ALONE, 2, 7), {"stores": "s"}, setup=config),
    "outbox": Workload(in_turn(OUTBOX, 2, 7), {"stores": "s"}, setup=config),
    "across-kinds": Workload(
        in_turn(ACROSS, 2, 7, ("a", "b")), {"stores": "js", "checkpoint_operations": 9}, setup=config
    ),
    "across-all": Workload(in_turn(ACROSS, 2, 5, ("a", "b")), {"stores": "jskt"}, setup=config),
    "across-memory": Workload(in_turn(ACROSS, 2, 7), {"stores": "jsm", "checkpoint_operations": 9}, setup=config),
    "dead-letters": Workload(in_turn(LETTERS, 2, 8), {"stores": "js", "checkpoint_operations": 9}, setup=config),
    "requeued": Workload(in_turn(REQUEUED, 2, 8), {"stores": "js", "checkpoint_operations": 9}, setup=config),
}
