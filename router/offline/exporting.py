"""Export of all that a data directory holds, as JSON Lines (lines.py).

    with open("data.jsonl", "wb") as file:
        exported = export(config, file.write)

The router is opened for it, and nothing in it is changed. Of a large body one chunk is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from ...adapters.core import Store
from ...adapters.core.migration import copying
from ...adapters.core.operations.branches import Branch
from ...adapters.core.operations.destination_changes import Subscribe, Unsubscribe
from ...adapters.core.record.encoding import as_carried, body_of, is_large, parts_of, reference_in
from ...adapters.core.record.large import StoredBody
from ...adapters.core.store_types import Progress, SubscriptionKey
from ...policies.config import Config
from ...policies.names.destination import Destination
from ..router import Router
from ..transactions.primary import unpacked
from ..transactions.xid import Xid
from .importing import quiet_router, untold
from .lines import VERSION, Chunk, Claim, Held, Line, Named, Prepared, Seen, Start, Subscribed, Waiting, encode, to_json


@dataclass(slots=True)
class Exported:
    """The number of things that were written, and of what was not."""

    destinations: int = 0
    messages: int = 0
    transactions: int = 0
    left_out: list[str] = field(default_factory=list)


def export(config: Config, write: Callable[[bytes], object], progress: Progress = untold) -> Exported:
    """Write each line of an export. Raises as Router.open, CorruptionError for a message that does not read, and what
    `write` raises."""
    done = Exported()
    with quiet_router(config, progress) as router:
        for line in _Export(router, done, progress).lines():
            write(encode(line) + b"\n")
    return done


@dataclass(slots=True)
class _Transaction:
    """A prepared transaction, with its branches."""

    xid: Xid | None
    branches: list[tuple[Store, Branch]] = field(default_factory=list)


Claims = Mapping[tuple[Destination, int], Sequence[Claim]]
"""By destination and seq: who acks a message."""


class _Export:
    def __init__(self, router: Router, done: Exported, progress: Progress) -> None:
        self._registry, self._coordinator = router._registry, router._coordinator
        self._done, self._progress = done, progress

    def lines(self) -> Iterator[Line]:
        """Yield all lines."""
        yield Start(VERSION)
        transactions = self._transactions()
        claims: dict[tuple[Destination, int], list[Claim]] = {}
        for number, transaction in enumerate(transactions):
            for _, branch in transaction.branches:
                for ack in branch.acks:
                    claim = Claim(number, _key_of(ack.state.subscriptions, ack.number), ack.drops)
                    claims.setdefault((ack.state.destination, ack.seq), []).append(claim)
        rows = sorted(self._registry.table.destinations.values(), key=lambda row: str(row.destination))
        for number, row in enumerate(rows):
            store = self._registry.with_id(row.store_id, lambda store: store)
            if copying.is_shared(store):
                self._done.left_out.append(f"{row.destination}: other routers use its store; copy its database")
            elif not store.volatile:
                yield from self._destination(store, row.destination, claims)
            self._progress("Exporting", number, len(rows))
        for transaction in transactions:
            yield from self._prepared(transaction)

    def _transactions(self) -> list[_Transaction]:
        found: dict[bytes, _Transaction] = {}
        for row in sorted(self._registry.table.stores.values(), key=attrgetter("name")):
            store = self._registry.with_row(row, lambda store: store)
            if copying.is_shared(store) or store.volatile:
                continue
            for branch in list(store._engine.sequencer.prepared.values()):
                known = self._coordinator.table.by_id.get(branch.transaction)
                xid = known.xid if known is not None else unpacked(branch.note).xid
                found.setdefault(branch.transaction, _Transaction(xid)).branches.append((store, branch))
        return [found[name] for name in sorted(found, key=lambda name: (str(found[name].xid), name))]

    def _destination(self, store: Store, destination: Destination, claims: Claims) -> Iterator[Line]:
        amount = copying.amount(store, destination)
        if not amount.known:
            return  # its row is left of a crash, or of a transaction that is prepared alone
        self._done.destinations += 1
        subscriptions = sorted(amount.subscriptions, key=attrgetter("key"))
        yield Named(str(destination), [Subscribed(s.name, s.client_id, s.selector, s.no_local) for s in subscriptions])
        for item in copying.read(store, destination):
            if isinstance(item, copying.Seen):
                yield Seen(item.name.decode())
                continue
            self._done.messages += 1
            waiting = [
                Waiting(name, client, count, item.untils.get((client, name), 0))
                for (client, name), count in sorted(item.waiting.items())
            ]
            yield from _message(
                item.record, item.large, claims.get((destination, item.seq), ()), waiting, item.deliveries, item.until
            )

    def _prepared(self, transaction: _Transaction) -> Iterator[Line]:
        self._done.transactions += 1
        branches = sorted(transaction.branches, key=lambda one: one[0].name)
        changes = []
        for _, branch in branches:
            for change in branch.changes:
                if isinstance(change, Subscribe):
                    topic, name, client, selector, no_local = change.subscription
                    begun = Subscribed(name, client, selector, no_local, str(topic), retroactive=change.retroactive)
                    changes.append(begun)
                elif isinstance(change, Unsubscribe):
                    client, name = change.key
                    changes.append(Subscribed(name, client, topic=str(change.state.destination), ends=True))
        sends = [(store, send) for store, branch in branches for send in branch.sends]
        acks = sum(len(branch.acks) for _, branch in branches)
        yield Prepared(len(sends), acks, transaction.xid, changes)
        for store, send in sends:
            record = as_carried(send.record)
            large = store.large_body(reference_in(record)) if is_large(record) else None
            yield from _message(record, large, until=send.deliver_at_ms, to=str(send.state.destination))


def _key_of(subscriptions: Mapping[SubscriptionKey, object], number: int) -> SubscriptionKey | None:
    return next((key for key, one in subscriptions.items() if getattr(one, "number", 0) == number), None)


def _message(
    record: bytes,
    large: StoredBody | None,
    claims: Sequence[Claim] = (),
    waiting: Sequence[Waiting] = (),
    deliveries: int = 0,
    until: int = 0,
    to: str | None = None,
) -> Iterator[Line]:
    """Yield a message, and the chunks of its body."""
    name, headers, priority, sent, expires = parts_of(record)
    text, data = None, None if large is not None else body_of(record)
    if data is not None:
        try:
            text, data = data.decode(), None
        except UnicodeDecodeError:
            pass
    yield Held(
        sent, name.decode() if name else None, priority, expires, deliveries, until,
        {key: to_json(value) for key, value in headers.items()},
        list(waiting), list(claims), to, text, data, None if large is None else large.size,
    )  # fmt: skip
    for number in range(large.chunks if large is not None else 0):
        assert large is not None
        yield Chunk(large.chunk(number))
