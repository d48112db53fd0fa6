"""Limits in the configuration: what is read, and what cannot be meant so."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.policies.config import Config, JournalOptions, MemoryOptions, StoreConfig, dump_yaml, loads
from anabranch.policies.config.limits import LimitOptions
from anabranch.policies.config.when_full import WhenFull
from anabranch.policies.errors import ConfigError
from anabranch.policies.names.pattern import Pattern, may_overlap

BASE = Path("/srv/app")


def problems(*stores: str) -> list[str]:
    """Return what is said of these stores, each with its line."""
    with pytest.raises(ConfigError) as raised:
        loads("directory: d\nstores:\n" + "".join(f"- {store}\n" for store in stores), BASE)
    return [f"{problem.line}: {problem.message}" for problem in raised.value.problems]


def test_limits_are_read_and_written() -> None:
    text = """
directory: d
defaults: {journal: {when_full: block, block_timeout: 5s}}
stores:
- name: a
  match: [">"]
  journal:
    max_messages: 10
    min_free_disk: 1GiB
    nonpersistent_max_messages: 5
    nonpersistent_max_bytes: 1MiB
    nonpersistent_memory: 128KiB
    limits:
    - {match: ["ticks.>", "topic://x"], max_messages: 1000, when_full: drop_old}
    - {match: ["*"], max_bytes: 1MiB, block_timeout: 1s}
"""
    config = loads(text, BASE)
    options = config.stores[0].options
    assert isinstance(options, JournalOptions)
    assert (options.when_full, options.block_timeout, options.min_free_disk) == (WhenFull.BLOCK, 5.0, 1 << 30)
    assert options.limits == (
        LimitOptions(match=("ticks.>", "topic://x"), max_messages=1000, when_full=WhenFull.DROP_OLD),
        LimitOptions(match=("*",), max_bytes=1 << 20, block_timeout=1.0),
    )
    assert loads(dump_yaml(config), BASE) == config


def test_all_that_contradicts_itself_is_told_at_once() -> None:
    assert problems(
        '{name: a, match: ["orders.>"], journal: {when_full: drop_old}}',
        '{name: b, match: [">"], sql: {max_messages: 1, block_timeout: 3s, limits: [{match: [x]}]}}',
        '{name: c, match: ["b.*"], memory: {limits: [{match: [a, b.x], max_bytes: 3}, {match: [b.x], max_bytes: 1}]}}',
        "{name: d, match: [d], memory: {nonpersistent_memory: 1MiB, block_timeout: -1, max_bytes: 1MiB,"
        " when_full: block}}",
    ) == [
        "3: store 'a': journal.when_full: drop_old means nothing without a limit; give max_messages, max_bytes or "
        "min_free_disk, or `limits` of destinations",
        "4: store 'b': sql.block_timeout: means nothing without `when_full: block`; give that too",
        "4: store 'b': sql.limits[0]: limits nothing; give max_messages or max_bytes",
        "5: store 'c': memory.limits[0].match[0]: no destination of this store matches 'a': it takes b.*",
        "5: store 'c': memory.limits[1].match[0]: pattern 'b.x' stands in limit number 1 already; keep one of the two",
        "6: store 'd': memory.block_timeout: expected a duration: seconds or a number with a unit (us ms s m h d), such"
        " as 0.5, 500ms or 2m; found the number -1",
        "6: store 'd': memory.nonpersistent_memory: a memory store keeps all messages alike; give limits of all, and "
        "leave this out",
        "6: store 'd': memory.when_full: block means nothing without a limit; give max_messages, max_stored_bytes or "
        "min_free_disk, or `limits` of destinations",
    ]


def test_objects_are_checked_likewise() -> None:
    with pytest.raises(ConfigError, match=r"journal\.when_full: drop_new means nothing without a limit"):
        Config("d", [StoreConfig("a", [">"], journal=JournalOptions(when_full=WhenFull.DROP_NEW))])
    with pytest.raises(ConfigError, match=r"nonpersistent_max_messages: a memory store"):
        Config("d", [StoreConfig("a", [">"], memory=MemoryOptions(nonpersistent_max_messages=1))])
    Config("d", [StoreConfig("a", [">"], journal=JournalOptions(when_full=WhenFull.DROP_NEW, max_messages=1))])


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("{match: [], max_messages: 1}", "expected at least one pattern"),
        ("{match: [a..], max_messages: 0}", "limits[0].max_messages: "),
        ("{match: ['a.>.b'], max_messages: 1}", "limits[0].match[0]: "),
        ("{match: [a], max_messages: 1, when_full: wait}", "expected 'fail', 'block', 'drop_new' or 'drop_old'"),
        ("{match: [a], max_messages: 1, block_timeout: 3s}", "block_timeout: means nothing without"),
        ("{match: [a], max_mesages: 1}", "did you mean 'max_messages'?"),
        ("{max_messages: 1}", "limits[0].match: is missing"),
    ],
)
def test_what_is_wrong_with_one(limit: str, says: str) -> None:
    assert says in "\n".join(problems(f'{{name: a, match: [">"], journal: {{limits: [{limit}]}}}}'))


def test_the_disk_of_a_server_is_not_watched() -> None:
    text = '{name: a, match: [">"], sql: {url: "sqlite:////x/y.db", min_free_disk: 1GiB}}'
    assert "sql.min_free_disk: the disk of a database is not this store's" in problems(text)[0]


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.*", "*.b", True),
        ("a.b.>", "a.*", True),
        ("a.b", "a.c", False),
        ("a.>", "a", True),
        ("a.>", "a.b.c", True),
        ("a.>", "b.>", False),
        (">", "x.y", True),
        ("a.b?", "a.bc", True),
        ("a.b?", "a.c", False),
        ("queue://a", "topic://a", False),
        ("queue://a", "a", True),
        ("*.x", "a.*", True),
        ("*.x.y", "a.*", False),
    ],
)
def test_which_patterns_have_destinations_in_common(one: str, other: str, overlap: bool) -> None:
    for first, second in ((one, other), (other, one)):
        assert may_overlap(Pattern.parse(first), Pattern.parse(second)) is overlap
