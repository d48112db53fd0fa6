"""A failed sync under eight senders, a waiting receiver and futures: all are told at once, other stores go on."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch

from .ledger import body_of, contents, violations

SOON = 120.0


def config(directory: Path) -> anabranch.Config:
    options = anabranch.JournalOptions(segment_size=64 * 1024)
    stores = [
        anabranch.StoreConfig("bad", ["queue://bad.>"], journal=options),
        anabranch.StoreConfig("good", [">"], journal=options),
    ]
    return anabranch.Config(directory, stores)


def test_a_failed_sync_stops_one_store_and_hangs_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, broken, failures = os.fdatasync, threading.Event(), []

    def fdatasync(fd: int) -> None:
        if broken.is_set() and "/bad/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            failures.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    outcomes: dict[str, BaseException] = {}
    sent: dict[str, int] = {}

    def until_error(name: str, act: Callable[[int], object]) -> None:
        number = 0
        try:
            while True:
                act(number)
                number += 1
                sent[name] = number
        except BaseException as error:
            outcomes[name] = error

    with anabranch.open(config(tmp_path / "data")) as router:
        queue = router.queue("bad.q")
        queue.send(body_of("first.0"))

        def sender(name: str) -> Callable[[int], object]:
            return lambda number: queue.send(body_of(f"{name}.{number}"))

        workers = {name: sender(name) for name in (f"t{number}" for number in range(8))}
        workers["receiver"] = lambda _: router.queue("bad.empty").receive(timeout=None)
        workers["future"] = lambda n: queue.send_nowait(body_of(f"future.{n}")).result(timeout=SOON)
        threads = [threading.Thread(target=until_error, args=item, daemon=True) for item in workers.items()]
        for thread in threads:
            thread.start()
        while len(sent) < 9 and not outcomes:  # all but the receiver
            router.queue("other").send(body_of(f"g.{router.queue('other').depth()}"))
        assert outcomes == {}
        broken.set()
        for thread in threads:
            thread.join(SOON)
        assert not [thread for thread in threads if thread.is_alive()]
        assert {type(error) for error in outcomes.values()} <= {
            anabranch.StoreFailedError,
            anabranch.OutcomeUnknownError,
        }
        assert len(outcomes) == 10
        assert len(failures) == 1  # never tried again
        router.queue("other").send(body_of(f"g.{router.queue('other').depth()}"))
        with pytest.raises(anabranch.StoreFailedError):
            queue.send(b"")
        broken.clear()
        router.reopen("bad")
        found = set(contents(router)["bad.q"])
        for name, count in sent.items():
            assert {f"{name}.{n}" for n in range(count)} <= found
        assert violations(router) == []


def test_destinations_may_be_made_while_statistics_are_taken(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        stop, errors = threading.Event(), []

        def look() -> None:
            try:
                while not stop.is_set():
                    router.stats()
                    router.destinations()
            except BaseException as error:
                errors.append(error)

        staging = threading.Thread(target=look)
        staging.start()
        for number in range(300):
            router.queue(f"new.{number}").send(body_of(f"n.{number}"))
        stop.set()
        staging.join()
        assert errors == []
        assert len(router.destinations()) == 300
