"""Workloads: what the description says is what the trace shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from anabranch.policies.advisor import Workload, generate
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.workload import generator as generator_module
from anabranch.policies.errors import ConfigError

from .conftest import EXAMPLES


def frame(text: str) -> pd.DataFrame:
    workload = Workload.parse(text)
    found: pd.DataFrame = generate(workload).to_pandas()
    found["ts"] -= workload.start_seconds
    return found


def lags(rows: pd.DataFrame) -> pd.Series:
    sends, acks = rows[rows.op == "send"], rows[rows.op == "ack"]
    both = sends.merge(acks, on=["destination", "message_id"], suffixes=("", "_ack"))
    return both["ts_ack"] - both["ts"]


ONE = "duration: 1h\nseed: {seed}\ndestinations: [{{name: q, size: {size}, arrival: {arrival}, consumer: {consumer}}}]"


def one(arrival: str, consumer: str = "{lag: 1s}", size: str = "100", seed: int = 1) -> pd.DataFrame:
    return frame(ONE.format(arrival=arrival, consumer=consumer, size=size, seed=seed))


def test_rates() -> None:
    sends = one("{rate: 90/h}").query("op == 'send'")
    assert len(sends) == 90
    assert np.diff(sends.ts) == pytest.approx(40.0)
    assert one("{poisson: 2/s}").query("op == 'send'").shape[0] == pytest.approx(7200, rel=0.05)
    bursts = one("{burst: {every: 20m, count: 5, spacing: 1s, offset: 1m}}").query("op == 'send'")
    assert bursts.ts.tolist() == pytest.approx([60 + 1200 * j + i for j in range(3) for i in range(5)])


def test_diurnal_follows_the_clock() -> None:
    arrival = "{diurnal: {mean: 0.2, amplitude: 1, peak: 12h}}"
    text = f"duration: 48h\nstart: 2026-01-05T00:00:00\ndestinations: [{{name: q, size: 1, arrival: {arrival}}}]"
    hours = (frame(text).query("op == 'send'").ts % 86400) // 3600
    assert hours.between(11, 12).sum() > 20 * hours.isin([0, 23]).sum()
    assert len(hours) == pytest.approx(0.2 * 48 * 3600, rel=0.05)


def test_consumers() -> None:
    assert lags(one("{rate: 1}", "{lag: 30s}")).tolist() == pytest.approx([30.0] * 3570)
    assert lags(one("{rate: 1}", "{lag: {min: 10s, max: 20s}}")).between(10, 20).all()
    assert lags(one("{poisson: 5}", "{lag: {mean: 10}}")).mean() == pytest.approx(10, rel=0.05)
    batched = one("{rate: 1}", "{lag: 1s, batch: 10m}").query("op == 'ack'")
    assert set(batched.ts.round(3)) == {600.0 * i for i in range(1, 6)}
    offline = one("{rate: 1}", "{lag: 1s, offline: [{from: 5m, to: 10m, every: 20m}]}").query("op == 'ack'").ts.round(3)
    assert not ((offline % 1200 >= 300) & (offline % 1200 < 600)).any()
    assert (offline == 600).sum() == 301
    assert len(one("{rate: 1}", "{never: 1}").query("op == 'ack'")) == 0
    kept = one("{rate: 10}", "{lag: 1ms, never: 0.25}").query("op == 'ack'").shape[0]
    assert kept == pytest.approx(0.75 * 36000, rel=0.03)


def test_sizes_are_of_the_body() -> None:
    rows = one("{rate: 1}", size="{min: 1KiB, max: 2KiB}").query("op == 'send'")
    assert rows.body_size.between(1024, 2048).all()
    assert (rows["size"] == rows.body_size + 64).all()


def test_topics_need_an_ack_of_each_subscription() -> None:
    rows = frame(
        "duration: 10m\ndestinations:\n"
        "  - {name: topic://t, subscriptions: 3, size: 1, arrival: {rate: 1}, consumer: {lag: 5s}}"
    )
    assert (rows.query("op == 'send'").acks_needed == 3).all()
    assert rows.query("op == 'ack'").groupby("message_id").subscription.nunique().eq(3).all()


def test_transactions_stand_side_by_side() -> None:
    workload = Workload.load(EXAMPLES / "toymaker_workload.yaml")
    rows = generate(workload).to_pandas()
    inside = rows[rows.tx.notna()]
    assert inside.groupby("tx").seq.agg(lambda s: s.max() - s.min()).eq(1).all()
    assert set(inside.groupby("tx").destination.agg(" ".join)) == {"queue://orders.standard queue://audit"}
    assert inside.tx.nunique() == 5400
    assert len(rows) == pytest.approx(46771, rel=0.01)


def test_a_trace_is_in_order_and_its_acks_follow_their_sends() -> None:
    table = generate(Workload.load(EXAMPLES / "toymaker_workload.yaml"))
    assert table.column("seq").to_pylist() == list(range(table.num_rows))
    codes = {finding.code for finding in build(table).findings}
    assert codes == {"pending-sends"}


def test_same_seed_same_trace_however_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ONE.format(arrival="{poisson: 1}", consumer="{lag: {mean: 9}}", size="{mean: 100}", seed=4)
    assert generate(Workload.parse(text)).equals(generate(Workload.parse(text)))
    assert not generate(Workload.parse(text)).equals(generate(Workload.parse(text.replace("seed: 4", "seed: 5"))))
    # Evenly spaced arrivals and bursts do not depend on the chunks at all.
    for arrival in ("{rate: 0.7}", "{burst: {every: 7m, count: 30, spacing: 2s}}"):
        fixed = Workload.parse(ONE.format(arrival=arrival, consumer="{lag: 9s}", size="100", seed=4))
        whole = generate(fixed).column("ts")
        with monkeypatch.context() as patch:
            patch.setattr(generator_module, "CHUNK_SENDS", 100)
            assert generator_module.chunk_count(fixed) > 1
            assert generate(fixed).column("ts").to_pylist() == pytest.approx(whole.to_pylist())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("duration: 1h", "destinations: Field required"),
        ("duration: soon\ndestinations: [{name: q, size: 1, arrival: {rate: 1}}]", "duration: expected a duration"),
        ("duration: 1h\ndestinations: [{name: q, size: 1}]", "queue://q has no arrival"),
        ("duration: 1h\ndestinations: [{name: q, size: 1, arrival: {}}]", "exactly one of rate, poisson, burst"),
        ("duration: 1h\ndestinations: [{name: q, size: 1, arrival: {rate: often}}]", "expected a rate"),
        ("duration: 1h\ndestinations: [{name: q, size: 1, arrival: {rate: 0}}]", "greater than 0"),
        ("duration: 1h\ndestinations: [{name: q, size: {min: 2}, arrival: {rate: 1}}]", "min and max, or mean"),
        ("duration: 1h\ndestinations: [{name: q, size: {min: 2, max: 1}, arrival: {rate: 1}}]", "min 2.0 is above max"),
        ("duration: 1h\ndestinations: [{name: q, size: 1, arival: {rate: 1}}]", "arival: Extra inputs"),
        ("duration: 1h\ndestinations: [{name: q, size: 1, subscriptions: 2, arrival: {rate: 1}}]", "only a topic"),
        ("duration: 1h\ndestinations: [{name: ftp://q, size: 1, arrival: {rate: 1}}]", "unknown scheme"),
        (
            "duration: 1h\ndestinations: [{name: q, size: 1, arrival: {burst: {every: 1s, count: 9, spacing: 1s}}}]",
            "do not fit",
        ),
        (
            "duration: 1h\ndestinations: [{name: q, size: 1, arrival: {rate: 1}}]\n"
            "transactions: [{name: t, sends: [p], arrival: {rate: 1}}]",
            "sends to queue://p, which is not described",
        ),
        ("duration: [", "line 1"),
        (
            "duration: 1h\ndestinations: [{name: q, size: 1,\n  arrival: {rate: .inf}}]",
            "line 3: destinations.0.arrival.rate: expected a rate: a number a second, or a count by a time such as "
            "2/s, 225/h or 5400/24h; found the number inf",
        ),
        ("duration: .inf\ndestinations: [{name: q, size: 1, arrival: {rate: 1}}]", "line 1: duration: expected a dur"),
        (
            "duration: 1h\ndestinations: [{name: q, size: 9000000000000000000, arrival: {rate: 1}}]",
            "line 2: destinations.0.size: expected a size of 1099511627776 bytes (1 TiB) at most; found the number",
        ),
        (
            "duration: 1h\ndestinations: [{name: q, size: {mean: 9e18}, arrival: {rate: 1}}]",
            "line 2: destinations.0.size: mean: expected a size: a whole number of bytes or a number with a unit, "
            "such as 65536, 32MiB or 10 MB; found '9e18'",
        ),
        ("duration: 1h\nduration: 2h", "key 'duration' stands here twice"),
    ],
)
def test_mistakes_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload.parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_than_any_memory_holds_is_refused() -> None:
    load = "{name: topic://t, size: 1, arrival: {rate: 1}, subscriptions: 1000000000}"
    with pytest.raises(ConfigError, match="some 3,600,000,003,600 operations, and 1,000,000,000 can be gen"):
        generate(Workload.parse(f"{{duration: 1h, destinations: [{load}]}}"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Workload.load(tmp_path / "none.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8; save the file as UTF-8"):
        Workload.load(tmp_path / "bytes.yaml")
    with pytest.raises(ConfigError, match="the workload s3a://bucket/w"):
        Workload.load("s3a://bucket/w.yaml")
