"""The last messages of a queue are looked up ahead, and those that come are put on top: in order, and each once."""

from __future__ import annotations

import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.state.stack import STACK_MAX
from anabranch.adapters.core.store_types import Settlement

from ..contract.disk import A, B, assert_whole, drain
from ..contract.newest import newest
from ..crash.interrupts import everywhere
from ..journal.disk import JournalDisk
from ..model import FAST
from .test_arrivals import lookups, send


@pytest.fixture
def store() -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-core-", dir=FAST) as path,
        JournalDisk(Path(path)) as disk,
    ):
        yield disk.create()


def test_few_questions_are_asked_for_many_messages(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = send(store, 0, 4 * STACK_MAX)
    asked, applied = lookups(store, monkeypatch, "rows"), lookups(store, monkeypatch, "apply")
    for body in reversed(sent):
        message = newest(store)
        assert message.body == body
        message.ack()
    assert store.receive(A, newest=True) is None
    assert len(asked) < len(sent) / 5
    assert len(applied) < len(sent) / 25


def test_bodies_are_read_some_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backwards as forwards; a larger one is read alone."""
    sent = [b"%04d" % number + bytes(1000) for number in range(100)]
    sent[50] = b"0050" + bytes(50_000)
    store.send_many(A, sent)
    reads: list[int] = []
    pread, me = os.pread, threading.get_ident()

    def counted(fd: int, size: int, offset: int) -> bytes:
        if threading.get_ident() == me:  # a checkpoint beside it reads the index
            reads.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    for body in reversed(sent):
        message = newest(store)
        assert message.body == body
        message.ack()
    assert len(reads) < len(sent) / 5
    assert max(reads) < 51_000


def test_what_comes_meanwhile_is_not_looked_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor read from the disk."""
    send(store, 0, 20)
    newest(store).ack()
    newest(store).ack()
    asked = lookups(store, monkeypatch, "rows", "bodies", "apply")
    for number in range(20, 50, 3):
        store.send(B, b"another's")
        sent = send(store, number, number + 3)
        for body in reversed(sent):
            message = newest(store)
            assert message.body == body
            message.ack()
    assert len(asked) < 10  # on a slow machine the index may be written out meanwhile
    assert newest(store).body == b"17"


def test_more_than_are_kept_may_come(store: Store) -> None:
    kept = send(store, 0, 3)
    newest(store).ack()
    kept[-1:] = send(store, 3, 3 + 3 * STACK_MAX)
    for body in reversed(kept):
        message = newest(store)
        assert message.body == body
        message.ack()
    assert_whole(store)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_beside(store: Store, seed: int) -> None:
    """Receivers of the first message, releases, purges, leases of one message, groups, delays, other queues: the last
    that is free comes first, and none comes twice."""
    chosen = random.Random(seed)
    free: dict[int, bytes] = {}
    held: dict[int, Message] = {}
    for number in range(1500):
        what = chosen.choices(
            ("send", "many", "newest", "first", "release", "ack", "purge", "again", "beside"),
            (30, 2, 40, 6, 3, 6, 0.3, 2, 5),
        )[0]
        body = b"%d" % number
        match what:
            case "send":
                free[store.send(A, body).seq] = body
            case "many":
                some = [b"%d-%d" % (number, n) for n in range(chosen.choice((3, 90)))]
                free |= {receipt.seq: one for receipt, one in zip(store.send_many(A, some), some, strict=True)}
            case "newest" | "first":
                found = store.receive(A, newest=what == "newest")
                assert (found is None) == (not free)
                if found is not None:
                    seq = max(free) if what == "newest" else min(free)
                    assert (found.seq, found.body) == (seq, free.pop(seq))
                    if chosen.random() < 0.7:
                        found.ack()
                    else:
                        held[seq] = found
            case "release" | "ack" if held:
                seq, message = chosen.choice(list(held.items()))
                del held[seq]
                if what == "ack":
                    message.ack()
                else:
                    free[seq] = message.body
                    message.release(delivered=chosen.random() < 0.5)
            case "purge":
                assert store.purge(A) == len(free)
                free.clear()
            case "again" if free:
                seq = chosen.choice(list(free))
                token = store.lease_again(A, seq)
                assert token is not None
                settled = chosen.choice((Settlement.ACK, Settlement.RELEASE))
                assert store.settle([token], settled) == [None]
                if settled is Settlement.ACK:
                    del free[seq]
            case "beside":
                store.send_many(B, [b"another's"] * chosen.choice((1, 70)))
                taken = store.receive(B)
                assert taken is not None
                taken.ack()
    store.release(list(held.values()))
    assert drain(store) == [body for _, body in sorted([*free.items(), *((s, m.body) for s, m in held.items())])]
    assert_whole(store)


def test_a_group_that_comes_later_is_kept_apart(store: Store) -> None:
    send(store, 0, 5)
    newest(store).ack()
    store.send(A, b"g1")
    store.send_many(A, [Outgoing(b"g2", group="g"), Outgoing(b"g3", group="g")])
    first = newest(store)
    assert first.body == b"g3"
    assert newest(store).body == b"g1"
    first.ack()
    assert newest(store).body == b"g2"


def test_one_that_another_has_acked_meanwhile_is_not_given(store: Store) -> None:
    """The stack had it, and knows of all that is applied."""
    seqs = [store.send(A, b"%d" % number).seq for number in range(6)]
    held = [newest(store), newest(store)]
    token = store.lease_again(A, seqs[2])
    assert token is not None
    assert store.settle([token], Settlement.ACK) == [None]
    held.append(newest(store))
    store._engine.look_soon()
    held += [newest(store), newest(store)]
    assert [message.body for message in held] == [b"5", b"4", b"3", b"1", b"0"]


def test_ctrl_c_leaves_none_out_of_sight_nor_doubled(store: Store) -> None:
    """Wherever it strikes while one is received, of those that were looked up or of those that have come since."""
    bodies = [b"%d" % number for number in range(7)]

    def prepare(at: int) -> Callable[[], object]:
        store.send_many(A, bodies[:4])
        store.release([newest(store)], delivered=False)
        newest(store).ack()  # 3, and the others are looked up
        store.send_many(A, bodies[4:])
        return lambda: newest(store).ack()

    def check(at: int, where: str) -> None:
        for lease in list(store._engine.catalog.destinations[A].channel.held.values()):
            store.settle([store._settling.token(lease)], Settlement.RELEASE)
        left: list[Message] = []
        while (message := store.receive(A, newest=True)) is not None:
            left.append(message)
            if len(left) % 3:
                message.ack()
            else:
                store._engine.look_soon()  # the acks before it are applied, and no other since
        found = [message.body for message in left]
        assert found in [[b"6", b"5", b"4", b"2", b"1", b"0"][n:] for n in range(2)], where
        store.ack(left[2::3])
        assert_whole(store)

    assert everywhere(prepare, check) > 50
