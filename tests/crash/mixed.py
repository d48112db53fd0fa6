"""A workload over all kinds of stores, and what must be found when its process was killed.

Stores are journals (`j`, `k`), SQLite (`s`, `t`), memory (`m`), and `p`, a PostgreSQL server's, if there is one; a
destination's name begins with its store's. Threads send (with priorities, times of life, not persistent, to topics),
ack, release, move messages in transactions over any of the stores, and in those of a database, prepare external ones,
begin and end subscriptions.

The ledger knows *channels*: a queue by its name, a topic's subscription as `topic://name#subscription`. A send to a
topic is one to all its channels at once; ending a subscription acks all that it holds. What lies in a dead-letter queue
counts as being in its channel, which must not hold it any more. A message's producer says its priority, with an `e` if
it expires: `r0t1p9e.12`. What must be gone after a kill, no mark speaks of.
"""

from __future__ import annotations

import random
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import sqlalchemy
from pydantic import SecretStr

import anabranch
from anabranch.policies.config.options import StoreOptions
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE
from .ledger import (
    Held,
    Marks,
    Operation,
    acks_of,
    body_of,
    compare,
    identity_of,
    name,
    nothing_else_waits,
    violations,
)
from .power.worker import FORMAT

MOST: Final = 3
"""Deliveries."""
SOON: Final = 0.01
"""Seconds that some messages wait: over, when another process looks."""
LARGE: Final = 3000
"""Bytes from which on a body is sent as a file."""
BACK: Final = ("back", "reject")
"""Operations after which a message may come back."""
NAMES: Final = ("a", "b")
"""The subscriptions of each common topic."""


def config(directory: Path, seed: int, url: str | None = None) -> anabranch.Config:
    """Options that depend on the directory's seed alone."""
    chance = random.Random(f"mixed {seed}")
    last = "p" if url else "k"
    dead = {"j": "s.dead", "k": "j.dead", "s": f"{last}.dead", "t": "k.dead", "m": "j.dead", "p": "j.dead"}

    def common(store: str) -> dict[str, Any]:
        return {"priorities": chance.random() < 0.6, "dead_letter": dead[store], "max_deliveries": MOST}

    journals = [
        anabranch.StoreConfig(
            store,
            [f"{store}.>"],
            journal=anabranch.JournalOptions(
                sync=sync,
                sync_interval=0.05,
                segment_size=128 * 1024,
                checkpoint_operations=chance.choice((7, 200, 20_000)),
                checkpoint_interval=chance.choice((0.03, 5.0)),
                pool_files=chance.choice((0, 1, 3)),
                **common(store),
            ),
        )
        for store, sync in (("j", list(anabranch.Sync)[seed % 3]), ("k", chance.choice(list(anabranch.Sync))))
    ]
    databases = [
        anabranch.StoreConfig(
            store,
            [f"{store}.>"],
            sql=anabranch.SqlOptions(
                url=SecretStr(where) if where else None,
                chunk_size=4096,
                batch_operations_max=chance.choice((3, 1000)),
                pool_min=0,
                **common(store),
            ),
        )
        for store, where in (("s", None), ("t", None), ("p", url))
        if store != "p" or url
    ]
    memory = anabranch.MemoryOptions(max_bytes=64 * 1024, roll_over_size=64 * 1024, **common("m"))
    return anabranch.Config(directory, [*journals, *databases, anabranch.StoreConfig("m", ["m.>"], memory=memory)])


def channel(message: anabranch.Message) -> str:
    """Where it was received from."""
    if message.subscription is None:
        return message.destination.name
    return f"{message.destination}#{message.subscription[1]}"


def channels_of(destination: str) -> list[str]:
    """Of one of the common destinations."""
    return [f"{destination}#{each}" for each in NAMES] if destination.startswith("topic://") else [destination]


class Hand:
    """One thread's doings, with their marks. `sub` is what its destinations' stores are chosen from."""

    def __init__(self, router: anabranch.Router, marks: Marks, name: str, chance: random.Random) -> None:
        self.router, self.marks, self.name, self.chance = router, marks, name, chance
        self.stores = [store.name for store in router.config.stores]
        self.sent = 0
        self._identities: dict[str, str] = {}
        """By token, of those that were received: a large body may not be read a second time."""

    def new(self, destination: str, priority: int, expires: bool = False) -> str:
        """A message's identity."""
        self.sent += 1
        lasting = "" if not destination.removeprefix("topic://").startswith("m.") else "gone"
        return f"{lasting}{self.name}p{priority}{'e' if expires else ''}.{self.sent}"

    def endpoint(self, destination: str) -> anabranch.Queue | anabranch.Topic:
        if destination.startswith("topic://"):
            return self.router.topic(destination)
        return self.router.queue(destination)

    def somewhere(self, stores: Sequence[str] = ()) -> str:
        """A common destination."""
        store = self.chance.choice(stores or self.stores)
        return self.chance.choice((f"{store}.q", f"{store}.r", f"topic://{store}.t"))

    def receive(self, where: str) -> anabranch.Message | None:
        """From a destination; of a topic for one of its subscriptions. What is over is not received."""
        endpoint: Any = self.endpoint(where)
        if where.startswith("topic://"):
            endpoint = self.chance.choice(endpoint.subscriptions())
        now = time.time_ns() // 1_000_000
        message: anabranch.Message | None = endpoint.receive()
        if message is not None:
            assert not 0 < message.expires_at_ms < now, f"{channel(message)}: {message!r} was over"
            assert message.deliveries <= MOST, f"{channel(message)}: {message!r} is spent"
            try:
                self._identities[message.token] = identity_of(message.read())
            except anabranch.AnabranchError:  # its large body is not to be had now
                message.release(delivered=False)
                return None
        return message

    def identity(self, message: anabranch.Message) -> str:
        """Of one that `receive` gave."""
        return self._identities[message.token]

    # Each on its own

    def send(self, destination: str, deliver_in: float | None = None) -> None:
        chance = self.chance
        priority = chance.choice((0, 4, 4, 300))
        expires = chance.choice((None, None, None, None, 0.02, 0.3))
        persistent = chance.random() < 0.92
        identity = self.new(destination, priority, expires is not None)
        size = chance.choice((20, 20, 400, 3000, 9000))
        endpoint = self.endpoint(destination)
        if not persistent or identity.startswith("gone"):
            body = body_of("gone" + identity.removeprefix("gone"), size)
            endpoint.send(body, priority=priority, expires_in=expires, persistent=persistent, deliver_in=deliver_in)
            return
        named = expires is None and chance.random() < 0.5
        self.perform(sent_to(destination, identity, size=size, named=named, priority=priority), expires, deliver_in)

    def perform(self, operation: Operation, expires: float | None = None, deliver_in: float | None = None) -> None:
        """A send as its mark says; once more, if need be."""
        identity = operation["id"]
        body = body_of(identity, operation["size"])
        self.marks.trying(operation)
        self.endpoint(operation["to"]).send(
            BytesIO(body) if operation["size"] >= LARGE else body,
            message_id=identity if operation["named"] else None,
            priority=operation["priority"],
            expires_in=expires,
            deliver_in=deliver_in,
        )
        self.marks.promised(operation)

    def ack(self, where: str) -> None:
        message = self.receive(where)
        if message is not None:
            operation = {"op": "ack", "q": channel(message), "ids": [self.identity(message)]}
            self.marks.trying(operation)
            message.ack()
            self.marks.promised(operation)

    def release(self, where: str, delay: float | None = None) -> None:
        message = self.receive(where)
        if message is not None:
            operation = self._back([message])
            self.marks.trying(operation)
            message.release(delay=delay)
            self.marks.promised(operation)

    def _back(self, messages: Iterable[anabranch.Message]) -> Operation:
        self.sent += 1
        back = [[channel(message), self.identity(message)] for message in messages]
        return {"op": "back", "ids": back, "turn": f"{self.name}.{self.sent}"}

    def reject(self, where: str) -> None:
        """Put one into the dead letters."""
        message = self.receive(where)
        if message is not None:
            operation = {**self._back([message]), "op": "reject"}
            self.marks.trying(operation)
            message.reject("tried")
            self.marks.promised(operation)

    def put_back(self, store: str) -> None:
        """The first dead letter there, if a queue's. (A topic's would go to all its subscriptions.)"""
        message = self.router.queue(f"{store}.dead").receive()
        if message is None:
            return
        if str(message.headers["dead_letter_source"]).startswith("topic://"):
            message.release(delivered=False)
            return
        self.sent += 1
        operation = {"op": "requeue", "ids": buried(message), "turn": f"{self.name}.{self.sent}"}
        self.marks.trying(operation)
        self.router.requeue(message)
        self.marks.promised(operation)

    def drain(self, store: str) -> None:
        """Ack what is dead."""
        message = self.router.queue(f"{store}.dead").receive()
        if message is not None:
            pairs = [list(pair) for pair in buried(message)]
            operation = {"op": "tx", "send": [], "ack": pairs, "dead": message.seq}
            self.marks.trying(operation)
            message.ack()
            self.marks.promised(operation)

    # Transactions

    def filled(self, tx: anabranch.Transaction, prefix: str = "") -> tuple[Operation, list[anabranch.Message]]:
        """Some sends and acks in it, all of which its mark speaks of."""
        chance = self.chance
        stores = chance.sample(self.stores, min(len(self.stores), chance.choice((1, 2, 2, 3, 9))))
        operation: Operation = {"op": "tx", "send": [], "ack": []}
        taken = []
        for store in stores:
            for _ in range(chance.choice((0, 1, 1, 2))):
                destination = self.somewhere([store])
                priority = chance.choice((4, 65_535))
                identity = self.new(destination, priority)
                if prefix and not identity.startswith("gone"):
                    identity = f"{prefix}p{priority}.{self.sent}"  # its own producer: others' sends may overtake it
                tx.send(destination, body_of(identity, chance.choice((20, 900))), priority=priority)
                if not identity.startswith("gone"):
                    operation["send"] += [[each, identity] for each in channels_of(destination)]
            for _ in range(chance.choice((0, 1, 1, 2))):
                message = self.receive(self.somewhere([store]))
                if message is None:
                    continue
                identity = self.identity(message)
                if "e." in identity and message.subscription:
                    message.release(delivered=False)  # its fate is not told by one channel alone
                    continue
                tx.ack(message)
                taken.append(message)
                if not identity.startswith("gone"):
                    operation["ack"].append([channel(message), identity])
        return operation, taken

    def transaction(self) -> None:
        tx = self.router.transaction()
        operation, messages = self.filled(tx)
        if self.chance.random() < 0.15:
            operation = self._back(messages)
            self.marks.trying(operation)
            tx.rollback()
        else:
            operation["turn"] = f"{self.name}.{self.sent}"
            self.marks.trying(operation)
            tx.commit()
        self.marks.promised(operation)

    def within(self) -> None:
        """Some sends and acks in a transaction of the database's own, on a connection of ours."""
        chance = self.chance
        store = chance.choice([store for store in self.stores if store in "stp"])
        messages, sends = [], []
        operation: Operation = {"op": "tx", "send": [], "ack": []}
        for _ in range(chance.choice((0, 1, 2))):
            message = self.receive(self.somewhere([store]))
            if message is None:
                continue
            identity = self.identity(message)
            if not message.persistent or ("e." in identity and message.subscription):
                message.release(delivered=False)
                continue
            messages.append(message)
            operation["ack"].append([channel(message), identity])
        for _ in range(chance.choice((1, 1, 2))):
            destination = self.somewhere([store])
            sends.append((destination, self.new(destination, 4)))
            operation["send"] += [[each, sends[-1][1]] for each in channels_of(destination)]
        try:
            self._commit_within(store, operation, messages, sends)
        except (anabranch.AnabranchError, sqlalchemy.exc.DBAPIError):
            self.marks.trying(self._back(messages))  # which counts, for those that it had taken
            raise

    def _commit_within(
        self,
        store: str,
        operation: Operation,
        messages: Sequence[anabranch.Message],
        sends: Sequence[tuple[str, str]],
    ) -> None:
        chance = self.chance
        with self._connected(store) as connection:
            for message in messages:
                message.ack(connection=connection)
            for destination, identity in sends:
                self.endpoint(destination).send(body_of(identity, chance.choice((20, 9000))), connection=connection)
            if chance.random() < 0.2:
                self.marks.trying(self._back(messages))
                connection.rollback()
                return  # that they have come back is counted a moment later, unless it dies before
            self.sent += 1
            operation["turn"] = f"{self.name}.{self.sent}"
            self.marks.trying(operation)
            connection.commit()
            self.marks.promised(operation)

    @contextmanager
    def _connected(self, store: str) -> Iterator[sqlalchemy.Connection]:
        """To the database that a store is in."""
        backend: Any = self.router._registry.store_for(Destination.parse(f"{store}.q")).backend
        url = backend._engine.url
        waits: dict[str, Any] = {"timeout": PATIENCE} if url.get_backend_name() == "sqlite" else {}
        engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args=waits)
        with engine.connect() as connection:
            if waits:
                for pragma in ("journal_mode=WAL", "synchronous=FULL"):
                    connection.exec_driver_sql(f"PRAGMA {pragma}")
                connection.rollback()
            yield connection

    def prepare(self) -> Operation:
        self.sent += 1
        xid = f"x{self.name}n{self.sent}"
        tx = self.router.transaction(xid=anabranch.Xid(FORMAT, xid))
        operation, _ = self.filled(tx, xid)
        operation |= {"op": "prepare", "xid": xid}
        if not operation["send"] and not operation["ack"]:  # with volatile stores alone there is nothing to keep
            tx.rollback()
            return {}
        self.marks.trying(operation)
        tx.prepare()
        self.marks.promised(operation)
        return operation

    def end(self, prepared: Operation, commit: bool) -> None:
        xid = prepared["xid"]
        operation = {**prepared, "op": "tx"} if commit else {"op": "rollback", "xid": xid}
        self.marks.trying(operation)
        (self.router.commit if commit else self.router.rollback)(anabranch.Xid(FORMAT, xid))
        self.marks.promised(operation)

    # Subscriptions

    def subscriptions(self) -> None:
        """A topic of its own: one subscription, a second one that begins with what is there, the first one's end."""
        chance = self.chance
        self.sent += 1
        store = chance.choice([store for store in self.stores if store != "m"])
        topic = f"topic://{store}.own.{self.name}.{self.sent}"
        one = self.router.topic(topic).subscribe("one", selector="a = 1")
        held = [self._to_topic(topic, ["one"]) for _ in range(chance.choice((1, 3)))]
        with self.router.transaction() as tx:
            tx.subscribe(topic, "two", retroactive=True)
            identity = self.new(topic, 4)
            tx.send(topic, body_of(identity))
            here = [[f"{topic}#one", identity], *([f"{topic}#two", each] for each in (*held, identity))]
            operation: Operation = {"op": "tx", "send": here, "ack": []}
            other = chance.choice([store for store in self.stores if store != "m"])
            tx.send(f"{other}.q", body_of(identity))
            here.append([f"{other}.q", identity])
            self.marks.trying(operation)
        self.marks.promised(operation)
        held.append(identity)
        if chance.random() < 0.7:
            message = one.receive()
            assert message is not None
            assert identity_of(message.read()) == held[0]
            operation = {"op": "ack", "q": f"{topic}#one", "ids": [held.pop(0)]}
            self.marks.trying(operation)
            message.ack()
            self.marks.promised(operation)
        if chance.random() < 0.8:
            operation = {"op": "tx", "send": [], "ack": [[f"{topic}#one", each] for each in held]}
            self.marks.trying(operation)
            if chance.random() < 0.5:
                assert one.unsubscribe() == len(held)
            else:
                with self.router.transaction() as tx:
                    tx.unsubscribe(one.subscription)
            self.marks.promised(operation)
        self._to_topic(topic, [each.subscription.name for each in self.router.topic(topic).subscriptions()])

    def _to_topic(self, topic: str, names: Sequence[str]) -> str:
        identity = self.new(topic, 4)
        operation = sent_to(topic, identity, [f"{topic}#{each}" for each in names], size=20, named=False, priority=4)
        self.perform(operation)
        return identity

    # All of it

    def run(self) -> None:
        """Until the process dies."""
        waiting: list[Operation] = []
        while True:
            self.step(waiting)

    def step(self, waiting: list[Operation]) -> None:
        chance, what = self.chance, self.chance.random()
        if what < 0.34:
            self.send(self.somewhere(), deliver_in=SOON if what < 0.04 else None)
        elif what < 0.62:
            self.ack(self.somewhere())
        elif what < 0.69:
            self.release(self.somewhere(), delay=SOON if what < 0.66 else None)
        elif what < 0.70:
            self.reject(self.somewhere())
        elif what < 0.79:
            self.transaction()
        elif what < 0.84:
            self.within() if {*"stp"}.intersection(self.stores) else self.transaction()
        elif what < 0.89:
            prepared = self.prepare()
            waiting += [prepared] if prepared else []
            if waiting and (len(waiting) > 2 or chance.random() < 0.6):
                self.end(waiting.pop(chance.randrange(len(waiting))), chance.random() < 0.7)
        elif what < 0.92:
            self.subscriptions()
        elif what < 0.96:
            store = chance.choice([store for store in self.stores if store != "m"])
            self.put_back(store) if what < 0.94 else self.drain(store)
        elif what < 0.99:
            self.router.sweep()
        else:
            self.router.reclaim()

    def end_left(self, held: Held, left: float) -> None:
        """As Worker.end_left."""
        for xid in self.router.recover():
            said = held.outcomes.get(xid.global_id)
            if said is not None or self.chance.random() >= left:
                commit = said["op"] == "tx" if said is not None else self.chance.random() < 0.5
                self.end(held.prepares[xid.global_id], commit)


def sent_to(destination: str, identity: str, channels: Sequence[str] = (), **about: Any) -> Operation:
    pairs = [[each, identity] for each in channels or channels_of(destination)]
    return {"op": "tx", "send": pairs, "ack": [], "to": destination, "id": identity, **about}


def prepare(router: anabranch.Router) -> None:
    """The common topics have their subscriptions."""
    for store in router.config.stores:
        for each in NAMES:
            router.topic(f"{store.name}.t").subscribe(each, client_id="c")


def retry(hand: Hand, promised: Iterable[Operation], maybe: Iterable[Operation]) -> None:
    """Send again what may not have been stored, as a careful sender does; only what had a message_id."""
    settled = {operation.get("id") for operation in promised}
    for operation in maybe:
        if operation.get("named") and operation["id"] not in settled:
            hand.perform(operation)


# What is found


def buried(message: anabranch.Message) -> list[tuple[str, str]]:
    """The channels that a message of a dead-letter queue comes from."""
    source = str(message.headers["dead_letter_source"])
    identity = identity_of(message.read())
    if source.startswith("queue://"):
        return [(source.removeprefix("queue://"), identity)]
    of_one = message.headers.get("dead_letter_subscription")
    return [(f"{source}#{each}", identity) for each in ([of_one] if of_one is not None else NAMES)]


@dataclass
class Found:
    """What is there."""

    channels: dict[str, list[str]] = field(default_factory=dict)
    dead: list[tuple[str, str]] = field(default_factory=list)
    expired: list[tuple[str, str]] = field(default_factory=list)
    """Of topics, dead for all subscriptions that had them still: channels that may have had them."""
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often each has come back."""
    overdue: set[tuple[str, str]] = field(default_factory=set)
    """What is not to be delivered any more."""
    requeues: dict[tuple[str, str], int] = field(default_factory=dict)
    """How often each dead letter, or what was one, has been put back."""
    wrong: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, router: anabranch.Router) -> Found:
        found = cls()
        options = {store.name: store.options for store in router.config.stores}
        for destination in router.destinations():
            ordered = options[destination.name.partition(".")[0]]
            assert isinstance(ordered, StoreOptions)
            if destination.name.endswith(".dead"):
                for message in router.queue(destination.name).browse():
                    found._bury(message)
            elif str(destination).startswith("topic://"):
                for subscriber in router.topic(destination.name).subscriptions():
                    found._add(f"{destination}#{subscriber.subscription.name}", subscriber, ordered.priorities)
            else:
                found._add(destination.name, router.queue(destination.name), ordered.priorities)
        return found

    def _add(self, where: str, source: anabranch.Queue | anabranch.Subscriber, ordered: bool) -> None:
        messages = list(source.browse())
        ids = [identity_of(message.read()) for message in messages]
        if source.depth() != len(messages):
            self.wrong.append(f"{where}: depth says {source.depth()}, browse shows {len(messages)}")
        priorities = [message.priority for message in messages]
        if [f"p{priority}" for priority in priorities] != [re.findall(r"p\d+", each)[-1] for each in ids]:
            self.wrong.append(f"{where}: other priorities than those sent: {list(zip(ids, priorities, strict=True))}")
        if ordered and priorities != sorted(priorities, reverse=True):
            self.wrong.append(f"{where}: not by priority: {ids}")
        now = time.time_ns() // 1_000_000
        for message, identity in zip(messages, ids, strict=True):
            self.counts[where, identity] = message.deliveries
            requeued = self._count_requeues((where, identity), message)
            if 0 < message.expires_at_ms <= now or message.deliveries >= MOST:
                self.overdue.add((where, identity))
            if bool(message.expires_at_ms) != ("e." in identity and not requeued):
                self.wrong.append(f"{where}: {identity} expires at {message.expires_at_ms}")
        if ids:
            self.channels[where] = ids

    def _count_requeues(self, pair: tuple[str, str], message: anabranch.Message) -> int:
        count = message.headers.get("requeued_count", 0)
        assert isinstance(count, int)
        self.requeues[pair] = count
        return count

    def _bury(self, message: anabranch.Message) -> None:
        pairs = buried(message)
        (self.dead if len(pairs) == 1 else self.expired).extend(pairs)
        for pair in pairs:
            self._count_requeues(pair, message)
        reason, count = message.headers["dead_letter_reason"], message.headers["dead_letter_deliveries"]
        assert isinstance(count, int)
        if (reason == "expired" and "e." not in pairs[0][1]) or (reason == "delivery_limit" and count < MOST):
            self.wrong.append(f"{name(pairs[0])} is dead without need: {reason}, {count} deliveries")
        if reason == "delivery_limit":
            self.counts |= dict.fromkeys(pairs, count)

    def compare(
        self, promised: Sequence[Operation], maybe: Sequence[Operation], held: Held, power: bool = False
    ) -> list[str]:
        """Why this cannot be; `power` if the latest deliveries may not be counted."""
        wrong = list(self.wrong)
        here = {(where, identity) for where, ids in self.channels.items() for identity in ids}
        acked = {pair for operation in promised for pair in acks_of(operation)}
        dead = {*self.dead, *self.expired}
        wrong += [f"in two places: {name(pair)}" for pair in sorted(here & dead)]
        for pairs in (self.dead, self.expired):
            wrong += [f"twice dead: {name(pair)}" for pair, times in Counter(pairs).items() if times > 1]
        # Which subscriptions had acked a topic's message that expired, its letter does not say.
        dead = {*self.dead, *(pair for pair in self.expired if pair not in acked)}
        again = {pair for pair, count in self.requeues.items() if count} - dead
        firsts = {where: [i for i in ids if (where, i) not in again] for where, ids in self.channels.items()}
        wrong += [f"twice: {name((where, i))}" for where, ids in self.channels.items() for i in _twice(ids)]
        wrong += compare(firsts, promised, maybe, dead | again)
        wrong += self._wrongly_requeued(promised, maybe)
        least, most = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for operation, sure in [*((each, True) for each in promised), *((each, False) for each in maybe)]:
            back = [(where, identity) for where, identity in operation["ids"]] if operation["op"] in BACK else []
            if operation["op"] == "rollback":
                back = acks_of({**held.prepares[operation["xid"]], "op": "tx"})
            most.update(back)
            least.update(back if sure and not power and operation["op"] == "back" else ())
            if operation["op"] in ("tx", "prepare") and not sure:  # rolled back by whoever opened the directory
                most.update(acks_of({**operation, "op": "tx"}))
        for pair, count in self.counts.items():
            # Whoever was killed while he put it aside has it come back once more.
            aside = "e." in pair[1] or most[pair] >= MOST
            if count < least[pair] and self.requeues.get(pair):
                continue  # they are counted anew
            if not least[pair] <= count <= most[pair] and not (aside and count > most[pair]):
                wrong.append(f"{name(pair)} has come back {least[pair]} to {most[pair]} times, and counts {count}")
        return wrong

    def _wrongly_requeued(self, promised: Sequence[Operation], maybe: Sequence[Operation]) -> list[str]:
        least, more = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for times, operations in ((least, promised), (more, maybe)):
            for operation in operations:
                if operation["op"] == "requeue":
                    times.update((where, identity) for where, identity in operation["ids"])
        return [
            f"{name(pair)} was put back {count} times, not {least[pair]} and perhaps {more[pair]}"
            for pair, count in self.requeues.items()
            if not least[pair] <= count <= least[pair] + more[pair]
        ]


def _twice(ids: Sequence[str]) -> list[str]:
    return [identity for identity, times in Counter(ids).items() if times > 1]


def verify(
    router: anabranch.Router,
    promised: Sequence[Operation],
    maybe: Sequence[Operation],
    held: Held,
    power: bool = False,
) -> list[str]:
    """What is wrong in a router that was opened just now; what is over is dead-lettered."""
    router._sweeper.close()
    found = Found.of(router)
    wrong = found.compare(promised, maybe, held, power) + violations(router) + nothing_else_waits(router)
    waiting = {xid.global_id for xid in router.recover()}
    wrong += held.compare(waiting, found.channels)
    if wrong:
        return wrong
    claimed = held.claimed(waiting)
    router._sweeper.closed = False
    router.sweep()
    router._sweeper.closed = True
    again = Found.of(router)
    wrong += again.compare(promised, maybe, held, power) + violations(router)
    topics = {(where.partition("#")[0], identity) for where, identity in claimed}
    wrong += [
        f"left behind: {name(pair)} is over, and not put aside"
        for pair in sorted(found.overdue & again.overdue)
        if pair not in claimed and (pair[0].partition("#")[0], pair[1]) not in topics
    ]
    return wrong + _receivable(router, again, claimed)


def _receivable(router: anabranch.Router, found: Found, claimed: set[tuple[str, str]]) -> list[str]:
    """All but what is claimed, or over, can be received, in order (rule X6); it is given back."""
    wrong = []
    for where, ids in found.channels.items():
        source: Any = router.queue(where) if "#" not in where else None
        if source is None:
            topic, _, subscription = where.partition("#")
            of_topic = router.topic(topic).subscriptions()
            source = next(each for each in of_topic if each.subscription.name == subscription)
        taken = []
        while (message := source.receive()) is not None:
            taken.append(message)
        got = [identity_of(message.read()) for message in taken]
        wanted = [identity for identity in ids if (where, identity) not in claimed | found.overdue]
        if [each for each in got if "e." not in each] != [each for each in wanted if "e." not in each]:
            wrong.append(f"{where} gives {got}, not {wanted}")
        for message in taken:
            message.release(delivered=False)
    return wrong
