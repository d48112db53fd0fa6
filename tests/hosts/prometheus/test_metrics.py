"""What Prometheus is told of a router, as its own parser reads it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import anabranch
from anabranch.hosts.prometheus import register

EXAMPLES = Path(__file__).resolve().parents[3] / "examples/prometheus"
PATIENCE = 120.0
Values = dict[tuple[str, str, str], float]


@pytest.fixture
def router(tmp_path: Path) -> Iterator[anabranch.Router]:
    journal = anabranch.JournalOptions(max_deliveries=1, dead_letter="dead.*")
    stores = [
        anabranch.StoreConfig("orders", ["queue://orders.>"], journal=journal),
        anabranch.StoreConfig("tenants", ["queue://tenant.>"], per_destination=True),
        anabranch.StoreConfig("rest", [">"], memory=anabranch.MemoryOptions()),
    ]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores)) as router:
        yield router


def scraped(router: anabranch.Router) -> Values:
    registry = CollectorRegistry()
    register(router, registry)
    return scraped_from(registry)


def scraped_from(registry: CollectorRegistry) -> Values:
    return {
        (sample.name.removeprefix("anabranch_"), sample.labels.get("store", ""), sample.labels.get("state", "")): (
            sample.value
        )
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }


def test_what_is_told(router: anabranch.Router) -> None:
    orders = router.queue("orders.new")
    orders.send_many([b"1", b"2", b"3"])
    orders.send(b"later", deliver_in=3600.0)
    held = orders.receive()
    assert held is not None
    for tenant in ("a", "b"):
        router.queue(f"tenant.{tenant}").send(b"x")
    router.queue("passing").send(b"x")
    router.queue("passing").receive().release()  # type: ignore[union-attr]
    with router.queue("passing").receive() as message:  # type: ignore[union-attr]
        assert message.body == b"x"
    found = scraped(router)
    states = {state: found["messages", "orders", state] for state in ("ready", "leased", "delayed")}
    assert states == {"ready": 2, "leased": 1, "delayed": 1}
    assert found["messages", "tenants", "ready"] == 2, "stores of one destination each are one"
    assert (found["sent_total", "orders", ""], found["sent_total", "tenants", ""]) == (4, 2)
    assert (found["redelivered_total", "rest", ""], found["redelivered_total", "orders", ""]) == (1, 0)
    assert (found["sent_total", "rest", ""], found["acked_total", "rest", ""]) == (1, 1)
    assert {store for name, store, _ in found if name == "store_up"} == {"orders", "tenants", "rest"}
    assert all(value == 1 for (name, *_), value in found.items() if name == "store_up")
    assert found["oldest_message_age_seconds", "orders", ""] >= 0
    assert ("oldest_message_age_seconds", "rest", "") not in found
    syncs = router.stats().stores["orders"].sync_durations
    assert found["syncs_total", "orders", ""] >= found["sync_duration_seconds_count", "orders", ""] > 0
    assert 0 < found["sync_duration_seconds_sum", "orders", ""] <= syncs.seconds
    assert found["sync_duration_seconds_count", "rest", ""] == 0
    assert found["disk_bytes", "orders", "live"] > 0
    assert found["transactions_in_doubt", "", ""] == 0
    held.release(delivered=False)


def test_counts_stay_where_a_store_goes_or_begins_anew(router: anabranch.Router) -> None:
    registry = CollectorRegistry()
    register(router, registry)

    def counts() -> tuple[float, float]:
        found = scraped_from(registry)
        return found["sent_total", "tenants", ""], found["sync_duration_seconds_count", "tenants", ""]

    router.queue("tenant.a").send_many([b"x"] * 100)
    router.queue("tenant.b").send_many([b"x"] * 10)
    assert counts()[0] == 110
    for sent in (111, 112):  # deleted and made anew between two scrapes, and over two
        before = counts()
        router.delete("tenant.a")
        if sent == 112:
            after = counts()
            assert after[0] == before[0] and after[1] >= before[1]
        router.queue("tenant.a").send(b"x")
        after = counts()
        assert after[0] == sent and after[1] >= before[1]
    for tenant in ("a", "b"):
        router.delete(f"tenant.{tenant}")
    assert counts()[0] == 112, "though no store is left"


def test_dead_letters_are_counted(router: anabranch.Router) -> None:
    queue = router.queue("orders.bad")
    queue.send(b"x")
    message = queue.receive()
    assert message is not None
    message.release()
    deadline = time.monotonic() + PATIENCE
    while not scraped(router)["dead_lettered_total", "", ""]:
        assert time.monotonic() < deadline
        router.sweep()
    router.queue("passing").send(b"x", deliver_in=3600.0)
    found = scraped(router)
    assert [found["messages", "rest", state] for state in ("ready", "delayed", "dead")] == [0, 1, 1]
    assert ("oldest_message_age_seconds", "rest", "") not in found, "letters wait for nobody"


def test_a_client_of_an_owner_tells_the_same(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send_many([b"1", b"2"])
        (ready,) = [v for (name, _, state), v in scraped(router).items() if (name, state) == ("messages", "ready")]
        assert ready == 2


def test_a_disk_that_hangs_holds_up_one_scrape(router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("orders.new", "tenant.a"):
        router.queue(name).send(b"x")
    go_on, sync = threading.Event(), os.fdatasync

    def fdatasync(fd: int) -> None:
        if "/stores/orders/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            assert go_on.wait(PATIENCE)
        sync(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    sending = threading.Thread(target=router.queue("orders.new").send, args=(b"y",))
    sending.start()
    try:
        for _ in range(2):
            found = scraped(router)
            assert (found["store_up", "orders", ""], found["store_up", "tenants", ""]) == (0, 1)
    finally:
        go_on.set()
        sending.join(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not scraped(router)["store_up", "orders", ""]:
        assert time.monotonic() < deadline


def test_a_store_that_does_not_open_hides_no_other(router: anabranch.Router) -> None:
    for name in ("orders.new", "tenant.a"):
        router.queue(name).send(b"x" * 1000)
    config = router.config
    router.close()
    (segment,) = (config.directory / "stores/orders/journal").glob("*.seg")
    segment.write_bytes(bytes(4096) + segment.read_bytes()[4096:])
    with anabranch.open(config) as again:
        for _ in range(2):
            found = scraped(again)
            assert (found["store_up", "orders", ""], found["store_up", "tenants", ""]) == (0, 1)
            assert ("messages", "orders", "ready") not in found, "nothing is known of it"
            assert found["messages", "tenants", "ready"] == 1


def test_rules_and_dashboard_ask_for_what_is_told(router: anabranch.Router) -> None:
    router.queue("orders.new").send(b"x")
    told = {f"anabranch_{name}" for name, *_ in scraped(router)}
    rules: dict[str, Any] = yaml.safe_load((EXAMPLES / "alerts.yaml").read_text())
    panels: list[Any] = json.loads((EXAMPLES / "dashboard.json").read_text())["panels"]
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    asked += [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for text in asked for name in re.findall(r"anabranch_\w+", text)}
    assert len(names) > 5 and names <= told, names - told


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")
def test_prometheus_takes_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(EXAMPLES / "alerts.yaml")], check=True)
    subprocess.run(["promtool", "check", "config", str(EXAMPLES / "prometheus.yml")], check=True)
