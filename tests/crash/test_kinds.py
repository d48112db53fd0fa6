"""What hits stores of the other kinds: a full disk, flipped bits, another process, a fork, a thousand threads.

What the journal is put through alone is in the modules beside this one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

import anabranch
import anabranch.adapters.sql
from anabranch.adapters.core.record.large import CHUNK_BYTES
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.options import StoreOptions
from anabranch.policies.config.when_full import WhenFull

from ..contract.children import forked, reaped
from ..shares import Share
from ..taking import take
from .damaging import Trial, outcomes
from .ledger import body_of, contents, identity_of, violations

SENT = 150


def config(directory: Path, **kinds: StoreOptions) -> anabranch.Config:
    """A store of each of these kinds, which takes what begins with its kind's name."""
    stores = [
        anabranch.StoreConfig(kind, [f"{kind}.>"], **{kind: options})  # type: ignore[arg-type]
        for kind, options in kinds.items()
    ]
    return anabranch.Config(directory, stores)


def all_kinds(directory: Path) -> anabranch.Config:
    memory = anabranch.MemoryOptions(max_bytes=1 << 20, roll_over_size=64 * 1024)
    return config(directory, journal=anabranch.JournalOptions(), sql=anabranch.SqlOptions(), memory=memory)


# A flipped bit -------------------------------------------------------------------------------------------------------


def fill(directory: Path) -> None:
    """A process that is killed when all is sent, so that much is in SQLite's WAL alone."""
    with anabranch.open(config(directory, sql=anabranch.SqlOptions())) as router:
        queue = router.queue("sql.q")
        for number in range(SENT):
            queue.send(body_of(f"s.{number}", 700))
            if number % 3 == 0:
                message = take(queue)
                message.ack()
        os.kill(os.getpid(), signal.SIGKILL)


def look(directory: Path, _: Trial) -> tuple[str, str]:
    """What is found: "right", "named", "earlier", "a body" or "wrong", and what an error says.

    SQLite takes its WAL from a damaged frame on for torn, so that the store is as it was at an earlier moment. Nothing
    in its other file tells one bit of a body from another.
    """
    try:
        with anabranch.open(config(directory, sql=anabranch.SqlOptions())) as router:
            store = router._registry.store_for(router.queue("sql.q").destination)
            found = []
            for message in router.queue("sql.q").browse():
                try:
                    found.append(identity_of(message.body))
                except AssertionError:
                    return "a body", ""
            wrong = list(store.check())
            if wrong:
                return "named", wrong[0]
            for sent in range(SENT + 1):
                for acked in (sent // 3, -(-sent // 3)):
                    if found == [f"s.{number}" for number in range(acked, sent)]:
                        return "right" if sent == SENT else "earlier", ""
            return "wrong", str(found)
    except (anabranch.AnabranchError, ValueError) as error:
        return "named", f"{type(error).__name__} {error}"


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


@pytest.mark.parametrize("victim", ["store.db", "store.db-wal"])
def test_a_bit_that_flips_in_sqlite_is_named_or_harmless(tmp_path: Path, victim: str) -> None:
    assert reaped(forked(partial(fill, tmp_path / "data"))) == -signal.SIGKILL
    path = Path("stores") / "sql" / victim
    chance, size = random.Random(victim), (tmp_path / "data" / path).stat().st_size
    bits = [(chance.randrange(size), chance.randrange(8)) for _ in range(6)]
    trials = [Trial(path, f"bit {bit} of byte {at}", partial(flipped, at=at, bit=bit)) for at, bit in bits]
    seen: Counter[str] = Counter()
    for trial, outcome, text in outcomes(tmp_path / "data", tmp_path / "copy", trials, look):
        seen[outcome] += 1
        assert outcome in ("right", "named", "earlier", "a body"), f"{trial}: {outcome} {text}"
    assert victim == "store.db-wal" or not seen["earlier"], seen


def test_a_bit_that_flips_in_a_swap_file_is_named_and_its_neighbours_are_there(tmp_path: Path) -> None:
    with anabranch.open(all_kinds(tmp_path / "data")) as router:
        queue = router.queue("memory.q")
        ids = [f"s.{number}" for number in range(400)]
        for identity in ids:
            queue.send(body_of(identity, 9000))
        files = sorted((tmp_path / "data").rglob("*.swap"))
        assert len(files) > 10
        for path in files[3:5]:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 4
            path.write_bytes(content)
        found, errors = [], 0
        for _ in range(2 * len(ids)):
            try:
                message = queue.receive()
            except anabranch.CorruptionError as error:
                assert ".swap" in str(error)
                errors += 1
                continue
            if message is None:
                break
            found.append(identity_of(message.body))
            message.ack()
        assert errors
        assert found == [identity for identity in ids if identity in set(found)]
        assert len(ids) // 2 < len(found) < len(ids)  # what was swapped out together has one checksum
        queue.delete()
        queue.send(body_of("s.0"))
        assert contents(router) == {"memory.q": ["s.0"]}


# Other processes -----------------------------------------------------------------------------------------------------


def test_two_processes_on_one_database_never_both_write(tmp_path: Path) -> None:
    """Each with a directory of its own and no lease: the one that the other overtakes stops (rule W3 of the writer)."""
    options = anabranch.SqlOptions(url=f"sqlite:///{tmp_path / 'shared.db'}")
    promised = tmp_path / "promised"

    def work(name: str) -> list[str]:
        sent = 0
        with promised.open("ab", buffering=0) as file:
            try:
                with anabranch.open(config(tmp_path / name, sql=options)) as router:
                    for sent in range(200):
                        router.queue("sql.q").send(body_of(f"{name}.{sent}"))
                        file.write(f"{name}.{sent}\n".encode())
            except (anabranch.StoreFailedError, anabranch.StoreLockedError, anabranch.PlacementError) as error:
                return [] if "somebody else" in str(error) or sent == 0 else [f"{name}: {error}"]
        return []

    children = [forked(partial(work, name)) for name in ("a", "b")]
    assert [reaped(child) for child in children] == [0, 0]
    found: list[str] = []
    for name in ("a", "b"):
        # While there is nothing in them yet, tables are taken over from who has just made them, and he is refused.
        with suppress(anabranch.PlacementError), anabranch.open(config(tmp_path / name, sql=options)) as router:
            found = found or contents(router).get("sql.q", [])
    said = promised.read_text().split()
    assert set(said) <= set(found)
    assert len(found) == len(set(found))
    for name in ("a", "b"):
        mine = [identity for identity in found if identity.startswith(name)]
        assert mine == [f"{name}.{number}" for number in range(len(mine))]


def test_a_forked_child_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    with anabranch.open(all_kinds(tmp_path / "data")) as router:
        queues = [router.queue(f"{kind}.q") for kind in ("journal", "sql", "memory")]
        for queue in queues:
            queue.send(body_of("s.0"))
            queue.send(body_of("t.0"), persistent=False)

        def child() -> list[str]:
            wrong = []
            for queue in queues:
                for call in (lambda q=queue: q.send(b"x"), queue.receive, lambda q=queue: list(q.browse())):
                    try:
                        call()
                        wrong.append(f"{queue} works")
                    except anabranch.ClosedError:
                        pass
            router.close()
            return wrong

        assert reaped(forked(child)) == 0
        for queue in queues:
            queue.send(body_of("s.1"))
            assert [identity_of(message.body) for message in queue.browse()] == ["s.0", "t.0", "s.1"]
        assert violations(router) == []


def test_a_forked_child_harms_nothing_that_waits_is_leased_or_streamed(tmp_path: Path) -> None:
    """It is refused, and what it lets go of when it ends is not its own: bodies, leases, times."""
    large, kinds = CHUNK_BYTES + 5000, ("journal", "sql", "memory")
    with anabranch.open(all_kinds(tmp_path / "data")) as router:
        queues = [router.queue(f"{kind}.q") for kind in kinds]
        streams, leased, waiters = [], [], []
        got: list[anabranch.Message | None] = []
        for queue in queues:
            queue.send(BytesIO(body_of("l.0", large)))
            queue.send(body_of("s.0"))
            message = queue.receive(lease=600)
            assert message is not None
            stream = message.open()
            streams.append(stream)
            assert stream.read(3) == b"l.0"
            leased += [message, take(queue)]
            queue.send(body_of("s.1"), deliver_in=1.0)
            waiters.append(threading.Thread(target=lambda q=queue: got.append(q.receive(timeout=60))))
        for waiter in waiters:
            waiter.start()

        def child() -> list[str]:
            wrong = []
            calls: list[Callable[[], object]] = [stream.read for stream in streams]
            for message in leased:
                calls += [message.ack, message.release, message.extend if message.seq == 1 else message.ack]
            calls += [partial(queue.receive, 0) for queue in queues]
            calls += [partial(queue.send, BytesIO(bytes(large))) for queue in queues]
            for call in calls:
                try:
                    call()
                    wrong.append(f"{call} works")
                except anabranch.ClosedError:
                    pass
            calls.clear()
            leased.clear()
            streams.clear()
            gc.collect()
            return wrong

        assert reaped(forked(child)) == 0
        for waiter in waiters:
            waiter.join(60)
        assert [message and message.body for message in got] == [body_of("s.1")] * 3
        for stream, queue in zip(streams, queues, strict=True):
            assert b"l.0" + stream.read() == body_of("l.0", large)
            stream.close()
            assert queue.counts().leased == 3
        leased[0].extend(600)
        for message in leased:
            message.ack()
        assert [queue.depth() for queue in queues] == [1, 1, 1]
        assert violations(router) == []


# A thousand threads --------------------------------------------------------------------------------------------------


def test_many_threads_that_delay_lease_stream_and_fill_rings(tmp_path: Path, share: Share) -> None:
    """Each sends one that waits and a large one, gives back what it received, and sends to a ring."""
    count = share.count(300, 1000)
    failed: list[BaseException] = []
    acked: Counter[str] = Counter()
    lock = threading.Lock()
    limits = (LimitOptions(match=("*.ring",), max_messages=20, when_full=WhenFull.DROP_OLD),)
    common: dict[str, Any] = {"large_message_size": 1024, "limits": limits}
    setup = config(tmp_path / "data", journal=anabranch.JournalOptions(**common), sql=anabranch.SqlOptions(**common))

    def work(router: anabranch.Router, number: int) -> None:
        kind = ("journal", "sql")[number % 2]
        queue = router.queue(f"{kind}.q")
        try:
            queue.send(body_of(f"w{number}.0"), deliver_in=0.2)
            queue.send(BytesIO(body_of(f"l{number}.0", 2000)))
            # Where all that is in a ring is being sent by others, nothing may go for one more.
            with suppress(anabranch.StoreFullError), router.transaction() as tx:
                tx.send("journal.ring", body_of(f"r{number}.0"))
                tx.send("sql.ring", body_of(f"r{number}.0"))
            message = queue.receive(timeout=300, lease=300)
            assert message is not None
            message.release(delay=0.05)
            message = take(queue, 300)
            identity = identity_of(message.read())
            message.ack()
            with lock:
                acked[identity] += 1
        except BaseException as error:
            failed.append(error)

    with anabranch.open(setup) as router:
        threads = [threading.Thread(target=work, args=(router, number)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads)
        assert failed == []
        assert len(acked) == sum(acked.values()) == count
    with anabranch.open(setup) as router:
        found = contents(router)
        assert len(found["journal.ring"]) == len(found["sql.ring"]) == 20
        left = [*found.get("journal.q", []), *found.get("sql.q", [])]
        assert sorted([*left, *acked]) == sorted(f"{sort}{number}.0" for number in range(count) for sort in "wl")
        assert violations(router) == []


def test_a_thousand_threads_over_all_kinds(tmp_path: Path) -> None:
    """Each sends to all of them, in a transaction and alone, and acks as much as it has sent."""
    failed: list[BaseException] = []
    acked: Counter[str] = Counter()
    lock = threading.Lock()
    kinds = ("journal", "sql", "memory")

    def work(router: anabranch.Router, number: int) -> None:
        try:
            with router.transaction() as tx:
                for kind in kinds:
                    tx.send(f"{kind}.q", body_of(f"{kind}{number}.0"))
            for kind in kinds:
                router.queue(f"{kind}.q").send(body_of(f"{kind}{number}.1"))
            for kind in kinds:
                message = take(router.queue(f"{kind}.q"), 300)
                identity = identity_of(message.body)
                message.ack()
                with lock:
                    acked[identity] += 1
        except BaseException as error:
            failed.append(error)

    with anabranch.open(all_kinds(tmp_path / "data")) as router:
        threads = [threading.Thread(target=work, args=(router, number)) for number in range(1000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
        assert not any(thread.is_alive() for thread in threads)
        assert failed == []
        left = [identity for ids in contents(router).values() for identity in ids]
        assert max(acked.values()) == 1
        assert len(acked) == 3000
        everything = {f"{kind}{number}.{n}" for kind in kinds for number in range(1000) for n in (0, 1)}
        assert sorted([*left, *acked]) == sorted(everything)
        assert violations(router) == []
