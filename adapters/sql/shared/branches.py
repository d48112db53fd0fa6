"""The branches of transactions that are prepared in a shared store, as rows: whoever opens it next can end them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....policies.names.destination import Destination
from ...core.messages import Outgoing
from ...core.state.leases import ACKED, ROLLED_BACK
from ...core.store_types import Change, Prepared, Subscription
from .database import Ask, SharedDatabase
from .leases import Leases, Place
from .sending import Sending, Stored
from .topics import Topics

COMMITTED_MAX = 10_000
"""The most transactions that `committed` tells."""


class Branch(msgspec.Struct, array_like=True, frozen=True):
    """What a transaction does here, in msgpack."""

    participants: tuple[bytes, ...]
    sends: list[tuple[int, Any]]
    """Queues, and messages for them: the fields of an Outgoing."""
    acks: list[Place]
    note: bytes = b""
    changes: list[Any] = []
    """Of subscriptions: see `packed`."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Branch).decode


class Branches:
    """What is prepared. Threads: all."""

    def __init__(self, database: SharedDatabase, leases: Leases, sending: Sending, topics: Topics) -> None:
        self._database, self._leases, self._sending, self._topics = database, leases, sending, topics

    def prepare(self, ask: Ask, transaction: bytes, branch: Branch, router: int) -> set[Place]:
        """Make it durable; returns the places of what it acks that was held still."""
        held = [place._replace(take=-place.take) for place in branch.acks]
        ask("prepare", transaction.hex(), router, _encode(msgspec.structs.replace(branch, acks=held)))
        return self._leases.kept_for(ask, branch.acks, None, for_branch=True) if held else set()

    def commit(self, transaction: bytes) -> tuple[Branch, Stored, list[int]] | None:
        """Let it take effect; returns it, what became of its sends, and the numbers of the subscriptions that have
        ended. None: it is not prepared."""

        def commit(ask: Ask) -> tuple[Branch, Stored, list[int]] | None:
            branch = self._taken(ask, transaction)
            if branch is None:
                return None
            ended = self._topics.change(ask, _unpacked(branch.changes))
            stored = self._sending.stored(ask, [(queue, Outgoing(*fields)) for queue, fields in branch.sends])
            if branch.acks:
                self._leases.acked(ask, branch.acks, set())
            ask("commit_branch", transaction.hex())
            return branch, stored, ended

        found = self._database.change(commit)
        if found is not None:
            self._leases.ended_by_branch(found[0].acks, ACKED)
        return found

    def roll_back(self, transaction: bytes) -> Branch | None:
        """Forget it: what it acks is free. None: it is not prepared."""

        def roll_back(ask: Ask) -> Branch | None:
            branch = self._taken(ask, transaction)
            if branch is not None and branch.acks:
                self._leases.released(ask, branch.acks, self._leases.counted(True))
            return branch

        branch = self._database.change(roll_back)
        if branch is not None:
            self._leases.ended_by_branch(branch.acks, ROLLED_BACK)
        return branch

    def _taken(self, ask: Ask, transaction: bytes) -> Branch | None:
        found = ask("branch", transaction.hex())
        if not found:
            return None
        ask("drop_branch", transaction.hex())
        return _decode(bytes(found[0][0]))

    def all(self, router: int) -> list[tuple[Prepared, bool]]:
        """Return all that is prepared, oldest first, and whether nobody else is to end it: it is this router's, or its
        router is gone."""
        found = []
        for xid, content, ours in self._database.look("branches", router):
            branch = _decode(bytes(content))
            prepared = Prepared(
                bytes.fromhex(xid), branch.participants, len(branch.sends), len(branch.acks), branch.note
            )
            found.append((prepared, ours))
        return found

    @staticmethod
    def claimed(ask: Ask, queues: Sequence[int]) -> int:
        """Return how many messages of these queues are acked by what is prepared."""
        branches = [_decode(bytes(content)) for _, content, _ in ask("branches", 0)]
        return sum(place.queue in queues for branch in branches for place in branch.acks)

    def committed(self) -> Sequence[bytes]:
        """Return the latest transactions that were committed and not forgotten."""
        return sorted(bytes.fromhex(xid) for (xid,) in self._database.look("committed", COMMITTED_MAX))

    def has_committed(self, transaction: bytes) -> bool:
        """Return whether `committed` has a transaction."""
        return bool(self._database.look("has_committed", transaction.hex()))

    def forget(self, transactions: Sequence[bytes]) -> None:
        """Forget these."""
        if transactions:
            self._database.change(lambda ask: ask("forget", [one.hex() for one in transactions]))


def packed(changes: Sequence[Change]) -> list[Any]:
    """Return changes of subscriptions as fields, those of the subscription first, with the name of the topic."""
    return [[str(one.subscription.topic), *one.subscription[1:], one.subscribe, one.retroactive] for one in changes]


def _unpacked(changes: Sequence[Any]) -> list[Change]:
    return [Change(Subscription(Destination.restored(one[0]), *one[1:5]), *one[5:]) for one in changes]
