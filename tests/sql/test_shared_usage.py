"""What a shared store tells the usage log of each router: with those of all the advisor says what has to be shared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.router.cli.app import app
from anabranch.router.usage.reading import usage_trace


def take(router: anabranch.Router, name: str) -> anabranch.Message:
    message = router.queue(name).receive()
    assert message is not None
    return message


@pytest.fixture
def node(tmp_path: Path, postgres_url: str) -> Callable[[str], anabranch.Router]:
    """Opens a router of that name, which keeps a usage log."""

    def node(name: str) -> anabranch.Router:
        stores = [
            anabranch.StoreConfig("local", ["local.>"], kind="journal"),
            anabranch.StoreConfig(
                "all", ["queue://>", "topic://>"], kind="sql", options={"url": postgres_url, "shared": True}
            ),
        ]
        return anabranch.open(anabranch.Config(tmp_path / name, stores, usage=anabranch.UsageOptions()))

    return node


def test_the_advisor_reads_who_sends_and_who_acks(tmp_path: Path, node: Callable[[str], anabranch.Router]) -> None:
    with node("a") as a, node("b") as b:
        b.topic("news").subscribe("desk")
        a.topic("news").send(b"1")
        a.queue("crossing").send_many([b"2", b"3", b"4"])
        a.queue("own").send(b"5")
        take(a, "own").ack()
        with b.transaction() as tx:
            tx.ack(take(b, "crossing"))
            tx.send("local.q", b"6")
        b.ack(b.queue("crossing").receive_many(2))
        message = b.topic("news").subscribe("desk").receive()
        assert message is not None
        message.ack()
    logs, out = f"{tmp_path / 'a'},{tmp_path / 'b'}", str(tmp_path / "out")
    result = CliRunner().invoke(app, ["recommend", "--usage", logs, "--out", out], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    sharing = json.loads((tmp_path / "out" / "recommendation.json").read_text())["sharing"]
    found = {one["name"]: (one["messages"], one["crossed_messages"]) for one in sharing["destinations"]}
    assert found == {
        "queue://crossing": (3, 3), "queue://own": (1, 0), "topic://news": (1, 1), "queue://local.q": (1, 0)
    }  # fmt: skip


def test_what_is_removed_is_told_as_what_is_acked(tmp_path: Path, node: Callable[[str], anabranch.Router]) -> None:
    """By the router that removes it, whoever has sent it: nothing is taken for pending for ever."""
    with node("a") as a, node("b") as b:
        for name in ("desk", "book"):
            a.topic("news").subscribe(name)
            a.topic("gone").subscribe(name)
        for name in ("purged", "deleted"):
            a.queue(name).send_many([b"1", b"2"])
        for name in ("news", "gone"):
            a.topic(name).send(b"3")
        assert (b.queue("purged").purge(), b.queue("deleted").delete()) == (2, 2)
        assert (b.topic("news").subscribe("desk").unsubscribe(), b.topic("gone").delete()) == (1, 1)
        with a.transaction() as transaction:
            transaction.unsubscribe(a.topic("news").subscribe("book"))
    events = list(usage_trace([tmp_path / "a", tmp_path / "b"]))
    acks = {(one.destination, one.message_id, one.subscription, one.node) for one in events if one.op == "ack"}
    sent = [event for event in events if event.op == "send"]
    assert len(sent) == 6 and len(acks) == 8
    assert acks == {
        (event.destination, event.message_id, of, "a" if (event.destination, of) == ("topic://news", ":book") else "b")
        for event in sent
        for of in ([":desk", ":book"] if event.destination.startswith("topic") else [None])
    }
