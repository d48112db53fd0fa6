"""What a shared store tells the usage log of each router: with those of all the advisor says what has to be shared."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

import anabranch
from anabranch.router.cli.app import app


def take(router: anabranch.Router, name: str) -> anabranch.Message:
    message = router.queue(name).receive()
    assert message is not None
    return message


def test_the_advisor_reads_who_sends_and_who_acks(tmp_path: Path, postgres_url: str) -> None:
    def node(name: str) -> anabranch.Router:
        stores = [
            anabranch.StoreConfig("local", ["local.>"], kind="journal"),
            anabranch.StoreConfig(
                "all", ["queue://>", "topic://>"], kind="sql", options={"url": postgres_url, "shared": True}
            ),
        ]
        return anabranch.open(anabranch.Config(tmp_path / name, stores, usage=anabranch.UsageOptions()))

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
