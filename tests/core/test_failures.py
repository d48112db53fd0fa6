"""Why messages were given back last (adapters/core/service/failures.py)."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.adapters.core.service import failures
from anabranch.adapters.core.service.failures import TEXT_MAX, TYPE_MAX, Failure, failure_of

from ..contract.disk import A, take
from .made import memory


class OwnError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("reason", "failure"),
    [
        (ValueError("no such part"), Failure("ValueError", "no such part")),
        (KeyError("k"), Failure("KeyError", "'k'")),
        (KeyboardInterrupt(), Failure("KeyboardInterrupt", "")),
        (OwnError(), Failure(f"{__name__}.OwnError", "its text cannot be had: RuntimeError")),
        ("out of stock", Failure(None, "out of stock")),
        ("", Failure(None, "")),
        ("a\ud800b", Failure(None, "a?b")),
    ],
)
def test_what_is_kept_of_a_reason(reason: Any, failure: Failure) -> None:
    assert failure_of(reason) == failure


def test_it_is_bounded() -> None:
    name, text = failure_of(type("E" * 1000, (ValueError,), {})("x" * 5000))
    assert name is not None
    assert (len(name), len(text)) == (TYPE_MAX, TEXT_MAX)
    assert text.endswith("...")


@pytest.mark.parametrize("reason", [5, None, b"x", ValueError])
def test_what_is_no_reason(reason: Any) -> None:
    with pytest.raises(TypeError, match="a reason is a str or an exception, not "):
        failure_of(reason)


def test_so_many_are_kept_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "FAILURES_MAX", 2)
    with memory() as disk:
        store = disk.create()
        store.send_many(A, [b"1", b"2", b"3"])
        messages = [take(store) for _ in range(3)]
        for message in (*messages, messages[1]):
            store.note_failure([message], f"of {message.seq}")
        assert [store.failure_of(message) for message in messages] == [
            None, Failure(None, f"of {messages[1].seq}"), Failure(None, f"of {messages[2].seq}"),
        ]  # fmt: skip


def test_who_holds_it_no_more_says_nothing_of_it() -> None:
    with memory() as disk:
        store = disk.create()
        store.send(A, b"1")
        before = take(store)
        before.release(reason="first")
        now = take(store)
        store.note_failure([before], "late")
        assert store.failure_of(now) == Failure(None, "first")
        now.release()
        assert store.failure_of(take(store)) == Failure(None, "first")


def test_a_release_with_what_is_no_reason_does_nothing() -> None:
    with memory() as disk:
        store = disk.create()
        store.send(A, b"1")
        message = take(store)
        with pytest.raises(TypeError, match="a reason is a str or an exception, not int: 5"):
            message.release(reason=5)  # type: ignore[arg-type]
        message.ack()
