"""The owner dies before each step of a commit, one by one, and after it: the commit goes again with its number, and
takes effect once, whatever it does."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import count, product
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import anabranch
from anabranch import Xid
from anabranch.adapters.journal import JournalStore
from anabranch.policies.errors import OutcomeUnknownError, TransactionError
from anabranch.router.sharing.owner.server import Server
from anabranch.router.sharing.protocol import VERSION
from anabranch.router.transactions.outcomes import Outcomes

from ..taking import take
from .peers import Op, Peer
from .striking import PATIENCE, STEPS, Striking, owners, owners_of
from .test_failover import bodies, connection_of, ready, stores

striking = pytest.fixture(owners)

Router = anabranch.Router
XID = Xid(1, "x")
ACKED = ("q", "other.q")


def _sends(transaction: anabranch.Transaction, *names: str) -> None:
    for name in names:
        transaction.send(name, b"sent")
        transaction.send(name, b"again")


def _one_store(router: Router, transaction: anabranch.Transaction) -> None:
    transaction.ack(take(router.queue("q")))
    _sends(transaction, "done", "more")


def _two_stores(router: Router, transaction: anabranch.Transaction) -> None:
    for name in ACKED:
        transaction.ack(take(router.queue(name)))
    _sends(transaction, "done", "other.done")


def _acks(router: Router, transaction: anabranch.Transaction) -> None:
    transaction.ack(take(router.queue("q")))


def _acks_in_two(router: Router, transaction: anabranch.Transaction) -> None:
    for name in ACKED:
        transaction.ack(take(router.queue(name)))


def _own_ids(router: Router, transaction: anabranch.Transaction) -> None:
    """Of which one was known before."""
    transaction.ack(take(router.queue("q")))
    transaction.send("done", b"sent", message_id="new")
    transaction.send("done", b"a duplicate", message_id="known")
    transaction.send("done", b"again")


def _map(router: Router, transaction: anabranch.Transaction) -> None:
    transaction.ack(take(router.queue("q")))
    transaction.put("m", "k", b"new")
    transaction.remove("m", "gone")


def _map_alone(router: Router, transaction: anabranch.Transaction) -> None:
    transaction.put("m", "k", b"new")
    transaction.remove("m", "gone")


def _subscriptions(router: Router, transaction: anabranch.Transaction) -> None:
    transaction.ack(take(router.queue("q")))
    transaction.subscribe("t", "s", retroactive=True)
    (before,) = router.topic("u").subscriptions()
    transaction.unsubscribe(before)


def _rejects(router: Router, transaction: anabranch.Transaction) -> None:
    """Of which one becomes a dead letter, and the other has no dead-letter queue."""
    transaction.reject(take(router.queue("q")), ValueError("it does not parse"))
    transaction.reject(take(router.queue("other.q")))
    _sends(transaction, "done", "more")


KINDS: dict[str, Callable[[Router, anabranch.Transaction], None]] = {
    "one store": _one_store, "two stores": _two_stores, "acks": _acks, "acks in two stores": _acks_in_two,
    "own ids": _own_ids, "a map and an ack": _map, "a map": _map_alone, "subscriptions": _subscriptions,
    "rejects from two stores": _rejects,
}  # fmt: skip


def _commit(router: Router, do: Callable[[Router, anabranch.Transaction], None]) -> Any:
    with router.transaction() as transaction:
        do(router, transaction)
    return transaction.receipts


def _vote(router: Router, do: Callable[[Router, anabranch.Transaction], None]) -> Any:
    """It is rolled back with its owner, unless its outcome was under way; then another is begun."""
    while True:
        transaction = router.transaction()
        try:
            do(router, transaction)
            transaction.vote()
            return transaction.commit()
        except anabranch.TransactionError as error:
            assert "rolled back" in str(error)


def _prepare(router: Router, do: Callable[[Router, anabranch.Transaction], None]) -> Any:
    transaction = router.transaction(XID)
    do(router, transaction)
    transaction.prepare()
    assert router.recover() == [XID]
    router.commit(XID)


WAYS = {"commit": _commit, "vote": _vote, "prepare": _prepare}


def _filled(router: Router) -> None:
    for name in ACKED:
        router.queue(name).send_many([b"1", b"2"])
    router.queue("done").send(b"known", message_id="known")
    router.map("m").put("k", b"old")
    router.map("m").put("gone", b"old")
    router.topic("u").subscribe("before")


def _struck(striking: Striking, what: str, way: str, moment: str, at: int) -> bool:
    """Commit while the owner dies at that step; returns whether it has died."""
    with striking.client() as router:
        _filled(router)
        assert len(striking.owners) == 1
        striking.aim_at_step(moment, at)
        receipts = WAYS[way](router, KINDS[what])
        _checked(router, what, receipts)
        assert router.in_doubt() == [] and router.recover() == []
    return len(striking.owners) > 1


def _checked(router: Router, what: str, receipts: Any) -> None:
    """All of it has taken effect, once, and the receipts tell of it."""
    acks = {"a map": 0}.get(what, 2 if "two" in what else 1)
    assert [ready(router, name) for name in ACKED] == [[b"2"] if n < acks else [b"1", b"2"] for n in range(2)]
    of_one = ["done", "more"]
    sent = {"one store": of_one, "two stores": ["done", "other.done"], "own ids": ["done"]}.get(what, [])
    if "rejects" in what:
        sent = of_one
        (letter,) = router.queue("q").dead_letters()
        assert (letter.message.body, letter.error_text) == (b"1", "it does not parse")
    for name in ("done", "more", "other.done"):
        first = [b"known"] if name == "done" else []
        assert bodies(router, name) == first + [b"sent", b"again"] * (name in sent)
    if receipts and what != "a map" and "ack" not in what:
        seqs = [(str(m.destination), m.seq) for name in sent for m in router.queue(name).browse() if m.body != b"known"]
        if "rejects" in what and not receipts[0].seq:  # the next owner does not know them
            seqs = [(name, 0) for name, _ in seqs]
        assert [(str(one.destination), one.seq) for one in receipts if not one.duplicate] == seqs
        assert [one.duplicate for one in receipts] == ([False, True, False] if what == "own ids" else [False] * 4)
    is_map = "a map" in what
    assert (router.map("m").get("k"), router.map("m").get("gone")) == ((b"new", None) if is_map else (b"old", b"old"))
    assert len(router.topic("t").subscriptions()) == (what == "subscriptions")
    assert len(router.topic("u").subscriptions()) == (what != "subscriptions")


def _is_short(what: str, way: str, store: str, moment: str) -> bool:
    """Return whether it is among those that stand for the others."""
    return (store, moment) == ("journal", "killed") and (
        (way == "commit" and "rejects" not in what) or what == "two stores"
    )


CASES = [
    pytest.param(*case, id="-".join(case), marks=() if _is_short(*case) else pytest.mark.campaign)
    for case in product(KINDS, WAYS, ("journal", "sqlite"), STEPS)
]


@pytest.mark.parametrize(("what", "way", "store", "moment"), CASES)
def test_it_takes_effect_once(tmp_path: Path, what: str, way: str, store: str, moment: str) -> None:
    for at in count(1):
        with owners_of(tmp_path / str(at)) as striking:
            stores(striking, store)
            if not _struck(striking, what, way, moment, at):
                break
    assert at > 1


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Router]:
    with anabranch.open(anabranch.Config(tmp_path, [anabranch.StoreConfig("s", [">"], kind="journal")])) as router:
        yield router


def test_one_that_comes_again_while_it_is_carried_out_waits_for_that(
    owner: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over another connection of its client."""
    client, begun, goes_on = f"{os.getpid():x}-0123456789abcdef", Event(), Event()
    commit = JournalStore.commit

    def slow(*given: Any) -> Any:
        begun.set()
        assert goes_on.wait(PATIENCE)
        return commit(*given)

    monkeypatch.setattr(JournalStore, "commit", slow)
    message = [b"x", None, None, 4, 0, True, False, 0]

    def asked(peer: Peer, again: bool) -> int:
        assert peer.ask(Op.HELLO, VERSION, client, 1, "", [])[0]
        return peer.send(Op.COMMIT, again, None, "commit", [["queue://q", message]], [], [])

    with Peer(owner.config.directory, greets=False) as first, Peer(owner.config.directory, greets=False) as second:
        asked(first, again=False)
        assert begun.wait(PATIENCE)
        number = asked(second, again=True)
        second.sock.settimeout(0.2)
        with pytest.raises(TimeoutError):
            second.next()
        second.sock.settimeout(PATIENCE)
        goes_on.set()
        found = second.next()
    (there,) = owner.queue("q").browse()
    assert found == [number, True, [[there.seq, False]]]


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("commit", [True, False])
def test_the_end_of_an_xid_of_which_nothing_is_left_as_it_comes_again(
    owner: Router, monkeypatch: pytest.MonkeyPatch, commit: bool, is_own: bool
) -> None:
    """Whoever has not prepared it cannot tell its own commit from another's rollback."""
    server, end = owner.serve(), Outcomes.end
    assert isinstance(server, Server)

    def end_and_cut(outcomes: Outcomes, xid: Xid, commit: bool) -> None:
        end(outcomes, xid, commit)
        owner._coordinator.cleanup.run()
        monkeypatch.undo()
        for session in list(server._sessions.values()):
            session.sock.shutdown(socket.SHUT_RDWR)

    with anabranch.open(owner.config.directory, shared=True) as client:
        transaction = (client if is_own else owner).transaction(xid=XID)
        transaction.send("done", b"t")
        transaction.prepare()
        monkeypatch.setattr(Outcomes, "end", end_and_cut)
        if commit and not is_own:
            with pytest.raises(OutcomeUnknownError, match=f"commit of transaction {XID}, which is prepared no more"):
                client.commit(XID)
        else:
            (client.commit if commit else client.rollback)(XID)
        assert bodies(client, "done") == ([b"t"] if commit else [])
        for say in (client.commit, client.rollback):  # not again
            with pytest.raises(TransactionError, match=f"no transaction {XID} is prepared here"):
                say(XID)


@pytest.mark.parametrize("acks", [False, True])
def test_without_a_window_nothing_is_known(tmp_path: Path, acks: bool) -> None:
    with owners_of(tmp_path / "data") as striking:
        striking.configure(anabranch.StoreConfig("s", [">"], kind="journal", options={"duplicate_window": 0}))
        with striking.client() as router:
            router.queue("q").send_many([b"1", b"2"])
            striking.aim("written", Op.COMMIT)
            expected = pytest.raises(anabranch.OutcomeUnknownError) if acks else nullcontext()
            with expected, router.transaction() as transaction:
                if acks:
                    transaction.ack(take(router.queue("q")))
                transaction.send("done", b"sent")
            striking.died()
            assert bodies(router, "done") == [b"sent"] * (1 if acks else 2)
            assert ready(router) == ([b"2"] if acks else [b"1", b"2"])


def test_what_is_deleted_before_it_goes_again_is_not_sent_to_twice(striking: Striking) -> None:
    """As a queue for replies is, whose reader has taken what was sent there: other queues tell of the commit."""
    stores(striking, "journal")
    with striking.client() as router, striking.client() as other:
        router.queue("q").send_many([b"1", b"2"])
        message = take(router.queue("q"))
        striking.aim("written", Op.COMMIT)
        receipts: list[Any] = []

        def commit() -> None:
            with router.transaction() as transaction:
                transaction.ack(message)
                transaction.send("reply", b"sent")
                transaction.send("done", b"sent")
            receipts.extend(transaction.receipts)

        committing = Thread(target=commit)
        with connection_of(router)._reading:  # it is stopped, as far as the owner sees
            committing.start()
            striking.died()
            assert other.queue("reply").delete() == 1
        committing.join(PATIENCE)
        assert [(str(one.destination), one.seq) for one in receipts] == [("queue://reply", 0), ("queue://done", 0)]
        assert (ready(other), bodies(other, "reply"), bodies(other, "done")) == ([b"2"], [], [b"sent"])


def test_a_rejection_is_one_operation(tmp_path: Path) -> None:
    """Also at the owner, where the dead letter is another one."""
    limits = anabranch.TransactionOptions(max_operations=2, max_bytes=1)
    stores = [anabranch.StoreConfig("all", [">"], kind="memory", options={"dead_letter": "dead"})]
    with (
        anabranch.open(anabranch.Config(tmp_path, stores, transactions=limits)) as router,
        anabranch.open(tmp_path, shared=True) as client,
    ):
        queue = client.queue("q")
        queue.send_many([b"12", b"34", b"56"])
        with client.transaction() as transaction:
            for _ in range(2):
                transaction.reject(take(queue))
            with pytest.raises(anabranch.TransactionError, match="max_operations is 2"):
                transaction.reject(take(queue))
        assert (router.queue("dead").depth(), router.queue("q").depth()) == (2, 1)


def test_one_that_is_rejected_twice_becomes_a_dead_letter_once(tmp_path: Path) -> None:
    """The second time is refused, and takes nothing from the first."""
    options = {"dead_letter": "dead"}
    config = anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"], kind="memory", options=options)])
    with anabranch.open(config) as owner, anabranch.open(tmp_path, shared=True) as client:
        for router in (owner, client):
            router.queue("q").send(b"x")
            with router.transaction() as transaction:
                message = take(router.queue("q"))
                transaction.reject(message, "bad")
                for _ in range(2):
                    with pytest.raises(anabranch.UnknownMessageError):
                        transaction.reject(message, "worse")
            (letter,) = router.queue("q").dead_letters()
            assert "bad" in str(letter.message.headers)
            router.queue("dead").purge()
