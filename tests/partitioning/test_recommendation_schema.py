"""recommendation.json says what its published schema says, and the figures of each destination."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from anabranch.policies.advisor import RecommendOptions, UsageEvent, from_events, generate, recommend, recommend_best
from anabranch.policies.config.durability import Sync

from .conftest import SEGMENT_BYTES, in_force, run, shape


def printed() -> Any:
    result = run("schema", "recommendation")
    assert (result.exit_code, result.stderr) == (0, "")
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["bursts", "topics", "never-acked"])
def test_a_recommendation_is_as_the_schema_says(name: str) -> None:
    schema = printed()
    Draft202012Validator.check_schema(schema)
    options = RecommendOptions(
        segment_bytes=SEGMENT_BYTES,
        engine="local",
        stores_max=4,
        peak_bytes_max=1,
        durability={"queue://machine.>": Sync.NEVER},
        pinned=(("plan.a", "desk"),),
        current=in_force({"all": [">"]}),
    )
    sizes = [SEGMENT_BYTES, 2 * SEGMENT_BYTES]
    answer = json.loads(json.dumps(recommend_best(generate(shape(name)), options, sizes).to_json(), allow_nan=False))
    validator = Draft202012Validator(schema)
    validator.validate(answer)
    assert answer["version"] == 2
    assert set(answer["parameters"]) == set(schema["$defs"]["parameters"]["properties"])
    assert [tried["segment_bytes"] for tried in answer["parameters"]["segment_sizes"]] == sizes
    if name != "bursts":  # their keys are the same
        return
    for part in ("candidate", "store", "destination", "tried"):
        broken = copy.deepcopy(answer)
        found = {
            "candidate": broken["candidates"][0],
            "store": broken["candidates"][0]["stores"][0],
            "destination": broken["destinations"][0],
            "tried": broken["parameters"]["segment_sizes"][1],
        }[part]
        for key in list(found):
            kept = found.pop(key)
            assert not validator.is_valid(broken), f"{part} without {key}"
            found[key] = kept


def test_what_is_said_of_each_destination() -> None:
    events, seq = [], 0
    for number in range(100):
        for op, ts in (("send", 10.0 * number), ("ack", 10.0 * number + (1.0 if number < 90 else 5.0))):
            size = 500 if op == "send" else None
            events.append(UsageEvent(seq, ts, op, "queue://a", str(number), 50, None, 1, None, size))
            seq += 1
    events.append(UsageEvent(seq, 1000.0, "send", "queue://b", "open", 50, None, 1, None, 500))
    options = RecommendOptions(segment_bytes=SEGMENT_BYTES, engine="local")
    a, b = recommend(from_events(events), options).destinations
    assert (a.name, a.messages, a.acks, a.pending) == ("queue://a", 100, 100, 0)
    assert (a.retention_p50_seconds, a.retention_p95_seconds) == (1.0, 5.0)
    assert a.bytes > 50_000
    assert (b.name, b.messages, b.acks, b.pending) == ("queue://b", 1, 0, 1)
    assert (b.retention_p50_seconds, b.retention_p95_seconds) == (None, None)
