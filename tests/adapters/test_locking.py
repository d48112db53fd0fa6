"""The lock of a directory: who has it, what is told of that, and that it is never lost nor left behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.system import locking
from anabranch.adapters.system.locking import DirectoryLock, owner_of
from anabranch.policies.errors import ConfigError, StoreFailedError, StoreLockedError

from ..contract.children import forked, reaped
from ..contract.disk import Parallel
from ..crash.interrupts import LIBRARY, OURS, everywhere


def lock_of(path: Path, **more: Callable[[], str]) -> DirectoryLock:
    """Held."""
    lock = DirectoryLock(path, "it", **more)  # type: ignore[arg-type]
    lock.acquire()
    return lock


def is_free(path: Path) -> bool:
    """Whether another process can have it."""
    program = f"""
from pathlib import Path
from anabranch.adapters.system.locking import DirectoryLock
DirectoryLock(Path({str(path)!r}), "it").acquire()
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0 or "StoreLockedError: it in" in run.stderr, run.stderr
    return run.returncode == 0


def descriptors() -> int:
    """How many this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks after the locks that are taken."""
    monkeypatch.setattr(locking, "WATCH_SECONDS", 3600)
    monkeypatch.setattr(locking, "_watch", locking._Watch())


class TestWhoHasIt:
    def test_another_object_of_this_process_is_told_where_it_was_opened(self, tmp_path: Path) -> None:
        held = lock_of(tmp_path / "lock", describe=lambda: "<one>")
        opened_at = f"{__file__}:{lock_of.__code__.co_firstlineno + 3}"
        with pytest.raises(StoreLockedError) as refused:
            DirectoryLock(tmp_path / "lock", "it").acquire()
        told = f"this process: <one>, opened at {opened_at}"
        assert f"it in {tmp_path} is open already, by {told}; close it there first" in str(refused.value)
        with pytest.raises(StoreLockedError, match="this process: <one>"):
            held.acquire()
        assert held.held
        assert owner_of(tmp_path / "lock") == told
        assert (tmp_path / "lock").read_text().split() == [str(os.getpid()), os.uname().nodename, opened_at]

    def test_another_process_is_told_its_pid_and_host_and_where(self, tmp_path: Path) -> None:
        (tmp_path / "lock").write_text("4711 far.away /srv/an app.py:12\n")
        assert owner_of(tmp_path / "lock") == "process 4711 on far.away, opened at /srv/an app.py:12"
        (tmp_path / "lock").write_text("4711 far.away\n")  # as earlier versions wrote it
        assert owner_of(tmp_path / "lock") == "process 4711 on far.away"
        (tmp_path / "lock").write_text("")
        assert owner_of(tmp_path / "lock") == owner_of(tmp_path / "none") == "another process"

    def test_one_of_the_same_pid_elsewhere_is_not_this_process(self, tmp_path: Path) -> None:
        """As in two containers over one volume."""
        (tmp_path / "lock").write_text(f"{os.getpid()} far.away\n")
        assert owner_of(tmp_path / "lock") == f"process {os.getpid()} on far.away"

    def test_a_forked_child_is_told_of_its_parent(self, tmp_path: Path) -> None:
        lock_of_parent = lock_of(tmp_path / "lock")

        def refused() -> list[str]:
            with pytest.raises(StoreLockedError, match=f"by the parent process {os.getppid()} on .*py:"):
                lock_of_parent.acquire()
            return [] if not lock_of_parent.held else ["the child holds it"]

        assert reaped(forked(refused)) == 0
        assert lock_of_parent.held

    def test_a_thread_of_ours_has_no_line(self, tmp_path: Path) -> None:
        lock = DirectoryLock(tmp_path / "lock", "it")
        thread = threading.Thread(target=lock.acquire)
        thread.start()
        thread.join()
        assert owner_of(tmp_path / "lock") == "this process"

    def test_a_router_tells_what_keeps_it_open(self, tmp_path: Path) -> None:
        config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"])])
        queue = anabranch.open(config).queue("orders")
        with pytest.raises(StoreLockedError, match=r"this process: <Router of .*data>, which <Queue orders> can reach"):
            anabranch.open(config)
        queue.send(b"1")
        message = queue.receive()
        with pytest.raises(StoreLockedError, match=r"and 1 other can reach, opened at .*test_locking\.py:\d+"):
            anabranch.open(config)
        assert message is not None
        message.ack()

    def test_a_full_disk_does_not_leak_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            lock = lock_of(tmp_path / "lock")
        assert not is_free(tmp_path / "lock")
        lock.release()
        assert is_free(tmp_path / "lock")


class TestTheFile:
    def test_a_symbolic_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("precious")
        (tmp_path / "data").mkdir()
        for target in ("precious", "nothing"):
            (tmp_path / "data" / "router.lock").symlink_to(tmp_path / target)
            with pytest.raises(ConfigError, match=r"router\.lock"):
                anabranch.open(anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"])]))
            (tmp_path / "data" / "router.lock").unlink()
        assert (tmp_path / "precious").read_text() == "precious"
        assert not (tmp_path / "nothing").exists()

    def test_one_that_goes_while_it_is_taken_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The last owner removes it between our opening and locking it."""
        path, real = tmp_path / "lock", fcntl.flock

        def flock(fd: int, how: int) -> None:
            monkeypatch.setattr(fcntl, "flock", real)
            path.unlink()
            real(fd, how)

        monkeypatch.setattr(fcntl, "flock", flock)
        lock = lock_of(path)
        assert lock.lost() is None
        assert not is_free(path)

    def test_a_file_system_without_locks_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def flock(fd: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        before = descriptors()
        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(ConfigError, match=r"file system gives no locks: No locks available .*router\.lock"):
            anabranch.open(anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"])]))
        assert descriptors() == before

    def test_its_mode(self, tmp_path: Path) -> None:
        lock = DirectoryLock(tmp_path / "lock", "it", 0o640)
        lock.acquire()
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o640

    def test_one_that_is_to_be_removed(self, tmp_path: Path) -> None:
        lock = lock_of(tmp_path / "lock")
        lock.release(remove=True)
        assert not (tmp_path / "lock").exists()
        lock.acquire()
        (tmp_path / "lock").unlink()
        (tmp_path / "lock").write_text("1 elsewhere\n")
        lock.release(remove=True)
        assert (tmp_path / "lock").read_text() == "1 elsewhere\n"


class TestDirectoriesThatGo:
    @pytest.mark.parametrize("gone", ["data", "data/stores/a"])
    @pytest.mark.usefixtures("unwatched")
    def test_a_store_that_needs_a_file_there_says_so(self, tmp_path: Path, gone: str) -> None:
        """Before anybody looks after its lock."""
        options = anabranch.JournalOptions(segment_size=64 * 1024)
        config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("a", [">"], journal=options)])
        with anabranch.open(config) as router:
            queue = router.queue("q")
            queue.send(b"1")
            (tmp_path / gone).rename(tmp_path / "elsewhere")
            with pytest.raises(StoreFailedError, match=rf"the directory {tmp_path / gone} was deleted or renamed"):
                for _ in range(10):  # the segments that were made ahead are full by then
                    queue.send(bytes(60_000))


class TestForks:
    def test_it_ends_with_its_process_though_a_forked_child_lives(self, tmp_path: Path) -> None:
        read, write = os.pipe()
        ends, hold = os.pipe()  # the grandchild lives until `hold` is closed everywhere

        def owner() -> None:
            lock = lock_of(tmp_path / "lock")
            if os.fork() == 0:
                os.close(hold)
                os.write(write, b"1")
                os.read(ends, 1)
                os._exit(0)
            assert lock.held
            signal.pause()

        pid = forked(owner)
        assert os.read(read, 1) == b"1"
        assert not is_free(tmp_path / "lock")
        os.kill(pid, signal.SIGKILL)
        assert reaped(pid) == -signal.SIGKILL
        assert is_free(tmp_path / "lock")
        for fd in (read, write, ends, hold):
            os.close(fd)

    def test_a_release_does_not_wait_for_who_has_the_descriptor_too(self, tmp_path: Path) -> None:
        """A child between fork and exec."""
        lock = lock_of(tmp_path / "lock")
        assert lock._open is not None
        other = os.dup(lock._open._descriptors[0])
        lock.release()
        assert is_free(tmp_path / "lock")
        os.close(other)

    def test_a_child_neither_unlocks_nor_removes(self, tmp_path: Path) -> None:
        lock = lock_of(tmp_path / "lock")

        def harm() -> None:
            nonlocal lock
            lock.release(remove=True)
            del lock
            gc.collect()

        assert reaped(forked(harm)) == 0
        assert (tmp_path / "lock").exists()
        assert not is_free(tmp_path / "lock")


class TestInterrupts:
    @pytest.mark.parametrize("remove", [False, True])
    def test_taking_and_releasing_it(self, tmp_path: Path, remove: bool) -> None:
        """Anywhere, in Python's own code too: others can be taken, this one can, and no descriptor stays open."""

        def prepare(at: int) -> Callable[[], object]:
            def run() -> None:
                lock = lock_of(tmp_path / "lock")
                lock.release(remove)

            return run

        def check(at: int, where: str) -> None:
            with Parallel(lambda: lock_of(tmp_path / "other").release()) as other:
                other.result()
            lock_of(tmp_path / "lock").release()
            assert descriptors() == before, where
            assert len(locking._watch._held) == held, where

        gc.collect()
        before, held = descriptors(), len(locking._watch._held)
        assert everywhere(prepare, check, folders=(*OURS, *LIBRARY)) > 40

    @pytest.mark.usefixtures("unwatched")
    def test_nobody_has_to_wait_for_what_the_collector_was_interrupted_at(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python swallows what is raised there. The next one who comes lets go of it, or the watch does."""
        monkeypatch.setattr(locking._LockFile, "_left", lambda file, _: None)
        lock_of(tmp_path / "lock")
        lock_of(tmp_path / "other")
        gc.collect()
        assert not is_free(tmp_path / "lock")
        lock_of(tmp_path / "lock").release()
        assert not locking._watch._held
        assert is_free(tmp_path / "other")

    def test_one_in_a_circle_is_collected_by_who_needs_it(self, tmp_path: Path) -> None:
        """As a router is that was struck when it was opened."""
        gc.collect()
        gc.disable()
        try:
            circle: list[object] = [lock_of(tmp_path / "lock")]
            circle.append(circle)
            del circle
            lock_of(tmp_path / "lock").release()
        finally:
            gc.enable()

    def test_one_that_lives_again_says_that_it_is_lost(self, tmp_path: Path) -> None:
        """Some other object's end has put it where it can be reached, after it was unlocked."""
        saved: list[object] = []

        class Saves:
            def __del__(self) -> None:
                saved.append(self)

        circle = Saves()
        circle.lock, circle.itself = lock_of(tmp_path / "lock"), circle  # type: ignore[attr-defined]
        del circle
        gc.collect()
        (again,) = saved
        with pytest.raises(StoreFailedError, match="was unlocked by the garbage collector"):
            again.lock.require()  # type: ignore[attr-defined]
        with contextlib.suppress(StoreFailedError):
            again.lock.release()  # type: ignore[attr-defined]
        assert is_free(tmp_path / "lock")
