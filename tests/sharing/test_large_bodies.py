"""Large bodies go by descriptors: from the owner's files, which stay readable, and from those that a client gives."""

from __future__ import annotations

import asyncio
import io
import os
import resource
import socket
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import aio
from anabranch.policies.errors import ClosedError, OutOfDescriptorsError
from anabranch.router.sharing.descriptors import MOST
from anabranch.router.sharing.owner.session import PASSED_MAX
from anabranch.router.sharing.protocol import pack

from ..contract.children import forked, reaped
from ..contract.disk import eventually
from ..taking import take
from .peers import PATIENCE, Op, Peer
from .striking import MOMENTS, Striking, owners

striking = pytest.fixture(owners)
DATA = os.urandom((2 << 20) + 12_345)
STORES = {
    "journal": anabranch.StoreConfig("all", [">"]),
    "memory": anabranch.StoreConfig("all", [">"], memory=anabranch.MemoryOptions()),
    "sql": anabranch.StoreConfig("all", [">"], sql=anabranch.SqlOptions()),
}


def none_of(striking: Striking, *names: str) -> None:
    """Wait until the owner has no files open with these in their names."""
    place = Path(f"/proc/{striking.owners[-1].pid}/fd")

    def found() -> list[str]:
        opened = []
        for path in place.iterdir():
            with suppress(FileNotFoundError):
                opened.append(str(path.readlink()))
        return [one for one in opened if any(name in one for name in names)]

    eventually(lambda: not found(), found)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with the body behind three bytes."""
    path = tmp_path / "file"
    path.write_bytes(b"abc" + DATA)
    os.utime(path, ns=(0, 0))
    return path


@contextmanager
def opened(path: Path, at: int = 3, **how: Any) -> Iterator[Any]:
    """Open a file, at its body."""
    with path.open("rb", **how) as file:
        file.seek(at)
        yield file


@pytest.mark.parametrize("kind", STORES)
def test_a_body_is_read_though_its_message_is_acked(striking: Striking, file: Path, kind: str) -> None:
    striking.configure(STORES[kind])
    with striking.client() as router:
        queue = router.queue("q")
        with opened(file) as body:
            queue.send(body)
            assert body.tell() == len(DATA) + 3
        message = take(queue)
        assert (message.is_large, message.size) == (True, len(DATA))
        with message.open() as stream:
            assert stream.read(10) == DATA[:10]
            message.ack()
            stream.seek(-10, io.SEEK_END)
            assert stream.read() == DATA[-10:]
        assert message.read() == DATA


def test_a_body_is_read_though_its_owner_is_killed(striking: Striking, file: Path) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        with opened(file) as body:
            queue.send(body)
        message = take(queue)
        striking.kill()
        assert message.read() == DATA
        message.ack()
        assert queue.depth() == 0 and message.read() == DATA
        with pytest.raises(ClosedError, match="gone with the process"):
            queue.send(message.content)


def test_more_bodies_than_are_passed_are_asked_for(striking: Striking, file: Path) -> None:
    count = PASSED_MAX + 6
    with striking.client() as router:
        queue = router.queue("q")
        for _ in range(count):
            with opened(file) as body:
                queue.send(body)
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        messages = queue.receive_many(count)
        assert len(messages) == count
        assert len(os.listdir("/proc/self/fd")) <= before + PASSED_MAX  # noqa: PTH208
        assert all(message.read() == DATA for message in messages)
        router.ack(messages)
        del messages
        assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208
        queue.depth()  # which tells what is not needed any more
        none_of(striking, "/large/")


WAYS: dict[str, Callable[[Path], Any]] = {
    "buffered": lambda path: path.open("rb"),
    "raw": lambda path: path.open("rb", buffering=0),
    "read and written": lambda path: path.open("r+b"),
    "stream": lambda path: io.BufferedReader(_Stream(path)),
    "memory": lambda path: io.BytesIO(path.read_bytes()),
}


class _Stream(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        return self._file.readinto(buffer) or 0

    def close(self) -> None:
        self._file.close()
        super().close()


@pytest.mark.parametrize("way", WAYS)
def test_a_file_is_sent_from_where_it_stands(striking: Striking, file: Path, way: str) -> None:
    with striking.client() as router, WAYS[way](file) as body:
        assert body.read(3) == b"abc"
        queue = router.queue("q")
        queue.send(body, size=len(DATA))
        assert body.read() == b""
        body.seek(3)
        with pytest.raises(ValueError, match="size says 7"):
            queue.send(body, size=7)
        body.seek(len(DATA))
        queue.send_many([body, b"plain"])
        body.seek(3)
        with router.transaction() as transaction:
            transaction.send(queue, body)
        messages = queue.receive_many(4)
        assert [one.read() for one in messages] == [DATA, DATA[-3:], b"plain", DATA]


def test_what_is_written_and_not_flushed_is_sent_too(striking: Striking) -> None:
    with striking.client() as router, tempfile.NamedTemporaryFile() as body:
        body.write(DATA)
        body.seek(0)
        body.write(b"xyz")
        body.seek(0)
        router.queue("q").send(body)
        assert take(router.queue("q")).read() == b"xyz" + DATA[3:]


def test_a_file_that_is_used_again_at_once(striking: Striking) -> None:
    """It is copied, since its time does not tell that it was written to."""
    with striking.client() as router, tempfile.TemporaryFile() as body:
        queue = router.queue("q")
        with router.transaction() as transaction:
            futures = []
            for n in range(20):
                body.seek(0)
                body.write(b"%d" % (n % 10) * len(DATA))
                body.seek(0)
                if n % 2:
                    transaction.send(queue, body)
                else:
                    futures.append(queue.send_nowait(body))
        for future in futures:
            future.result(PATIENCE)
        messages = queue.receive_many(20)
        assert sorted(one.read() for one in messages) == sorted(b"%d" % (n % 10) * len(DATA) for n in range(20))


def test_a_file_that_says_it_is_empty_is_read_all_the_same(striking: Striking) -> None:
    with striking.client() as router, Path("/proc/self/status").open("rb") as body:
        router.queue("q").send(body)
        assert b"Pid:" in take(router.queue("q")).read()


def test_a_pipe_is_read_to_its_end(striking: Striking) -> None:
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb") as file:
            file.write(DATA)

    thread = threading.Thread(target=write)
    thread.start()
    with striking.client() as router, os.fdopen(reading, "rb") as body:
        router.queue("q").send(body)
        assert take(router.queue("q")).read() == DATA
    thread.join(PATIENCE)


@pytest.mark.parametrize("change", ["shrinks", "is emptied", "is written"])
def test_a_file_that_changes_is_refused(striking: Striking, file: Path, change: str) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        with opened(file) as body:
            kept = router._store.keep(body)  # type: ignore[attr-defined]
        if change == "is written":
            file.write_bytes(b"xyz" + DATA)
        else:
            os.truncate(file, 1 << 20 if change == "shrinks" else 0)
        with pytest.raises(ValueError, match="was changed while it was sent"):
            queue.send(kept)
        with pytest.raises(ValueError, match="was changed while it was sent"), router.transaction() as transaction:
            transaction.send(queue, kept)
            transaction.send(queue, b"x")
        assert queue.depth() == 0 and not list(striking.directory.glob("stores/*/large/*"))


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_body_is_sent_though_its_owner_dies(striking: Striking, file: Path, moment: str) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        queue.declare()
        striking.aim(moment, Op.SEND)
        with opened(file) as body:
            queue.send(body)
        striking.died()
        assert queue.depth() == 1
        striking.aim(moment, Op.COMMIT)
        with opened(file) as body, router.transaction() as transaction:
            transaction.send(queue, body)
        striking.died()
        assert [one.read() for one in queue.receive_many(9)] == [DATA, DATA]


def test_many_bodies_at_once(striking: Striking, file: Path) -> None:
    """As many as can be on their way, of several threads."""
    with striking.client() as router:
        queue = router.queue("q")
        futures = []
        for _ in range(100):
            with opened(file, len(DATA) - 20_000) as body:
                futures.append(queue.send_nowait(body))
        for future in futures:
            future.result(PATIENCE)
        assert {len(one.read()) for one in queue.receive_many(200)} == {20_003}
        del futures, future
        queue.depth()
        none_of(striking, str(file))


def _sent(peer: Peer, fds: list[int], data: bytes) -> None:
    peer.sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))])


def test_descriptors_that_no_frame_speaks_of_are_closed(striking: Striking, tmp_path: Path) -> None:
    with striking.client() as router, Path("/dev/zero").open("rb") as zero:
        router.queue("q").send(b"x")
        reading, writing = os.pipe()
        names = "/dev/zero", os.readlink(f"/proc/self/fd/{reading}")  # noqa: PTH115
        try:
            with Peer(striking.directory) as peer:
                for _ in range(200):  # with whole frames: they are closed at once
                    _sent(peer, [zero.fileno(), reading, writing], pack(7, [Op.CALL, "depth", ["queue://q", None]]))
                    assert peer.next() == [7, True, 1]
                none_of(striking, *names)
                found = os.fstat(reading)
                body = [Op.BODY, -1, [found.st_dev, found.st_ino], 0, 10, found.st_mtime_ns]
                _sent(peer, [reading], pack(8, body))  # no file
                assert peer.next() == [8, True, None]
                ok, value = peer.ask(Op.SEND, "queue://q", [[10, -1], {}, None, 4, 0, True, False, 0], False)
                assert not ok and "was changed" in value[1][0]
                ok, value = peer.ask(Op.SEND, "queue://q", [[10, -2], {}, None, 4, 0, True, False, 0], False)
                assert not ok and "gone with the process" in value[1][0]
            none_of(striking, *names)
            with Peer(striking.directory) as peer:  # with half a frame, until it is too much
                data = pack(9, [Op.SEND, "x" * 10_000])
                with pytest.raises(OSError):
                    for at in range(MOST * 3):
                        _sent(peer, [zero.fileno()] * 8, data[at : at + 1])
                    peer.ended()
                    raise ConnectionError
            none_of(striking, *names)
        finally:
            os.close(reading)
            os.close(writing)
        assert router.queue("q").depth() == 1 and len(striking.owners) == 1


def test_a_client_without_descriptors_says_so(striking: Striking, file: Path) -> None:
    with striking.client() as router:
        queue = router.queue("q")
        with opened(file) as body:
            queue.send(body)

        def child() -> list[str] | None:
            with anabranch.open(striking.source, shared=True) as own:
                own.queue("q").depth()
                before = resource.getrlimit(resource.RLIMIT_NOFILE)
                highest = max(int(one) for one in os.listdir("/proc/self/fd"))  # noqa: PTH208
                held = [os.dup(0) for _ in range(highest)]
                resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, before[1]))
                message = take(own.queue("q"))
                try:
                    message.open()
                except OutOfDescriptorsError:
                    pass
                else:
                    return ["it was read"]
                for fd in held:
                    os.close(fd)
                return None if message.read() == DATA else ["it has another body"]

        assert reaped(forked(child)) == 0


def test_bodies_are_awaited(striking: Striking, file: Path) -> None:
    async def main() -> None:
        async with aio.open(striking.source) as router:
            queue = router.queue("q")
            with opened(file) as body:
                await queue.send(body)
            await queue.send(io.BytesIO(DATA))
            for _ in range(2):
                message = await queue.receive(PATIENCE)
                assert message is not None
                async with message:
                    assert await message.read() == DATA
                with await message.open() as stream:
                    assert stream.read(5) == DATA[:5]

    asyncio.run(main())
