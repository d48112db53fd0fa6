"""`anabranch backup`: a copy of a directory in use, as all of it was at one moment."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner

import anabranch
from anabranch import Config, JournalOptions, PlacementError, Router, SqlOptions, StoreConfig
from anabranch.adapters.core.migration.backup import StoreCopier
from anabranch.policies.errors import StoreFailedError
from anabranch.router.cli.app import app
from anabranch.router.offline.verification import verify
from anabranch.router.placement.record import StoreRow
from anabranch.router.router import inspection_of
from anabranch.router.upkeep import backup
from anabranch.router.upkeep.backup import _Backup

TOKENS = 12
BODY = bytes(range(256)) * 20


def config(directory: Path) -> Config:
    journal = JournalOptions(sync="never", segment_size="64KiB", large_message_size="1KiB")
    return Config(
        directory,
        [
            StoreConfig("a", ["a.>"], journal=journal),
            StoreConfig("b", ["b.>"], journal=journal),
            StoreConfig("s", ["s.>"], sql=SqlOptions()),
            StoreConfig("per", ["p.>"], per_destination=True, journal=journal),
            StoreConfig("memory", ["m.>"], memory={}),
        ],
    )


class Load:
    """Threads that use a router until they are told to end. What fails in one fails the test."""

    def __init__(self, router: Router) -> None:
        self._router, self._end = router, threading.Event()
        self.errors: list[BaseException] = []
        self.sent = 0
        """Numbers up to this one were sent to a.numbers, and acknowledged."""
        self.rounds = {"moving": 0, "carrying": 0, "churning": 0, "counting": 0}
        self._threads = [
            threading.Thread(target=self._run, args=(name, getattr(self, f"_{name}"))) for name in self.rounds
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _run(self, name: str, once: Callable[[int], None]) -> None:
        try:
            while not self._end.is_set():
                once(self.rounds[name])
                self.rounds[name] += 1
        except BaseException as error:
            self.errors.append(error)

    def _moving(self, number: int) -> None:
        """Some tokens go round the stores, in transactions."""
        places = ["a.token", "b.token", "p.token", "a.token", "b.token", "s.token"]
        source, target = places[number % 6], places[(number + 1) % 6]
        with self._router.transaction() as tx:
            for message in self._router.queue(source).receive_many(3):
                tx.send(target, message.body)
                tx.ack(message)

    def _carrying(self, number: int) -> None:
        """Another is sent on, and then acked."""
        places = ["b.carried", "a.carried", "s.carried"]
        source, target = places[number % 3], places[(number + 1) % 3]
        message = self._router.queue(source).receive(timeout=0)
        if message is not None:
            self._router.queue(target).send(message.body)
            message.ack()

    def _churning(self, number: int) -> None:
        """Segments and large bodies come and go."""
        queue = self._router.queue("a.churn")
        queue.send(b"." * 900)
        queue.send(io.BytesIO(BODY), message_id=f"large-{number}")
        for _ in range(2 if number > 20 else 1):
            message = queue.receive(timeout=0)
            assert message is not None
            message.ack()

    def _counting(self, number: int) -> None:
        self._router.queue("a.numbers").send(b"%d" % number, message_id=f"n{number}")
        self.sent = number
        self._end.wait(0.002)  # there are enough of them


def eventually(load: Load, name: str, more: int) -> None:
    """Wait for so many rounds more of a thread."""
    wanted = load.rounds[name] + more
    while load.rounds[name] < wanted and not load.errors:
        threading.Event().wait(0.001)


def look(directory: Path, sent: int, before: int) -> None:
    """Look at a backup that was begun when all up to a number was sent."""
    here = config(directory)
    assert verify(directory, here).damages == []
    with anabranch.open(here) as router:
        tokens = [one.body for name in "absp" for one in router.queue(f"{name}.token").browse()]
        assert sorted(tokens) == sorted(b"%d" % number for number in range(TOKENS))
        carried = {one.body for name in "bas" for one in router.queue(f"{name}.carried").browse()}
        assert carried == {b"%d" % number for number in range(TOKENS)}
        numbers = [int(one.body) for one in router.queue("a.numbers").browse()]
        assert numbers == list(range(len(numbers))) and len(numbers) > before
        for message in router.queue("a.churn").browse():
            if message.message_id is not None:
                with message.open() as body:
                    assert body.read() == BODY
        assert router.in_doubt() == []
        assert router.topic("b.t").subscriptions()[0].depth() == 1
        assert router.map("b.m").get("key") == b"value"
        assert inspection_of(router).decisions_damage is None
        with router.transaction() as tx:
            tx.send("a.numbers", b"%d" % len(numbers))
            tx.send("s.more", b"it goes on")
    assert sent >= before


def test_a_backup_under_load_is_of_one_moment(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        for number in range(TOKENS):
            router.queue("a.token").send(b"%d" % number)
            router.queue("b.carried").send(b"%d" % number)
        router.topic("b.t").subscribe("s")
        router.topic("b.t").send(b"x")
        router.map("b.m").put("key", b"value")
        router.queue("m.x").send(b"gone")
        with Load(router) as load:
            befores = []
            for number in range(6):
                eventually(load, "churning", 10)
                befores.append(load.sent)
                found = inspection_of(router).backup(str(tmp_path / f"copy{number}"))
                assert found.still_seconds < 60
        assert router.stats().stores["a"].segments["active"] < 30  # they are released again
    for number, before in enumerate(befores):
        look(tmp_path / f"copy{number}", load.sent, before)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("when", ["before", "as it begins", "as it copies"])
def test_a_store_that_is_removed_is_in_it_whole_or_not_at_all(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = config(tmp_path / "copy")
    with anabranch.open(config(tmp_path / "data")) as router:
        router.queue("a.x").send(b"x")
        router.queue("p.gone").send(b"x")

        def removing(usual: Callable[..., object]) -> Callable[..., object]:
            def call(*given: object) -> object:
                if router.exists("p.gone"):
                    router.queue("p.gone").delete()
                return usual(*given)

            return call

        if when == "before":
            router.queue("p.gone").delete()
        else:
            name = "_copier" if when == "as it begins" else "_copy"
            monkeypatch.setattr(_Backup, name, removing(getattr(_Backup, name)))
        found = inspection_of(router).backup(str(tmp_path / "copy"))
        assert not router.exists("p.gone")
    there = {"a.x": 1, "p.gone": 1} if len(found.stores) > 1 else {"a.x": 1}
    assert verify(tmp_path / "copy", here).damages == []
    with anabranch.open(here) as router:
        assert {one.name: router.queue(one).depth() for one in router.destinations()} == there
    assert when == "as it copies" or len(there) == 1


def test_a_store_that_fails_is_not_copied_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though others come and go meanwhile."""
    tries = []

    def copy(self: _Backup, *given: object) -> int:
        tries.append(given)
        router.queue(f"p.{len(tries)}").send(b"x")
        raise StoreFailedError("its disk fails")

    with anabranch.open(config(tmp_path / "data")) as router:
        router.queue("a.x").send(b"x")
        monkeypatch.setattr(_Backup, "_copy", copy)
        with pytest.raises(StoreFailedError, match="its disk fails"):
            inspection_of(router).backup(str(tmp_path / "copy"))
    assert len(tries) == 2


def test_stores_that_come_while_others_are_looked_at_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes each time the one before is looked at, so that all are never there when it is begun anew."""
    count = 6
    usual = _Backup._copier
    monkeypatch.setattr(backup, "TRIES", 3)
    with anabranch.open(config(tmp_path / "data")) as router:

        def copier(self: _Backup, row: StoreRow, kept: ExitStack) -> StoreCopier | None:
            last = row.name.removeprefix("per:queue://p.")
            if last.isdigit() and int(last) < count and not router.exists(f"p.{int(last) + 1}"):
                router.queue(f"p.{int(last) + 1}").send(b"x")
                router.queue("p.gone").send(b"x")
                router.queue("p.gone").delete()
            return usual(self, row, kept)

        router.queue("p.0").send(b"x")
        monkeypatch.setattr(_Backup, "_copier", copier)
        found = inspection_of(router).backup(str(tmp_path / "copy"))
    assert sorted(found.stores) == sorted(f"per:queue://p.{number}" for number in range(count + 1))
    assert verify(tmp_path / "copy", config(tmp_path / "copy")).damages == []


def test_the_command_copies_an_open_directory_and_a_closed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with anabranch.open(config(tmp_path / "data")) as router:
        with router.transaction() as tx:
            tx.send("a.x", b"both")
            tx.send("b.x", b"both")
        shown = CliRunner().invoke(app, ["backup", "data", "copy", "--json"])
        assert shown.exit_code == 0, shown.output
        assert json.loads(shown.stdout)["stores"] == ["a", "b"]
        router.queue("a.x").send(b"later")
    assert CliRunner().invoke(app, ["backup", "data", "later"]).exit_code == 0
    for name, count in (("copy", 1), ("later", 2)):
        assert CliRunner().invoke(app, ["verify", name]).exit_code == 0
        with anabranch.open(tmp_path / name) as router:
            assert router.queue("a.x").depth() == count
    again = CliRunner().invoke(app, ["backup", "data", "copy"])
    assert again.exit_code == 2 and "is there already" in again.output
    inside = CliRunner().invoke(app, ["backup", "data", "data/copy"])
    assert inside.exit_code == 2 and "lies in" in inside.output


def test_what_lies_elsewhere_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    elsewhere = StoreConfig("a", [">"], directory=tmp_path / "disk")
    with anabranch.open(Config(tmp_path / "data", [elsewhere])) as router:
        router.queue("x").send(b"x")
        with pytest.raises(PlacementError, match="a backup is of one directory"):
            inspection_of(router).backup(str(tmp_path / "copy"))
        router.queue("x").send(b"y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "disk"]
