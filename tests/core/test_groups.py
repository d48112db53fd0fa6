"""Message groups beside a model of what each receive must give, under threads, and at what cost."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from anabranch.adapters.core.features import groups
from anabranch.adapters.core.messages import DEFAULT_PRIORITY, Message, Outgoing
from anabranch.policies.config import Redelivery
from anabranch.policies.names.destination import Destination

from ..contract.disk import PATIENCE, A, B, Disk, assert_whole, drain, take
from ..contract.expiring import Clock, stopped_clock
from ..contract.preparing import prepare
from ..journal.disk import SMALL, JournalDisk
from ..memory.disk import MemoryDisk
from ..sql.disk import SqliteDisk

KINDS: dict[str, Any] = {
    "journal": lambda path: JournalDisk(path, **SMALL),
    "sql": SqliteDisk,
    "memory": MemoryDisk,
}
STEPS = 120


clock = pytest.fixture(stopped_clock)


@pytest.fixture(params=KINDS)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with KINDS[request.param](tmp_path) as disk:
        yield disk


class Known:
    """What the model knows of a message."""

    def __init__(self, number: int, group: str | None, priority: int, persistent: bool, due: int) -> None:
        self.number, self.group, self.priority, self.persistent, self.due = number, group, priority, persistent, due
        self.deliveries = 0
        self.message: Message | None = None
        """Leased, or claimed by `branch`."""
        self.branch = b""
        self.holds = False
        """It waits for another try."""


class Run:
    """A store, and what it should hold."""

    def __init__(self, disk: Disk, clock: Clock, seed: int) -> None:
        self.random = random.Random(seed)
        self.disk, self.clock = disk, clock
        self.priorities = self.random.random() < 0.3
        self.has_few = self.random.random() < 0.4
        """Few messages have groups, so that pages of what is fetched have none."""
        self.store = disk.create(priorities=self.priorities)
        self.known: list[Known] = []
        self.sent = self.branches = 0

    def step(self) -> None:
        steps = (self.send, self.send, self.receive, self.receive, self.receive_many, self.ack, self.ack, self.release)
        rare = (self.wait, self.pass_time, self.again, self.purge, self.begin, self.end)
        self.random.choice(rare if self.random.random() < 0.25 else steps)()

    def free(self) -> Known | None:
        """What a receive must give."""
        busy = {one.group for one in self.known if one.message or one.branch or (one.holds and one.due)}
        there = [
            one
            for one in self.known
            if not (one.message or one.branch or one.due) and (one.group is None or one.group not in busy)
        ]
        return min(there, key=lambda one: (-one.priority if self.priorities else 0, one.number), default=None)

    def leased(self) -> list[Known]:
        return [one for one in self.known if one.message and not one.branch]

    def send(self) -> None:
        made = []
        for _ in range(self.random.choice((1, 1, 2, 90 if self.has_few else 7))):
            group = self.random.choice(("a", "a", "b", "c", None))
            if self.has_few and self.random.random() < 0.95:
                group = None
            priority = self.random.choice((DEFAULT_PRIORITY, DEFAULT_PRIORITY, 9, 0))
            persistent, due = self.random.random() < 0.8, self.clock.now + 10 if self.random.random() < 0.1 else 0
            made.append(Known(self.sent, group, priority, persistent, due))
            self.sent += 1
        outgoing = [
            Outgoing(
                b"%d" % one.number, priority=one.priority, persistent=one.persistent, deliver_at_ms=one.due,
                group=one.group,
            )
            for one in made
        ]  # fmt: skip
        self.known += made
        if self.random.random() < 0.5:
            self.store.send_many(A, outgoing)
        else:
            self.store.commit([(A, message) for message in outgoing], [])

    def given(self, message: Message | None) -> None:
        expected = self.free()
        found = None if message is None else int(message.body)
        assert found == (None if expected is None else expected.number), self.store.name
        if expected is not None and message is not None:
            assert (message.group, message.deliveries) == (expected.group, expected.deliveries + 1)
            message._note.kept = True
            expected.message = message

    def receive(self) -> None:
        self.given(self.store.receive(A))

    def receive_many(self) -> None:
        count = self.random.choice((2, 5, 20, 70))
        messages = self.store.receive_many(A, count)
        for message in messages:
            self.given(message)
        if len(messages) < count:
            self.given(None)

    def some(self) -> list[Known]:
        leased = self.leased()
        return self.random.sample(leased, self.random.randint(min(1, len(leased)), len(leased)))

    def ack(self) -> None:
        some = self.some()
        self.store.ack([one.message for one in some if one.message])
        for one in some:
            self.known.remove(one)

    def release(self, delay: float | None = None) -> None:
        some, delivered = self.some(), self.random.random() < 0.7
        self.store.release([one.message for one in some if one.message], delivered, delay)
        for one in some:
            one.message = None
            one.deliveries += delivered
            if delay:
                one.due, one.holds = self.clock.now + round(delay * 1000), True

    def wait(self) -> None:
        self.release(0.02)

    def pass_time(self) -> None:
        self.clock.offset_ms += self.random.choice((5, 10, 30))
        for one in self.known:
            if one.due <= self.clock.now:
                one.due, one.holds = 0, False

    def again(self) -> None:
        """The next process."""
        if self.disk.volatile:
            return
        crashed = self.random.random() < 0.5
        before, self.store = self.store, self.disk.later(self.store, "crashed" if crashed else "closed")
        if crashed:
            before.close()
        self.known = [one for one in self.known if one.persistent]
        for one in self.known:
            if not one.branch:
                one.message = None
            one.holds = one.holds and one.deliveries > 0

    def purge(self) -> None:
        if self.random.random() < 0.3:
            self.store.purge(A)
            self.known = [one for one in self.known if one.message or one.branch]

    def begin(self) -> None:
        """Prepare a branch that acks some."""
        some = [one for one in self.some() if one.persistent][:2]
        for one in some:
            assert one.message
            self.store.claim(one.message)
        self.branches += 1
        name = prepare(self.store, self.branches, [(B, Outgoing(b"b"))], [one.message for one in some if one.message])
        for one in some:
            one.branch = name

    def end(self) -> None:
        names = sorted({one.branch for one in self.known if one.branch})
        if not names:
            return
        name, committed = self.random.choice(names), self.random.random() < 0.5
        end = self.store.commit_prepared if committed else self.store.rollback_prepared
        end(name).wait()
        for one in [one for one in self.known if one.branch == name]:
            if committed:
                self.known.remove(one)
            one.branch, one.message = b"", None
            one.deliveries += 1

    def finish(self) -> None:
        """In the end all of it comes out."""
        while any(one.branch for one in self.known):
            self.end()
        self.store.release([one.message for one in self.leased() if one.message])
        for one in self.known:
            one.deliveries += one.message is not None
            one.message = None
        self.clock.offset_ms += 1000
        self.pass_time()
        while self.free() is not None:
            self.receive()
            self.ack()
        assert (self.known, self.store.depth(A)) == ([], 0)
        assert_whole(self.store)


@pytest.mark.parametrize("most", [groups.HELD_BACK_MAX, 4], ids=["", "few"])
@pytest.mark.parametrize("seed", range(12))
def test_it_gives_what_the_model_says(
    disk: Disk, clock: Clock, seed: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "HELD_BACK_MAX", most)
    run = Run(disk, clock, seed)
    for _ in range(STEPS):
        run.step()
    run.finish()


GROUPS, EACH, RECEIVERS = 5, 40, 4


@pytest.mark.parametrize("seed", range(3))
def test_threads_have_one_of_a_group_at_a_time(disk: Disk, seed: int) -> None:
    """Those who send, receive, listen, give back and roll back together: each group comes in order, one by one, and
    nobody waits for ever."""
    store = disk.create()
    out: set[str] = set()
    done: defaultdict[str, list[int]] = defaultdict(list)
    lock, finished, wrong = threading.Lock(), threading.Event(), list[str]()
    count = GROUPS * EACH

    def handle(message: Message, dice: random.Random) -> None:
        group, number = message.group or f"none{message.body.decode()}", int(message.body)
        with lock:
            if group in out:
                wrong.append(f"two of {group} at once")
            out.add(group)
        choice = dice.random()
        if choice < 0.2:
            with lock:
                out.discard(group)
            message.release()
            return
        if choice < 0.3:
            store.claim(message)
            with lock:
                out.discard(group)
            store.unclaim([message])
            return
        with lock:
            out.discard(group)
            done[group].append(number)
            if sum(map(len, done.values())) == count:
                finished.set()
        if choice < 0.5:
            store.claim(message)
            store.commit([], [message])
        else:
            message.ack()

    def receive(number: int) -> None:
        dice = random.Random(seed * 100 + number)
        while not finished.is_set():
            for message in store.receive_many(A, dice.choice((1, 3)), timeout=0.1):
                handle(message, dice)

    def send(part: int) -> None:
        for number in range(EACH):
            for group in range(part, GROUPS, 2):
                store.send_many(A, [Outgoing(b"%d" % number, group=f"g{group}", persistent=bool((number + group) % 7))])

    threads = [threading.Thread(target=receive, args=(number,)) for number in range(RECEIVERS)]
    threads += [threading.Thread(target=send, args=(part,)) for part in range(2)]
    dice = random.Random(seed)

    def listened(message: Message) -> None:
        handle(message, dice)
        listener.add_credit(1)

    listener = store.listen(A, listened, credit=2)
    for thread in threads:
        thread.start()
    assert finished.wait(PATIENCE), {group: len(numbers) for group, numbers in done.items()}
    for thread in threads:
        thread.join(PATIENCE)
    listener.close()
    assert not wrong
    assert done == {f"g{group}": list(range(EACH)) for group in range(GROUPS)}
    assert store.depth(A) == 0


def count_looks(store: Any) -> Counter[str]:
    """How many messages the store is asked for, from now on."""
    counts: Counter[str] = Counter()

    def asked(name: str, question: Any, *arguments: Any) -> Any:
        found = list(question(*arguments))
        counts[name] += len(found)
        return iter(found) if name == "bodies" else found

    for name in ("rows", "bodies"):
        setattr(store.backend, name, partial(asked, name, getattr(store.backend, name)))
    return counts


def test_what_is_held_back_is_looked_at_once(disk: Disk) -> None:
    """However many receives come in between, and however often the group becomes free."""
    store = disk.create()
    many = 2000
    store.send_many(A, [Outgoing(b"%d" % n, group="g") for n in range(many)])
    store.send_many(A, [Outgoing(b"x", group="h") for _ in range(50)])
    counts = count_looks(store)
    first = take(store)
    for _ in range(50):
        other = store.receive(A)
        assert other is not None and other.body == b"x"
        other.ack()
    assert store.receive(A) is None
    assert first.body == b"0"
    first.release()
    for number in range(50):
        message = take(store)
        assert message.body == b"%d" % number
        message.ack()
    assert counts["rows"] < many + 1000
    assert counts["bodies"] < many + 1000


def test_who_has_no_group_is_not_looked_at(disk: Disk) -> None:
    """In a store that was opened empty, also beside queues whose messages have groups."""
    store = disk.create()
    store.send_many(B, [Outgoing(b"b", group="g")])
    store.send_many(A, [b"1", b"2", b"3"])
    assert drain(store, A) == [b"1", b"2", b"3"]
    assert store._engine.catalog.state(A).channel.groups is None
    assert store._engine.catalog.state(B).channel.groups is not None


@pytest.mark.parametrize("released", [False, True])
def test_what_was_there_at_open_is_looked_at_until_it_is_gone(disk: Disk, released: bool) -> None:
    store = disk.create()
    if disk.volatile:
        return
    store.send_many(A, [b"%d" % n for n in range(5)])
    store = disk.reopen(store)
    channel = store._engine.catalog.state(A).channel
    first = take(store)
    assert channel.groups is None and channel.unsure is not None
    if released:
        first.release()
        assert channel.groups is not None and channel.unsure is None
        first = take(store)
    store.send_many(A, [b"x"] * 200)
    assert len(drain(store)) == 204
    assert channel.groups or channel.unsure
    first.ack()
    for _ in range(3):
        store.send_many(A, [b"x"] * 200)
        assert len(drain(store)) == 200
    assert channel.groups is channel.unsure is None
    store.send_many(A, [Outgoing(b"1", group="g"), Outgoing(b"2", group="g")])
    assert take(store).body == b"1"
    assert store.receive(A) is None


def test_what_waits_is_looked_for_once_for_all_queues(
    disk: Disk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many messages wait, and in however many queues."""
    store = disk.create()
    if disk.volatile:
        return
    queues = [Destination.parse(f"q{number}") for number in range(5)]
    for queue in queues:
        store.send_many(queue, [Outgoing(b"%d" % n, group="g") for n in range(2)])
        take(store, queue).release(delay=10)
    store = disk.reopen(store)
    rows: Any = store._engine.rows
    walks = count()
    due = rows.due
    monkeypatch.setattr(rows, "due", lambda now, most: (most < sys.maxsize or next(walks), due(now, most))[1])
    assert [store.receive(queue) for queue in queues] == [None] * 5
    assert next(walks) == 1
    clock.offset_ms = 10_000
    assert [drain(store, queue) for queue in queues] == [[b"0", b"1"]] * 5


def test_what_waits_holds_its_group_also_after_ctrl_c(
    disk: Disk, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the receive that looks for it."""
    store = disk.create()
    store.send_many(A, [Outgoing(b"%d" % n, group="g") for n in range(2)])
    take(store).release(delay=10)
    store = disk.later(store)
    strikes = iter([KeyboardInterrupt])
    hold = groups.ChannelGroups.hold

    def struck(channel: groups.ChannelGroups, place: Any) -> None:
        for strike in strikes:
            raise strike
        hold(channel, place)

    with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
        patched.setattr(groups.ChannelGroups, "hold", struck)
        store.receive(A)
    assert store.receive(A) is None
    clock.offset_ms = 10_000
    assert drain(store) == [b"0", b"1"]


def test_what_was_waiting_at_open_is_looked_at_once_it_is_due(disk: Disk, clock: Clock) -> None:
    """Though nothing that is fetched before has a group."""
    store = disk.create()
    if disk.volatile:
        return
    due = clock.now + 10
    store.send_many(A, [Outgoing(b"%d" % n, group="g", deliver_at_ms=due) for n in range(3)])
    store.send_many(A, [b"x"] * 3)
    store = disk.reopen(store)
    channel = store._engine.catalog.state(A).channel
    assert take(store).body == b"x"
    assert channel.groups is None
    clock.offset_ms = 10
    first = take(store)
    assert [first.body, take(store).body, take(store).body] == [b"0", b"x", b"x"]
    assert store.receive(A) is None
    first.ack()
    assert drain(store) == [b"1", b"2"]


def test_what_a_rollback_lets_wait_holds_its_group(disk: Disk) -> None:
    """It was claimed as the store was opened, and waits only since what waits was looked for, for another queue."""
    store = disk.create(redelivery=Redelivery(delay=60.0))
    for destination in (A, B):
        store.send_many(destination, [Outgoing(b"1", group="g"), Outgoing(b"2", group="g")])
    take(store).release()
    first = take(store, B)
    store.claim(first)
    store.prepare(b"t" * 16, (), [], [first], False).wait()
    store = disk.reopen(store)
    if store.volatile:
        return
    assert store.receive(A) is None
    store.rollback_prepared(b"t" * 16).wait()
    assert store.receive(B) is None
