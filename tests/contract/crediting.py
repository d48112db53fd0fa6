"""The contract of a listener's credit that is taken back."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.store_types import Counts

from .disk import PATIENCE, A, Parallel, eventually, take


class CreditingContract:
    def test_credit_that_is_withdrawn_leases_nothing(self, store: Store) -> None:
        heard: SimpleQueue[Message] = SimpleQueue()
        listener = store.listen(A, heard.put, credit=3)
        store.send(A, b"1")
        assert heard.get(timeout=PATIENCE).body == b"1"
        assert listener.withdraw_credit(1) == 1
        store.send_many(A, [b"2", b"3"])
        assert heard.get(timeout=PATIENCE).body == b"2"
        assert (take(store).body, listener.withdraw_credit(5)) == (b"3", 0)
        listener.add_credit(4)
        assert (listener.withdraw_credit(0), listener.withdraw_credit(9)) == (0, 4)
        listener.add_credit(1)
        store.send(A, b"4")
        assert heard.get(timeout=PATIENCE).body == b"4"
        listener.add_credit(1)
        listener.close()
        assert (listener.withdraw_credit(1), heard.empty()) == (0, True)

    def test_who_waits_behind_withdrawn_credit_is_next(self, store: Store) -> None:
        heard: SimpleQueue[Message] = SimpleQueue()
        listener = store.listen(A, heard.put, credit=1)
        eventually(lambda: store.stats().waiting == 1)
        with Parallel(lambda: take(store, A, PATIENCE)) as receiver:
            eventually(lambda: store.stats().waiting == 2)
            assert listener.withdraw_credit(1) == 1
            store.send(A, b"x")
            assert receiver.result().body == b"x"
        assert heard.empty()

    def test_no_credit_is_both_used_and_withdrawn(self, store: Store) -> None:
        """Whatever moment it is withdrawn in, what is left of it is heard, each message once."""
        heard: list[Message] = []
        listener = store.listen(A, heard.append, credit=0)
        given = 0
        for n in range(40):
            listener.add_credit(2)
            store.send(A, b"%d" % n)
            given += 2 - listener.withdraw_credit(n % 4)
        given -= listener.withdraw_credit(1000)
        eventually(lambda: len(heard) == given, lambda: (len(heard), given))
        assert store.counts(A) == Counts(40 - given, given)
        assert listener.withdraw_credit(1) == 0

    @pytest.mark.parametrize("wrong", [-1, None, 1.5, True])
    def test_what_is_no_credit_is_not_withdrawn(self, store: Store, wrong: Any) -> None:
        listener = store.listen(A, print, credit=0)
        with pytest.raises((TypeError, ValueError), match="credit"):
            listener.withdraw_credit(wrong)
