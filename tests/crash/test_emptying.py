"""Room to finish (rule J10): a disk that is full to its last byte is emptied again by what users do to empty it, and by
nothing else; also by whoever opens the stores anew, after a kill as well."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest

import anabranch
from anabranch.adapters.core.service import purging
from anabranch.adapters.journal import JournalStore
from anabranch.policies.config.durability import Sync

from ..contract.children import forked, reaped
from ..contract.disk import PATIENCE
from ..taking import take
from .ledger import body_of, contents, identity_of, violations
from .test_full_disk import fill_up

SYNCS = [Sync.ALWAYS, Sync.PERIODIC, Sync.NEVER]
SIZES = [20, 500, 20_000]
SYNCS_AND_SIZES = [
    pytest.param(sync, size, marks=[] if (number + row) % 3 == 0 else [pytest.mark.campaign, pytest.mark.weight(0)])
    for number, sync in enumerate(SYNCS)
    for row, size in enumerate(SIZES)
]
"""`make test` has each of both once."""

Work = Callable[[Path, anabranch.Router, int], int]


def elsewhere(disk: Path, sync: Sync, work: Work, number: int, kill: bool = True) -> int:
    """What a function of this module returns in another process, which is killed after it, or closes its router."""
    reader, writer = os.pipe()

    def run() -> None:
        with anabranch.open(config(disk, sync)) as router:
            done = work(disk, router, number)
            os.write(writer, b"%d" % done)
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)

    pid = forked(run)
    os.close(writer)
    assert reaped(pid) == (-signal.SIGKILL if kill else 0)
    with os.fdopen(reader) as pipe:
        return int(pipe.read())


def filling(disk: Path, router: anabranch.Router, size: int) -> int:
    return len(send_all(disk, router.queue("q"), size))


def acking(disk: Path, router: anabranch.Router, count: int) -> int:
    for _ in range(count):
        take(router.queue("q")).ack()
    return count


def sending_and_acking(disk: Path, router: anabranch.Router, count: int) -> int:
    """So many, once there is room for them, which there is once what was there is acked; ten are left."""
    queue = router.queue("q")
    while queue.depth() and not _takes(queue, 500):
        take(queue).ack()
    while (message := queue.receive(timeout=0)) is not None:
        message.ack()
    for number in range(10 - count, 10):
        queue.send(body_of(f"s.{number}", 500))
        if number < 0:
            take(queue).ack()
    return count


def _takes(queue: anabranch.Queue, size: int) -> bool:
    try:
        queue.send(body_of("first.0", size))
    except anabranch.StoreFullError:
        return False
    return True


def killed_amid_a_purge(disk: Path, pages: int) -> None:
    """In another process, once so many pages of one message each are gone."""
    left = pages

    def pause(seconds: float) -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        with anabranch.open(config(disk, Sync.NEVER)) as router:
            router.queue("q").purge()

    with patch.object(purging, "PAGE", 1), patch.object(purging, "PAGES", 1), patch.object(purging, "sleep", pause):
        assert reaped(forked(run)) == -signal.SIGKILL


def preparing(disk: Path, router: anabranch.Router, size: int) -> int:
    """Twelve, of which four have their outcome once the disk is full."""
    xids = [over_two(router, number, size) for number in range(12)]
    sent = filling(disk, router, 500)
    for number in range(4):
        (router.rollback if number % 2 else router.commit)(xids[number])
    return sent


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def config(disk: Path, sync: Sync = Sync.NEVER, segment_size: int = 256 * 1024) -> anabranch.Config:
    journal = anabranch.JournalOptions(segment_size=segment_size, sync=sync)
    stores = [anabranch.StoreConfig("a", [">"], journal=journal), anabranch.StoreConfig("b", ["b.>"], journal=journal)]
    return anabranch.Config(disk / "data", stores)


def send_all(disk: Path, queue: anabranch.Queue | anabranch.Topic, size: int) -> list[str]:
    """Fill the disk with messages of one queue, and what is left of it, until not one more is taken: the background may
    give back what it could not write."""
    sent: list[str] = []
    filled = -1
    while filled < len(sent):
        filled = len(sent)
        try:
            while True:
                identity = f"s.{len(sent)}"
                queue.send(body_of(identity, size))
                sent.append(identity)
        except anabranch.StoreFullError as error:
            assert "store 'a'" in str(error)
            assert "free some space and try again: receive and ack messages" in str(error)
            assert "call `compact`" in str(error)
        fill_up(disk / "filler")
    return sent


def send_again(router: anabranch.Router, queue: anabranch.Queue) -> None:
    """There is room."""
    queue.send(body_of("again.0"))
    assert contents(router) == {queue.destination.name: ["again.0"]}
    assert violations(router) == []


def ack_all(queue: anabranch.Queue, sent: list[str]) -> None:
    for identity in sent:
        message = take(queue)
        assert identity_of(message.body) == identity
        message.ack()


@pytest.mark.parametrize(("sync", "size"), SYNCS_AND_SIZES)
def test_acks_alone_empty_it(disk: Path, sync: Sync, size: int) -> None:
    with anabranch.open(config(disk, sync)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, size)
        ack_all(queue, sent)
        assert violations(router) == []
        router.reclaim()
        assert shutil.disk_usage(disk).free > 300_000
        send_again(router, queue)
    with anabranch.open(config(disk, sync)) as router:
        assert contents(router) == {"q": ["again.0"]}
        assert violations(router) == []


def test_acks_in_any_order_empty_it(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 60)
        messages = [take(queue) for _ in sent]
        random.Random(1).shuffle(messages)
        for message in messages:
            message.ack()
        router.reclaim()
        send_again(router, queue)
    with anabranch.open(config(disk)) as router:
        assert contents(router) == {"q": ["again.0"]}


def test_acks_of_many_threads_and_without_waiting_empty_it(disk: Path) -> None:
    with anabranch.open(config(disk, Sync.ALWAYS)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 100)

        def ack(count: int) -> None:
            for _ in range(count):
                take(queue).ack()

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(ack, len(sent) // 5) for _ in range(4)]:
                done.result()
        futures = [message.ack_nowait() for message in iter(queue.receive, None)]
        for future in futures:
            future.result()
        assert queue.depth() == 0
        assert violations(router) == []


def test_a_purge_empties_it(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 60)
        assert queue.purge() == len(sent)
        router.reclaim()
        send_again(router, queue)


def test_the_end_of_a_subscription_empties_it(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        topic = router.topic("t")
        desk, book = topic.subscribe("desk"), topic.subscribe("book")
        send_all(disk, topic, 60)
        for _ in range(100):
            message = take(desk)
            message.ack()
        book.unsubscribe()
        desk.unsubscribe()
        router.reclaim()
        send_again(router, router.queue("q"))


def test_what_is_given_back_counts_its_deliveries(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 500)
        for _ in range(3):
            for message in [take(queue) for _ in range(100)]:
                message.release()
        for number, identity in enumerate(sent):
            message = take(queue)
            assert (identity_of(message.body), message.deliveries) == (identity, 4 if number < 100 else 1)
            message.ack()
        send_again(router, queue)


def test_all_can_be_given_back_and_then_acked(disk: Path) -> None:
    """Not all of it can be counted: a count takes room in the index."""
    with anabranch.open(config(disk)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 400)
        for _ in range(2):
            for message in [take(queue) for _ in sent]:
                message.release()
        ack_all(queue, sent)
        router.reclaim()
        send_again(router, queue)


@pytest.mark.parametrize("sync", SYNCS)
def test_it_is_closed_and_opened_while_it_is_full(disk: Path, sync: Sync) -> None:
    with anabranch.open(config(disk, sync)) as router:
        sent = send_all(disk, router.queue("q"), 500)
    for _ in range(8):
        fill_up(disk / "more")
        with anabranch.open(config(disk, sync)) as router:
            ack_all(router.queue("q"), sent[:100])
            sent = sent[100:]
            assert contents(router) == {"q": sent}
            assert violations(router) == []
    with anabranch.open(config(disk, sync)) as router:
        ack_all(router.queue("q"), sent)
        router.reclaim()
        send_again(router, router.queue("q"))


@pytest.mark.parametrize("sync", SYNCS)
def test_it_is_opened_while_it_is_full_after_kills(disk: Path, sync: Sync) -> None:
    sent = [f"s.{number}" for number in range(elsewhere(disk, sync, filling, 500))]
    for acks in (0, 0, 1, 1, 300, 1):
        fill_up(disk / "more")
        assert elsewhere(disk, sync, acking, acks) == acks
        sent = sent[acks:]
    with anabranch.open(config(disk, sync)) as router:
        assert contents(router) == {"q": sent}
        ack_all(router.queue("q"), sent)
        router.reclaim()
        send_again(router, router.queue("q"))


def test_it_is_emptied_by_processes_that_are_killed_amid_a_purge(disk: Path) -> None:
    """Each of them takes a spare file, and what it writes there frees nothing yet."""
    sent = [f"s.{number}" for number in range(elsewhere(disk, Sync.NEVER, filling, 3000))]
    for pages in (1, 2, 1, 1):
        fill_up(disk / "more")
        killed_amid_a_purge(disk, pages)
        sent = sent[pages:]
    with anabranch.open(config(disk)) as router:
        assert contents(router) == {"q": sent}
        assert violations(router) == []
        assert router.queue("q").purge() == len(sent)
        router.reclaim()
        send_again(router, router.queue("q"))


def over_two(router: anabranch.Router, number: int, size: int) -> anabranch.Xid:
    """One that is prepared, with a message in either store."""
    xid = anabranch.Xid(1, f"x{number}")
    transaction = router.transaction(xid)
    transaction.send("in", body_of(f"x.{number}", size))
    transaction.send("b.in", body_of(f"x.{number}", size))
    transaction.prepare()
    return xid


@pytest.mark.parametrize("killing", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("size", [10, 3000])
def test_prepared_transactions_have_their_outcomes(disk: Path, size: int, killing: bool) -> None:
    sent = [f"s.{number}" for number in range(elsewhere(disk, Sync.NEVER, preparing, size, kill=killing))]
    fill_up(disk / "more")
    with anabranch.open(config(disk)) as router:
        for number in range(4, 12):
            (router.rollback if number % 2 else router.commit)(anabranch.Xid(1, f"x{number}"))
        assert router.in_doubt() == []
        committed = [f"x.{number}" for number in range(0, 12, 2)]
        found = contents(router)
        assert (found["in"], found["b.in"], found["q"]) == (committed, committed, sent)
        ack_all(router.queue("q"), sent)
        ack_all(router.queue("in"), committed)
        router.reclaim()
        over_two(router, 99, size)
        assert violations(router) == []


def test_destinations_go_and_new_ones_are_refused(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        for number in range(50):
            router.queue(f"old.{number}").send(body_of("s.0"))
        sent = send_all(disk, router.queue("q"), 500)
        new: list[str] = []
        with pytest.raises(anabranch.StoreFullError, match="free some space"):
            for number in range(1000):
                name = f"new.{number}.{'x' * 200}"
                router.queue(name).send(body_of("new.0"))
                new.append(name)  # the background may have given back what one takes
        for number in range(50):
            router.delete(f"old.{number}")
        assert contents(router) == {"q": sent, **{name: ["new.0"] for name in new}}
        ack_all(router.queue("q"), sent)
        for name in new:
            router.delete(name)
        router.reclaim()
        send_again(router, router.queue("q"))


WHOLE_DISK = 32 * 1024 * 1024
"""Bytes of a segment that never is full on such a disk, as with the default."""


@pytest.mark.parametrize(("sync", "size"), SYNCS_AND_SIZES)
def test_a_disk_that_one_segment_fills_takes_messages_again(disk: Path, sync: Sync, size: int) -> None:
    """Time and again, without reopening or `compact`. What lies in the segment has died, but it is the one that is
    being written: it is left for a spare file, and goes."""
    with anabranch.open(config(disk, sync, WHOLE_DISK)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, size)
        first = len(sent)
        for _ in range(3):
            ack_all(queue, sent)
            sent = send_all(disk, queue, size)
            assert 2 * len(sent) > first
        assert contents(router) == {"q": sent}
        assert violations(router) == []
    with anabranch.open(config(disk, sync, WHOLE_DISK)) as router:
        assert contents(router) == {"q": sent}


@pytest.mark.parametrize("behind", [0, 1, 20])
def test_a_queue_that_is_never_empty_goes_on_for_ever_on_a_disk_that_one_segment_fills(disk: Path, behind: int) -> None:
    """What is sent where there still is a little room would keep that segment for ever, if it had to be empty."""
    with anabranch.open(config(disk, segment_size=WHOLE_DISK)) as router:
        queue = router.queue("q")
        filled = len(send_all(disk, queue, 2000))
        sizes, acked, number = itertools.cycle([2000, 300, 4000]), 0, filled
        while acked < 5 * filled:
            try:
                queue.send(body_of(f"s.{number}", next(sizes)))
                number += 1
                refused = False
            except anabranch.StoreFullError:
                refused = True
            if refused or queue.depth() > behind:
                message = take(queue)
                assert identity_of(message.body) == f"s.{acked}"
                message.ack()
                acked += 1
        assert [identity_of(message.body) for message in queue.browse()] == [f"s.{n}" for n in range(acked, number)]
        assert violations(router) == []


@pytest.mark.parametrize("sync", SYNCS)
def test_a_killed_process_leaves_a_disk_that_one_segment_fills_to_the_next(disk: Path, sync: Sync) -> None:
    with anabranch.open(config(disk, sync, WHOLE_DISK)) as router:
        sent = send_all(disk, router.queue("q"), 500)
    elsewhere(disk, sync, acking, len(sent) - 10)
    assert elsewhere(disk, sync, sending_and_acking, len(sent)) == len(sent)
    with anabranch.open(config(disk, sync, WHOLE_DISK)) as router:
        assert contents(router) == {"q": [f"s.{number}" for number in range(10)]}
        assert violations(router) == []


def one_at_a_time(disk: Path, router: anabranch.Router, count: int) -> int:
    """A queue that is empty again after each message, and at the end a disk that is full."""
    queue = router.queue("q")
    for number in range(count):
        queue.send(body_of(f"s.{number}"))
        take(queue).ack()
    return len(send_all(disk, queue, 20_000))


@pytest.mark.parametrize("count", [400, 600, 800, 1000, 1200])
def test_what_was_applied_one_by_one_is_written_out_on_a_full_disk_after_a_kill(disk: Path, count: int) -> None:
    """LMDB takes a new page for each message in a table that is empty without it: far more than is kept for so many.
    What is left of them after the first step needs more pages, too, than the file has then."""
    sent = elsewhere(disk, Sync.NEVER, one_at_a_time, count)
    with anabranch.open(config(disk)) as router:
        assert len(contents(router)["q"]) == sent
        assert violations(router) == []


def test_acks_are_not_refused_where_sends_come_with_them(disk: Path) -> None:
    """The sends find no room, or what acks before them have made."""
    with anabranch.open(config(disk, Sync.ALWAYS)) as router:
        queue = router.queue("q")
        sent = send_all(disk, queue, 100)
        messages = [take(queue) for _ in sent]
        store = messages[0]._store
        assert isinstance(store, JournalStore)
        refused = taken = 0
        for start in range(0, 200, 10):
            sends = [store.send_nowait(queue.destination, body_of("new.0", 30_000)) for _ in range(3)]
            acks = [store.ack_nowait([message]) for message in messages[start : start + 10]]
            for done in acks:
                done.result(PATIENCE)
            errors = [done.exception(PATIENCE) for done in sends]
            assert all(error is None or isinstance(error, anabranch.StoreFullError) for error in errors)
            taken += errors.count(None)
            refused += len(errors) - errors.count(None)
        assert refused
        assert contents(router) == {"q": sent[200:] + ["new.0"] * taken}


def test_an_index_is_rebuilt_while_it_is_full(disk: Path) -> None:
    with anabranch.open(config(disk)) as router:
        sent = send_all(disk, router.queue("q"), 100)
    index = disk / "data" / "stores" / "a" / "index.mdb"
    with index.open("r+b") as file:
        file.write(b"damaged" * 1000)
    with anabranch.open(config(disk)) as router:
        ack_all(router.queue("q"), sent)
        router.reclaim()
        send_again(router, router.queue("q"))
