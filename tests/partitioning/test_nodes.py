"""Traces of several nodes: clocks, what crossed from one to another, journals apart, and the answer."""

from __future__ import annotations

import json
import random
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from click.testing import Result
from jsonschema import Draft202012Validator

import anabranch
from anabranch.policies.advisor import RecommendOptions, UsageEvent, from_events, recommend, recommend_best, write_trace
from anabranch.policies.advisor.advice.schema import recommendation_schema
from anabranch.policies.advisor.advice.sharing import URL_VARIABLE
from anabranch.policies.advisor.model.cost_model import GIB, HOUR, CostModel, canonical
from anabranch.policies.advisor.model.engine import LocalEngine
from anabranch.policies.advisor.model.evaluate import SetCosts
from anabranch.policies.advisor.spark.trace import prepare
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.trace.nodes import merge_clocks
from anabranch.policies.advisor.trace.table import read_trace
from anabranch.policies.config import load, loads
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import TraceError

from ..model import FAST
from ..taking import take
from .conftest import SEGMENT_BYTES, in_force, run
from .test_spark import assert_engines_agree, assert_rows_agree, assert_same, both, divisions

Step = tuple[float, str, str, str, str]
"""A time, a node, send or ack, a destination, and a message's id."""


def traced(steps: Sequence[Step], ahead: Mapping[str, float] | None = None, size: int = 400) -> pa.Table:
    """The steps as nodes tell of them whose clocks are ahead by so much, in the order of what they say."""
    ahead = ahead or {}
    told = sorted((when + ahead.get(node, 0.0), number) for number, (when, node, *_) in enumerate(steps))
    events = []
    for seq, (ts, number) in enumerate(told):
        _, node, op, destination, message = steps[number]
        body = size if op == "send" else None
        events.append(UsageEvent(seq, ts, op, destination, message, size, None, 1, None, body, node))
    return from_events(events)


def shop(count: int = 600, seed: int = 1) -> list[Step]:
    """Orders that any node takes from any other, and jobs and a log that are each node's own."""
    chance, steps = random.Random(seed), []
    for number in range(count):
        when, node = 1.7e9 + number, chance.choice("abc")
        for name, by, stays in (
            ("queue://orders", chance.choice("abc"), chance.uniform(0.2, 5.0)),
            ("queue://jobs", node, 2.0),
            ("queue://log", node, chance.uniform(50, 400)),
        ):
            steps.append((when, node, "send", name, f"{name}{number}"))
            steps.append((when + stays, by, "ack", name, f"{name}{number}"))
    return steps


# Clocks -------------------------------------------------------------------------------------------------------------


def test_clocks_are_merged_by_what_crossed() -> None:
    steps, ahead = shop(), {"b": 3600.0, "c": -20.0}
    table, logs = merge_clocks(traced(steps, ahead), ["a", "b", "c"])
    assert [(log.node, log.reference) for log in logs] == [("a", "a"), ("b", "a"), ("c", "a")]
    assert logs[0][2:] == (None, None, 0.0, 1.0)
    for log in logs[1:]:
        assert log.low_seconds is not None and log.high_seconds is not None
        assert log.low_seconds < ahead[log.node] < log.high_seconds < log.low_seconds + 1.0
        assert log.moved_seconds == pytest.approx((log.low_seconds + log.high_seconds) / 2)
    rows = table.to_pylist()
    assert [row["seq"] for row in rows] == list(range(len(steps)))
    assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
    operations = build(table)
    assert not any(finding.code == "early-acks" for finding in operations.findings)
    for node in "abc":  # each one's own order is as it was
        own = [(row["op"], row["message_id"]) for row in rows if row["node"] == node]
        before = [(row["op"], row["message_id"]) for row in traced(steps, ahead).to_pylist() if row["node"] == node]
        assert own == before


@pytest.mark.parametrize(("ahead", "moved"), [(-100.0, -98.0), (0.0, 0.0), (100.0, 0.0)])
def test_messages_one_way_bound_a_clock_from_one_side(ahead: float, moved: float) -> None:
    steps = [(10.0, "a", "send", "q", "1"), (12.0, "b", "ack", "q", "1"), (11.0, "a", "send", "q", "2")]
    table, (_, log) = merge_clocks(traced(steps, {"b": ahead}), ["a", "b"])
    assert (log.low_seconds, log.high_seconds) == (None, ahead + 2.0)
    assert log.moved_seconds == pytest.approx(moved, abs=1e-5)
    assert [row["message_id"] for row in table.to_pylist() if row["op"] == "ack"] == ["1"]
    assert table.column("op")[0].as_py() == "send"


def test_clocks_that_may_be_right_stay() -> None:
    steps = shop(200)
    given = traced(steps, {"b": 0.05})
    table, logs = merge_clocks(given, ["a", "b", "c"])
    assert table.equals(given)
    assert [log.moved_seconds for log in logs] == [0.0, 0.0, 0.0]
    assert all(log.low_seconds < 0 < log.high_seconds for log in logs[1:])  # type: ignore[operator]


def test_a_clock_is_compared_through_another_and_one_without_messages_stays() -> None:
    """c meets b alone, d nobody."""
    passed = [("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("d", "d")]
    steps = [
        (2.0 * number + after, on, op, "q", str(number))
        for number, (sender, acker) in enumerate(passed)
        for after, on, op in ((0.0, sender, "send"), (1.0, acker, "ack"))
    ]
    _, logs = merge_clocks(traced(steps, {"b": 50.0, "c": 80.0, "d": 1e6}), ["a", "b", "c", "d"])
    assert [log.moved_seconds for log in logs] == [0.0, 50.0, 80.0, 0.0]
    assert [log.reference for log in logs] == ["a", "a", "a", "d"]


def test_clocks_that_drift_are_taken_between_what_they_say() -> None:
    """At first b is 100 s ahead, and 110 s later."""
    ways = [("a", "send", "1"), ("b", "ack", "1"), ("b", "send", "2"), ("a", "ack", "2")]
    table = traced([(float(when), on, op, "q", message) for when, (on, op, message) in enumerate(ways)])
    table = table.set_column(1, "ts", pa.array([0.0, 101.0, 120.0, 10.0]))
    _, (_, log) = merge_clocks(table, ["a", "b"])
    assert (log.low_seconds, log.high_seconds, log.moved_seconds) == (101.0, 110.0, 105.5)


# What crossed, and what is apart ------------------------------------------------------------------------------------


def test_what_crossed_is_told_from_what_has_the_same_name_or_id() -> None:
    steps = [
        (1.0, "a", "send", "topic://news", "n1"), (2.0, "b", "ack", "topic://news", "n1"),
        (2.5, "c", "ack", "topic://news", "n1"),
        (2.6, "c", "ack", "topic://news", "n1"), (3.0, "a", "ack", "topic://news", "n1"),
        (4.0, "b", "send", "topic://news", "n2"), (5.0, "b", "ack", "topic://news", "n2"),
        # By a bridge, or from a copied directory: sent on both.
        (6.0, "a", "send", "jobs", "j1"), (7.0, "b", "send", "queue://jobs", "j1"), (8.0, "b", "ack", "jobs", "j1"),
        (9.0, "b", "ack", "queue://jobs", "before"),
    ]  # fmt: skip
    operations = build(traced(steps))
    use = operations.use
    assert use is not None and operations.destinations == ("queue://jobs", "topic://news")
    assert (use.nodes, use.used) == (("a", "b", "c"), ((0, 1), (0, 1, 2)))
    assert (use.flows, use.crossed) == ({(1, 0, 1): 1, (1, 0, 2): 1}, {1: 1})
    # The ack of j1 is that of b's.
    assert operations.send[7:10].tolist() == [-1, -1, 8]
    assert operations.totals[0].pending == 1


def test_each_node_has_journals_of_its_own() -> None:
    steps = shop()
    whole, costs = LocalEngine(build(traced(steps))), CostModel(SEGMENT_BYTES, min_segments=2)
    jobs, log, orders = (whole.destinations.index(f"queue://{name}") for name in ("jobs", "log", "orders"))
    partitions = [canonical([[jobs, log], [orders]]), canonical([[jobs], [log], [orders]])]
    apart, courses = [], []
    for node in "abc":
        own = LocalEngine(build(traced([s for s in steps if s[1] == node and s[3] != "queue://orders"])))
        apart.append(own.measure([((0, 1),), ((0,), (1,))], costs))
        courses.append(own.courses([((0, 1),), ((0,), (1,))], costs))
    for number, (partition, found) in enumerate(zip(partitions, whole.measure(partitions, costs), strict=True)):
        for name in ("written_bytes", "copied_bytes"):
            assert getattr(found, name) == sum(getattr(one[number], name) for one in apart)
        held = sum(course.byte_seconds(whole.finish) for one in courses for course in one[number])
        assert found.gib_hours == pytest.approx(held / GIB / HOUR)
        assert found.mean_bytes == pytest.approx(held / (whole.finish - whole.begin))
        # What crosses is in no journal, and nodes' files are not shared.
        assert found.store_written_bytes[partition.index((orders,))] == 0
        assert max(one[number].peak_bytes for one in apart) < found.peak_bytes
        assert found.peak_bytes <= sum(one[number].peak_bytes for one in apart)
    assert sum(one[0].copied_bytes for one in apart) > 0


def test_the_search_sees_what_the_exact_model_sees() -> None:
    engine = LocalEngine(build(traced(shop(3000))))
    for costs in (CostModel(SEGMENT_BYTES), CostModel(SEGMENT_BYTES, live_percent=0)):
        quick = SetCosts(engine.summary(SEGMENT_BYTES), costs)
        for members in ((0,), (1,), (0, 1)):
            (exact,) = engine.measure([(members,)], costs)
            assert quick.cost(sum(1 << d for d in members)) == pytest.approx(exact.cost, rel=0.05)
        assert quick.cost(1 << engine.destinations.index("queue://orders")) == 0.0


@pytest.mark.parametrize("model", [pytest.param("anabranch", marks=pytest.mark.campaign), "kahadb"])
def test_spark_has_the_same_figures(spark: Any, tmp_path: Path, model: Any) -> None:
    """Also where a destination has two texts, and nodes have odd names."""
    table = traced([(when, f"{node}'\\ü", op, name if number % 3 else name.removeprefix("queue://"), message)
                    for number, (when, node, op, name, message) in enumerate(shop(300))])  # fmt: skip
    with both(spark, table, tmp_path, table.num_rows // 3, model, "ts") as (here, there):
        assert here.use is not None and here.use == there.use
        assert here.use.crossed
        partitions = divisions(len(here.destinations), np.random.default_rng(1))
        assert_engines_agree(here, there, partitions, SEGMENT_BYTES)
        assert_rows_agree(here, there)
        np.testing.assert_array_equal(here.operations().site, there.operations().site)
        for engine in (here, there):
            engine.leave_out([0])
        assert 0 not in here.crossed
        assert_same(there.summary(SEGMENT_BYTES), here.summary(SEGMENT_BYTES))
        costs = CostModel(SEGMENT_BYTES)
        assert there.measure(partitions, costs) == here.measure(partitions, costs)
        assert here.measure([((0,),)], costs)[0].peak_bytes == 0


def test_a_node_that_is_missing_somewhere_is_an_error(spark: Any, tmp_path: Path) -> None:
    table = traced(shop(5))
    for nodes, says in ((["a", None], "column node is empty in 29 rows"), ([None], None), (["a"], None)):
        node = pa.array((nodes * 30)[:1] + (nodes[-1:] * 29), pa.string())
        write_trace(table.set_column(table.num_columns - 1, "node", node), tmp_path / "t.parquet")
        frame = spark.read.parquet(str(tmp_path / "t.parquet"))
        if says is None:
            prepared = prepare(spark, frame)
            assert (prepared.use, build(read_trace(tmp_path / "t.parquet")).use) == (None, None)
            prepared.close()
            continue
        told = f"{says}.*give the node of every operation, or of none"
        with pytest.raises(TraceError, match=told):
            read_trace(tmp_path / "t.parquet")
        with pytest.raises(TraceError, match=told):
            prepare(spark, frame)


# The answer ---------------------------------------------------------------------------------------------------------


def test_the_answer_says_what_has_to_be_shared(tmp_path: Path) -> None:
    table, logs = merge_clocks(traced(shop(), {"b": 3600.0}), ["a", "b", "c"])
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local", durability={"queue://orders": Sync.NEVER})
    answer = recommend_best(table, options, [SEGMENT_BYTES], logs=logs)
    sharing = answer.sharing
    assert sharing is not None
    (orders,) = sharing.needed
    assert (orders.name, orders.nodes, orders.messages) == ("queue://orders", ("a", "b", "c"), 600)
    assert orders.crossed_messages == sum(flow.messages for flow in orders.flows)
    assert 0.5 < orders.crossed_messages / 600 < 0.8
    assert {(flow.source, flow.target) for flow in orders.flows} == {(x, y) for x in "abc" for y in "abc" if x != y}
    duration = answer.parameters["duration_seconds"]
    assert orders.messages_per_second == pytest.approx(600 / duration)
    assert orders.operations_per_second == pytest.approx(1200 / duration)
    usage = {one.name: one for one in answer.destinations}
    assert orders.bytes_per_second == pytest.approx(usage["queue://orders"].bytes / duration)
    assert usage["queue://orders"].pending == 0
    assert sum(store.written_bytes for store in answer.recommended.stores if sharing.is_shared(store.destinations)) == 0
    answer.write(tmp_path)
    text, page = (tmp_path / "summary.txt").read_text(), (tmp_path / "report.html").read_text()
    for shown in (" ".join(text.split()), page):
        assert "1 of 3 destinations needs a store that a, b and c share; queue://jobs, queue://log need none." in shown
        assert f"queue://orders: {orders.crossed_messages} of 600 messages crossed" in shown
        assert "sends and acks), " in shown
        assert "The clock of b is 3,600.0 s ahead of that of a, known to within" in shown
        assert "shared by the nodes" in shown
    document = json.loads((tmp_path / "recommendation.json").read_text())
    Draft202012Validator(recommendation_schema()).validate(document)
    assert document["sharing"]["clocks"][1]["moved_seconds"] == logs[1].moved_seconds
    stores = yaml.safe_load((tmp_path / "stores.yaml").read_text())["stores"]
    assert [s["match"] for s in stores if "sql" in s] == [["queue://orders"]]
    assert load(tmp_path / "stores.yaml", names_suffice=True).stores
    assert URL_VARIABLE in (tmp_path / "stores.yaml").read_text()
    sampled = [log._replace(sampled=0.5) for log in logs]
    again = recommend_best(table, options, [SEGMENT_BYTES], logs=sampled).sharing
    assert again is not None
    assert again.needed[0].operations_per_second == pytest.approx(2400 / duration)


def test_all_but_a_few_is_not_all() -> None:
    steps = [step for step in shop() if step[3] == "queue://orders"]
    moved = [
        (when, "b" if op == "ack" and message != "queue://orders0" else "a", op, name, message)
        for when, _, op, name, message in steps
    ]
    sharing = recommend(traced(moved), RecommendOptions(engine="local")).sharing
    assert sharing is not None
    assert "queue://orders: 599 of 600 messages crossed, over 99 % (a to b 599)." in sharing.sentences()


def test_all_or_nothing_to_share() -> None:
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")
    steps = [step for step in shop() if step[3] == "queue://orders"]
    answer = recommend(traced(steps), options)
    assert answer.sharing is not None and answer.sharing.missing
    texts = answer.render(answer, "out")
    assert texts["summary.txt"].startswith("Put this destination into 1 store, shared by the nodes:")
    assert "1 of 1 destination needs a store that a, b and c share." in texts["summary.txt"]
    assert answer.recommended.peak_bytes == 0
    made = loads(answer.stores_yaml(), ".", names_suffice=True)
    assert [(store.kind, store.match) for store in made.stores] == [("sql", ("queue://orders",)), ("journal", (">",))]
    steps = [step for step in shop() if step[3] != "queue://orders"]
    answer = recommend(traced(steps), options)
    assert answer.sharing is not None and not answer.sharing.needed
    texts = answer.render(answer, "out")
    assert "No message crossed between a, b and c: no destination needs a store that they" in texts["summary.txt"]
    assert "sql" not in answer.stores_yaml()


@pytest.mark.parametrize("percent", [0, 50])
def test_a_configuration_in_force_gets_a_store_that_is_shared(percent: int) -> None:
    for stores in ({"all": [">"]}, {"orders": ["orders"], "rest": [">"]}):
        current = in_force(stores, percent)
        options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local", current=current)
        answer = recommend(traced(shop()), options)
        made = loads(answer.stores_yaml(), ".", names_suffice=True)
        (shared,) = [store for store in made.stores if store.kind == "sql"]
        assert made.routes().route(anabranch.Destination.parse("queue://orders")).target == shared  # type: ignore[union-attr]
        assert "Leave it as it is" not in answer.render(answer, "out")["summary.txt"]
        assert answer.render(answer, "out")["report.html"]
        assert URL_VARIABLE in answer.stores_yaml()


def test_a_trace_of_one_node_is_as_it_was() -> None:
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")
    steps = [step for step in shop() if step[3] != "queue://orders" and step[1] == "a"]
    plain = traced(steps).drop_columns("node")
    one, other = (recommend(table, options) for table in (traced(steps), plain))
    assert one.sharing is None
    assert one.render(one, "out") == other.render(other, "out")
    assert "sharing" not in other.to_json()
    assert "nodes" not in other.render(other, "out")["report.html"]


# Real usage logs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def nodes() -> Iterator[Path]:
    """A directory of routers' directories, in memory."""
    with tempfile.TemporaryDirectory(prefix="anabranch-nodes-", dir=FAST) as name:
        yield Path(name)


def node(nodes: Path, name: str, **usage: Any) -> anabranch.Router:
    """A node with a journal of its own, and a store that it has in turn with others."""
    shared = {"url": f"sqlite:///{nodes / 'shared.db'}", "lease_expiration": 60.0, "pool_min": 0}
    stores = [
        anabranch.StoreConfig("shared", ["queue://s.>"], kind="sql", options=shared),
        anabranch.StoreConfig("own", [">"], journal=anabranch.JournalOptions(sync=Sync.NEVER)),
    ]
    return anabranch.open(anabranch.Config(nodes / name / "data", stores, usage=usage))


def work(nodes: Path, monkeypatch: pytest.MonkeyPatch, ahead: float = 3600.0) -> None:
    """Two nodes, the clock of whose second is ahead, use a store in turn, and each a queue of its own."""
    real, moved = time.time_ns, [0]
    monkeypatch.setattr(time, "time_ns", lambda: real() + moved[0])

    def turn(name: str, sends: int, takes: int) -> None:
        moved[0] = int(ahead * 1e9) if name == "two" else 0
        with node(nodes, name) as router:
            for _ in range(takes):
                take(router.queue("s.orders")).ack()
            for _ in range(sends):
                router.queue("s.orders").send(bytes(700))
                router.queue("jobs").send(bytes(300))
            take(router.queue("jobs")).ack()
            router.queue("s.audit").send(b"1")
            take(router.queue("s.audit")).ack()

    turn("one", 20, 0)
    turn("two", 10, 12)
    turn("one", 5, 15)
    turn("two", 0, 5)
    moved[0] = 0


def recommended(nodes: Path, usage: str, *more: Any) -> tuple[Any, Result]:
    result = run(
        "recommend", "--usage", usage, "--out", nodes / "advice", "--force", "--engine", "local", "--json", *more
    )
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), result


def test_real_routers(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(nodes, monkeypatch)
    found, result = recommended(nodes, f"{nodes}/one/data,{nodes}/two/data/usage")
    assert "Warning" not in result.stderr
    sharing = found["sharing"]
    assert sharing["nodes"] == ["one", "two"]
    audit, orders, jobs = (
        next(one for one in sharing["destinations"] if one["name"] == f"queue://{name}")
        for name in ("s.audit", "s.orders", "jobs")
    )
    # 20 of one's are sent first: two takes 12 of them; one then 8 of its own and 7 of two's; two then 3 of its own, 2.
    assert orders["flows"] == [
        {"source": "one", "target": "two", "messages": 14},
        {"source": "two", "target": "one", "messages": 7},
    ]
    assert (orders["messages"], orders["crossed_messages"], orders["needs_shared_store"]) == (35, 21, True)
    assert (jobs["nodes"], jobs["crossed_messages"], jobs["needs_shared_store"]) == (["one", "two"], 0, False)
    assert (jobs["shared_store"], audit["shared_store"], orders["shared_store"]) == (None, "shared", "shared")
    _, two = sharing["clocks"]
    assert two["low_seconds"] <= 3600 <= two["high_seconds"]
    assert two["low_seconds"] < two["moved_seconds"] < two["high_seconds"]
    summary = " ".join((nodes / "advice/summary.txt").read_text().split())
    assert "queue://s.orders: 21 of 35 messages crossed, 60 % (one to two 14, two to one 7)." in summary
    assert "In a shared store now, for no message that crossed: queue://s.audit:" in summary
    # It opens as it is, on another node, which finds in the shared store what is there.
    written = (nodes / "advice/stores.yaml").read_text()
    assert yaml.safe_load(written)["directory"] == "data"
    assert str(nodes) not in written.replace(f"sqlite:///{nodes}", "")
    (nodes / "three").mkdir()
    shutil.copy(nodes / "advice/stores.yaml", nodes / "three")
    with anabranch.open(nodes / "three/stores.yaml") as router:
        assert router.queue("s.orders").counts().ready == 35 - 32


def test_a_directory_of_nodes_and_a_trace_of_them_say_the_same(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(nodes, monkeypatch)
    found, _ = recommended(nodes, str(nodes / "one"), "--usage", nodes / "two")
    for name in ("one", "two"):
        shutil.copytree(nodes / name / "data/usage", nodes / "collected" / name)
    again, _ = recommended(nodes, f"{nodes / 'collected'}")
    assert again["sharing"] == found["sharing"]
    assert again["recommended"] == found["recommended"]
    result = run("trace", "--usage", nodes / "collected", "--out", nodes / "t.parquet")
    assert re.match(r"Note: The clock of two is [0-9,.]+ s ahead of that of one, known to within", result.stderr)
    out = nodes / "advice-of-trace"
    assert run("recommend", "--trace", nodes / "t.parquet", "--out", out, "--engine", "local").exit_code == 0
    told = json.loads((out / "recommendation.json").read_text())["sharing"]
    assert told["clocks"] == []
    for one, other in zip(told["destinations"], found["sharing"]["destinations"], strict=True):
        assert one == other | {"shared_store": None}


def test_logs_at_a_url_and_through_spark(
    spark: Any, nodes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hadoop's view file system shows a directory of this machine under a URL: the way is that of hdfs://."""
    work(nodes, monkeypatch)
    name = f"n{secrets.token_hex(4)}"
    configuration = spark.sparkContext._jsc.hadoopConfiguration()
    configuration.set(f"fs.viewfs.mounttable.{name}.link./logs", nodes.as_uri())
    here, _ = recommended(nodes, f"{nodes}/one,{nodes}/two")
    urls = f"viewfs://{name}/logs/one/data,viewfs://{name}/logs/two/data/usage"
    there, result = recommended(nodes, urls, "--engine", "spark")
    assert there["parameters"]["engine"] == "spark"
    assert there["sharing"] == here["sharing"]
    assert there["recommended"] == here["recommended"]
    assert f"viewfs://{name}/logs/one/data is copied to be read" in result.stderr
    result = run("trace", "--usage", f"viewfs://{name}/logs/none", "--out", tmp_path / "t.csv")
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"there is nothing at viewfs://{name}/logs/none" in result.stderr


def test_what_cannot_be_merged_is_one_clear_error(nodes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work(nodes, monkeypatch)
    node(nodes, "silent").close()
    shutil.copytree(nodes / "one", nodes / "copy")
    one, two = nodes / "one", nodes / "two"
    for usage, says in (
        (f"{one},{one}/data", "was given already, as"),
        (f"{one},{nodes}/copy", f"the usage log {nodes}/copy/data/usage was given already, as {one}/data/usage"),
        (f"{nodes}/one/../copy,{one}", "was given already, as"),
        (f"{one},{nodes}/none", f"there is no usage log at {nodes}/none"),
        (f"{one},,{two}", "has nothing before or behind a comma"),
        (f"{one},{nodes}/silent", f"{nodes}/silent/data/usage: nothing is recorded there yet. Leave it out"),
    ):
        result = run("recommend", "--usage", usage, "--out", nodes / "advice")
        assert (result.exit_code, result.stdout) == (2, ""), usage
        assert says in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not (nodes / "advice").exists()


def test_nodes_have_the_names_of_their_directories(nodes: Path) -> None:
    places = ["x/one/data", "y/one/data", "y/two/data", "one,two"]
    for place in places:
        with node(nodes, place.removesuffix("/data")) as router:
            router.queue("jobs").send(b"1")
            take(router.queue("jobs")).ack()
    for given, names in (
        (["x/one", "y/two"], ["one", "two"]),
        (["x/one", "y/one/data"], ["x", "y"]),
        (["x/one", "y/one", "y/two"], ["x/one", "y/one", "y/two"]),
        (["one,two", "x/one"], ["one", "one,two"]),
    ):
        arguments = [argument for name in given for argument in ("--usage", nodes / name)]
        result = run("recommend", *arguments, "--out", nodes / "advice", "--force", "--engine", "local", "--json")
        assert json.loads(result.stdout)["sharing"]["nodes"] == names


def test_parts_of_the_messages_are_told(nodes: Path) -> None:
    for name, sample in (("one", 1.0), ("two", 0.5)):
        with node(nodes, name, sample=sample) as router:
            for _ in range(40):
                router.queue("jobs").send(b"1")
                take(router.queue("jobs")).ack()
    found, result = recommended(nodes, f"{nodes}/one,{nodes}/two")
    assert [clock["sampled"] for clock in found["sharing"]["clocks"]] == [1.0, 0.5]
    assert "the nodes recorded different parts of their messages" in result.stderr
