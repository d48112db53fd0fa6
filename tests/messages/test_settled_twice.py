"""Who settles a message once more hears what had become of it: from the message, and by its token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import anabranch
from anabranch import Settlement, UnknownMessageError
from anabranch.adapters.core.service import settling

from ..contract.disk import PATIENCE, eventually
from ..router.disk import take
from .test_hosting import KINDS, config


@pytest.fixture(params=KINDS)
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    with anabranch.open(config(tmp_path / "data", request.param)) as router:
        yield router


def committed(router: anabranch.Router, message: anabranch.Message) -> None:
    with router.transaction() as tx:
        tx.ack(message)


def prepared(router: anabranch.Router, message: anabranch.Message, commit: bool) -> None:
    """Over two stores, in two phases."""
    xid = anabranch.Xid(1, str(message.seq))
    tx = router.transaction(xid)
    tx.ack(message)
    tx.prepare()
    (router.commit if commit else router.rollback)(xid)


def rolled_back(router: anabranch.Router, message: anabranch.Message) -> None:
    tx = router.transaction()
    tx.ack(message)
    tx.rollback()


def ran_out(router: anabranch.Router, message: anabranch.Message) -> None:
    message.extend(0.001)
    eventually(lambda: router.queue("q").counts().leased == 0)


Way = Callable[[anabranch.Router, anabranch.Message], object]
BY_TOKEN: list[tuple[str, Way, str]] = [
    ("acked by token", lambda r, m: r.settle(m.token, Settlement.ACK), "it was acked"),
    ("acked soon by token", lambda r, m: r.settle_nowait(m.token, Settlement.ACK).result(PATIENCE), "it was acked"),
    ("released by token", lambda r, m: r.settle(m.token, Settlement.RELEASE), "it was released"),
    ("rejected by token", lambda r, m: r.settle(m.token, Settlement.REJECT), "it was rejected"),
    ("ran out", ran_out, r"its lease of 0\.001 s ran out"),
]
WAYS: list[tuple[str, Way, str]] = [
    ("acked", lambda r, m: m.ack(), "it was acked"),
    ("acked soon", lambda r, m: m.ack_nowait().result(PATIENCE), "it was acked"),
    ("released", lambda r, m: m.release(), "it was released"),
    ("released soon", lambda r, m: m.release_nowait().result(PATIENCE), "it was released"),
    ("rejected", lambda r, m: m.reject("no"), "it was rejected"),
    ("committed", committed, "it was acked"),
    ("rolled back", rolled_back, "a transaction that had it was rolled back"),
    ("prepared and committed", lambda r, m: prepared(r, m, True), "a transaction has claimed it, or acked it"),
    ("prepared and rolled back", lambda r, m: prepared(r, m, False), "a transaction that had it was rolled back"),
    ("claimed", lambda r, m: r.transaction().ack(m), "a transaction has claimed it, or acked it"),
    ("deleted", lambda r, m: r.delete("q"), "its queue or subscription was removed"),
    *BY_TOKEN,
]


@pytest.mark.parametrize(("way", "says"), [pytest.param(way, says, id=name) for name, way, says in WAYS])
def test_it_says_what_became_of_it(router: anabranch.Router, way: Way, says: str) -> None:
    router.queue("q").send(b"1")
    message = take(router, "q")
    way(router, message)
    settle: list[Callable[[], object]] = [
        message.ack, message.release, message.extend, message.reject, lambda: committed(router, message)
    ]  # fmt: skip
    for again in settle:
        with pytest.raises(UnknownMessageError, match=f"not leased here any more: .*{says}"):
            again()


@pytest.mark.parametrize(("way", "says"), [pytest.param(way, says, id=name) for name, way, says in BY_TOKEN])
def test_so_it_does_by_its_token(router: anabranch.Router, way: Way, says: str) -> None:
    router.queue("q").send(b"1")
    message = take(router, "q")
    token = message.token
    way(router, message)
    for how in Settlement:
        with pytest.raises(UnknownMessageError, match=f"token {token} is not leased here any more: .*{says}"):
            router.settle(token, how)


def test_so_many_tokens_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "ENDS_KEPT", 3)
    with anabranch.open(config(tmp_path / "data", "memory")) as router:
        queue = router.queue("q")
        queue.send_many([b"%d" % number for number in range(5)])
        messages = queue.receive_many(5)
        tokens = [message.token for message in messages]
        assert router.settle(tokens, Settlement.ACK) == [None] * 5
        wrong = [str(error) for error in router.settle(tokens, Settlement.ACK)]
        assert ["it was acked or released, its lease ran out" in text for text in wrong] == [True] * 2 + [False] * 3
        assert [text.endswith("it was acked") for text in wrong] == [False] * 2 + [True] * 3
