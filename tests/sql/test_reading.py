"""What a store reads while another transaction commits."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.sql.reading import Reading
from anabranch.adapters.store_types import Subscription

from ..contract.disk import PATIENCE, T, assert_whole, eventually, take
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
