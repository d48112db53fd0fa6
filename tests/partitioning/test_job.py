"""The advisor from end to end, in this process."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch.policies import config
from anabranch.policies.advisor import (
    RecommendOptions,
    UsageEvent,
    check_place,
    from_events,
    generate,
    recommend,
    recommend_best,
    render_text,
    write_trace,
)
from anabranch.policies.advisor.advice.recommendation import store_names
from anabranch.policies.advisor.statistics.operations import Clock
from anabranch.policies.advisor.statistics.sizes import Model
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import ConfigError, TraceError
from anabranch.policies.text import human_bytes

from .conftest import SEGMENT_BYTES, alike, in_force, shape, store_of, written

OPTIONS = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")


@pytest.mark.parametrize("clock", ["ts", "seq"])
def test_the_toy_maker_as_activemq_keeps_it(toymaker: pa.Table, clock: str) -> None:
    """The split that the real broker was measured with: 6 files, 3.1 MB, or one that costs no more."""
    options = RecommendOptions(
        model="kahadb",
        segment_bytes=512 << 10,
        clock=clock,  # type: ignore[arg-type]
        engine="local",
        current=in_force({"custom": ["orders.custom"], "dlq": ["dlq"], "rest": [">"]}),
    )
    answer = recommend(toymaker, options)
    together, split = answer.candidate("all-together"), answer.candidate("current")
    assert 23.1e6 * 0.9 <= together.peak_bytes <= 24.1e6 * 1.1
    assert split.peak_bytes == pytest.approx(3.1e6, rel=0.1)
    assert len(split.stores) == 3
    for candidate, least, most in ((together, 19.1e6, 24.1e6), (split, 6 << 19, 6 << 19)):  # as measured
        assert candidate.broker_peak is not None
        assert candidate.broker_peak.low_bytes <= least <= most <= candidate.broker_peak.high_bytes
    best = answer.recommended
    assert best.cost <= split.cost
    assert best.peak_bytes <= 0.15 * together.peak_bytes
    assert best.spanning_transactions == 0
    short = {"short-trace": 7} if clock == "ts" else {}
    assert {f.code: f.count for f in answer.findings} == {"pending-sends": 61, **short}


def test_the_toy_maker_in_our_own_store(toymaker: pa.Table) -> None:
    answer = recommend(toymaker, RecommendOptions(segment_bytes=512 << 10, clock="seq", engine="local"))
    assert answer.recommended.broker_peak is None
    together = answer.candidate("all-together")
    assert answer.recommended.copied_bytes < 0.5 * together.copied_bytes
    assert answer.recommended.cost < 0.8 * together.cost
    assert answer.recommended.spanning_transactions == 0


def test_json_has_the_agreed_shape(toymaker: pa.Table) -> None:
    answer = recommend(toymaker, RecommendOptions(segment_bytes=512 << 10, engine="local"))
    document = json.loads(json.dumps(answer.to_json()))
    assert set(document) == {"version", "recommended", "candidates", "destinations", "findings", "parameters"}
    names = [candidate["name"] for candidate in document["candidates"]]
    assert {"all-together", "all-separate", "recommended"} <= set(names)
    assert len(names) == len(set(names))
    for candidate in document["candidates"]:
        figures = {"mean_bytes", "peak_bytes", "gib_hours", "spanning_transactions", "cost", "broker_peak"}
        figures |= {"written_bytes", "copied_bytes", "most_copied"}
        assert set(candidate) == {"name", "stores", "segment_bytes", "possible"} | figures
        keys = {"name", "destinations", "filters", "sync", "gib_hours", "peak_bytes"}
        keys |= {"written_bytes", "copied_bytes", "saves_mean_bytes", "saves_peak_bytes", "saves_copied_bytes"}
        assert all(set(store) == keys for store in candidate["stores"])
        destinations = sorted(name for store in candidate["stores"] for name in store["destinations"])
        assert destinations == sorted(total for total in document["candidates"][1]["stores"][0]["destinations"])
    assert document["recommended"] == document["candidates"][0]


def test_files_are_written_and_others_left_alone(tmp_path: Path) -> None:
    table = generate(shape("bursts"))
    write_trace(table, tmp_path / "trace.parquet")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    answer = recommend(tmp_path / "trace.parquet", OPTIONS)
    paths = written(answer, out)
    paths[1].write_text("edited")
    for place in (out, str(out)):
        with pytest.raises(ConfigError, match=r"recommendation\.json exists already and was left as it is; give"):
            answer.write(place)
        with pytest.raises(ConfigError, match="exists already"):
            check_place(place)
    assert paths[1].read_text() == "edited"
    check_place(out, overwrite=True)
    assert answer.write(out, overwrite=True) == paths
    assert [path.name for path in paths] == ["recommendation.json", "stores.yaml", "summary.txt", "report.html"]
    assert sorted(path.name for path in out.iterdir()) == sorted(["mine.txt", *(path.name for path in paths)])
    assert json.loads(paths[0].read_text()) == answer.to_json()
    assert paths[2].read_text() == render_text(answer, out=str(out))
    opened = config.load(paths[1])
    for store in answer.recommended.stores:
        assert {store_of(opened, name).name for name in store.destinations} == {store.name}
    assert store_of(opened, "queue://never.seen").name == "rest"


def test_the_text_says_what_matters(toymaker: pa.Table) -> None:
    text = render_text(recommend(toymaker, RecommendOptions(model="kahadb", segment_bytes=512 << 10, engine="local")))
    first, _, rest = text.partition("\n\n")
    first = first.replace("\n", " ")
    assert first.startswith("Put these 6 destinations into 2 stores")
    assert re.search(r": 8\d % less disk at the peak \([\d.]+ MB, not [\d.]+ MB\) than in one store\.$", first)
    assert rest.startswith("  anabranch mkahadb --from-config stores.yaml\n")
    for piece in ("spanning tx", "queue://orders.custom", "61 sends", "all-separate"):
        assert piece in rest


def test_what_compaction_copies_is_said(toymaker: pa.Table) -> None:
    """In one store compaction makes up for what a division would save, by copying."""
    options = RecommendOptions(segment_bytes=512 << 10, clock="seq", engine="local")
    answer = recommend(toymaker, options)
    without = recommend(toymaker, replace(options, compact_live_percent=0)).candidate("all-together")
    together, best = answer.candidate("all-together"), answer.recommended
    assert together.peak_bytes < 0.5 * without.peak_bytes
    assert best.copied_bytes < together.copied_bytes
    text = " ".join(render_text(answer, 120).split())
    assert f"all-together 1 {human_bytes(together.mean_bytes)} {human_bytes(together.peak_bytes)}" in text
    assert f"{human_bytes(together.copied_bytes)} 0 " in text
    assert "copied: by compaction" in text
    assert answer.to_json()["recommended"]["copied_bytes"] == best.copied_bytes
    assert "copied" not in render_text(recommend(toymaker, replace(options, model="kahadb")))
    assert without.copied_bytes == 0


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
@pytest.mark.parametrize("clock", ["ts", "seq"])
def test_the_text_fits_a_screen(toymaker: pa.Table, clock: Clock, model: Model) -> None:
    options = RecommendOptions(segment_bytes=512 << 10, engine="local", clock=clock, model=model)
    lines = render_text(recommend(toymaker, options), out="advice").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 23


def test_much_is_told_of_in_a_screen(toymaker: pa.Table) -> None:
    """Twenty stores of long names, and findings of every kind."""
    answer = recommend(toymaker, RecommendOptions(segment_bytes=512 << 10, engine="local"))
    store = answer.recommended.stores[0]
    stores = tuple(
        replace(store, name=f"store.{n}", destinations=tuple(f"queue://plant.line.{n}.{i}" for i in range(30)))
        for n in range(20)
    )
    many = replace(answer, recommended=replace(answer.recommended, stores=stores), findings=answer.findings[:1] * 9)
    lines = render_text(many).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 80
    assert "  and 14 more, in stores.yaml" in lines
    assert "And 6 more, in report.html." in lines


def test_nothing_to_gain_is_said() -> None:
    answer = recommend(alike(), OPTIONS)
    assert len(answer.recommended.stores) == 1
    assert render_text(answer).startswith("Keep one store: the journals take ")
    assert [finding.code for finding in answer.findings] == ["short-trace"]
    assert "400 s is all that the trace covers; record some days" in render_text(answer)


def test_the_same_trace_gives_the_same_answer() -> None:
    table = generate(shape("transactions"))
    assert recommend(table, OPTIONS).to_json() == recommend(table, OPTIONS).to_json()


def test_durability_pins_and_most_stores() -> None:
    table = generate(shape("bursts"))
    options = RecommendOptions(
        segment_bytes=SEGMENT_BYTES,
        engine="local",
        durability={"machine.>": Sync.NEVER},
        pinned=(("plan.a", "desk"),),
        stores_max=3,
    )
    best = recommend(table, options).recommended
    assert len(best.stores) <= 3
    home = {name: store for store in best.stores for name in store.destinations}
    assert {store.sync for store in best.stores} == {"always", "never"}
    for name, store in home.items():
        assert store.sync == ("never" if "machine" in name else "always")
    assert home["queue://plan.a"] is home["queue://desk"]


def test_a_cap_on_the_peak(toymaker: pa.Table) -> None:
    # Stores are so dear here that all in one costs least, unless the peak is capped.
    dear = RecommendOptions(model="kahadb", segment_bytes=512 << 10, engine="local", overhead_segments=40)
    free = recommend(toymaker, dear).recommended
    assert len(free.stores) == 1
    cap = 8 << 20
    capped = recommend(toymaker, replace(dear, peak_bytes_max=cap))
    assert capped.recommended.peak_bytes <= cap
    assert capped.recommended.cost > free.cost
    hopeless = recommend(toymaker, replace(dear, peak_bytes_max=1))
    assert {finding.code for finding in hopeless.findings} == {"pending-sends", "peak-cap", "short-trace"}
    assert capped.cap_kept and not hopeless.cap_kept
    assert render_text(hopeless).startswith("The cap on the peak, 1 byte, cannot be kept: the lowest peak found is")
    assert hopeless.recommended.peak_bytes <= capped.recommended.peak_bytes


def test_a_cap_is_held_against_the_peak_that_is_shown(toymaker: pa.Table) -> None:
    """Under ActiveMQ's model that is the broker's, which has more files than the retention model."""
    options = RecommendOptions(model="kahadb", segment_bytes=512 << 10, clock="seq", engine="local", stores_max=1)
    free = recommend(toymaker, options).recommended
    assert free.broker_peak is not None and free.peak_bytes < free.broker_peak.bytes
    kept = recommend(toymaker, replace(options, peak_bytes_max=free.broker_peak.bytes))
    missed = recommend(toymaker, replace(options, peak_bytes_max=free.broker_peak.bytes - 1))
    assert kept.cap_kept and not missed.cap_kept
    assert f"the lowest peak found is {human_bytes(free.broker_peak.bytes)}" in render_text(missed)


def test_of_several_sizes_above_the_cap_the_lowest_peak_is_taken(toymaker: pa.Table) -> None:
    options = RecommendOptions(segment_bytes=512 << 10, engine="local", peak_bytes_max=1, stores_max=1)
    for sizes in ([512 << 10, 16 << 20], [16 << 20, 512 << 10]):
        answer = recommend_best(toymaker, options, sizes)
        tried = answer.parameters["segment_sizes"]
        assert not answer.cap_kept
        assert answer.recommended.peak_bytes == min(one["peak_bytes"] for one in tried)
        assert answer.recommended.cost > min(one["cost"] for one in tried), "the costs say the other"


def test_a_message_larger_than_a_journal_file_is_told() -> None:
    sent = [UsageEvent(i, float(i), "send", "q", str(i), 0, None, 1, None, 1000 if i else 1 << 20) for i in range(3)]
    for size, many in ((512 << 10, 1), (2 << 20, 0)):
        answer = recommend(from_events(sent), replace(OPTIONS, segment_bytes=size))
        found = [finding for finding in answer.findings if finding.code == "large-operation"]
        assert len(found) == many
        for one in found:
            assert one.count > 1 << 20
            assert "that of seq 0: more than a journal file of 512KiB" in one.message


def test_options_that_make_no_sense_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        RecommendOptions(segment_bytes=0, sync_rate=-1, model="artemis", stores_max=0).check()  # type: ignore[arg-type]
    text = str(caught.value)
    for piece in ("segment_bytes (--segment-size)", "sync_rate (--sync-rate)", "'artemis'", "(--stores-max)"):
        assert piece in text
    with pytest.raises(ConfigError, match=r"disk_gib \(--disk-gib\) is inf; it must be above 0, and finite"):
        RecommendOptions(disk_gib=float("inf")).check()
    with pytest.raises(ConfigError, match=r"is 4096: expected at least 64KiB and at most 1GiB"):
        RecommendOptions(segment_bytes=4096).check()
    with pytest.raises(ConfigError, match=r"routes queue://slow\.a nowhere"):
        current = in_force({"fast": ["fast.>"]})
        recommend(generate(shape("slow-among-fast")), replace(OPTIONS, current=current))


def test_more_journal_files_than_can_be_simulated_are_refused() -> None:
    sent = [UsageEvent(i, float(i), "send", "q", str(i), 0, None, 1, None, 1 << 38) for i in range(3)]
    with pytest.raises(TraceError) as caught:
        recommend(from_events(sent), OPTIONS)
    assert str(caught.value) == (
        "the trace: 824.6 GB in all fill 13,421,773 journal files of 65536 bytes, and at most 10,000,000 can be "
        "simulated; the largest operation is that of seq 0, of 274877907034 bytes; if the sizes are right, choose a "
        "larger --segment-size"
    )


def test_progress_is_told_by_stage() -> None:
    told: list[str] = []
    recommend(generate(shape("topics")), OPTIONS, lambda stage, share: told.append(stage))
    assert list(dict.fromkeys(told)) == ["read", "summarise", "search", "confirm", "picture"]


def test_store_names_are_safe_and_differ() -> None:
    stores = [["queue://a.b.x", "queue://a.b.y"], ["queue://A.B"], ["queue://rest"], ["topic://ü/é"], ["queue://..."]]
    weights = {name: 1 for names in stores for name in names}
    assert store_names(stores, weights) == ["a.b", "A.B-2", "rest-2", "store", "store-2"]
