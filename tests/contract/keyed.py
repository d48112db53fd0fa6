"""The contract of keyed values: maps, alone and in transactions with messages."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Outgoing
from anabranch.adapters.core.record.keys import KEY_BYTES_MAX, put_of, removal_of
from anabranch.policies.errors import ClosedError, DestinationError, MessageTooLargeError, StoreFullError
from anabranch.policies.names.destination import Destination

from .disk import A, Disk, Parallel, assert_whole, bodies, eventually, in_one_store, take
from .expiring import HOUR, Clock, undelivered
from .preparing import prepare

M = Destination.map("m")
N = Destination.map("n")
KEYS = ("a", "b", "ba", "bb", "c", "ä", "\0", "日本", "k" * 480)


def contents(store: Store, destination: Destination = M) -> dict[str, bytes]:
    return dict(store.maps.items(destination))


class KeyedContract:
    def test_a_value_is_there_until_it_is_removed(self, disk: Disk, store: Store, place: str) -> None:
        maps = store.maps
        assert maps.get(M, "a") is None
        maps.put(M, "a", b"1")
        maps.put(M, "b", b"2")
        maps.put(N, "a", b"of another map")
        maps.put(M, "a", b"3")
        assert maps.pop(M, "b") == b"2"
        assert maps.pop(M, "b") is None
        store = disk.later(store, place)
        assert (store.maps.get(M, "a"), store.maps.get(M, "b"), store.maps.get(N, "a")) == (
            b"3",
            None,
            b"of another map",
        )
        assert (store.maps.count(M), store.maps.count(N)) == (1, 1)
        assert_whole(store)
        assert store.maps.pop(M, "a") == b"3"
        assert contents(store) == {}
        assert_whole(store)

    def test_what_depends_on_the_value_before(self, store: Store) -> None:
        maps = store.maps
        assert maps.put_if_absent(M, "a", b"1") is None
        assert maps.put_if_absent(M, "a", b"2") == b"1"
        assert not maps.compare_and_set(M, "a", b"2", b"3")
        assert not maps.compare_and_set(M, "a", None, b"3")
        assert maps.compare_and_set(M, "a", b"1", b"3")
        assert maps.compare_and_set(M, "a", b"3", None)
        assert maps.compare_and_set(M, "a", None, b"4")
        assert maps.compare_and_set(M, "none", None, None)
        assert contents(store) == {"a": b"4"}
        assert [maps.increment(M, "n"), maps.increment(M, "n", 10**30), maps.increment(M, "n", -3)] == [
            1, 10**30 + 1, 10**30 - 2,
        ]  # fmt: skip
        assert maps.get(M, "n") == b"%d" % (10**30 - 2)
        with pytest.raises(ValueError, match=r"'x' in map://m is no whole number .* b'one'; put one first"):
            maps.put(M, "x", b"one")
            maps.increment(M, "x")
        assert_whole(store)

    def test_keys_come_in_order_and_in_pages(self, disk: Disk, store: Store, place: str) -> None:
        names = [f"job-{number:04}" for number in range(150)]
        random.Random(1).shuffle(names)
        store.commit([(M, put_of(name, name.encode())) for name in names], [])
        store.commit([(M, put_of(name, b"other")) for name in KEYS], [])
        store.commit([(M, removal_of(name)) for name in names[:30]], [])
        store = disk.later(store, place)
        there = sorted(names[30:])
        assert list(store.maps.items(M, "job-")) == [(name, name.encode()) for name in there]
        assert list(store.maps.items(M, "job-", after=there[69])) == [(name, name.encode()) for name in there[70:]]
        assert list(store.maps.items(M, "b")) == [("b", b"other"), ("ba", b"other"), ("bb", b"other")]
        assert [name for name, _ in store.maps.items(M)] == sorted([*there, *KEYS], key=str.encode)
        for after, before in (("b", "job-0100"), (there[69], there[72]), ("ba", "ä"), ("c", "b"), (None, "b")):
            inside = [name for name in sorted([*there, *KEYS], key=str.encode)
                if (after is None or name.encode() > after.encode()) and name.encode() < before.encode()]  # fmt: skip
            assert list(store.maps.keys(M, "", after, before)) == inside
            assert [name for name, _ in store.maps.items(M, "", after, before)] == inside
        wanted = [*there[5:100], "none", "a", there[5], names[0]]
        values = {**dict.fromkeys(there, b"other"), **{name: name.encode() for name in there}, "a": b"other"}
        assert list(store.maps.get_many(M, wanted)) == [values.get(name) for name in wanted]
        assert list(store.maps.items(M, "nothing")) == list(store.maps.items(N)) == []

    def test_others_write_while_the_keys_are_walked(self, store: Store) -> None:
        store.commit([(M, put_of(f"{number:03}", b"before")) for number in range(130)], [])
        found = {}
        for name, value in store.maps.items(M):
            found[name] = value
            if name in ("010", "070", "100"):
                puts = [put_of(f"{number:03}", b"after") for number in (0, 63, 64, 100, 129)]
                store.commit([(M, put) for put in (*puts, put_of(f"{name}+", b"new"))], [])
        assert found.keys() >= {f"{number:03}" for number in range(130)}
        assert (found["000"], found["129"]) == (b"before", b"after")

    def test_a_value_whose_time_is_over_is_gone_at_once(self, clock: Clock, disk: Disk, place: str) -> None:
        store = disk.create()
        soon = clock.now + HOUR
        for name in ("a", "b", "c", "d"):
            store.maps.put(M, name, b"1", soon)
        store.maps.put(M, "b", b"2")
        store.maps.put(M, "c", b"3", soon + HOUR)
        store.maps.increment(M, "n", 1, soon)
        assert store.maps.increment(M, "n", 1, soon + HOUR) == 2  # it keeps the time with which it began
        store.send(A, b"message", expires_at_ms=soon)
        clock.offset_ms += HOUR + 1
        store = disk.later(store, place)
        assert contents(store) == {"b": b"2", "c": b"3"}
        assert (store.maps.get(M, "a"), store.maps.pop(M, "a"), store.maps.get(M, "n")) == (None, None, None)
        assert store.maps.put_if_absent(M, "d", b"4") is None
        assert [found.message.body for found in undelivered(store)] == [b"message"]
        assert contents(store) == {"b": b"2", "c": b"3", "d": b"4"}
        assert store.maps.count(M) == 3  # swept
        assert store.maps.increment(M, "n", 5, clock.now + HOUR) == 5
        assert_whole(store)

    def test_touch_gives_a_value_another_time(self, clock: Clock, disk: Disk, place: str) -> None:
        store = disk.create()
        soon, later = clock.now + HOUR, clock.now + 2 * HOUR
        for name in ("longer", "shorter", "as long", "for ever", "anew"):
            store.maps.put(M, name, name.encode(), 0 if name == "shorter" else soon)
        assert store.maps.touch(M, "longer", later) and store.maps.touch(M, "shorter", soon)
        assert store.maps.touch(M, "as long", soon) and store.maps.touch(M, "for ever")
        assert not store.maps.touch(M, "none", later) and not store.maps.touch(N, "longer", later)
        store.maps.touch(M, "anew", later)
        store.maps.put(M, "anew", b"2", soon)  # which begins a new time
        clock.offset_ms += HOUR + 1
        store = disk.later(store, place)
        assert contents(store) == {"longer": b"longer", "for ever": b"for ever"}
        assert list(store.maps.get_many(M, ("anew", "longer", "as long"))) == [None, b"longer", None]
        assert list(store.maps.keys(M)) == ["for ever", "longer"]
        assert not store.maps.touch(M, "shorter", later)  # it is over
        assert undelivered(store) == []
        clock.offset_ms += HOUR
        assert contents(store) == {"for ever": b"for ever"}
        assert undelivered(store) == []
        assert store.maps.count(M) == 1
        assert_whole(store)

    def test_many_that_are_over_go_in_one_sweep(self, clock: Clock, store: Store) -> None:
        store.commit([(M, put_of(str(number), b"1", clock.now + HOUR)) for number in range(250)], [])
        store.maps.put(M, "stays", b"1")
        clock.offset_ms += HOUR + 1
        assert undelivered(store, 100) == []
        assert store.maps.count(M) == 1
        assert_whole(store)

    # In transactions

    def test_a_message_and_its_result_change_together(self, disk: Disk, store: Store, place: str) -> None:
        store.maps.put(M, "old", b"0")
        store.send(A, b"job")
        message = take(store)
        store.claim(message)
        store.commit([(M, put_of("job", b"done")), (M, removal_of("old")), (A, Outgoing(b"next"))], [message])
        store = disk.later(store, place)
        assert contents(store) == {"job": b"done"}
        assert bodies(store) == [b"next"]
        assert_whole(store)

    def test_the_last_of_a_key_counts(self, disk: Disk, store: Store, place: str) -> None:
        store.maps.put(M, "a", b"0")
        store.maps.put(M, "b", b"0")
        store.commit(
            [
                (M, put_of("a", b"1")), (M, put_of("b", b"1")), (M, removal_of("a")), (M, put_of("c", b"1")),
                (M, put_of("c", b"2")), (M, removal_of("b")), (M, put_of("b", b"3")), (M, removal_of("never")),
            ],
            [],
        )  # fmt: skip
        store = disk.later(store, place)
        assert contents(store) == {"b": b"3", "c": b"2"}
        assert store.maps.count(M) == 2
        assert_whole(store)

    @pytest.mark.parametrize("commit", [True, False])
    def test_what_is_prepared_is_seen_at_its_commit(self, disk: Disk, store: Store, place: str, commit: bool) -> None:
        if place == "closed" and disk.volatile:
            return
        maps = store.maps
        maps.put(M, "a", b"0")
        maps.put(M, "b", b"0")
        name = prepare(store, 1, [(M, put_of("a", b"1")), (M, removal_of("b")), (M, put_of("c", b"1"))])
        assert contents(store) == {"a": b"0", "b": b"0"}
        maps.put(M, "a", b"between")  # the commit comes behind it
        maps.pop(M, "b")
        store = disk.later(store, place)
        (store.commit_prepared if commit else store.rollback_prepared)(name).wait()
        assert contents(store) == ({"a": b"1", "c": b"1"} if commit else {"a": b"between"})
        assert_whole(store)

    # Among threads

    def test_no_increment_is_lost(self, store: Store) -> None:
        def work() -> None:
            for _ in range(10):
                store.maps.increment(M, "n")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.maps.get(M, "n") == b"40"

    def test_one_of_many_gets_a_lock(self, store: Store) -> None:
        won: list[int] = []

        def work(number: int) -> None:
            if store.maps.put_if_absent(M, "lock", b"%d" % number) is None:
                won.append(number)
            if store.maps.pop(M, "token") is not None:
                won.append(-1)

        store.maps.put(M, "token", b"")
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won)[0] == -1
        assert len(won) == 2

    def test_a_reader_never_finds_a_key_without_its_value(self, store: Store) -> None:
        store.maps.put(M, "a", b"0")
        ended = threading.Event()
        found: set[bytes | None] = set()

        def read() -> None:
            while not ended.is_set():
                found.add(store.maps.get(M, "a"))
                found.update(value for _, value in store.maps.items(M))

        with Parallel(read):
            for number in range(30):
                store.maps.put(M, "a", b"%d" % number)
            ended.set()
        assert None not in found

    # Waiting

    def test_wait_returns_once_there_is_a_value(self, store: Store) -> None:
        assert store.maps.wait(M, "a", 0) is None
        assert store.maps.wait(M, "a", 0.01) is None
        forever, long = (lambda: store.maps.wait(M, "a", None)), (lambda: store.maps.wait(M, "a", 600))
        with Parallel(forever) as one, Parallel(long) as two:
            eventually(lambda: store.stats().waiting == 2)
            store.maps.put(M, "b", b"another's")
            assert one.outlives(0.01)
            store.commit([(M, put_of("a", b"1"))], [])
            assert (one.result(), two.result()) == (b"1", b"1")
        assert store.maps.wait(M, "a", 0) == b"1"
        assert store.stats().waiting == 0

    def test_wait_returns_once_there_is_another_value(self, store: Store) -> None:
        store.maps.put(M, "a", b"1")
        assert store.maps.wait(M, "a", None, b"0") == b"1"
        assert store.maps.wait(M, "a", 0, b"1") is None
        with Parallel(lambda: store.maps.wait(M, "a", None, b"1")) as waiting:
            for change in (
                lambda: store.maps.put(M, "a", b"1"), lambda: store.maps.touch(M, "a", 1 << 50),
                lambda: store.maps.pop(M, "a"),
            ):  # fmt: skip
                eventually(lambda: store.stats().waiting == 1)
                change()
                assert waiting.outlives(0.01)
            store.maps.put(M, "a", b"2")
            assert waiting.result() == b"2"
        assert store.stats().waiting == 0

    def test_closing_ends_the_wait(self, store: Store) -> None:
        with Parallel(lambda: store.maps.wait(M, "a", None)) as waiting:
            eventually(lambda: store.stats().waiting == 1)
            assert not store.retire()
            store.close()
            with pytest.raises(ClosedError):
                waiting.result()

    def test_who_waits_goes_on_when_the_map_is_deleted(self, store: Store) -> None:
        store.maps.put(M, "other", b"1")
        with Parallel(lambda: store.maps.wait(M, "a", None)) as waiting:
            eventually(lambda: store.stats().waiting == 1)
            store.delete(M)
            store.maps.put(M, "a", b"2")
            assert waiting.result() == b"2"

    # Removing

    def test_delete_and_purge(self, disk: Disk, store: Store, place: str) -> None:
        store.commit([(where, put_of(name, b"1")) for name in KEYS for where in (M, N)], [])
        assert store.delete(M) == store.purge(N) == len(KEYS)
        assert contents(store) == contents(store, N) == {}
        store.maps.put(M, "a", b"2")
        store.maps.put(N, "a", b"2")
        store = disk.later(store, place)
        assert contents(store) == contents(store, N) == {"a": b"2"}
        assert_whole(store)

    # Limits, and what is refused

    def test_a_full_store_takes_what_makes_room(self, disk: Disk) -> None:
        store = disk.create(max_messages=2)
        store.maps.put(M, "a", b"1")
        store.maps.put(M, "b", b"1")
        with pytest.raises(StoreFullError):
            store.maps.put(M, "c", b"1")
        with pytest.raises(StoreFullError):
            store.maps.put_if_absent(M, "c", b"1")
        with pytest.raises(StoreFullError):
            store.maps.touch(M, "a", 1 << 50)
        store.commit([(M, removal_of("a"))], [])
        store.maps.put(M, "c", b"1")
        assert contents(store) == {"b": b"1", "c": b"1"}

    def test_a_store_that_drops_drops_no_values(self, disk: Disk) -> None:
        for when_full in ("drop_new", "drop_old"):
            store = disk.create(max_messages=2, when_full=when_full)
            store.maps.put(M, "a", b"1")
            store.send(A, b"x")
            if when_full == "drop_new":
                with pytest.raises(StoreFullError):
                    store.maps.put(M, "b", b"1")
                store.purge(A)
            store.maps.put(M, "b", b"1")
            assert (contents(store), bodies(store, A)) == ({"a": b"1", "b": b"1"}, [])
            for call in (lambda: store.maps.put(M, "c", b"1"), lambda: store.maps.increment(M, "n")):  # noqa: B023
                with pytest.raises(StoreFullError):
                    call()
            assert len(contents(store)) == 2

    @in_one_store("key", ["", "k" * (KEY_BYTES_MAX + 1), "\ud800"])
    def test_what_is_no_key_is_refused(self, store: Store, key: str) -> None:
        for call in (
            lambda: store.maps.get(M, key),
            lambda: store.maps.put(M, key, b""),
            lambda: store.maps.pop(M, key),
            lambda: store.maps.touch(M, key),
            lambda: list(store.maps.get_many(M, ["a", key])),
            lambda: put_of(key, b""),
        ):
            with pytest.raises(ValueError, match=r"key|unicode"):
                call()
        assert contents(store) == {}

    @in_one_store("key", [b"a", None, 1])
    def test_what_is_no_text_is_no_key(self, store: Store, key: Any) -> None:
        with pytest.raises(TypeError, match="a key of a map is a str"):
            store.maps.put(M, key, b"")
        with pytest.raises(TypeError, match="bytes"):
            store.maps.put(M, "a", "text")  # type: ignore[arg-type]

    def test_what_is_no_map_is_refused(self, disk: Disk) -> None:
        store = disk.create(message_bytes_max=100)
        with pytest.raises(DestinationError, match="queue://a is no map"):
            store.maps.get(A, "a")
        with pytest.raises(DestinationError, match="queue://a is no map"):
            store.maps.put(A, "a", b"")
        with pytest.raises(MessageTooLargeError):
            store.maps.put(M, "a", bytes(200))
        assert contents(store) == {}

    # All of it

    def test_it_is_a_dict(self, disk: Disk) -> None:
        store, model, rng = disk.create(), dict[str, bytes](), random.Random(1)
        names = [f"k{number}" for number in range(12)]
        for step in range(120):
            name, value = rng.choice(names), b"%d" % step
            match rng.randrange(10):
                case 0 | 1 | 2:
                    store.maps.put(M, name, value)
                    model[name] = value
                case 3:
                    assert store.maps.pop(M, name) == model.pop(name, None)
                case 4:
                    assert store.maps.put_if_absent(M, name, value) == model.get(name)
                    model.setdefault(name, value)
                case 5:
                    expected = rng.choice([model.get(name), b"wrong", None])
                    new = rng.choice([value, None])
                    assert store.maps.compare_and_set(M, name, expected, new) == (model.get(name) == expected)
                    if model.get(name) == expected:
                        model.pop(name, None)
                        model |= {} if new is None else {name: new}
                case 6:
                    others = dict.fromkeys(rng.sample(names, 3), value + b"!")
                    gone = rng.choice(names)
                    store.commit([*((M, put_of(*one)) for one in others.items()), (M, removal_of(gone))], [])
                    model |= others
                    model.pop(gone, None)
                case 7:
                    assert contents(store) == model
                case 8:
                    assert store.maps.touch(M, name, (1 << 50) + step) == (name in model)
                    assert list(store.maps.get_many(M, names)) == list(map(model.get, names))
                case 9 if not disk.volatile and rng.randrange(4) == 0:
                    store = disk.later(store, rng.choice(["crashed", "closed"]))
        assert contents(store) == model
        assert_whole(store)
        later = disk.later(store, "crashed")
        assert contents(later) == model
        assert_whole(later)
