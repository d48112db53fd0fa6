"""Maps as users hold them: in every kind of store, in transactions over several, with codecs, and when they move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import DecodeError, Destination, DestinationError, TransactionError
from anabranch.router.offline.repartition import repartition

from ..contract.disk import Parallel, eventually
from ..router.disk import NEVER
from ..taking import take
from .test_hosting import KINDS, config


def test_the_calls_of_a_map(router: anabranch.Router) -> None:
    results = router.map("results")
    assert (results.get("a"), results.get("a", b"none"), results.pop("a"), results.count()) == (None, b"none", None, 0)
    assert list(results.items()) == []
    results.put("a", b"1")
    assert not results.put_if_absent("a", b"2")
    assert results.put_if_absent("b", b"2")
    assert results.compare_and_set("b", b"2", b"3")
    assert not results.compare_and_set("b", b"2", b"4")
    assert (results.increment("n"), results.increment("n", 41)) == (1, 42)
    assert list(results.items()) == [("a", b"1"), ("b", b"3"), ("n", b"42")]
    assert list(results.items("b")) == [("b", b"3")]
    assert results.wait("a", 0) == b"1"
    assert results.wait("z", 0, b"late") == b"late"
    with Parallel(lambda: results.wait("z", None)) as waiting:
        eventually(lambda: sum(store.waiting for store in router.stats().stores.values()) == 1)
        results.put("z", b"last")
        assert waiting.result() == b"last"
    assert (results.pop("z"), results.count()) == (b"last", 3)
    assert router.destinations() == [Destination.map("results")]
    assert router.exists("map://results")
    assert results.delete() == 3
    assert (results.get("a"), router.destinations()) == (None, [])


def test_many_keys_and_ranges_of_them(router: anabranch.Router) -> None:
    plain, results = router.map("results"), router.map("results", codec="json")
    assert (results.get_many(["a"]), list(results.items("", "a", "b")), results.touch("a", 1.0)) == ({}, [], False)
    names = [f"job-{number:03}" for number in range(300)]
    with router.transaction() as tx:
        for name in names:
            tx.put(results, name, [name])
    plain.put("bad", b"{bad")
    assert list(results.get_many([names[299], "none", *names, names[0]]).items())[:2] == [
        (names[299], [names[299]]), (names[0], [names[0]]),
    ]  # fmt: skip
    assert list(results.get_many(iter(names)).values()) == [[name] for name in names]
    assert [key for key, _ in results.items("job-", "job-009", "job-290")] == names[10:290]
    with pytest.raises(DecodeError, match="'bad' in map://results"):
        results.get_many(["bad"])
    with pytest.raises(TypeError, match="several keys, not one str: 'bad'"):
        results.get_many("bad")
    for keys in (["a", ""], ["a", 1]):
        with pytest.raises((TypeError, ValueError), match="key"):
            results.get_many(keys)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="before of a map is a str"):
        next(results.items(before=7))  # type: ignore[arg-type]
    assert results.touch("bad", 1e6) and results.touch("bad")
    plain.put("b", b"[1, 2]")
    assert results.wait("b", 0.01, "over", unless=[1, 2]) == "over"
    with Parallel(lambda: results.wait("b", None, unless=[1, 2])) as waiting:
        eventually(lambda: sum(store.waiting for store in router.stats().stores.values()) == 1)
        plain.put("b", b"[1,  2]")  # the same
        assert waiting.outlives(0.01)
        results.put("b", [1, 3])
        assert waiting.result() == [1, 3]


def test_a_transaction_removes_a_range(router: anabranch.Router) -> None:
    results, other = router.map("results"), router.map("other.results")
    for name in ("a", "b1", "b2", "b3", "c"):
        results.put(name, b"0")
        other.put(name, b"0")
    with router.transaction() as tx:  # over two stores
        tx.put(results, "b4", b"1")
        tx.remove(results, "b1")
        assert (tx.remove_range(results, "b"), tx.remove_range("results", "b")) == (3, 0)
        tx.put(results, "b2", b"2")
        savepoint = tx.savepoint()
        assert tx.remove_range(other) == 5
        savepoint.rollback()
        assert tx.remove_range(other, after="a", before="b3") == 2
        assert tx.remove_range("map://none") == 0
        results.put("b5", b"another's")
        assert results.count() == 6
    assert dict(results.items()) == {"a": b"0", "b2": b"2", "b5": b"another's", "c": b"0"}
    assert list(dict(other.items())) == ["a", "b3", "c"]
    with pytest.raises(ZeroDivisionError), router.transaction() as tx:
        assert tx.remove_range(results) == 4
        raise ZeroDivisionError
    assert results.count() == 4
    with pytest.raises(TypeError, match="prefix of a map is a str"):
        router.transaction().remove_range(results, 1)  # type: ignore[arg-type]


def test_calls_that_do_not_wait(router: anabranch.Router) -> None:
    results = router.map("results")
    puts = [results.put_nowait(str(number), b"%d" % number) for number in range(20)]
    assert [put.result() for put in puts] == [None] * 20
    assert results.put_if_absent_nowait("0", b"1").result() is False
    assert results.compare_and_set_nowait("0", b"0", b"5").result() is True
    assert results.increment_nowait("0", by=2).result() == 7
    assert results.touch_nowait("0", 1e6).result() is True
    assert results.get_many_nowait(["0", "none"]).result() == {"0": b"7"}
    assert (results.pop_nowait("0").result(), results.get_nowait("0", b"none").result()) == (b"7", b"none")
    with pytest.raises(ValueError, match="1 to 480"):
        results.put_nowait("", b"").result()


def test_a_message_and_its_result_change_together(router: anabranch.Router) -> None:
    jobs, results = router.queue("other.jobs"), router.map("results")
    assert results.put_if_absent("job-2", b"waits")
    jobs.send(b"job-1")
    message = take(jobs)
    with pytest.raises(ZeroDivisionError), router.transaction() as tx:
        tx.ack(message)
        tx.put(results, "job-1", b"half")
        raise ZeroDivisionError
    assert results.get("job-1") is None
    message = take(jobs)
    with router.transaction() as tx:  # over two stores
        tx.ack(message)
        tx.put(results, "job-1", b"done")
        tx.remove("results", "job-2")
        tx.put(Destination.map("counts"), "done", b"1", ttl=3600)
        savepoint = tx.savepoint()
        tx.put(results, "job-1", b"never")
        savepoint.rollback()
        assert results.get("job-1") is None
        assert len(tx.commit()) == 3
    assert dict(results.items()) == {"job-1": b"done"}
    assert router.map("counts").get("done") == b"1"
    assert jobs.depth() == 0


def test_a_time_to_live(memory: anabranch.Router) -> None:
    results = memory.map("results")
    results.put("a", b"1", ttl=0.001)
    eventually(lambda: results.get("a") is None)
    assert results.put_if_absent("a", b"2", ttl=1e6)
    for ttl, error in ((0, ValueError), (-1, ValueError), (float("nan"), ValueError), ("1", TypeError)):
        with pytest.raises(error, match=r"ttl is a number of seconds"):
            results.put("a", b"3", ttl=ttl)  # type: ignore[arg-type]
        with pytest.raises(error, match=r"ttl is a number of seconds"):
            memory.transaction().put(results, "a", b"3", ttl=ttl)  # type: ignore[arg-type]
    eventually(lambda: memory.sweep() == 0 and results.count() == 1)


def test_values_of_a_codec(memory: anabranch.Router) -> None:
    plain, results = memory.map("results"), memory.map("results", codec="json")
    results.put("a", {"n": [1, None]})
    assert results.get("a") == {"n": [1, None]}
    assert plain.get("a") == b'{"n":[1,null]}'
    assert results.compare_and_set("a", {"n": [1, None]}, 7)
    assert results.increment("a") == 8
    with memory.transaction() as tx:
        tx.put(results, "b", "text")
    assert dict(results.items()) == {"a": 8, "b": "text"}
    with pytest.raises(TypeError, match=r"a value for map://results cannot be encoded as application/json"):
        results.put("c", object())
    plain.put("d", b"{")
    with pytest.raises(DecodeError, match=r"'d' in map://results does not decode as application/json.*b'\{'") as caught:
        results.get("d")
    assert caught.value.message is None
    assert plain.get("d") == b"{"
    with pytest.raises(ValueError, match=r"count in a map without a codec, or with `json`"):
        memory.map("n", codec="msgpack").increment("a")
    with pytest.raises(TypeError, match=r"incremented by an int"):
        plain.increment("a", 1.5)  # type: ignore[arg-type]


def test_a_value_is_what_it_is_whatever_bytes_it_was_made_of(router: anabranch.Router) -> None:
    """Else who has read one and changes it would never come to an end."""
    plain, coded = router.map("m"), router.map("m", codec="json")
    assert not coded.compare_and_set("a", {"n": 1}, {"n": 2})
    plain.put("a", b'{ "n": 1, "m": 2 }')
    assert not coded.compare_and_set("a", {"n": 1}, {"n": 2})
    assert coded.compare_and_set("a", {"m": 2, "n": 1}, {"n": 3})
    assert plain.get("a") == b'{"n":3}'
    assert coded.compare_and_set("a", {"n": 3}, None)
    assert not coded.compare_and_set("a", {"n": 3}, 4)
    assert coded.compare_and_set("a", None, [5])
    plain.put("bad", b"{bad")
    assert not coded.compare_and_set("bad", 1, 2)
    assert plain.get("bad") == b"{bad"
    pickled, strings = router.map("p", codec="pickle"), {chr(97 + n) * 3 for n in range(20)}
    strings.discard("aaa")
    pickled.put("a", strings)
    assert pickled.compare_and_set("a", pickled.get("a"), set())
    with pytest.raises(ValueError, match="1 to 480 are allowed"):
        router.map("never", codec="json").compare_and_set("", 1, 2)


def test_one_of_many_changes_a_value(memory: anabranch.Router) -> None:
    numbers: Any = memory.map("m", codec="json")
    numbers.put("n", {"n": 0})

    def work() -> None:
        for _ in range(50):
            while not numbers.compare_and_set("n", there := numbers.get("n"), {"n": there["n"] + 1}):
                pass

    with Parallel(work), Parallel(work):
        pass
    assert numbers.get("n") == {"n": 100}


def test_what_does_not_decode_is_not_taken_away(router: anabranch.Router) -> None:
    plain, coded = router.map("m"), router.map("m", codec="json")
    plain.put("bad", b"{bad")
    plain.put("good", b"[1]")
    with pytest.raises(DecodeError, match="the value of 'bad' in map://m does not decode"):
        coded.pop("bad")
    assert plain.get("bad") == b"{bad"
    assert (coded.pop("good"), coded.pop("good"), coded.pop("good", 7), coded.count()) == ([1], None, 7, 1)
    popped: list[Any] = []
    coded.put("one", "one")
    with Parallel(lambda: popped.append(coded.pop("one"))), Parallel(lambda: popped.append(coded.pop("one"))):
        pass
    assert sorted(map(str, popped)) == ["None", "one"]


def test_nothing_is_sent_to_a_map_or_received_from_it(memory: anabranch.Router) -> None:
    for call in (
        lambda: memory.send("map://m", b"x"),
        lambda: memory.send("queue://q,map://m", b"x"),
        lambda: memory.send(Destination.map("m"), b"x"),
        lambda: memory.queue("map://m"),
        lambda: memory.topic(Destination.map("m")),
        lambda: memory.map("queue://m"),
        lambda: memory.transaction().put("topic://m", "a", b"1"),
    ):
        with pytest.raises(DestinationError, match=r"is a (map|queue|topic)"):
            call()
    assert memory.destinations() == []


def test_a_transaction_has_its_limits(tmp_path: Path) -> None:
    limits = anabranch.TransactionOptions(max_operations=2, sync=NEVER)
    options = anabranch.MemoryOptions()
    stores = [anabranch.StoreConfig("all", [">"], memory=options)]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores, transactions=limits)) as router:
        tx = router.transaction()
        tx.put("m", "a", b"1")
        tx.remove("m", "b")
        with pytest.raises(TransactionError, match="max_operations"):
            tx.put("m", "c", b"1")
        with pytest.raises(TransactionError, match="would hold 3 operations"):
            tx.remove_range("m")  # what it puts itself
        tx.commit()
        assert dict(router.map("m").items()) == {"a": b"1"}


@pytest.mark.parametrize("kind", ["journal", "sql"])
def test_patterns_say_where_it_lives_and_it_is_there_again(tmp_path: Path, kind: str) -> None:
    """In a store of its own, which is opened and closed as it is used."""
    options: Any = KINDS[kind]
    stores = [
        anabranch.StoreConfig("maps", ["map://jobs.>"], per_destination=True, **{kind: options}),
        anabranch.StoreConfig("all", [">"], memory=anabranch.MemoryOptions()),
    ]
    configured = anabranch.Config(tmp_path / "data", stores, transactions=anabranch.TransactionOptions(sync=NEVER))
    with anabranch.open(configured) as router:
        for name in ("jobs.a", "jobs.b", "other"):
            router.map(name).put("key", name.encode())
        router.queue("jobs.a").send(b"a queue of the same name")
        assert sorted(router.stats().stores) == ["all", "maps:map://jobs.a", "maps:map://jobs.b"]
    with anabranch.open(configured) as router:
        assert [router.map(name).get("key") for name in ("jobs.a", "jobs.b", "other")] == [b"jobs.a", b"jobs.b", None]


def test_keys_are_walked_while_their_store_closes_for_being_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with anabranch.open(config(tmp_path / "data", "journal")) as router:
        names = [f"{number:03}" for number in range(150)]
        results = router.map("results")
        with router.transaction() as tx:
            for name in names:
                tx.put(results, name, b"")
        found = []
        for name, value in results.items():
            assert value == b""
            found.append(name)
            if name in ("010", "100"):
                router._registry.store_for(results.destination).close()
        assert found == names


@pytest.mark.parametrize("live", [True, False], ids=["live", "closed"])
@pytest.mark.parametrize("kinds", [("journal", "sql"), ("sql", "journal")], ids="-".join)
def test_a_map_moves_with_all_that_it_has(tmp_path: Path, kinds: tuple[str, str], live: bool) -> None:
    """Also what is prepared for it."""
    xid = anabranch.Xid(1, "g", "b")
    stores = [
        anabranch.StoreConfig("all", [">"], **{kinds[0]: KINDS[kinds[0]]}),
        anabranch.StoreConfig("maps", ["map://>"], **{kinds[1]: KINDS[kinds[1]]}),
    ]
    options = anabranch.TransactionOptions(sync=NEVER)
    before = anabranch.Config(tmp_path / "data", stores[:1], transactions=options)
    after = anabranch.Config(tmp_path / "data", stores, transactions=options)
    with anabranch.open(before) as router:
        values = router.map("values")
        for number in range(200):
            values.put(f"{number % 150:03}", b"%d" % number)
        for number in range(0, 150, 3):
            values.pop(f"{number:03}")
        values.put("long", b"lives", ttl=1e6)
        if not live:  # else it would be waited for
            tx = router.transaction(xid)
            tx.put(values, "long", b"prepared")
            tx.remove(values, "001")
            tx.prepare()
        expected = dict(values.items())
        if live:
            done = router.repartition(after)
            assert [str(move.destination) for move in done.moves] == ["map://values"]
            assert dict(values.items()) == expected
            values.put("new", b"there")
    if not live:
        repartition(after)
    with anabranch.open(after) as router:
        values = router.map("values")
        expected |= {"new": b"there"} if live else {}
        assert dict(values.items()) == expected
        if not live:
            router.commit(xid)
            expected["long"] = b"prepared"
            del expected["001"]
        assert dict(values.items()) == expected
        assert values.count() == len(expected)
        assert {store.name: len(store.destinations) for store in router.stats().stores.values()}["maps"] == 1
