"""What a store reads while another transaction commits."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.backend.writers import Threaded
from anabranch.adapters.core.features import scheduled as core_waiting
from anabranch.adapters.core.state.sweep import wall_ms
from anabranch.adapters.core.store_types import Subscription
from anabranch.adapters.sql.reading import Reading

from ..contract.disk import PATIENCE, A, T, assert_whole, eventually, take
from ..contract.features import schedule_of
from .disk import SqliteDisk, backend_of, directory_of, lead_of


def test_the_last_ack_while_it_is_looked_up_whether_a_message_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes along what says that others have acked the message before: it waits for none of them."""
    with SqliteDisk(tmp_path) as disk:
        store = disk.create()
        desk, book = Subscription(T, "desk"), Subscription(T, "book")
        for subscription in (desk, book):
            store.subscribe(subscription)
        seq = store.send(T, b"x").seq
        take(store, T, 0, desk.key).ack()
        last = take(store, T, 0, book.key)
        state = store._engine.catalog.destinations[T]
        database = sqlite3.connect(directory_of(store) / "store.db")
        read = Reading._all

        def read_and_ack(reading: Reading, statement: str, **parameters: Any) -> Sequence[Any]:
            found = read(reading, statement, **parameters)
            monkeypatch.setattr(Reading, "_all", read)
            lead.release()
            eventually(lambda: database.execute("SELECT COUNT(*) FROM messages").fetchone() == (0,))
            return found

        lead = lead_of(store)
        lead.acquire()  # nothing is written until it is let go
        acked = store.ack_nowait([last])
        with store._engine.lock:
            monkeypatch.setattr(Reading, "_all", read_and_ack)
            assert backend_of(store).row(state, state.subscriptions[desk.key], seq) is None
        database.close()
        acked.result(PATIENCE)
        assert_whole(store)
        with store._engine.lock:
            assert backend_of(store).row(state, state.subscriptions[desk.key], seq) is None


@pytest.mark.parametrize("ahead", [True, False], ids=["before", "behind"])
@pytest.mark.parametrize("begins", [True, False], ids=["begins", "ends"])
def test_a_message_that_begins_to_wait_or_comes_free_while_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: bool, ahead: bool
) -> None:
    """It lies elsewhere in the tables then, before that is applied: it is seen all the same, and once."""
    with SqliteDisk(tmp_path) as disk:
        store = disk.create()
        seqs = [store.send(A, b"x").seq for _ in range(3)]
        taken = take(store, A)
        if not begins:
            taken.release(delay=100.0)
        database = sqlite3.connect(directory_of(store) / "store.db")
        waiting = "SELECT COUNT(*) FROM messages WHERE destination < 0"
        read = Reading._all

        def between() -> None:
            monkeypatch.setattr(Reading, "_all", read)
            lead.release()
            eventually(lambda: database.execute(waiting).fetchone() == (int(begins),))

        def read_and_move(reading: Reading, statement: str, **parameters: Any) -> Sequence[Any]:
            if not statement.startswith("select.messages"):
                return read(reading, statement, **parameters)
            if ahead:
                between()
                return read(reading, statement, **parameters)
            found = read(reading, statement, **parameters)
            between()
            return found

        lead = lead_of(store)
        lead.acquire()  # nothing is written until it is let go
        if not begins:
            monkeypatch.setattr(core_waiting, "wall_ms", lambda: wall_ms() + 200_000)
        asked, put = threading.Event(), Threaded._put

        def put_and_tell(writer: Threaded, tickets: Any) -> None:
            put(writer, tickets)
            asked.set()

        monkeypatch.setattr(Threaded, "_put", put_and_tell)
        mover = threading.Thread(target=partial(taken.release, delay=60.0) if begins else schedule_of(store).bring)
        mover.start()
        assert asked.wait(PATIENCE)
        monkeypatch.setattr(Reading, "_all", read_and_move)
        assert [message.seq for message in store.browse(A)] == seqs
        mover.join(PATIENCE)
        database.close()
        assert [message.seq for message in store.browse(A)] == seqs
        assert_whole(store)
