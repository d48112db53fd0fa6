"""How messages leave those who hold them: acked, given back, or part of a transaction that is to be decided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from ..base import Change, Done, Message, Pending, Receipt, Store
from ..delivery import CLAIMED, LEASED, LEAVING, feeds_of
from .branches import Branch
from .core import Core
from .records import Encoded, StoredMessage


class Settling:
    """Of one store. Threads: all."""

    def __init__(self, store: Store, core: Core) -> None:
        self._store, self._core = store, core

    def settle(
        self,
        messages: Sequence[Message],
        hold: int,
        sends: Sequence[Encoded],
        subscriptions: Sequence[Change],
    ) -> list[Receipt]:
        """Changes, sends and acks as one. Raises, and then nothing took effect and the messages are held as before."""
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            if sends:
                core.make_room(sends)
            try:
                core.delivery.take(self._store, messages, hold, LEAVING)
                change = core.change()
                for one in subscriptions:
                    change.change(one, core.residence.records)
                receipts = [change.send(message) for message in sends]
                for message in messages:
                    change.ack(cast("StoredMessage", message))
                core.carry_out(change, required=bool(sends or subscriptions))
            except BaseException:
                core.delivery.put_back(messages, hold)  # what the change has reached is not held any more
                raise
        return receipts

    def give_back(self, messages: Sequence[Message], hold: int, delivered: bool) -> None:
        """All or none of them, wherever Ctrl-C strikes."""
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            try:
                core.delivery.take(self._store, messages, hold, LEAVING)
                core.steps.do(self._returning(messages, delivered))
            except BaseException:
                core.delivery.put_back(messages, hold)  # unless they are all given back
                raise

    def claim(self, message: Message) -> None:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            core.delivery.take(self._store, [message], LEASED, CLAIMED)

    def _returning(self, messages: Sequence[Message], delivered: bool) -> Callable[[], None]:
        """A step: these are free again, each at its old place."""
        core = self._core
        counts: list[tuple[dict[tuple[int, int], int], tuple[int, int], int]] = []
        if delivered:
            for message in cast("Sequence[StoredMessage]", messages):
                for feed in feeds_of(message.note):
                    if feed.base + message.seq in core.delivery.held:  # else the subscription is gone
                        key = (feed.number, message.index)
                        counts.append((message.chunk.counts, key, message.chunk.counts.get(key, 0) + 1))

        def give_back() -> None:
            for counted, key, count in counts:
                counted[key] = count
            core.delivery.give_back(messages, core.contents)

        return give_back

    def prepare(self, branch: Branch) -> Pending[None]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            core.make_room(branch.sends)
            core.delivery.take(self._store, branch.acks, CLAIMED, CLAIMED)

            def prepare() -> None:
                core.branches.prepared[branch.transaction] = branch
                core.residence.prepared = core.branches.cost

            core.steps.do(prepare)
        return Done(None)

    def commit_prepared(self, transaction: bytes) -> Pending[list[Receipt]]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            branch = core.branches.prepared.get(transaction)
            if branch is None:
                return Done([])
            core.make_room([], required=False)
            change = core.change()
            for one in branch.changes:
                change.change(one, core.residence.records)
            receipts = [change.send(message) for message in branch.sends]
            for message in branch.acks:
                change.ack(message)
            core.carry_out(change, False, lambda: self._ended(branch, True))
            return Done(receipts)

    def rollback_prepared(self, transaction: bytes) -> Pending[bool]:
        core = self._core
        core.require_open()
        with core.lock:
            core.enter()
            branch = core.branches.prepared.get(transaction)
            if branch is None:
                return Done(False)
            give_back = self._returning(branch.acks, True)

            def roll_back() -> None:
                give_back()
                self._ended(branch, False)

            core.steps.do(roll_back)
            return Done(True)

    def _ended(self, branch: Branch, committed: bool) -> None:
        core = self._core
        core.branches.ended(branch, committed)
        core.residence.prepared = core.branches.cost
