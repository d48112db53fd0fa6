"""Where what the trace did not show goes, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from anabranch import Router, StoreConfig
from anabranch.policies.activemq import write_mkahadb
from anabranch.policies.advisor import Recommendation, RecommendOptions, generate, recommend, render_html, render_text
from anabranch.policies.advisor.search.catch_all import catch_all_store
from anabranch.policies.config import Config, loads
from anabranch.policies.config.durability import Sync
from anabranch.policies.config.options import JournalOptions

from .conftest import SEGMENT_BYTES, alike, shape, store_of

OPTIONS = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")


def written(answer: Recommendation, base: str = ".") -> Config:
    return loads(answer.stores_yaml(), Path(base))


def store_of_unseen(config: Config) -> StoreConfig:
    return store_of(config, "queue://never.seen")


@pytest.mark.parametrize("model", ["anabranch", "kahadb"])
def test_one_store_is_written_as_one(model: str) -> None:
    answer = recommend(alike(), replace(OPTIONS, model=model))  # type: ignore[arg-type]
    (store,) = written(answer).stores
    assert (store.name, store.match) == (answer.recommended.stores[0].name, (">",))
    assert "1 more" not in render_text(answer) + render_html(answer)


def test_a_store_of_its_own_takes_nothing_before_its_first_message(tmp_path: Path) -> None:
    answer = recommend(generate(shape("bursts")), OPTIONS)
    config = written(answer, str(tmp_path))
    assert len(answer.recommended.stores) > 1
    assert store_of_unseen(config).name == "rest"
    for text in (render_text(answer), render_html(answer)):
        assert "And 1 more, rest, for what the trace did not show" in " ".join(text.split())
    with Router(config) as router:
        for store in answer.recommended.stores:
            for name in store.destinations:
                router.queue(name).send(b"x")
        used = {path.name for path in (tmp_path / "data" / "stores").iterdir()}
    assert used >= {store.name for store in answer.recommended.stores}
    assert "rest" not in used


def test_for_activemq_the_largest_store_takes_the_unseen_too(toymaker: pa.Table) -> None:
    answer = recommend(toymaker, replace(OPTIONS, model="kahadb", segment_bytes=512 << 10))
    assert len(answer.recommended.stores) == 2
    config = written(answer)
    assert len(config.stores) == 2
    bytes_of = {one.name: one.bytes for one in answer.destinations}
    largest = max(answer.recommended.stores, key=lambda store: sum(map(bytes_of.__getitem__, store.destinations)))
    assert store_of_unseen(config).name == largest.name
    assert largest.filters == (">",)
    converted = write_mkahadb(config)
    assert not converted.notes
    assert converted.xml.count("<filteredKahaDB") == 2
    peak = answer.recommended.broker_peak
    assert peak is not None
    assert peak.bytes < answer.recommended.peak_bytes + 1.5 * (512 << 10), "no file of an adapter for all others"


def test_where_no_more_stores_are_allowed_none_is_added() -> None:
    best = recommend(generate(shape("bursts")), OPTIONS).recommended
    answer = recommend(generate(shape("bursts")), replace(OPTIONS, stores_max=len(best.stores)))
    assert len(written(answer).stores) <= len(best.stores)


def test_the_unseen_syncs_as_it_was_told_to() -> None:
    for durability, sync in (({">": Sync.NEVER}, Sync.NEVER), ({"q0": Sync.NEVER}, Sync.ALWAYS)):
        options = store_of_unseen(written(recommend(alike(), replace(OPTIONS, durability=durability)))).options
        assert isinstance(options, JournalOptions)
        assert options.sync is sync
    (store,) = written(recommend(alike(), replace(OPTIONS, durability={">": Sync.NEVER}))).stores
    assert store.match == (">",)


def test_a_store_that_syncs_otherwise_does_not_take_it() -> None:
    stores, weights = [["queue://a"], ["queue://b"]], {"queue://a": 9, "queue://b": 1}
    for syncs, taken in (
        ([Sync.ALWAYS, Sync.ALWAYS], 0),
        ([Sync.NEVER, Sync.ALWAYS], 1),
        ([Sync.NEVER, Sync.PERIODIC], None),
    ):
        found = catch_all_store(stores, syncs, weights, model="kahadb", stores_max=None, durability={})
        assert found == taken
