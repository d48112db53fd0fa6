"""The programs in examples/ run, and say what they should."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ..children import started
from ..contract.disk import PATIENCE
from ..kernels import compiled  # noqa: F401  a fixture

pytestmark = pytest.mark.usefixtures("compiled")

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "embed": "1,000 readings consumed\norders: 1 pending\nrest: 1 pending\ntelemetry: 0 pending\n",
    "event_loop": (
        "300 jobs in 30 queues: 0 left\n"
        "dead: job 113 (nobody makes thirteen)\n"
        "dead: job 13 (nobody makes thirteen)\n"
        "dead: job 213 (nobody makes thirteen)\n"
    ),
    "log_records": "killed: True\n1000 records logged, 0 missing\n",
    "many_processes": (
        "a worker was killed; its job is free again: a bad day\n200 jobs done by 4 processes; left: 0\n"
    ),
    "kinds_of_stores": "dead: [('a curse', 'delivery_limit')]\naudit: ['a train']\ninvoices: ['a train']\nprices: []\n",
    "transactions": (
        "rolled back, the order is in its queue again: there is nothing to pack\n"
        "shop.orders: ['nothing']\n"
        "shop.parcels: ['parcel for a train']\n"
        "shop.audit: ['packed a train']\n"
    ),
    "orders_and_audit": (
        "rolled back: an empty order\n"
        "in two stores:\n"
        "  orders.accepted: []\n"
        "  orders.packed: ['a train']\n"
        "  audit.orders: ['accepted a train', 'packed a train']\n"
        "prepared: order-2\n"
        "after its commit:\n"
        "  orders.accepted: ['a doll']\n"
        "  orders.packed: ['a train']\n"
        "  audit.orders: ['accepted a train', 'packed a train', 'a doll']\n"
    ),
    "own_database": (
        "rolled back: an order without a toy\n"
        "orders: ['a train', 'a doll']\n"
        "parcels: ['a train']\n"
        "to pack: ['a doll']\n"
    ),
    "worker": (
        "to carol: welcome\n"
        "delivery 1 of mail-as-text: DecodeError\n"
        "delivery 1 of mail-without-text: KeyError\n"
        "delivery 2 of mail-as-text: DecodeError\n"
        "delivery 2 of mail-without-text: KeyError\n"
        "delivery 3 of mail-as-text: DecodeError\n"
        "delivery 3 of mail-without-text: KeyError\n"
        "dead: mail-as-text of queue://mail.bob, delivery_limit after 3 deliveries\n"
        "dead: mail-without-text of queue://mail.carol, delivery_limit after 3 deliveries\n"
    ),
    "recommend_from_activemq": "Peak 23.1 MB in one store, 3.1 MB as recommended:\n",
}


def test_none_is_forgotten() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err, here = tmp_path / "out", tmp_path / "err", tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    process = started(f"examples.{name}", out=str(out), err=str(err))
    process.join(PATIENCE)
    assert (process.exitcode, err.read_text()) == (0, "")
    assert SAYS[name] in out.read_text()
    assert not list(here.iterdir())


def test_a_listener_of_log_records_is_not_stopped_by_what_was_to_stop_the_one_before(tmp_path: Path) -> None:
    from examples.log_records import DurableQueue, opened

    with opened(str(tmp_path)) as router:
        queue = DurableQueue(router.queue("log"))
        queue.put_nowait(None)
        queue.put_nowait(logging.makeLogRecord({"msg": "sold"}))
        queue.flush()
        assert queue.get(block=False) is None
        queue.put_nowait(None)
        queue.flush()
    with opened(str(tmp_path)) as router:
        record = DurableQueue(router.queue("log")).get(block=False)
        assert record is not None and record.msg == "sold"
