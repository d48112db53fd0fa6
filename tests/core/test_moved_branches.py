"""What a prepared transaction does to one destination, in another store (adapters/core/migration/moved_branches.py)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing
from anabranch.adapters.core.migration import copying, moved_branches
from anabranch.adapters.core.store_types import Change, Subscription
from anabranch.policies.names.destination import Destination

from ..contract.disk import A, B, T
from .test_copying import Both, disk_of

ID = b"t" * 32
OTHER = b"o" * 16
MINE = Subscription(T, "mine", "c")
NEW = Subscription(T, "new")


@pytest.fixture(params=[("journal", "sqlite"), ("sqlite", "journal"), ("journal", "memory")], ids="-".join)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Both]:
    with ExitStack() as stack:
        disks = []
        for name, kind in zip(("from", "to"), request.param, strict=True):
            (tmp_path / name).mkdir()
            disks.append(stack.enter_context(disk_of(kind, tmp_path / name, request)))
        source, target = disks[0].create(), disks[1].create()
        target.send(B, b"in the way")  # seqs and numbers differ
        yield Both(disks[0], disks[1], source, target)


def bodies(messages: Iterable[Message]) -> list[bytes]:
    return [message.body for message in messages]


def fill(store: Store) -> None:
    """A branch that acks the second of A and of T, sends to both and to B, and changes T's subscriptions."""
    store.subscribe(MINE)
    for destination in (A, T):
        for number in range(3):
            store.send(destination, b"%d" % number)
    store.receive(A)
    store.receive(T, subscription=MINE.key)
    acks = [one for one in (store.receive(A), store.receive(T, subscription=MINE.key)) if one is not None]
    for message in acks:
        store.claim(message)
    sends = [(destination, Outgoing(b"sent", {"n": 1}, "id")) for destination in (A, B, T)]
    changes = [Change(NEW, True), Change(MINE, False)]
    store.prepare(ID, [store.store_id, OTHER], sends, acks, True, None, changes, "mark").wait()


def move(both: Both, destination: Destination) -> None:
    source, target = both.source, both.target
    subscriptions = copying.amount(source, destination).subscriptions
    copying.bring(target, destination, copying.read(source, destination), subscriptions)
    for branch in moved_branches.concerning(source, destination):
        moved_branches.put(target, ID, moved_branches.with_part(source, target, branch, destination))
        moved_branches.put(source, ID, moved_branches.without(source, ID, destination))
    source.delete(destination)


def test_part_by_part(both: Both) -> None:
    fill(both.source)
    for destination, rest in (A, {B, T}), (T, {B}), (B, set()):
        move(both, destination)
        left = {one for one in (A, B, T) if moved_branches.concerning(both.source, one)}
        assert left == rest
        assert moved_branches.concerning(both.source, destination) == []
    assert both.source.recover_prepared() == []
    if not both.target.volatile:
        both.later()
    (prepared,) = both.target.recover_prepared()
    assert prepared.transaction == ID and (prepared.sends, prepared.acks) == (3, 2)
    assert set(prepared.participants) == {both.source.store_id, both.target.store_id, OTHER}
    assert bodies(both.target.browse(A)) == [b"0", b"1", b"2"]
    both.target.commit_prepared(ID).wait()
    assert bodies(both.target.browse(A)) == [b"0", b"2", b"sent"]
    assert bodies(both.target.browse(B)) == [b"in the way", b"sent"]
    for destination in (A, B, T):
        assert both.target.marked("mark", [], [destination]) == []
    assert [one.key for one in both.target.subscriptions()] == [NEW.key]
    assert bodies(both.target.browse(T, subscription=NEW.key)) == [b"sent"]
    assert both.target.send(A, b"", message_id="id").duplicate
    assert list(both.target.check()) == []


def test_rolled_back_it_gives_back_what_it_acks(both: Both) -> None:
    fill(both.source)
    move(both, A)
    both.target.rollback_prepared(ID).wait()
    assert [message.body for message in iter(lambda: both.target.receive(A), None)] == [b"0", b"1", b"2"]


def test_rolled_back_it_gives_back_what_it_would_have_dropped_as_it_was(both: Both) -> None:
    both.source = source = both.source_disk.reopen(both.source, max_messages=2, when_full="drop_old")
    for body in b"1", b"2":
        source.send(A, body)
    sends = [(A, Outgoing(b"3"))]
    source.prepare(ID, [source.store_id], sends, [], True, source.reserve(sends)).wait()
    move(both, A)
    if not both.target.volatile:
        both.later()
    both.target.rollback_prepared(ID).wait()
    assert [(one.body, one.deliveries) for one in iter(lambda: both.target.receive(A), None)] == [(b"1", 1), (b"2", 1)]


def test_put_again_it_changes_nothing(both: Both) -> None:
    fill(both.source)
    (branch,) = moved_branches.concerning(both.source, A)
    whole = branch.payload or moved_branches.without(both.source, ID, Destination.parse("queue://none"))
    for _ in range(2):
        moved_branches.put(both.source, ID, whole)
        assert [branch] == moved_branches.concerning(both.source, A)
    for _ in range(2):
        moved_branches.put(both.source, ID, moved_branches.NOTHING)
        assert both.source.recover_prepared() == []
    moved_branches.put(both.source, ID, whole)
    both.source = both.source_disk.later(both.source)
    (prepared,) = both.source.recover_prepared()
    assert (prepared.sends, prepared.acks) == (3, 2)
    assert [m.deliveries for m in both.source.browse(A)] == [0, 0, 0]
