"""A router that nobody shares can be looked into while it is open: what that costs, and when it cannot be."""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import Config, StoreConfig
from anabranch.policies.errors import StoreLockedError
from anabranch.router.sharing import socket_file, starting
from anabranch.router.sharing.client import greeting
from anabranch.router.sharing.clients import ClientFile
from anabranch.router.sharing.owner import control, presence, process
from anabranch.router.sharing.socket_file import connected

from ..children import CONTEXT, run_program
from ..contract.children import forked, reaped
from ..contract.disk import PATIENCE, eventually
from ..taking import take

OWNS = """
import sys, anabranch
router = anabranch.open(sys.argv[1])
router.queue("orders").send(b"first")
print("open", flush=True)
sys.stdin.read()
"""


def config(directory: Path, control: bool = True) -> Config:
    return Config(directory, [StoreConfig("all", [">"], journal={"sync": "never"})], control=control)


def serving() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "anabranch-control-serve"]


def test_a_client_comes_to_a_router_that_is_open_and_the_server_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LINGER_SECONDS", 0.0)
    with anabranch.open(config(tmp_path)) as router:
        for number in range(3):
            assert not serving()
            code, told = run_program(
                "import sys, anabranch\n"
                "with anabranch.open(sys.argv[1], shared=True) as router:\n"
                "    assert router.queue('q').receive().ack() is None if sys.argv[2] != '0' else True\n"
                "    router.queue('q').send(b'from another process')\n"
                "    print(router._store.connection.owner_pid)",
                str(tmp_path), str(number), seconds=PATIENCE,
            )  # fmt: skip
            assert (code, told) == (0, f"{os.getpid()}\n")
            assert router.queue("q").depth() == 1
            eventually(lambda: not serving())
    assert not any(path.is_socket() for path in tmp_path.rglob("*"))


def test_who_comes_to_an_owner_comes_by_its_file(tmp_path: Path) -> None:
    """The other way there is once that is open: clients of the owner before are all told of to one server."""
    with process._opened(config(tmp_path), 0) as router:
        with pytest.raises(ConnectionRefusedError):
            connected(tmp_path)
        router.serve()
        connected(tmp_path).close()
        (tmp_path / "serve.sock").unlink()
        connected(tmp_path).close()


def test_it_loads_nothing_and_starts_one_thread_for_all_routers(tmp_path: Path) -> None:
    program = (
        "import sys, threading, anabranch\n"
        "routers = [anabranch.open(f'{sys.argv[1]}/{n}') for n in range(5)]\n"
        "names = [thread.name for thread in threading.enumerate()]\n"
        "print(names.count('anabranch-control'), 'anabranch-control-serve' in names)\n"
        "names = ('owner.server', 'client.router')\n"
        "print([name for name in names if f'anabranch.router.sharing.{name}' in sys.modules])"
    )
    assert run_program(program, str(tmp_path)) == (0, "1 False\n[]\n")


def test_who_serves_nobody_is_named(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, control=False)), pytest.raises(StoreLockedError) as refused:
        anabranch.open(tmp_path, shared=True)
    assert "is open already, by this process: <Router of" in str(refused.value)
    assert "That process serves nobody: its configuration says `control: false`, or" in str(refused.value)


def test_control_false_makes_no_socket(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path, control=False)) as router:
        with pytest.raises(ConnectionRefusedError):
            socket_file.connected(tmp_path)
        server = router.serve()  # which asks for it
        socket_file.connected(tmp_path).close()
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket_file.connected(tmp_path)


def test_serve_beside_it(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path)) as router, anabranch.open(tmp_path, shared=True) as client:
        client.queue("q").send(b"1")
        message = take(client.queue("q"))
        server = router.serve()
        with anabranch.open(tmp_path, shared=True) as other:
            assert (other.queue("q").receive(), other.queue("q").depth()) == (None, 1)
        message.ack()
        assert (client.queue("q").depth(), (tmp_path / "serve.sock").is_socket()) == (0, True)
        server.stop()
        assert client.queue("q").depth() == 0
        with anabranch.open(tmp_path, shared=True) as other:
            assert other.queue("q").depth() == 0


def test_what_a_client_holds_is_its_own_when_a_server_of_the_router_follows_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    come = threading.Event()
    come.set()
    connected = socket_file.connected
    monkeypatch.setattr(greeting, "connected", lambda directory: come.wait() and connected(directory))
    with anabranch.open(config(tmp_path)) as router:
        server = router.serve()
        with anabranch.open(tmp_path, shared=True) as client:
            queue = client.queue("q")
            queue.send_many([b"1", b"2"])
            first, second = queue.receive_many(2)
            come.clear()
            server.stop()
            taken = router.queue("q").receive()  # the router's own receivers stay open meanwhile
            assert taken is not None and taken.body == b"1"
            come.set()
            second.ack()
            with pytest.raises(anabranch.UnknownMessageError):
                first.ack()
            assert (queue.depth(), queue.counts().leased) == (1, 1)


def test_who_opens_the_directory_next_receives_nothing_that_a_living_client_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (control, presence):
        monkeypatch.setattr(module, "GRACE_SECONDS", PATIENCE)
    monkeypatch.setattr(starting, "_tell_start", lambda config: None)
    greet = greeting.Greeter._greet
    with anabranch.open(config(tmp_path)) as first, anabranch.open(config(tmp_path), shared=True) as client:
        client.queue("q").send(b"x")
        message = take(client.queue("q"))

        def late(*given: Any) -> Any:
            time.sleep(0.2)
            return greet(*given)

        monkeypatch.setattr(greeting.Greeter, "_greet", late)
        first.close()
        with anabranch.open(config(tmp_path)) as second:
            assert second.queue("q").receive() is None
            message.ack()
            assert second.queue("q").depth() == 0


def test_a_client_that_never_comes_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "GRACE_SECONDS", 0.05)
    stopped = ClientFile(tmp_path, f"{os.getpid():x}-abc")
    anabranch.open(config(tmp_path)).close()
    stopped.close()


@pytest.mark.parametrize("error", [PermissionError(13, "no"), OSError(28, "no room"), OSError(24, "no descriptor")])
def test_where_no_socket_can_be_the_router_opens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: OSError
) -> None:
    def refused(directory: Path, backlog: int) -> socket.socket:
        raise error

    monkeypatch.setattr(control, "bound_without_file", refused)
    with anabranch.open(config(tmp_path)) as router:
        router.queue("q").send(b"1")
    assert [record.message for record in caplog.records] == [
        f"no other process can look into {tmp_path} while it is open: {error}"
    ]


def test_a_system_without_such_sockets_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(control, "HAS_SOCKETS", False)
    with anabranch.open(config(tmp_path)), pytest.raises(ConnectionRefusedError):
        socket_file.connected(tmp_path)
    assert not caplog.records


def test_a_name_that_is_taken_for_a_moment_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a child of fork that is on its way to another program."""
    monkeypatch.setattr(control, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(control, "TRIES", 10_000)
    tmp_path.joinpath("data").mkdir()
    taken = socket_file.bound_without_file(tmp_path / "data", 1)
    with anabranch.open(config(tmp_path / "data")) as router:
        taken.close()
        others = router._others
        assert isinstance(others, control.ControlSocket)
        eventually(lambda: others._listening is not None)
        socket_file.connected(tmp_path / "data").close()
    assert not caplog.records


def test_a_directory_of_any_length_and_in_memory_alone(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 200) / ("e" * 200)
    with (
        anabranch.open(Config(deep, [StoreConfig("all", [">"], memory={})])) as router,
        anabranch.open(deep, shared=True) as client,
    ):
        client.queue("q").send(b"1")
        assert router.queue("q").depth() == 1


def test_a_router_that_nobody_holds_is_closed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "LINGER_SECONDS", 0.0)
    router = anabranch.open(config(tmp_path))
    with anabranch.open(tmp_path, shared=True) as client:
        client.queue("q").send(b"1")
        alive = weakref.ref(router)
        del router
        gc.collect()
        assert client.queue("q").depth() == 1  # who is connected keeps it alive
        assert alive() is not None
    eventually(lambda: gc.collect() is not None and alive() is None)
    with pytest.raises(ConnectionRefusedError):
        socket_file.connected(tmp_path)
    with anabranch.open(config(tmp_path)) as again:
        assert again.queue("q").depth() == 1
        socket_file.connected(tmp_path).close()


@pytest.mark.parametrize("looked_at", [False, True])
def test_a_forked_child_keeps_nothing_of_it(tmp_path: Path, looked_at: bool) -> None:
    """Else whoever connects after the parent's death would wait for an answer as long as the child lives."""
    told, tell = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_parent, args=(str(tmp_path), looked_at, tell))
    process.start()
    child = told.recv()
    os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
    process.join()
    try:
        with pytest.raises(ConnectionRefusedError):
            socket_file.connected(tmp_path)
        with anabranch.open(config(tmp_path)) as router, anabranch.open(tmp_path, shared=True) as client:
            router.queue("q").send(b"1")
            assert client.queue("q").depth() == 1
    finally:
        os.kill(child, signal.SIGKILL)


def _parent(directory: str, looked_at: bool, tell: object) -> None:
    router = anabranch.open(config(Path(directory)))
    if looked_at:
        client = anabranch.open(directory, shared=True)
        assert client.queue("q").depth() == 0
    if os.fork() == 0:
        tell.send(os.getpid())  # type: ignore[attr-defined]
    signal.pause()
    router.close()


def test_a_child_of_fork_opens_another_directory(tmp_path: Path) -> None:
    def run() -> list[str]:
        with anabranch.open(config(tmp_path / "b")), anabranch.open(tmp_path / "b", shared=True) as client:
            client.queue("q").send(b"1")
            return [] if client.queue("q").depth() == 1 else ["it is not there"]

    with anabranch.open(config(tmp_path / "a")):
        assert reaped(forked(run)) == 0


def test_another_user_in_the_owners_place_is_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with anabranch.open(config(tmp_path)):
        monkeypatch.setattr(socket_file, "user_of", lambda sock: 65534)
        with pytest.raises(ConnectionRefusedError, match="user 65534 is in the place of"):
            socket_file.connected(tmp_path)
