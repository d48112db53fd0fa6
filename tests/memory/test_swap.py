"""What does not fit into memory lies in swap files, comes back whole, and leaves nothing behind (features.md Z)."""

from __future__ import annotations

import errno
import json
import random
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.memory import MemoryStore
from anabranch.policies.errors import CorruptionError, StoreFailedError, StoreFullError
from anabranch.policies.units import KIB, MIB

from ..contract.disk import A, B, T, assert_whole, bodies, drain, take
from .disk import MemoryDisk, directory_of, swap_files

DESK, BOOK = Subscription(T, "desk"), Subscription(T, "book")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[MemoryDisk]:
    with MemoryDisk(tmp_path) as disk:
        yield disk


def small(disk: MemoryDisk, **options: Any) -> MemoryStore:
    """A store with little memory."""
    return disk.reopen(disk.create(), **{"max_bytes": 256 * KIB, "roll_over_size": 64 * KIB, **options})


def body(number: int, size: int = 1000) -> bytes:
    """One that differs from all others."""
    return random.Random(number).randbytes(size)


def fill(store: MemoryStore, count: int = 2000) -> list[bytes]:
    """Some of it cannot stay in memory."""
    sent = [body(n) for n in range(count)]
    store.send_many(A, sent)
    return sent


# What is swapped


def test_what_is_swapped_comes_back_in_order(disk: MemoryDisk) -> None:
    store = small(disk)
    sent = fill(store)
    stats = store.stats()
    assert stats.memory_bytes <= 256 * KIB
    assert stats.swap_bytes > 1_700_000
    assert len(swap_files(store)) >= 20
    assert bodies(store) == sent
    assert drain(store) == sent
    assert_whole(store)


def test_all_that_belongs_to_a_message_is_swapped(disk: MemoryDisk) -> None:
    store = small(disk)
    seqs = [
        store.send(A, body(n), {"n": n, "ü": None}, f"id {n}", None, 6553 * (n % 10), (1 << 50) + n if n % 3 else 0).seq
        for n in range(1000)
    ]
    for n, message in enumerate(store.browse(A)):
        assert (message.body, message.headers, message.message_id) == (body(n), {"n": n, "ü": None}, f"id {n}")
        assert (message.priority, message.expires_at_ms) == (6553 * (n % 10), (1 << 50) + n if n % 3 else 0)
        assert message.seq == seqs[n]


def test_nothing_is_on_disk_as_long_as_it_fits(disk: MemoryDisk) -> None:
    store = disk.create()
    fill(store)
    drain(store)
    assert not (directory_of(store) / "swap").exists()


@pytest.mark.parametrize("order", ["first to last", "last to first", "any"])
def test_a_file_goes_with_its_last_message(disk: MemoryDisk, order: str) -> None:
    store = small(disk)
    fill(store)
    messages = [take(store) for _ in range(2000)]
    before = len(swap_files(store))
    if order == "last to first":
        messages.reverse()
    elif order == "any":
        random.Random(1).shuffle(messages)
    fewer = 0
    for at in range(0, 2000, 50):
        store.ack(messages[at : at + 50])
        now = len(swap_files(store))
        fewer += now < before
        before = now
    assert fewer > (1 if order == "any" else 10)  # on the way, not at the end
    assert (swap_files(store), store.stats().swap_bytes) == ([], 0)
    assert_whole(store)


@pytest.mark.parametrize("how", ["purge", "delete"])
def test_files_go_with_their_destination(disk: MemoryDisk, how: str) -> None:
    store = small(disk)
    sent = fill(store)
    held = [take(store) for _ in range(3)]
    if how == "purge":
        assert store.purge(A) == 1997
        assert bodies(store) == sent[:3]
        store.ack(held)
    else:
        assert store.delete(A) == 2000
    assert (swap_files(store), store.stats().messages) == ([], 0)
    assert store.stats().memory_bytes < 8 * KIB
    assert_whole(store)


def test_a_topic_is_swapped_once_for_all(disk: MemoryDisk) -> None:
    store = small(disk)
    store.subscribe(DESK)
    store.subscribe(BOOK)
    sent = [body(n) for n in range(2000)]
    store.send_many(T, sent)
    assert store.stats().swap_bytes < 2_200_000
    assert drain(store, T, DESK.key) == sent
    assert (store.depth(T), len(swap_files(store)) > 20) == (2000, True)
    assert_whole(store)
    middle = store.subscribe(Subscription(T, "late"), retroactive=True)
    assert middle
    assert store.unsubscribe(T, BOOK.key) == 2000
    assert bodies(store, T, ("", "late")) == sent
    assert_whole(store)
    assert store.unsubscribe(T, ("", "late")) == 2000
    assert (swap_files(store), store.stats().messages) == ([], 0)
    assert_whole(store)


def test_priorities_expiry_and_counts_beside_the_swap(disk: MemoryDisk) -> None:
    store = small(disk, priorities=True, max_deliveries=2, dead_letter="dlq")
    for n in range(1500):
        store.send(A, body(n), priority=n % 10, expires_at_ms=1 if n % 100 == 50 else 0)
    lost = [message for message, _ in store.take_undelivered(1000)]
    assert [message.body for message in lost] == [body(n) for n in range(50, 1500, 100)]
    store.ack(lost)
    store.release([take(store) for _ in range(5)])
    expected = [n for n in sorted(range(1500), key=lambda n: (-(n % 10), n)) if n % 100 != 50]
    again = [take(store) for _ in range(5)]
    assert [(message.body, message.deliveries) for message in again] == [(body(n), 2) for n in expected[:5]]
    store.release(again)
    assert drain(store) == [body(n) for n in expected[5:]]
    assert [message.body for message, _ in store.take_undelivered()] == [body(n) for n in expected[:5]]
    assert_whole(store)


def test_transactions_beside_the_swap(disk: MemoryDisk) -> None:
    """One that is larger than all the memory, too."""
    store = small(disk)
    sent = fill(store, 500)
    messages = [take(store) for _ in range(100)]
    for message in messages:
        store.claim(message)
    more = [body(n + 1000, 5000) for n in range(200)]
    store.commit([(B, Outgoing(some)) for some in more], messages[:50])
    name = bytes(32)
    store.prepare(name, [store.store_id], [(B, Outgoing(some)) for some in more], messages[50:], True, None).wait()
    assert len(store.commit_prepared(name).wait()) == 200
    assert store.stats().memory_bytes <= 256 * KIB
    assert drain(store) == sent[100:]
    assert drain(store, B) == more + more
    assert_whole(store)


def test_many_destinations(disk: MemoryDisk) -> None:
    """Chunks that are not full are swapped as well."""
    store = small(disk, max_bytes=MIB)
    where = [type(A)(A.kind, f"q.{n}") for n in range(40)]
    for n in range(6000):
        store.send(where[n % 40], body(n))
    assert store.stats().memory_bytes <= MIB
    for k, destination in enumerate(where):
        assert drain(store, destination) == [body(n) for n in range(k, 6000, 40)]
    assert_whole(store)


def test_a_large_body(disk: MemoryDisk) -> None:
    store = small(disk)
    large = body(1, MIB) * 100
    store.send(A, b"before")
    store.send(A, large)
    store.send(A, b"after")
    assert store.stats().memory_bytes <= 256 * KIB
    assert store.stats().swap_bytes > 100 * MIB
    assert [message.body == large for message in store.browse(A)] == [False, True, False]
    take(store).ack()
    message = take(store)
    assert message.body == large
    message.ack()
    assert drain(store) == [b"after"]
    assert store.stats().swap_bytes < MIB
    assert_whole(store)


# Bounded (invariant 10)

SLACK = 4 * MIB
"""What the process may take beside, whatever max_bytes is: the interpreter's own caches, one message in hand."""


@pytest.mark.parametrize(
    ("size", "max_bytes", "how"),
    [
        (100, MIB, "one"),
        (1024, 2 * MIB, "topic"),
        (1024, 2 * MIB, "many"),
        (100 * KIB, 8 * MIB, "one"),
        (16 * MIB, 16 * MIB, "big"),
    ],
)
def test_memory_does_not_grow_with_the_backlog(size: int, max_bytes: int, how: str) -> None:
    """Resident, as the operating system sees it, at ten times max_bytes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.memory.resident", str(size), str(max_bytes), "10", how],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["seen"] == found["messages"]
    assert found["swap_bytes"] > 8.5 * max_bytes
    assert found["memory_bytes"] <= max_bytes
    assert found["grown"] <= 1.5 * max_bytes + SLACK + (4 * size if size > MIB else 0), found
    assert found["files_left"] == ["store.id"]


def test_what_tells_where_messages_are_is_bounded_too(disk: MemoryDisk) -> None:
    """So many small destinations that nothing more fits: the store is full, keeps what it has, and can be emptied."""
    store = disk.reopen(disk.create(), max_bytes=64 * KIB)
    sent = 0
    with pytest.raises(StoreFullError, match="max_bytes is 65536"):
        for n in range(1000):
            store.send(type(A)(A.kind, f"q.{n}"), b"x")
            sent += 1
    assert store.stats().messages == sent > 10
    assert store.stats().memory_bytes <= 64 * KIB
    for n in range(sent):
        assert drain(store, type(A)(A.kind, f"q.{n}")) == [b"x"]
        store.delete(type(A)(A.kind, f"q.{n}"))
    store.send(A, b"x")
    assert_whole(store)


# Files


def test_close_leaves_nothing_but_the_id(disk: MemoryDisk) -> None:
    store = small(disk)
    fill(store)
    store.close()
    assert [path.name for path in directory_of(store).rglob("*")] == ["store.id"]


def test_what_a_killed_process_left_is_wiped(disk: MemoryDisk) -> None:
    store = small(disk)
    fill(store)
    again = disk.crash(store)
    assert swap_files(again) == []
    sent = fill(again)
    assert drain(again) == sent


# When the disk fails (invariants 7 and 9)


@contextmanager
def files_limited(size: int) -> Iterator[None]:
    """No file grows beyond that: the operating system says EFBIG, which is to say full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_refuses_sends_and_loses_nothing(disk: MemoryDisk) -> None:
    store = small(disk, roll_over_size=MIB)
    sent = fill(store, 300)
    before = store.stats().swap_bytes
    with files_limited(before + 5000):
        with pytest.raises(StoreFullError, match="cannot grow"):
            while True:
                store.send(A, body(len(sent)), None, f"id {len(sent)}")
                sent.append(body(len(sent)))
        with pytest.raises(StoreFullError, match="cannot grow"):
            store.send_nowait(A, b"x" * 300_000).result()
        message = take(store)
        store.claim(message)
        with pytest.raises(StoreFullError, match="cannot grow"):
            store.commit([(B, Outgoing(b"x" * 100_000)), (B, Outgoing(b"x" * 200_000))], [message])
        store.commit([], [message])
        assert bodies(store) == sent[1:]
        assert store.stats().failed is None
        assert_whole(store)
        for expected in sent[1:250]:
            message = take(store)
            assert message.body == expected
            message.ack()
        store.send(A, b"there is room again")
    assert not store.send(A, body(len(sent)), None, f"id {len(sent)}").duplicate  # the refused one was not sent
    assert drain(store) == [*sent[250:], b"there is room again", body(len(sent))]
    assert_whole(store)


def test_a_disk_that_cannot_be_written(disk: MemoryDisk) -> None:
    store = small(disk)
    (directory_of(store) / "swap").write_bytes(b"no directory")
    sent: list[bytes] = []
    with pytest.raises(StoreFailedError, match="Nothing was sent") as caught:
        for n in range(1000):
            store.send(A, body(n))
            sent.append(body(n))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno in (errno.EEXIST, errno.ENOTDIR)
    assert bodies(store) == sent
    assert drain(store) == sent
    (directory_of(store) / "swap").unlink()
    sent = fill(store)
    assert drain(store) == sent
    assert_whole(store)


def test_what_is_damaged_can_be_removed_message_by_message(disk: MemoryDisk) -> None:
    """Nothing of a swapped message has to be read to ack it, or to end what it waits for."""
    store = small(disk)
    store.subscribe(DESK)
    store.subscribe(BOOK)
    store.send_many(T, [body(n) for n in range(2000)])
    held = [take(store, T, 0, DESK.key) for _ in range(1000)]
    for path in swap_files(store):
        path.write_bytes(b"")
    store.ack(held[::2])
    assert (store.depth(T), store.depth(T, DESK.key), store.depth(T, BOOK.key)) == (2000, 1500, 2000)
    assert store.purge(T, BOOK.key) == 2000
    assert (store.depth(T), store.depth(T, DESK.key)) == (1500, 1500)
    assert store.unsubscribe(T, DESK.key) == 1500
    assert (swap_files(store), store.stats().messages) == ([], 0)
    assert_whole(store)


@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_told_and_skips_nothing(disk: MemoryDisk, how: str) -> None:
    store = small(disk)
    sent = fill(store)
    path = swap_files(store)[3]
    content = bytearray(path.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    seen = []
    with pytest.raises((CorruptionError, StoreFailedError), match=path.name) as caught:
        while True:
            message = take(store)
            seen.append(message.body)
            message.ack()
    if how != "gone":
        assert isinstance(caught.value, CorruptionError)
        assert caught.value.path == str(path)
    assert seen == sent[: len(seen)]
    assert store.stats().leased == 0
    with pytest.raises((CorruptionError, StoreFailedError)):
        store.receive(A)
    assert [problem for problem in store.check() if path.name in problem]
    store.send(B, b"others go on")
    assert drain(store, B) == [b"others go on"]
    assert (store.purge(A) if how == "cut" else store.delete(A)) == 2000 - len(seen)
    assert_whole(store)
    sent = fill(store)
    assert drain(store) == sent
