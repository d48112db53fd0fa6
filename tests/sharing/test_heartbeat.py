"""An owner that is stopped, and is not dead: its clients hear of it, and go on with it once it goes on."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any
from unittest.mock import patch

import pytest

import anabranch
from anabranch.policies.errors import OutcomeUnknownError, StoreFailedError
from anabranch.router.sharing import protocol
from anabranch.router.sharing.client import heartbeat
from anabranch.router.sharing.owner import session
from anabranch.router.sharing.protocol import pack

from ..children import CONTEXT
from ..contract.disk import Parallel, eventually
from ..taking import take
from .hanging import hang
from .peers import Op, Peer
from .striking import PATIENCE, Striking, owners
from .test_failover import CASES, Case, bodies, stores

striking = pytest.fixture(owners)
SECONDS, PERIODS = 0.4, heartbeat.PERIODS
LONG = 200
"""Times as long may it take while nobody has stopped it, on a busy machine."""

CHANGES = {Op.SEND, Op.SEND_MANY, Op.ACK, Op.SETTLE, Op.COMMIT, Op.CALL}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client looks as often all the time."""
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", LONG * SECONDS)
    monkeypatch.setattr(heartbeat, "PERIODS", LONG * PERIODS)


@contextmanager
def stopped(striking: Striking) -> Iterator[int]:
    """Stop the owner for so long."""
    pid = striking.stop()
    try:
        with patch.multiple(heartbeat, HEARTBEAT_SECONDS=SECONDS, PERIODS=PERIODS):
            yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def answers(router: anabranch.Router) -> bool:
    try:
        router.destinations()
    except StoreFailedError:
        return False
    return True


def goes_on(router: anabranch.Router) -> None:
    """Wait until the owner answers again, and has done what was asked of it meanwhile."""
    eventually(lambda: answers(router), lambda: "the owner goes on, and calls fail still")
    eventually(
        lambda: sum(one["unanswered"] - one["waiting"] for one in sessions(router)) == 1, lambda: "it is not done"
    )


def contents(router: anabranch.Router) -> dict[str, Counter[bytes]]:
    return {name: Counter(bodies(router, name)) for name in ("q", "done", "other.done")}


@pytest.mark.parametrize("name", CASES)
def test_a_call_to_an_owner_that_is_stopped(striking: Striking, name: str) -> None:
    """It raises what the caller has to know: whether it may be carried out yet. It is carried out once at most, and is
    not sent to the next owner."""
    case: Case = CASES[name]
    stores(striking, "journal")
    with striking.client() as router:
        given = case.prepare(router)
        with stopped(striking) as pid:
            with pytest.raises(StoreFailedError) as raised:
                case.call(router, given)
            looks = name in ("prepare", "extend", "remove_range")  # they ask for an xid, a lease, keys
            assert isinstance(raised.value, OutcomeUnknownError) == (case.op in CHANGES and not looks)
            assert f"process {pid}" in str(raised.value) and str(striking.directory) in str(raised.value)
            began = time.monotonic()
            with pytest.raises(StoreFailedError, match="Nothing was done"):
                router.queue("q").send(b"later")
            assert time.monotonic() - began < SECONDS / 2
        goes_on(router)
        found = contents(router)
        assert all(count == 1 for each in found.values() for count in each.values()) and b"later" not in found["q"]
        striking.kill()
        assert contents(router) == found
        router.queue("q").send(b"later")
        assert len(striking.owners) == 2


def test_what_comes_late_for_a_receive_is_free_again(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        for most in (1, 9):
            other.queue("q").send(b"x")
            with stopped(striking), pytest.raises(StoreFailedError) as raised:
                router.queue("q").receive_many(most, 0 if most > 1 else PATIENCE)
            assert not isinstance(raised.value, OutcomeUnknownError)
            goes_on(router)
            goes_on(other)
            message = take(other.queue("q"), PATIENCE)
            assert (message.body, message.deliveries) == (b"x", 1)
            message.ack()


def test_a_receive_that_was_given_up_does_not_wait_on(striking: Striking) -> None:
    """What is sent once the owner goes on is not taken for it."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        queue = router.queue("q")
        queue.declare()
        with Parallel(lambda: queue.receive(None)) as waiting:
            eventually(lambda: any(one["waiting"] for one in sessions(router)), lambda: "nobody waits")
            with stopped(striking), pytest.raises(StoreFailedError):
                waiting.result()
        goes_on(router)
        goes_on(other)
        eventually(lambda: not any(one["waiting"] for one in sessions(router)), lambda: "it waits on")


def sessions(router: anabranch.Router) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = router._store.call("sessions")  # type: ignore[attr-defined]
    return found


def test_futures_and_threads_hear_of_it_and_so_does_the_log(
    striking: Striking, caplog: pytest.LogCaptureFixture
) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        queue = router.queue("q")
        queue.send(b"0")
        with ThreadPoolExecutor(4) as threads, stopped(striking) as pid, caplog.at_level(logging.WARNING):
            futures = [queue.send_nowait(b"%d" % n) for n in range(1, 20)]
            futures += [threads.submit(queue.send, b"t") for _ in range(4)]
            assert all(isinstance(one.exception(PATIENCE), OutcomeUnknownError) for one in futures)
            with pytest.raises(StoreFailedError):
                queue.send_nowait(b"late")
            assert len([one for one in caplog.messages if f"process {pid}" in one and "stopped" in one]) == 1
        goes_on(router)
        assert Counter(bodies(router)) == Counter([b"%d" % n for n in range(20)] + [b"t"] * 4)
        assert queue.send_nowait(b"more").result(PATIENCE).seq


def test_a_send_that_is_stuck_half_way_is_not_done(striking: Striking) -> None:
    """The owner hears no end of it. The client comes back over another connection, with what it holds."""
    stores(striking, "journal")
    with striking.client() as router:
        queue = router.queue("q")
        queue.send(b"held")
        message = take(queue)
        router._store.connection._greeter._patience = SECONDS  # type: ignore[attr-defined]
        with stopped(striking):
            with pytest.raises(StoreFailedError) as raised:
                queue.send(bytes(900_000))
            assert not isinstance(raised.value, OutcomeUnknownError)
            with pytest.raises(StoreFailedError):
                queue.send(b"later")
        goes_on(router)
        message.ack()
        assert bodies(router) == []


def test_a_transaction_that_is_rolled_back_meanwhile_holds_nothing(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send(b"x")
        message = take(router.queue("q"))
        with stopped(striking), pytest.raises(OutcomeUnknownError):  # noqa: SIM117
            with router.transaction() as transaction:
                transaction.ack(message)
                transaction.send("done", b"t")
        goes_on(other)
        assert (bodies(other), bodies(other, "done")) in (([b"x"], []), ([], [b"t"]))
        if bodies(other):
            assert take(other.queue("q"), PATIENCE).body == b"x"


@pytest.mark.parametrize("how", ["commit", "ack_nowait"])
def test_what_an_owner_was_to_settle_that_dies_is_received_again(striking: Striking, how: str) -> None:
    """It was stopped before, so that its client has given the call up."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send(b"x")
        message = take(router.queue("q"))
        with stopped(striking):
            with pytest.raises(OutcomeUnknownError):
                if how == "commit":
                    with router.transaction() as transaction:
                        transaction.ack(message)
                else:
                    message.ack_nowait().result(PATIENCE)
            striking.kill()
        eventually(lambda: answers(router), lambda: "there is no other owner")
        if how == "ack_nowait":
            message.release()
        assert take(other.queue("q"), PATIENCE).body == b"x"


def test_votes_that_are_given_up_are_rolled_back(striking: Striking) -> None:
    """The owner gives their messages back before they are cast, or is asked to while they stand: by chance."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send_many([b"%d" % n for n in range(8)])

        def voting() -> anabranch.Transaction:
            transaction = router.transaction()
            transaction.ack(take(router.queue("q")))
            transaction.send("done", b"t")
            return transaction

        transactions = [voting() for _ in range(8)]
        with ThreadPoolExecutor(8) as threads, stopped(striking):
            votes = [threads.submit(one.vote) for one in transactions]
            assert all(isinstance(one.exception(PATIENCE), OutcomeUnknownError) for one in votes)
        goes_on(other)
        taken = [take(other.queue("q"), PATIENCE).body for _ in range(8)]
        assert sorted(taken) == [b"%d" % n for n in range(8)]
        assert {one.state for one in transactions} == {"rolled back"} and bodies(other, "done") == []


def test_a_vote_that_is_interrupted_is_rolled_back(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        queue = router.queue("q")
        queue.send(b"x")
        transaction = router.transaction()
        transaction.ack(take(queue))
        unanswered = router._store.connection._unanswered  # type: ignore[attr-defined]

        def is_asked(kind: type[protocol.Request]) -> bool:
            return any(one.is_sent and type(one.request) is kind for one in list(unanswered.values()))

        def interrupt() -> None:
            eventually(lambda: is_asked(protocol.Commit))
            os.kill(os.getpid(), signal.SIGINT)
            eventually(lambda: is_asked(protocol.Cancel))
            os.kill(pid, signal.SIGCONT)

        pid = striking.stop()
        with Parallel(interrupt), pytest.raises(KeyboardInterrupt):
            transaction.vote()
        assert take(other.queue("q"), PATIENCE).body == b"x"
        assert transaction.state == "rolled back"


@pytest.mark.parametrize("step", ["commit_as", "end_vote", "end_vote, commit", "end_vote, committed"])
def test_a_transaction_that_is_interrupted_beside_its_vote_leaves_none(
    striking: Striking, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        store = router._store  # type: ignore[attr-defined]
        queue = router.queue("q")
        queue.send(b"x")
        transaction = router.transaction()
        transaction.ack(take(queue))
        name, _, end = step.partition(", ")
        call = getattr(store, name)

        def interrupted(*given: Any) -> None:
            if name == "commit_as" or end == "committed":
                call(*given)
            raise KeyboardInterrupt

        if name == "end_vote":
            transaction.vote()
        monkeypatch.setattr(store, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            transaction.vote() if name == "commit_as" else transaction.commit() if end else transaction.rollback()
        if end == "committed":
            eventually(lambda: not store.connection._unanswered and not router._coordinator._votes)  # type: ignore[attr-defined]
            assert other.queue("q").counts()[:2] == (0, 0)
        else:
            assert take(other.queue("q"), PATIENCE).body == b"x"
        eventually(lambda: transaction.state == ("of unknown outcome" if end else "rolled back"))


def test_a_vote_for_nothing_leaves_nothing(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        for end in ("commit", "rollback"):
            transaction = router.transaction()
            transaction.vote()
            getattr(transaction, end)()
        assert not router._coordinator._votes  # type: ignore[attr-defined]


@pytest.mark.parametrize("end", ["commit", "rollback", "sent"])
def test_a_transaction_that_has_voted_ends_meanwhile(striking: Striking, end: str) -> None:
    """A commit that was not sent is rolled back."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send(b"x")
        transaction = router.transaction()
        transaction.ack(take(router.queue("q")))
        transaction.send("done", b"t")
        transaction.vote()
        with stopped(striking):
            if end == "sent":
                with pytest.raises(OutcomeUnknownError):
                    transaction.commit()
                assert transaction.state == "of unknown outcome"
                return
            with pytest.raises(StoreFailedError):
                router.queue("q").depth()
            if end == "rollback":
                transaction.rollback()
            else:
                with pytest.raises(StoreFailedError, match="Nothing was done"):
                    transaction.commit()
            assert transaction.state == "rolled back"
        goes_on(other)
        assert take(other.queue("q"), PATIENCE).body == b"x" and bodies(other, "done") == []


def test_what_goes_back_meanwhile_holds_up_no_thread_and_no_call(striking: Striking) -> None:
    """More of it than the socket takes."""
    stores(striking, "journal")
    count, size = 12, 1000
    with striking.client() as router, striking.client() as other:
        queue = router.queue("q")
        transactions = [router.transaction() for _ in range(count)]
        for transaction in transactions:
            queue.send_many([b"x"] * size)
            for message in queue.receive_many(size):
                transaction.ack(message)
        with stopped(striking):
            with pytest.raises(OutcomeUnknownError):
                queue.send(b"y")
            for transaction in transactions:
                transaction.rollback()
            eventually(lambda: len(router._store._going_back) > 0)  # type: ignore[attr-defined]
            with pytest.raises(StoreFailedError, match="Nothing was done"):
                queue.send(b"z")
        eventually(lambda: other.queue("q").counts()[:2] == (count * size + 1, 0))


def test_what_nobody_holds_is_given_back_once_the_owner_goes_on(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send(b"x")
        message = take(router.queue("q"))
        with stopped(striking):
            with pytest.raises(StoreFailedError):
                router.queue("q").depth()
            with pytest.warns(ResourceWarning):
                del message
            time.sleep(SECONDS)
        goes_on(other)
        assert take(other.queue("q"), PATIENCE).body == b"x"


def test_a_listener_goes_on_with_the_owner(striking: Striking) -> None:
    stores(striking, "journal")
    taken: Queue[anabranch.Message[bytes]] = Queue()
    with striking.client() as router, striking.client() as other:
        listener = router.queue("q").listen(taken.put, credit=2)
        with stopped(striking), pytest.raises(StoreFailedError):
            router.queue("q").depth()
        goes_on(other)
        other.queue("q").send_many([b"1", b"2", b"3"])
        messages = [taken.get(timeout=PATIENCE) for _ in range(2)]
        assert [message.body for message in messages] == [b"1", b"2"] and taken.empty()
        listener.close()


def test_a_listener_is_granted_credit_meanwhile(striking: Striking) -> None:
    stores(striking, "journal")
    taken: Queue[anabranch.Message[bytes]] = Queue()
    with striking.client() as router, striking.client() as other:
        listener = router.queue("q").listen(taken.put)
        with stopped(striking):
            listener.add_credit(1)  # it waits for the owner in vain
            listener.add_credit(1)
        goes_on(other)
        other.queue("q").send_many([b"1", b"2", b"3", b"4"])
        assert [taken.get(timeout=PATIENCE).body for _ in range(3)] == [b"1", b"2", b"3"]
        assert answers(router) and listener.withdraw_credit(9) == 0 and taken.empty()
        listener.close()


@pytest.mark.parametrize("dies", [False, True])
def test_a_listener_that_is_closed_meanwhile_takes_nothing(striking: Striking, dies: bool) -> None:
    """The owner hears of its end once it goes on; the next one does not begin it again."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        listener = router.queue("q").listen(lambda message: None, credit=9)
        with stopped(striking):
            with pytest.raises(StoreFailedError):
                router.queue("q").depth()
            assert not listener.close()
            if dies:
                striking.kill()
        goes_on(other)
        other.queue("q").send(b"x")
        message = take(other.queue("q"), PATIENCE)
        assert (message.body, message.deliveries) == (b"x", 1)
        eventually(
            lambda: answers(router) and not any(one["listeners"] for one in sessions(router)), lambda: "it listens"
        )
        message.ack()


def test_a_listener_that_begins_all_the_same_ends(striking: Striking) -> None:
    """Its caller has heard that it failed."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        with stopped(striking), pytest.raises(StoreFailedError):
            router.queue("q").listen(lambda message: None, credit=9)
        goes_on(other)
        eventually(
            lambda: answers(router) and not any(one["listeners"] for one in sessions(router)), lambda: "it listens"
        )
        other.queue("q").send(b"x")
        assert take(other.queue("q"), PATIENCE).body == b"x"


def test_a_client_that_closes_does_not_wait_for_it(striking: Striking) -> None:
    stores(striking, "journal")
    with ExitStack() as stack:
        router = stack.enter_context(striking.client())
        router.queue("q").send(b"x")
        with stopped(striking):
            with pytest.raises(StoreFailedError):
                router.queue("q").depth()
            began = time.monotonic()
            router.close()
            assert time.monotonic() - began < 1


def test_an_owner_that_is_killed_while_it_is_stopped_is_replaced(striking: Striking) -> None:
    stores(striking, "journal")
    with striking.client() as router:
        router.queue("q").send(b"x")
        with stopped(striking):
            with pytest.raises(StoreFailedError):
                router.queue("q").depth()
            striking.kill()
            goes_on(router)
        assert bodies(router) == [b"x"] and len(striking.owners) == 2


def test_a_client_that_was_stopped_itself_waits_on(striking: Striking) -> None:
    with striking.client() as router:
        said = CONTEXT.Queue()
        process = CONTEXT.Process(target=_receive, args=(striking.source, said))
        process.start()
        assert said.get(timeout=PATIENCE) is None
        eventually(lambda: any(one["waiting"] for one in sessions(router)), lambda: "nobody waits")
        os.kill(process.pid or 0, signal.SIGSTOP)
        time.sleep(SECONDS * 4)
        os.kill(process.pid or 0, signal.SIGCONT)
        time.sleep(SECONDS)
        router.queue("q").send(b"x")
        assert said.get(timeout=PATIENCE) == b"x"
        process.join(PATIENCE)


def _receive(source: Any, said: Any) -> None:
    vars(heartbeat)["HEARTBEAT_SECONDS"] = SECONDS
    with anabranch.open(source, shared=True) as router:
        said.put(None)
        try:
            said.put(take(router.queue("q"), PATIENCE).body)
        except Exception as error:
            said.put(repr(error))


def test_an_owner_whose_store_hangs_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that reads no more of a client, since that has so many requests in hand."""
    monkeypatch.setattr(heartbeat, "PERIODS", PERIODS)
    monkeypatch.setattr(heartbeat, "HEARTBEAT_SECONDS", 2.0)  # its turn passes on after half a second
    stores = [anabranch.StoreConfig("slow", ["slow"]), anabranch.StoreConfig("rest", [">"])]
    config = anabranch.Config(tmp_path / "data", stores)
    with ExitStack() as stack:
        stack.enter_context(anabranch.open(config)).serve()
        one, other = (stack.enter_context(anabranch.open(config, shared=True)) for _ in range(2))
        peer = stack.enter_context(Peer(config.directory))
        for name in ("slow", "q"):
            one.queue(name).send(b"first")
        go_on = hang(monkeypatch, "/stores/slow/")
        futures = [one.queue("slow").send_nowait(b"slow") for _ in range(session.UNANSWERED_MAX + 200)]
        waiting = threading.Thread(target=other.queue("slow").send, args=(b"slow",))
        waiting.start()
        send = [Op.SEND, "queue://slow", [b"x", None, None, 4, 0, True, False, 0], True]
        peer.sock.sendall(b"".join(pack(n, send) for n in range(10, session.UNANSWERED_MAX + 200)))
        assert peer.next() == [0, True, None]  # it is not read, and sees that the owner lives
        time.sleep(4.0)
        assert waiting.is_alive() and not any(future.done() for future in futures)
        assert other.queue("q").send(b"second").seq
        go_on.set()
        assert all(future.result(PATIENCE).seq for future in futures)
        waiting.join(PATIENCE)
        assert len(bodies(one, "q")) == 2


def test_nothing_is_asked_while_answers_come(striking: Striking) -> None:
    """Nor while nothing is waited for."""
    with striking.client() as router, patch.object(type(router._store.connection), "_ping") as ping:  # type: ignore[attr-defined]
        answered = [time.monotonic()]
        for n in range(200):
            router.queue("q").send(b"%d" % n)
            answered.append(time.monotonic())
        time.sleep(SECONDS)
        # A busy machine may keep an answer back until it is rightly asked for.
        assert not ping.called or max(b - a for a, b in pairwise(answered)) > SECONDS / PERIODS / 2
