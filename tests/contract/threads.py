"""The contract of a store under many threads: nothing lost, nothing twice, each producer's messages in order."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.policies.names.destination import Destination

from .disk import PATIENCE, A, B, Disk, assert_whole, bodies

PRODUCERS = CONSUMERS = 8
EACH = 100


def produce(store: Store, destination: Destination, producer: int) -> None:
    """EACH messages `producer:number`, by all the ways to send."""
    number = 0
    while number < EACH:
        names = [f"{producer}:{number + n}".encode() for n in range(min(3, EACH - number))]
        way = (producer + number) % 4
        if way == 0:
            store.send_many(destination, names)
        elif way == 1:
            store.commit([(destination, Outgoing(name)) for name in names], [])
        else:
            names = names[:1]
            if way == 2:
                store.send(destination, names[0])
            else:
                store.send_nowait(destination, names[0]).result(PATIENCE)
        number += len(names)


def consume(store: Store, destination: Destination, done: threading.Event, seed: int) -> list[bytes]:
    """Receive until told and empty; ack most, give some back first, ack some in transactions."""
    chance = random.Random(seed)
    taken: list[bytes] = []
    while True:
        message = store.receive(destination, 0.01)
        if message is None:
            if done.is_set() and store.depth(destination) == 0:
                return taken
            continue
        way = chance.random()
        if way < 0.1:
            message.release()
            continue
        if way < 0.3:
            store.claim(message)
            if way < 0.15:
                store.unclaim([message])
                continue
            store.commit([], [message])
        else:
            message.ack()
        taken.append(message.body)


class ThreadsContract:
    def test_producers_and_consumers(self, disk: Disk, store: Store) -> None:
        done = threading.Event()
        with ThreadPoolExecutor(PRODUCERS + CONSUMERS) as pool:
            consumers = [pool.submit(consume, store, A, done, seed) for seed in range(CONSUMERS)]
            producers = [pool.submit(produce, store, A, producer) for producer in range(PRODUCERS)]
            for producer in producers:
                producer.result(3 * PATIENCE)
            done.set()
            taken = [body for consumer in consumers for body in consumer.result(3 * PATIENCE)]
        assert sorted(taken) == sorted(f"{p}:{n}".encode() for p in range(PRODUCERS) for n in range(EACH))
        assert_whole(store)
        assert bodies(disk.later(store)) == []

    def test_each_producers_order(self, disk: Disk, store: Store) -> None:
        with ThreadPoolExecutor(PRODUCERS) as pool:
            for future in [pool.submit(produce, store, A, producer) for producer in range(PRODUCERS)]:
                future.result(3 * PATIENCE)
        for view in disk.views(store):
            numbers: dict[int, list[int]] = defaultdict(list)
            for body in bodies(view):
                producer, number = map(int, body.split(b":"))
                numbers[producer].append(number)
            assert numbers == {producer: list(range(EACH)) for producer in range(PRODUCERS)}
            assert_whole(view)

    def test_one_message_id_from_many_threads(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            receipts = [
                receipt
                for n in range(20)
                for receipt in pool.map(lambda _, n=n: store.send(A, b"x", None, f"id-{n}"), range(8))
            ]
        assert sum(not receipt.duplicate for receipt in receipts) == 20
        assert store.depth(A) == 20

    def test_acks_of_one_message_from_many_threads(self, store: Store) -> None:
        def ack_it(message: object) -> bool:
            try:
                store.ack([message])  # type: ignore[list-item]
            except LookupError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            for _ in range(20):
                store.send(A, b"x")
                message = store.receive(A)
                assert sum(pool.map(ack_it, [message] * 8)) == 1
        assert store.stats().acks == 20

    def test_readers_while_others_change(self, store: Store) -> None:
        """browse, stats, check, purge and reclaim beside sends, acks and deletes: no error, no violation."""
        stop = threading.Event()

        def look() -> int:
            rounds = 0
            while not stop.is_set() or rounds < 3:
                seqs = [message.seq for message in store.browse(A)]
                assert seqs == sorted(set(seqs))
                store.stats()
                assert_whole(store)
                rounds += 1
            return rounds

        def clean() -> None:
            while not stop.is_set():
                store.purge(B)
                store.reclaim()
                store.send(B, b"x" * 5000)
                store.delete(B)

        with ThreadPoolExecutor(5) as pool:
            others = (pool.submit(look), pool.submit(clean), pool.submit(consume, store, A, stop, 1))
            for producer in [pool.submit(produce, store, A, producer) for producer in range(2)]:
                producer.result(3 * PATIENCE)
            stop.set()
            for other in others:
                other.exception(3 * PATIENCE)
            assert [other.exception() for other in others] == [None] * 3
        assert_whole(store)
