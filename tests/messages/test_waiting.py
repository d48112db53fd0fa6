"""Messages that wait for their time, as a router's users send them, give them back and move them."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.policies.config import load
from anabranch.router.offline.repartition import repartition

from ..contract.expiring import HOUR, Clock, stopped_clock
from ..taking import drained, take
from .stores import config

clock = pytest.fixture(stopped_clock)


def test_all_ways_to_send(clock: Clock, tmp_path: Path) -> None:
    at = datetime.fromtimestamp(clock.time() + 3600, UTC)
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        queue.send(b"1", deliver_in=3600)
        queue.send(b"2", deliver_at=at)
        queue.send(b"3", deliver_at=at.astimezone(timezone(timedelta(hours=5))))
        queue.send_nowait(b"4", deliver_at=clock.time() + 3600).result(60)
        queue.send_many([anabranch.Outgoing(b"5", deliver_at_ms=clock.now + HOUR), b"free"])
        with router.transaction() as tx:
            tx.send(queue, b"6", deliver_in=3600)
            tx.send("topic://t,queue://q", b"7", deliver_in=3600)
        router.send("queue://q", b"8", deliver_in=3600)
        queue.send(b"past", deliver_at=0)
        queue.send(b"now", deliver_in=0)
        assert queue.counts() == (3, 0, 8, 0)
        assert drained(queue) == [b"free", b"past", b"now"]
        clock.offset_ms = HOUR + 1
        assert drained(queue) == [b"%d" % number for number in range(1, 9)]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"deliver_in": 1, "deliver_at": 2.0**40}, ValueError, "deliver_in or deliver_at, not both"),
        ({"deliver_in": -1}, ValueError, "deliver_in is a number of seconds"),
        ({"deliver_in": math.nan}, ValueError, "not nan"),
        ({"deliver_in": math.inf}, ValueError, "not inf"),
        ({"deliver_in": 2.0**63}, ValueError, "deliver_in is a number of seconds"),
        ({"deliver_in": "1"}, TypeError, "deliver_in is a number of seconds, not str"),
        ({"deliver_at": -1}, ValueError, "deliver_at is a time from 1970 on"),
        ({"deliver_at": math.nan}, ValueError, "not nan"),
        ({"deliver_at": math.inf}, ValueError, "not inf"),
        ({"deliver_at": 2.0**63}, ValueError, "deliver_at is a time"),
        ({"deliver_at": "soon"}, TypeError, "deliver_at is a datetime or a number"),
        ({"deliver_at": datetime(2100, 1, 1)}, ValueError, "has no time zone"),
    ],
)
def test_what_is_no_time(tmp_path: Path, options: Any, error: type[Exception], says: str) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        for send in (queue.send, queue.send_nowait):
            with pytest.raises(error, match=says):
                send(b"x", **options)
        with router.transaction() as tx:
            with pytest.raises(error, match=says):
                tx.send(queue, b"x", **options)
            tx.send(queue, b"whole")
        assert drained(queue) == [b"whole"]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("{delay: 0s}", "delay"),
        ("{multiplier: 2}", "delay"),
        ("{delay: 1s, multiplier: 0.5}", "multiplier"),
        ("{delay: 1s, multiplier: .nan}", "multiplier"),
        ("{delay: 1s, jitter: 2}", "jitter"),
        ("{delay: 1s, delays: 2}", "delays"),
    ],
)
def test_a_policy_that_is_none(tmp_path: Path, written: str, says: str) -> None:
    path = tmp_path / "stores.yaml"
    path.write_text(
        f"directory: data\nstores:\n  - name: s\n    match: '>'\n    journal:\n      redelivery: {written}\n"
    )
    with pytest.raises(anabranch.ConfigError, match=says):
        load(path)


def test_a_transaction_that_rolls_back_waits(clock: Clock, tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, redelivery=anabranch.Redelivery(delay=60))) as router:
        queue = router.queue("q")
        queue.send(b"1")
        with pytest.raises(KeyError), router.transaction() as tx:
            message = take(queue)
            tx.ack(message)
            raise KeyError
        assert (queue.receive(), queue.counts()) == (None, (0, 0, 1, 0))
        clock.offset_ms = 60_000
        assert drained(queue) == [b"1"]


@pytest.mark.parametrize("live", [False, True])
def test_a_queue_that_moves_keeps_what_waits(clock: Clock, tmp_path: Path, live: bool) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("q")
        for number in range(5):
            queue.send(b"%d" % number, deliver_in=3600 * number)
        given_back = take(queue)
        given_back.release(delay=7200)
        if live:
            router.repartition(config(tmp_path, "two"))
            assert queue.counts() == (0, 0, 5, 0)
    if not live:
        repartition(config(tmp_path, "two"))
    with anabranch.open(config(tmp_path, "two")) as router:
        queue = router.queue("q")
        assert queue.counts() == (0, 0, 5, 0)
        for hours, expected in ((1, [b"1"]), (2, [b"0", b"2"]), (4, [b"3", b"4"])):
            clock.offset_ms = hours * HOUR
            assert drained(queue) == expected
