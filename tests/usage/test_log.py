"""The usage log on its disk: whatever fails there, messages go on (rule U7); what it takes is bounded; what it has
written is found again."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.adapters.core.engine.usage import ROW
from anabranch.router.usage import UsageLog, log
from anabranch.router.usage.reading import UsageTrace, usage_trace

from ..contract.children import forked, reaped
from ..crash.calls import Crash, Faults, Jobs, simulated
from ..shares import Share
from ..taking import take
from .conftest import config


class UsageFaults(Faults):
    """Counts and spoils what the usage log alone asks of the system."""

    def call(self, name: str, real: Callable[..., Any], target: str, *arguments: Any) -> Any:
        if self.dead or "/usage" in target:
            return super().call(name, real, target, *arguments)
        return real(*arguments)


def small(directory: Path) -> anabranch.Config:
    return config(directory, usage={"max_bytes": 1 << 20})


def log_of(router: anabranch.Router) -> UsageLog:
    assert router._usage.log is not None
    return router._usage.log


def noise(router: anabranch.Router, chance: random.Random) -> None:
    """Rows that cannot be deflated, of destinations that nobody knows."""
    if router._usage.log is not None:
        router._usage.log._buffer.rows.append(chance.randbytes(300 * ROW.size))


def test_a_directory_whose_maker_was_killed_gets_its_name_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without that a power failure takes the log with it, whatever was written there since (D2)."""
    anabranch.open(small(tmp_path)).close()
    synced: list[Path] = []
    monkeypatch.setattr(log, "sync_directory", synced.append)
    anabranch.open(small(tmp_path)).close()
    assert synced == [tmp_path, tmp_path.parent]


class Script:
    """A router that records and is stopped and started; what it did, and how much of that was flushed."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        self.directory, self.jobs = directory, jobs
        self.done: list[tuple[str, int]] = []
        """Operations that returned: which message was sent or acked."""
        self.written: set[tuple[str, int]] = set()
        """Those that were flushed without an error."""
        self.waiting: list[tuple[str, int]] = []
        """Those that were recorded since."""
        self.messages = 0
        self.chance = random.Random(1)

    def run(self) -> None:
        with anabranch.open(small(self.directory)) as router:
            queue = router.queue("j.a")
            for turn in range(6):
                for _ in range(2):
                    self.tell("send", queue.send(b"x").seq)
                    self.messages += 1
                message = take(queue)
                message.ack()
                self.messages -= 1
                self.tell("ack", message.seq)
                noise(router, self.chance)
                self.flush(router)
                if turn == 3:
                    router.stop_usage_log()
                    with contextlib.suppress(anabranch.AnabranchError):
                        router.start_usage_log()
            self.flush(router)

    def tell(self, op: str, seq: int) -> None:
        self.done.append((op, seq))
        self.waiting.append((op, seq))

    def flush(self, router: anabranch.Router) -> None:
        recorded = router._usage.log is not None and router._usage.log.active
        self.jobs.run()
        if recorded and router._usage.log is not None and router._usage.log.active:
            self.written.update(self.waiting)
        self.waiting.clear()


def told(script: Script, trace: UsageTrace) -> list[str]:
    """What was written is there in order, but for the oldest; more of what was done may be."""
    found = [(event.op, int(event.message_id.rpartition("-")[2])) for event in trace]
    first = script.done.index(found[0]) if found else 0
    has_gap = any(
        "is missing" in line for line in trace.warnings
    )  # a file that could not be removed stays, and is told
    wanted = [one for one in script.done[first:] if (one in script.written and not has_gap) or one in found]
    wrong = [line for line in trace.warnings if "is damaged" in line]  # what a crash leaves is no damage
    return wrong if found == wanted else [*wrong, f"the trace says {found}, not {wanted}"]


def shown(trace: UsageTrace) -> list[tuple[str, int | None]]:
    return [(event.op, event.body_size) for event in trace]


def trial(base: Path, kind: str, at: int) -> tuple[UsageFaults, list[str]]:
    """Run the script with call number `at` spoilt; what is wrong, then and in what it leaves."""
    directory, killed = base / "data", base / "killed" / "data"
    faults, jobs = UsageFaults(base, kind, at), Jobs()
    wrong: list[str] = []
    try:
        with simulated(jobs, f"{kind} {at}"):
            script = Script(directory, jobs)
            with faults.patched():
                with contextlib.suppress(Crash):
                    script.run()
                    if faults.hit and kind == "crash":
                        wrong.append("it goes on after a crash")
                faults.dead = True
            shutil.copytree(directory, killed)
        wrong += jobs.raised
        jobs = Jobs()
        with simulated(jobs, f"after {kind} {at}"):
            if (killed / "usage" / "journal").exists():
                wrong += told(script, usage_trace([killed]))
            if sum(file.stat().st_size for file in (killed / "usage").rglob("*") if file.is_file()) > 1 << 20:
                wrong.append("it takes more than it may")
            with anabranch.open(small(killed)) as router:
                if router.queue("j.a").depth() != script.messages:
                    wrong.append("messages are missing")
                if not log_of(router).active:
                    wrong.append("nothing is recorded after it")
                router.queue("j.a").send(bytes(1000))
            if [*usage_trace([killed])][-1].body_size != 1000:
                wrong.append("what comes after it is not recorded")
    finally:
        gc.collect()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(killed, ignore_errors=True)
    return faults, [f"{kind} at {at}, {faults.hit}: {line}" for line in wrong]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small files, which go soon; no log is kept, whose records would hold stores and their files."""
    monkeypatch.setattr(log, "SHARES", 64)
    monkeypatch.setattr(log, "SPARE_SHARES", 60)
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("lean")
def test_no_spoiled_call_harms_messages_or_what_was_written(tmp_path: Path, share: Share) -> None:
    faults, wrong = trial(tmp_path, "", 0)
    assert wrong == []
    assert any("rename" in line or "unlink" in line for line in faults.log)  # the oldest files go
    count = faults.count
    for first, kind in enumerate(("crash", "eio", "enospc", "short")):
        for at in share.of(range(1, count + 1), every=64, first=16 * first):
            wrong += trial(tmp_path, kind, at)[1]
    assert wrong == []
    share.counts.append(f"{count} calls of the usage log, each spoiled in four ways")


def test_it_never_takes_more_than_it_may(tmp_path: Path) -> None:
    chance, most = random.Random(1), 0
    for size in (2 << 20, 1 << 20):  # less than before
        with anabranch.open(config(tmp_path, usage={"max_bytes": size})) as router:
            usage = log_of(router)
            for number in range(60):
                usage._buffer.rows.append(chance.randbytes(2000 * ROW.size))
                router.queue("j.a").send(bytes(number))
                usage.flush()
                taken = [file.stat().st_size for file in (tmp_path / "usage").rglob("*") if file.is_file()]
                most = max(most, sum(taken)) if number > 30 else most
                assert sum(taken) <= (2 << 20 if number <= 30 else size)
        assert most > size * 9 // 16
        most = 0
    trace = usage_trace([tmp_path])
    found = [event.body_size for event in trace]
    assert found == list(range(found[0] or 0, 60))
    assert len(found) < 30
    assert all("the destination's name is lost" in warning for warning in trace.warnings)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_stops_the_log_and_nothing_else(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.pwrite

    def failing(fd: int, data: Any, offset: int) -> int:
        if "/usage/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            raise OSError(code, os.strerror(code))
        return real(fd, data, offset)

    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("j.a")
        queue.send(b"1")
        log_of(router).flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing)
            queue.send(b"22")
            log_of(router).flush()
            queue.send(b"333")
        take(queue).ack()
        assert all(store.usage is None for store in router._registry.open_stores())
        stats = router.usage_stats()
        assert stats is not None
        assert (stats.recorded, stats.lost) == (1, 1)
        assert stats.failed
        told = [record.getMessage() for record in caplog.records if "has stopped" in record.getMessage()]
        assert len(told) == 1
        assert "start_usage_log() begins again" in told[0]
        router.start_usage_log()
        queue.send(b"4444")
        assert queue.depth() == 3
    assert shown(usage_trace([tmp_path])) == [("send", 1), ("send", 4)]


def test_a_disk_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "BUFFER_BYTES", 100 * ROW.size)
    real, hangs, goes_on = os.pwrite, threading.Event(), threading.Event()

    def hanging(fd: int, data: Any, offset: int) -> int:
        if "/usage/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            hangs.set()
            goes_on.wait()
        return real(fd, data, offset)

    with anabranch.open(config(tmp_path, usage={"flush_interval": 60})) as router:
        queue = router.queue("j.a")
        queue.send(b"1")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", hanging)
            writer = threading.Thread(target=log_of(router).flush)
            writer.start()
            hangs.wait()
            for _ in range(150):
                queue.send(b"22")
            router.queue("s.a").send(b"333")  # a store that is opened meanwhile
            goes_on.set()
            writer.join()
        stats = router.usage_stats()
        assert stats is not None
        assert (stats.recorded, stats.lost, stats.failed) == (1, 51, None)
    trace = usage_trace([tmp_path])
    assert len(list(trace)) == 101
    assert trace.warnings == (
        f"some 51 operations of {tmp_path / 'usage'} were not recorded: the disk did not keep up",
    )


@pytest.mark.parametrize("where", ["pwrite of close", "fdatasync of close", "pwrite before close"])
def test_a_disk_that_hangs_does_not_hang_close(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rule U9."""
    call, _, when = where.partition(" ")
    real, hangs, goes_on = getattr(os, call), threading.Event(), threading.Event()

    def hanging(fd: int, *arguments: Any) -> Any:
        if "/usage/" in str(Path(f"/proc/self/fd/{fd}").readlink()):
            hangs.set()
            goes_on.wait()
        return real(fd, *arguments)

    monkeypatch.setattr(log, "CLOSE_SECONDS", 0.05)
    usage = {"flush_interval": 60}
    router = anabranch.open(config(tmp_path, usage))
    monkeypatch.setattr(os, call, hanging)
    try:
        router.queue("j.a").send(b"1")
        if when == "before close":
            threading.Thread(target=log_of(router).flush).start()
            hangs.wait()
        router.queue("j.a").send(b"22")
        (file,) = (tmp_path / "usage" / "journal").glob("*.seg")
        router.close()
        (told,) = [record.getMessage() for record in caplog.records if "is not closed" in record.getMessage()]
        assert f"has not answered at {file}" in told
        with anabranch.open(config(tmp_path, usage)) as other:
            stats = other.usage_stats()
            assert stats is not None
            assert "is free once the disk does" in (stats.failed or "")
            assert other.queue("j.a").depth() == 2
            goes_on.set()
            while not log_of(other).active:
                with contextlib.suppress(anabranch.StoreLockedError):
                    other.start_usage_log()
            other.queue("j.a").send(b"333")
    finally:
        goes_on.set()
    trace = usage_trace([tmp_path])
    assert shown(trace) == [("send", 1), ("send", 2), ("send", 3)]
    assert trace.warnings == ()


def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router:
        queue = router.queue("j.a")
        queue.send(b"1")

        def child() -> list[str] | None:
            log_of(router).flush()
            router.close()
            with anabranch.open(config(tmp_path.parent / "child")) as own:
                own.queue("j.a").send(b"22")
            return None if shown(usage_trace([tmp_path.parent / "child"])) == [("send", 2)] else ["it records nothing"]

        assert reaped(forked(child)) == 0
        queue.send(b"333")
    assert shown(usage_trace([tmp_path])) == [("send", 1), ("send", 3)]


def test_a_log_that_cannot_be_opened_keeps_nobody_from_messages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with anabranch.open(config(tmp_path)) as router:
        router.queue("j.a").send(b"1")
    (segment,) = (tmp_path / "usage" / "journal").glob("*.seg")
    segment.write_bytes(b"x" * 10_000)
    with anabranch.open(config(tmp_path)) as router:
        assert take(router.queue("j.a")).body == b"1"
        stats = router.usage_stats()
        assert stats is not None
        assert (stats.recorded, stats.lost) == (0, 0)
        assert str(segment) in (stats.failed or "")
        with pytest.raises(anabranch.CorruptionError) as raised:
            router.start_usage_log()
        assert router.usage_stats() == anabranch.UsageStats(0, 0, str(raised.value))
        shutil.move(tmp_path / "usage", tmp_path / "damaged")
        router.start_usage_log()
        router.queue("j.a").send(b"22")
    assert "nothing is recorded" in caplog.text
    assert shown(usage_trace([tmp_path])) == [("send", 2)]


@pytest.mark.parametrize("name", ["stores/journal", "stores", "decisions", "", "stores/x"])
def test_it_keeps_out_of_where_others_keep_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(anabranch.ConfigError, match="lie in one another"):
        config(tmp_path, usage={"directory": tmp_path / name})
    with (
        anabranch.open(config(tmp_path, usage=None)) as router,
        pytest.raises(anabranch.ConfigError, match="lie in one another"),
    ):
        router.start_usage_log(anabranch.UsageOptions(directory=tmp_path / name))


def test_it_writes_into_nothing_but_a_usage_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with anabranch.open(config(tmp_path / "other", usage=None)) as router:
        router.queue("j.a").send(b"1")
    other = tmp_path / "other" / "stores" / "journal"
    before = {path: path.read_bytes() for path in other.rglob("*") if path.is_file()}
    (tmp_path / "empty").mkdir()
    with anabranch.open(config(tmp_path / "data", usage={"directory": other})) as router:
        router.queue("j.a").send(b"1")
        stats = router.usage_stats()
        assert stats is not None
        assert stats.failed is not None
        assert stats.failed in caplog.text
        assert "holds something else than a usage log, and was left as it is" in caplog.text
        router.start_usage_log(anabranch.UsageOptions(directory=tmp_path / "empty"))
        (tmp_path / "empty" / "usage.version").write_text("2\n")
        with pytest.raises(anabranch.ConfigError, match="of another version"):
            router.start_usage_log(anabranch.UsageOptions(directory=tmp_path / "empty"))
        router.queue("j.a").send(b"1")
    assert {path: path.read_bytes() for path in other.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"smaple": 0.5}, "smaple: unknown key; did you mean 'sample'?"),
        ({"max_bytes": "1 PB", 7: 1}, "max_bytes: expected a size"),
        ([("sample", 0.5)], "the usage log takes UsageOptions or a mapping of them, not list"),
        ({"directory": "stores"}, "lie in one another"),
    ],
)
def test_options_that_cannot_be_are_one_error_and_change_nothing(
    tmp_path: Path, options: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with anabranch.open(config(tmp_path)) as router:
        with pytest.raises((anabranch.ConfigError, TypeError), match=re.escape(says)):
            router.start_usage_log(options)
        router.queue("j.a").send(b"1")
    assert shown(usage_trace([tmp_path])) == [("send", 1)]


def test_options_may_be_a_mapping(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, {"destinations": ["queue://s.>"]})) as router:
        router.start_usage_log({})  # by default, and not as the configuration says
        router.queue("j.a").send(b"1")
        router.start_usage_log({"destinations": ["queue://m.>"], "flush_interval": "2s"})
        router.queue("j.a").send(b"22")
        router.queue("m.a").send(b"333")
        router.stop_usage_log()
        assert router.usage_stats() is None
    assert [size for op, size in shown(usage_trace([tmp_path])) if op == "send"] == [1, 3]


def test_two_routers_do_not_share_one(tmp_path: Path) -> None:
    usage = {"directory": tmp_path / "shared"}
    with (
        anabranch.open(config(tmp_path / "a", usage)),
        anabranch.open(config(tmp_path / "b", usage=None)) as other,
        pytest.raises(anabranch.StoreLockedError),
    ):
        other.start_usage_log(anabranch.UsageOptions(directory=tmp_path / "shared"))


def test_it_is_written_by_itself(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, usage={"flush_interval": 0.05})) as router:
        router.queue("j.a").send(b"1")
        while not shown(usage_trace([tmp_path])):
            pass
        assert router.usage_stats() == anabranch.UsageStats(1, 0, None)
