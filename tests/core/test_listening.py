"""Messages that are handed to a callback: in order, as many as were asked for, on a thread of ours."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.state.leases import Channel

from ..contract.disk import A, Parallel, drain, eventually, take
from ..journal.disk import JournalDisk
from .made import onefile

PATIENCE = 60.0


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_a_callback_does_not_take_is_free_again(error: type[BaseException], store: Store) -> None:
    heard: SimpleQueue[bytes] = SimpleQueue()

    def fail(message: Message) -> None:
        heard.put(message.body)
        raise error("no")

    listener = store.listen(A, fail)
    store.send(A, b"1")
    assert heard.get(timeout=PATIENCE) == b"1"
    message = take(store, A, PATIENCE)
    message.ack()
    eventually(lambda: not listener.close())  # its callback may be about to return


def test_a_callback_that_raises_ends_no_listener(store: Store) -> None:
    """Whatever it raises, and though more has come meanwhile."""
    heard: SimpleQueue[bytes] = SimpleQueue()

    def fail(message: Message) -> None:
        heard.put(message.body)
        message.ack()
        if message.body == b"1":
            store.send(A, b"2")
        raise SystemExit

    listener = store.listen(A, fail, credit=2)
    store.send(A, b"1")
    assert [heard.get(timeout=PATIENCE) for _ in range(2)] == [b"1", b"2"]
    eventually(lambda: not listener.close())


def test_a_listener_ends_with_its_store() -> None:
    with onefile() as disk:
        store = disk.create()
        heard: list[bytes] = []
        store.listen(A, lambda message: heard.append(message.body))
        store.close()
        store = disk.reopen(store)
        store.send(A, b"1")
        assert (heard, drain(store)) == ([], [b"1"])


@pytest.mark.parametrize("how", ["listen", "receive"])
def test_what_comes_as_one_gets_in_line_is_heard_of(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the last look at what has come, and before anybody would be woken."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create()
        engine, waits = store._engine, [True]
        is_gone = engine.is_gone

        def meanwhile(channel: Channel) -> bool:
            if waits and waits.pop():
                with Parallel(lambda: store.send(A, b"1")) as sending:
                    sending.result()
            return is_gone(channel)

        monkeypatch.setattr(engine, "is_gone", meanwhile)
        heard: SimpleQueue[bytes] = SimpleQueue()
        if how == "listen":
            store.listen(A, lambda message: heard.put(message.body))
            assert heard.get(timeout=PATIENCE) == b"1"
        else:
            with Parallel(lambda: store.receive(A, None)) as receiving:
                message = receiving.result()
            assert message is not None and message.body == b"1"
        assert not waits
