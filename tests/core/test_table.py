"""What a backend is told."""

from __future__ import annotations

from typing import Any

from anabranch.adapters.core.operations.branches import Forget
from anabranch.adapters.core.operations.changes import Ack, AckRange, Change, Returned
from anabranch.adapters.core.operations.destination_changes import Remove
from anabranch.adapters.core.operations.table import apply_all
from anabranch.adapters.core.state.states import Catalog

from ..contract.disk import A, B
from .made import send_to


class Heard:
    """A table that writes down what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, *arguments))


def test_messages_to_one_destination_come_together() -> None:
    catalog = Catalog()
    a, b = catalog.state(A), catalog.state(B)
    sends = [send_to(a), send_to(a), send_to(b), send_to(a), send_to(a)]
    acks = [Ack(a, 1, 0), Ack(a, 2, 0)]
    changes: list[Change] = [*sends[:4], acks[0], sends[4], acks[1]]
    heard = Heard()
    apply_all(changes, heard)
    assert heard.calls == [("put", [*sends[:2], *sends[3:]]), ("put", [sends[2]]), ("ack", acks)]

    in_order = Heard()
    apply_all(iter(changes), in_order)
    assert in_order.calls == [
        ("put", sends[:2]), ("put", [sends[2]]), ("put", [sends[3]]), ("ack", acks[:1]), ("put", [sends[4]]),
        ("ack", acks[1:]),
    ]  # fmt: skip


def test_nothing_but_messages_and_acks_changes_its_place() -> None:
    a = Catalog().state(A)
    first, second = send_to(a), send_to(a)
    one, six = Ack(a, 1, 0), Ack(a, 6, 0)
    heard = Heard()
    apply_all([one, first, AckRange(a, 2, 5, 0), second, six], heard)
    assert heard.calls == [
        ("put", [first]), ("ack", [one]), ("ack_range", a, 2, 5, 0), ("put", [second]), ("ack", [six]),
    ]  # fmt: skip


def test_each_has_a_method() -> None:
    a = Catalog().state(A)
    heard = Heard()
    apply_all([AckRange(a, 1, 5, 0), Returned(a, 1, 0, 3), Remove(a), Forget([b"t"])], heard)
    assert heard.calls == [
        ("ack_range", a, 1, 5, 0), ("returned", a, 1, 0, 3, None), ("remove", a), ("forget", [b"t"]),
    ]  # fmt: skip
