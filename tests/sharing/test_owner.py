"""Owners: which one there is, how it starts and ends, and what becomes of a directory for which there is none."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.policies.errors import AnabranchError, StoreFailedError, StoreLockedError
from anabranch.router.cli.app import app
from anabranch.router.placement.on_disk.in_force import configuration_of
from anabranch.router.sharing import starting

from ..children import CONTEXT
from ..contract.disk import eventually
from .striking import PATIENCE, Striking, owners

striking = pytest.fixture(owners)


def owner_pid(directory: Path) -> int:
    """Return the pid of the process that owns a directory."""
    said: list[str] = []

    def is_said() -> bool:  # one may just be writing it
        said[:] = (directory / "router.lock").read_text().split()
        return bool(said)

    eventually(is_said)
    return int(said[0])


def is_alive(pid: int) -> bool:
    """Return whether a process is there, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def serving(directory: Path) -> list[int]:
    """Return the processes that serve a directory, or stand by to."""
    found, sources = [], {os.fsencode(directory), os.fsencode(directory / "stores.yaml")}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = {*path.read_bytes().split(b"\0")}
        except OSError:
            continue
        if b"anabranch.router.sharing.owner" in words and words & sources and is_alive(int(path.parent.name)):
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory whose owners are real; none is left behind."""
    monkeypatch.setattr(starting, "LINGER", 0.5)
    place = tmp_path / "data"
    yield place
    eventually(lambda: not serving(place))
    left = {path.name for path in place.iterdir()} if place.is_dir() else set()
    assert not left & {"serve.sock"} and not any(path.name for path in place.glob("clients/*"))


@contextmanager
def _coming(count: int, directory: Path, body: bytes = b"x") -> Iterator[None]:
    """Let so many clients open the directory at once. Each sends one message, and is there until the block ends."""
    begin, all_there = CONTEXT.Pipe(duplex=False)
    over, end = CONTEXT.Pipe(duplex=False)
    clients = [
        CONTEXT.Process(target=_client, args=(directory, begin, b"%s%d" % (body, n), over)) for n in range(count)
    ]
    for one in clients:
        one.start()
    all_there.close()
    yield
    end.close()
    for one in clients:
        one.join(PATIENCE * 3)
    assert [one.exitcode for one in clients] == [0] * count


def _client(directory: Path, begin: Connection, body: bytes, over: Connection) -> None:
    vars(starting)["LINGER"] = 0.5
    with suppress(EOFError):
        begin.recv()
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send(body)
        with suppress(EOFError):
            over.recv()


def test_a_directory_for_which_an_owner_is_just_started_is_no_other_programs(tmp_path: Path) -> None:
    """What the first client has made there is all that the second one finds."""
    (tmp_path / "clients").mkdir()
    for name in ("serve.starting", "in-force.yaml.tmp"):
        (tmp_path / name).touch()
    anabranch.open(tmp_path).close()


def test_a_program_that_comes_beside_an_owner_is_told_to_share(directory: Path) -> None:
    with anabranch.open(directory, shared=True), pytest.raises(StoreLockedError) as refused:
        anabranch.open(directory)
    assert f"by process {owner_pid(directory)} on " in str(refused.value)
    told = ", opened for its clients, which opened it with shared=True; open it with shared=True to use it together"
    assert f"{told}, end that process, or" in str(refused.value)


def test_processes_that_come_at_once_are_clients_of_one_owner(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so are those that come at once after it was killed."""
    monkeypatch.setattr(starting, "LINGER", 10 * PATIENCE)  # on a busy machine they come long after the successor
    with anabranch.open(directory, shared=True) as router:  # which keeps it
        queue, first = router.queue("q"), owner_pid(directory)
        with _coming(10, directory):
            eventually(lambda: queue.depth() == 10)
        assert owner_pid(directory) == first
        os.kill(first, signal.SIGKILL)
        with _coming(20, directory, b"y"):
            eventually(lambda: queue.depth() == 30)
        assert owner_pid(directory) != first
        bodies = sorted(message.body for message in queue.browse())
        assert bodies == sorted([b"x%d" % n for n in range(10)] + [b"y%d" % n for n in range(20)])
    os.kill(owner_pid(directory), signal.SIGTERM)
    log = (directory / "serve.log").read_text()
    assert log.count(" serves ") == 2 and "StoreLockedError" not in log


def test_processes_that_come_at_once_to_a_new_directory_start_one_owner(directory: Path) -> None:
    """Nobody is told that another has the directory."""
    with _coming(100, directory), anabranch.open(directory, shared=True) as router:
        eventually(lambda: router.queue("q").depth() == 100)
    log = (directory / "serve.log").read_text()
    assert log.count(" serves ") == 1 and "StoreLockedError" not in log


def test_a_client_that_is_stopped_as_it_starts_an_owner_holds_up_no_other(directory: Path) -> None:
    """And finds the owner of the others, once it goes on."""
    with anabranch.open(directory) as router:
        router.queue("q").declare()
    starts = CONTEXT.Process(target=_stop_and_start, args=(directory,))
    starts.start()
    eventually(lambda: starting._is_stopped(str(starts.pid)))
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send(b"x")
        os.kill(starts.pid or 0, signal.SIGCONT)
        eventually(lambda: router.queue("q").depth() == 2)
        starts.join(PATIENCE)
    assert starts.exitcode == 0


def _stop_and_start(directory: Path) -> None:
    spawn = starting._spawn

    def stop_and_spawn(config: Any, fd: int) -> int:
        os.kill(os.getpid(), signal.SIGSTOP)
        return spawn(config, fd)

    vars(starting)["_spawn"] = stop_and_spawn
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send(b"y")


def test_who_starts_an_owner_for_too_long_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "START_SECONDS", 0.1)
    directory.mkdir(exist_ok=True)
    with (directory / "serve.starting").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(str(os.getpid()))
        file.flush()
        with pytest.raises(StoreFailedError, match=f"process {os.getpid()} holds .*serve.starting locked"):
            anabranch.open(directory, shared=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_owner_that_is_killed_while_it_starts_is_replaced(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Here with its first breath, twice; by SIGTERM once it heeds that, and so ends in order."""
    spawn, killed = starting._spawn, list[int]()

    def heeds(pid: int) -> bool:
        caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
        return bool(int(caught, 16) >> (number - 1) & 1)

    def spawn_and_kill(config: Any, fd: int) -> int:
        pid = spawn(config, fd)
        if len(killed) < 2:
            if number == signal.SIGTERM:
                eventually(lambda: heeds(pid))
            os.kill(pid, number)
            killed.append(pid)
        return pid

    monkeypatch.setattr(starting, "_spawn", spawn_and_kill)
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send(b"x")
    assert len(killed) == 2


def test_a_successor_goes_by_the_configuration_as_it_is_when_it_takes_over(directory: Path) -> None:
    directory.mkdir()
    file = directory / "stores.yaml"
    other = "{name: other, match: [other.>]}, "
    file.write_text("directory: .\nstores: [{name: all, match: ['>']}]\n")
    with anabranch.open(directory, shared=True) as router:
        for n, more in enumerate(["", other, other]):
            file.write_text(f"directory: .\nstores: [{more}{{name: all, match: ['>']}}]\n")
            before = owner_pid(directory)
            os.kill(before, signal.SIGKILL)
            eventually(lambda before=before: owner_pid(directory) != before)  # type: ignore[misc]
            router.queue(f"{'other' if more else 'all'}.{n}").send(b"x")
            assert (directory / "stores" / "other").is_dir() == bool(more)
        assert [router.queue(name).depth() for name in ("all.0", "other.1", "other.2")] == [1] * 3


def test_a_successor_leaves_alone_what_its_owner_may_have_died_of(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one after the other would die of it, as long as the machine runs."""
    monkeypatch.setattr(starting, "LINGER", 10 * PATIENCE)
    anabranch.open(directory, shared=True).close()
    first = owner_pid(directory)
    (second,) = {*serving(directory)} - {first}
    os.kill(second, signal.SIGSTOP)
    os.kill(first, signal.SIGKILL)
    with (directory / "router.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # so it does not come to serve
        eventually(lambda: not is_alive(first))
        os.kill(second, signal.SIGCONT)
        eventually(lambda: len(serving(directory)) == 2)
        os.kill(second, signal.SIGKILL)
        eventually(lambda: not serving(directory))
    assert "has died before it served" in (directory / "serve.log").read_text()
    (directory / "serve.sock").unlink()


def _errors(directory: Any, count: int = 4) -> set[str]:
    """Return the types of errors that clients get that open it at once."""

    def opened(_: int) -> str:
        try:
            anabranch.open(directory, shared=True).close()
        except (AnabranchError, OSError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(count) as pool:
        return set(pool.map(opened, range(count)))


@pytest.fixture
def mounted(directory: Path) -> Iterator[Path]:
    """A directory on a disk of its own."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=1", "tmpfs", directory], check=True)
    try:
        yield directory
        eventually(lambda: not serving(directory))
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


def test_a_full_disk_is_told_to_each_client(mounted: Path) -> None:
    _let_have(mounted, 20)
    with suppress(OSError), (mounted / "lost+found").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    _all_are_full(_errors(mounted, 2))


def test_a_disk_that_is_full_for_any_step_is_told_to_each_client(mounted: Path) -> None:
    """It has room for one file more each time, until there is one for each that a client or its owner makes."""
    count = 1
    while "" not in (errors := _errors(mounted, 1)):
        _all_are_full(errors)
        _let_have(mounted, count := count + 1)
    assert count > 5


def _let_have(place: Path, files: int) -> None:
    subprocess.run(["mount", "-o", f"remount,nr_inodes={files}", place], check=True)


def _all_are_full(errors: set[str]) -> None:
    assert all(error.startswith("StoreFullError") and "No space left on device" in error for error in errors), errors


def test_a_configuration_that_is_wrong_for_the_owner_is_told_to_each_client(tmp_path: Path, directory: Path) -> None:
    """It was right when the client read it."""
    file = tmp_path / "stores.yaml"
    file.write_text(f"directory: {directory}\nstores: [{{name: all, match: ['>']}}]\n")
    config = configuration_of(file)
    file.write_text(f"directory: {directory}\nstores: [{{name: all, match: ['>'], nothing: 1}}]\n")
    (error,) = _errors(config, 2)
    assert error.startswith("ConfigError") and "nothing" in error


def test_an_owner_ends_after_its_last_client_and_the_next_client_starts_another(directory: Path) -> None:
    pids = set()
    for n in range(2):
        with anabranch.open(directory, shared=True) as router:
            router.queue("q").send(b"%d" % n)
            pids.add(owner_pid(directory))
        eventually(lambda: not serving(directory))
    assert len(pids) == 2
    assert not (directory / "serve.sock").exists()


def test_clients_that_come_while_the_owner_ends_are_served(directory: Path) -> None:
    """Each comes some time after the last one has gone: before, just when, and after the owner ends."""
    for n in range(8):
        with anabranch.open(directory, shared=True) as router:
            router.queue("q").send(b"%d" % n)
        time.sleep(0.46 + n / 50)
    with anabranch.open(directory, shared=True) as router:
        assert [message.body for message in router.queue("q").browse()] == [b"%d" % n for n in range(8)]
    assert "StoreLockedError" not in (directory / "serve.log").read_text()


def test_sigterm_finishes_what_is_in_hand(directory: Path) -> None:
    """No outcome is unknown: what the owner has begun it answers, and what it has not begun the next one does."""
    with anabranch.open(directory, shared=True) as router:
        counted = router.map("n")
        over = threading.Event()
        numbers: list[int] = []

        def count() -> None:
            while not over.is_set():
                numbers.append(counted.increment("k"))

        threads = [threading.Thread(target=count) for _ in range(3)]
        for one in threads:
            one.start()
        for _ in range(2):
            eventually(lambda: is_alive(owner_pid(directory)))
            before, pid = len(numbers), owner_pid(directory)
            eventually(lambda before=before: len(numbers) > before + 20)  # type: ignore[misc]
            os.kill(pid, signal.SIGTERM)
            eventually(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
        over.set()
        for one in threads:
            one.join(PATIENCE)
        assert sorted(numbers) == list(range(1, len(numbers) + 1))


def test_a_socket_that_was_deleted_is_made_anew(striking: Striking) -> None:
    with striking.client() as router:
        (striking.directory / "serve.sock").unlink()
        router.queue("q").send(b"x")
        eventually((striking.directory / "serve.sock").exists)
        with striking.client() as other:
            assert other.queue("q").depth() == 1
        assert len(striking.owners) == 1


def test_an_owner_whose_lock_was_deleted_is_replaced(directory: Path) -> None:
    with anabranch.open(directory, shared=True) as router:
        router.queue("q").send(b"x")
        first = owner_pid(directory)
        (directory / "router.lock").unlink()
        eventually(lambda: not is_alive(first))
        assert [message.body for message in router.queue("q").browse()] == [b"x"]
        assert owner_pid(directory) != first


def test_a_path_may_be_longer_than_a_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "LINGER", 0.5)
    place = tmp_path / ("d" * 100) / ("e" * 100)
    place.parent.mkdir()
    with anabranch.open(place, shared=True) as router:
        router.queue("q").send(b"x")
        os.kill(owner_pid(place), signal.SIGKILL)
        assert router.queue("q").depth() == 1
    eventually(lambda: not serving(place))


def test_another_user_is_refused(striking: Striking) -> None:
    """By the directory, and, where that lets in anybody, by the socket, and by the owner itself."""
    with striking.client():
        for mode in (0o700, 0o755, 0o777):
            striking.directory.chmod(mode)
            if mode == 0o777:
                (striking.directory / "serve.sock").chmod(0o777)
            process = CONTEXT.Process(target=_open_as, args=(striking.directory, 65534))
            process.start()
            process.join(PATIENCE)
            assert process.exitcode == 3
        striking.directory.chmod(0o700)


def _open_as(directory: Path, user: int) -> None:
    for parent in directory.parents:
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 1:
            parent.chmod(parent.stat().st_mode | 0o11)
    os.setgid(user)
    os.setuid(user)
    try:
        anabranch.open(directory, shared=True).close()
    except (AnabranchError, PermissionError) as error:
        print(error, file=sys.stderr)
        os._exit(3)


def test_signals_that_a_client_has_blocked_reach_the_owner_that_it_has_started(directory: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        with anabranch.open(directory, shared=True):
            status = Path(f"/proc/{owner_pid(directory)}/status").read_text()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert "SigBlk:\t0000000000000000\n" in status


def test_nothing_of_a_client_stays_open_in_the_owner_that_it_has_started(directory: Path) -> None:
    """A pipe of the client's own, say, whose end its parent waits for."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    with anabranch.open(directory, shared=True):
        target = Path(f"/proc/self/fd/{writing}").readlink()
        for pid in serving(directory):
            assert target not in [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()]
            assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    os.close(reading)
    os.close(writing)


def test_a_command_does_not_come_before_the_next_owner(striking: Striking) -> None:
    """One that finds nobody, since the owner has just died, is a client as those that live."""
    with striking.client() as router:
        router.queue("q").send(b"x")
        striking.kill()
        shown = CliRunner().invoke(app, ["queues", str(striking.directory)])
        assert (shown.exit_code, shown.stdout.splitlines()[1].split()[0]) == (0, "q")
        assert router.queue("q").depth() == 1
        assert owner_pid(striking.directory) != os.getpid()
