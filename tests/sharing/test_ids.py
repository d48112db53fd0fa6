"""Ids that an owner makes for what clients send without one: it is stored once, and nobody is shown them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

import anabranch
from anabranch import Config, Outgoing, StoreConfig
from anabranch.adapters.core.messages import MADE
from anabranch.router.cli.app import app
from anabranch.router.sharing.protocol import VERSION

from ..taking import take
from .peers import Op, Peer

Router = anabranch.Router
FIELDS = [None, None, 4, 0, True, False, 0]
"""What follows a message's body as it goes over the socket."""

WAYS: dict[str, Callable[[Router], object]] = {
    "send": lambda client: client.queue("q").send(b"x"),
    "send_nowait": lambda client: client.queue("q").send_nowait(b"x").result(60),
    "send_many": lambda client: client.queue("q").send_many([b"x"]),
    "transaction": lambda client: client.send("q,other.q", b"x"),
    "transient": lambda client: client.queue("q").send(b"x", persistent=False),
    "delayed": lambda client: client.queue("q").send(b"x", deliver_in=0.001),
}


@pytest.fixture(params=["journal", "sql", "memory"])
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Router]:
    options = {"dead_letter": "dead"}
    stores = [StoreConfig("rest", [">"], kind=request.param, options=options), StoreConfig("other", ["other.>"])]
    with anabranch.open(Config(tmp_path, stores)) as router:
        yield router


@pytest.mark.parametrize("way", WAYS)
def test_nobody_is_shown_an_id_that_was_not_given(owner: Router, way: str) -> None:
    events: list[anabranch.Event] = []
    listener = owner.on_event(events.append)
    with anabranch.open(owner.config.directory, shared=True) as client:
        WAYS[way](client)
        for router in (owner, client):
            message = take(router.queue("q"))
            assert message.body == b"x" and message.message_id is None
            message.release()
            assert [one.message_id for one in router.queue("q").browse()] == [None]
        shown = CliRunner().invoke(app, ["browse", str(owner.config.directory), "q", "--json"], catch_exceptions=False)
        assert [json.loads(line)["message_id"] for line in shown.stdout.splitlines()] == [None]
        take(client.queue("q")).reject("bad")
        (letter,) = client.queue("q").dead_letters()
        assert letter.message_id is None and letter.message.message_id is None
        assert "dead_letter_message_id" not in letter.message.headers
        assert client.requeue("dead") == 1
        assert take(owner.queue("q")).message_id is None
    listener.close()
    assert [one.message_id for one in events if isinstance(one, anabranch.MessageDeadLettered)] == [None]


def test_a_request_that_comes_again_is_done_once(owner: Router) -> None:
    client = f"{os.getpid():x}-0123456789abcdef"
    message, named = [b"x", *FIELDS], [b"y", None, "i", *FIELDS[2:]]
    requests = [
        (Op.SEND, "queue://q", message, False),
        (Op.SEND, "queue://q", named, False),
        (Op.SEND_MANY, "queue://q", [message, message, named], False),
        (Op.COMMIT, True, None, "commit", [["queue://q", message], ["queue://other.q", message]], [], []),
    ]
    answers = []
    for _ in range(2):
        with Peer(owner.config.directory, greets=False) as peer:
            assert peer.ask(Op.HELLO, VERSION, client, 1, "", [])[0]
            answers.append([peer.ask(*request) for request in requests])
    assert all(ok for ok, _ in answers[0])
    duplicates = [answers[0][0], (True, [answers[0][1][1][0], True]), *answers[0][2:]]
    assert answers[1] == duplicates
    assert [one.body for one in owner.queue("q").browse()] == [b"x", b"y", b"x", b"x", b"x"]
    with Peer(owner.config.directory) as other:  # whose numbers are the same
        assert other.ask(*requests[0])[1][0] > answers[0][0][1][0]
        assert owner.queue("q").depth() == 6


def _send_nowait(queue: anabranch.Queue[bytes]) -> None:
    queue.send_nowait(b"x", message_id=MADE).result(60)


def test_an_id_that_begins_so_is_refused(owner: Router) -> None:
    with anabranch.open(owner.config.directory, shared=True) as client:
        for router in (owner, client):
            queue = router.queue("q")
            with router.transaction() as transaction:
                calls: list[Callable[[], object]] = [
                    partial(queue.send, b"x", message_id=MADE),
                    partial(_send_nowait, queue),
                    partial(queue.send_many, [b"x", Outgoing(b"x", message_id=MADE)]),
                    partial(queue.find, MADE),
                    partial(transaction.send, "q", b"x", message_id=MADE),
                ]
                for call in calls:
                    with pytest.raises(ValueError, match="begins with"):
                        call()
            with router.transaction() as transaction:  # a key of a map is its user's own
                transaction.put("m", MADE, b"value")
            assert router.map("m").get(MADE) == b"value"
            router.map("m").put(MADE, b"other")
            assert list(router.map("m").items()) == [(MADE, b"other")]
            router.map("m").pop(MADE)
    assert owner.queue("q").depth() == 0
