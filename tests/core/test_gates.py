"""Who comes to a destination that is on its way to another store (adapters/core/state/gates.py)."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing, Receipt
from anabranch.adapters.core.operations.destination_changes import CloseGate
from anabranch.adapters.core.state.gates import Gate, MovedError
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.adapters.journal.writing import JournalBatch
from anabranch.adapters.wal.ticket import Tail
from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, B, T, take
from ..journal.disk import JournalDisk

SUBSCRIPTION = Subscription(T, "s")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with JournalDisk(tmp_path) as disk:
        yield disk.create()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.send(A, b""),
        lambda store: store.send(A, b"", persistent=False),
        lambda store: store.send_nowait(A, b"").result(10),
        lambda store: store.send_many(A, [b"1", b"2"]),
        lambda store: store.send_many(A, [b"1"] * 1000),
        lambda store: store.commit([(B, Outgoing(b"")), (A, Outgoing(b""))], []),
        lambda store: store.purge(A),
        lambda store: store.delete(A),
        lambda store: store.subscribe(SUBSCRIPTION),
        lambda store: store.commit([], [], changes=[Change(SUBSCRIPTION, True)]),
    ],
)
def test_is_sent_away(store: Store, call: Callable[[Store], object]) -> None:
    """And nothing was done; what was in hand is settled."""
    store.send(A, b"1")
    store.send(A, b"2")
    held = take(store)
    gates = [Gate.passed(A), Gate.passed(T)]
    store._sending.write([CloseGate(gate) for gate in gates])
    with pytest.raises(MovedError, match=r"(queue://a|topic://t) moves to another store") as caught:
        call(store)
    assert caught.value.gate in gates
    assert (store.depth(A), store.depth(B), store.subscriptions()) == (2, 0, [])
    held.ack()
    assert store.depth(A) == 1


@pytest.mark.parametrize("limited", [False, True])
def test_what_follows_one_that_is_sent_away_is_sent_away(tmp_path: Path, limited: bool) -> None:
    """Also if the gate is gone by then, as that of a move that was given up: many keep their order. What had passed has
    its receipts, and need not be sent again."""
    options = {"max_messages": 1000} if limited else {}
    with JournalDisk(tmp_path) as disk:
        store = disk.create(large_message_size=1 << 20, **options)
        sequencer, bodies = store._engine.sequencer, [b"%d" % n + bytes(700_000) for n in range(6)]
        encoder, plans = store.backend._encoder, list[object]()
        real = encoder.encode

        def encode(tail: Tail, ticket: Any, watermark: int) -> JournalBatch:
            plans.append(ticket)
            sequencer.gates.clear()
            if len(plans) == 3:
                sequencer.gates[A] = Gate.passed(A)
            return real(tail, ticket, watermark)

        encoder.encode = encode
        done: list[Receipt] = []
        with pytest.raises(MovedError):
            store.send_many(A, bodies, done=done)
        store._writer.flush()
        assert [receipt.seq for receipt in done] == [1, 2]
        assert [message.body for message in store.browse(A)] == bodies[:2]
        assert len(plans) > 5
        assert store.send_many(A, bodies[2:], done=done) is done
        assert [receipt.seq for receipt in done] == list(range(1, 7))
        assert [message.body for message in store.browse(A)] == bodies


def test_a_copy_of_the_error_says_the_same() -> None:
    """Each who waits for a write gets one."""
    error = MovedError(Gate(A))
    assert str(copy.copy(error)) == str(error)
    assert copy.copy(error).gate is error.gate


def test_what_its_opening_says() -> None:
    gate = Gate(A)
    with pytest.raises(RuntimeError, match="queue://a is being moved by this thread"):
        gate.wait()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            gate.wait()
        except StoreFailedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    gate.error = StoreFailedError("nobody knows")
    gate.open()
    thread.join(20)
    assert errors == [gate.error]
