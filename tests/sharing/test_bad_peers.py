"""What a client says that is none of ours, or is out of its mind: it harms itself alone."""

from __future__ import annotations

import io
import random
import resource
import select
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import anabranch
from anabranch.router.sharing import protocol
from anabranch.router.sharing.owner import reading, session
from anabranch.router.sharing.owner.server import Server
from anabranch.router.sharing.protocol import LENGTH, REQUEST_MAX, VERSION, pack

from ..contract.disk import Parallel, eventually
from ..shares import Share
from ..taking import take
from .hanging import hang
from .peers import PATIENCE, Op, Peer
from .striking import Striking, owners

striking = pytest.fixture(owners)
MIB = 1 << 20


def framed(data: bytes) -> bytes:
    """Return bytes as a frame."""
    return LENGTH.pack(len(data)) + data


@pytest.fixture
def served(striking: Striking) -> Iterator[anabranch.Router]:
    """A client that goes on, whatever another does: with the same owner, and with what it holds."""
    with striking.client() as router:
        router.queue("q").send_many([b"1", b"2"])
        message = take(router.queue("q"))
        yield router
        message.ack()
        router.queue("q").send(b"3")
        assert [one.body for one in router.queue("q").browse()] == [b"2", b"3"]
        assert len(striking.owners) == 1
    striking.kill()
    with striking.client() as router:  # the store is whole, and has nothing that is no message
        assert [one.body for one in router.queue("q").browse()] == [b"2", b"3"]
        for destination in router.destinations("queue://"):
            for message in router.queue(destination).browse():
                assert (type(message.body), type(message.headers)) == (bytes, dict)


def dropped(striking: Striking, data: bytes, greets: bool = True) -> list[list[Any]]:
    """Send bytes, and no more; returns what the owner has said before it ended the connection."""
    with Peer(striking.directory, greets) as peer:
        peer.sock.sendall(data)
        peer.shut()
        return peer.ended()


NOT_FRAMES = {
    "nothing": b"",
    "half a length": b"\1\0",
    "half a frame": LENGTH.pack(100) + b"x" * 50,
    "4 GB": b"\xff\xff\xff\xff" + b"x" * 1000,
    "an empty frame": framed(b""),
    "no msgpack": framed(b"\xc1"),
    "a number": framed(b"\1"),
    "a map": framed(msgspec.msgpack.encode({"a": 1})),
    "an empty list": framed(b"\x90"),
    "a list of one": framed(b"\x91\1"),
    "a text as number": framed(msgspec.msgpack.encode(["a", 1])),
    "a text as op": framed(msgspec.msgpack.encode([1, "a"])),
    "a list as op": framed(msgspec.msgpack.encode([1, [1]])),
    "no UTF-8": framed(b"\x93\1\1\xa2\xff\xff"),
    "deep": framed(b"\x91" * 100_000),
    "a list of 4 G": framed(b"\x93\1\1\xdd\xff\xff\xff\xff"),
    "a map of 4 G": framed(b"\x93\1\1\xdf\xff\xff\xff\xff"),
    "bytes of 4 G": framed(b"\x93\1\1\xc6\xff\xff\xff\xff"),
    "a list as key": framed(b"\x93\1\1\x81\x90\1"),
    "an extension": framed(b"\x93\1\1\xd4\5\0"),
    "a time that is none": framed(b"\x93\1\1\xc7\x0c\xff" + struct.pack(">Iq", 0, 1 << 62)),
    "more than a value": framed(b"\x92\1\1\1"),
}


@pytest.mark.parametrize("greets", [True, False])
@pytest.mark.parametrize("name", NOT_FRAMES)
def test_what_is_no_frame_ends_its_own_connection(
    striking: Striking, served: anabranch.Router, name: str, greets: bool
) -> None:
    dropped(striking, NOT_FRAMES[name], greets)


def test_random_bytes_end_their_own_connection(striking: Striking, served: anabranch.Router) -> None:
    chance = random.Random(1)
    for _ in range(200):
        data = chance.randbytes(chance.randrange(1, 200))
        dropped(
            striking, framed(b"\x92\1\x95" + bytes([chance.randrange(13)]) + data) if chance.random() < 0.8 else data
        )


# Greetings


def test_a_client_of_another_version_hears_both(striking: Striking, served: anabranch.Router) -> None:
    """Whatever else its greeting has."""
    for rest in ([], ["a-1", 1, "", []], ["a-1", 1, "", [], "more"]):
        with Peer(striking.directory, greets=False) as peer:
            ok, (name, args, *_) = peer.ask(Op.HELLO, VERSION + 1, *rest)
            assert not ok and name == "ClosedError"
            assert f"version {VERSION} " in args[0] and f"version {VERSION + 1}:" in args[0]


def test_who_has_not_greeted_is_served_nothing(striking: Striking, served: anabranch.Router) -> None:
    send = (Op.SEND, "queue://q", [b"x", None, None, 4, 0, True, False, 0], True)
    for fields in (send, (Op.CALL, "purge", ["queue://q", None])):
        with Peer(striking.directory, greets=False) as peer:
            peer.send(*fields)
            peer.shut()
            assert [ok for _, ok, *_ in peer.ended()] in ([], [False])


def test_who_greets_again_is_refused_and_keeps_what_it_holds(striking: Striking, served: anabranch.Router) -> None:
    with Peer(striking.directory) as peer:
        ok, ((token, *_),) = peer.ask(Op.RECEIVE, "queue://q", None, 1, 0, None)
        assert ok
        ok, error = peer.ask(Op.HELLO, VERSION, "a-1", 1, "", [])
        assert not ok and error[0] == "ValueError"
        assert served.queue("q").receive() is None
        assert peer.ask(Op.SETTLE, [token], "release", None, False, None) == (True, None)


@pytest.mark.parametrize("client", ["", "../x", "../../data/router.lock", "/etc/passwd", "a", 1, None, ["a"], "a-1\n"])
def test_a_client_has_an_id_that_is_no_path(striking: Striking, served: anabranch.Router, client: Any) -> None:
    (striking.directory / "x").touch()
    with Peer(striking.directory, greets=False) as peer:
        ok, error = peer.ask(Op.HELLO, VERSION, client, 1, "", [])
        assert not ok and error[0] in ("ValueError", "TypeError")
    assert (striking.directory / "x").exists()


@pytest.mark.parametrize("held", [1, "x", [1], [[1]], [["t", "queue://q", None, 1, "x"]], [["t", "q/", 1, [], {}]], {}])
def test_a_greeting_tells_leases_or_is_refused(striking: Striking, served: anabranch.Router, held: Any) -> None:
    with Peer(striking.directory, greets=False) as peer:
        ok, _ = peer.ask(Op.HELLO, VERSION, "a-1", 1, "other", held)
        assert not ok or peer.ask(Op.CALL, "depth", ["queue://q", None]) == (True, 2)


# Requests

OUTGOING = [b"x", {"h": "v"}, "id", 4, 0, True, False, 0]
TOPIC = {"kind": 1, "name": "t"}
TOKEN = "0" * 32 + ".1.0.1.1"
REQUESTS: dict[str, list[Any]] = {
    "send": [Op.SEND, "queue://new", OUTGOING, True],
    "send_many": [Op.SEND_MANY, "queue://new", [OUTGOING], True],
    "receive": [Op.RECEIVE, "queue://new", None, 1, 0, None],
    "receive of a subscription": [Op.RECEIVE, "topic://new", ["s", ""], 1, 0, None],
    "receive, waiting": [Op.RECEIVE, "queue://new", None, 1, 0.001, None],
    "receive of a pattern": [Op.RECEIVE_PATTERN, "new.>", 0, None],
    "ack": [Op.ACK, [TOKEN]],
    "settle": [Op.SETTLE, [TOKEN], "release", None, True, None],
    "settle with a reason": [Op.SETTLE, [TOKEN], "reject", ["builtins.ValueError", "x"], True, 0.0],
    "extend": [Op.CALL, "extend", [TOKEN, 1.0]],
    "browse": [Op.CALL, "browse", ["queue://new", None, 10, [1, 4, bytes(16)], True]],
    "commit": [Op.COMMIT, False, None, "commit", [["queue://new", OUTGOING]], [], []],
    "commit again": [Op.COMMIT, True, None, "commit", [["queue://new", OUTGOING]], [TOKEN], []],
    "commit of a change": [Op.COMMIT, False, None, "commit", [], [], [[[TOPIC, "s", "", None, False], True, False]]],
    "prepare": [Op.COMMIT, False, [1, "g", "b"], "prepare", [["queue://new", OUTGOING]], [], []],
    "cancel": [Op.CANCEL, 1],
    "credit": [Op.CREDIT, 1, 1],
    "listen": [Op.LISTEN, 1, "queue://new", None, 1, None, 1],
    "unlisten": [Op.UNLISTEN, 1],
    "purge": [Op.CALL, "purge", ["queue://new", None]],
    "depth": [Op.CALL, "depth", ["queue://new", None]],
    "find": [Op.CALL, "find", ["queue://new", "id"]],
    "subscribe": [Op.CALL, "subscribe", [[TOPIC, "s", "", None, False], False]],
    "put": [Op.CALL, "map_put", ["map://m", "k", b"v", 0, None]],
    "increment": [Op.CALL, "map_increment", ["map://n", "k", [1], 0, False]],
    "items": [Op.CALL, "map_items", ["map://m", "", None]],
    "body": [Op.BODY, -1, [1, 2], 0, 10, 0],
    "read": [Op.CALL, "body_file", [1]],
    "end_vote": [Op.CALL, "end_vote", [1, True, [], [], [], False]],
    "stats": [Op.CALL, "stats", []],
}  # fmt: skip
WRONG: list[Any] = [
    None, True, -1, 0, 1, 1 << 63, 1e308, float("nan"), float("inf"), -1.5, "", "x", "queue://", "\0", "topic://a", b"",
    b"x", [], [[]], [None],
    ["x"], [1, 2, 3], {}, {"a": 1}, "x" * 70_000,
]  # fmt: skip


def _wrong(fields: list[Any], at: int = 0) -> Iterator[list[Any]]:
    """Yield a request with each of its fields, and each field of those, replaced by each of what is wrong; with one
    field less, and with one more."""
    for place in range(at, len(fields)):
        for wrong in WRONG:
            yield [*fields[:place], wrong, *fields[place + 1 :]]
        if isinstance(fields[place], list):
            for inner in _wrong(fields[place]):
                yield [*fields[:place], inner, *fields[place + 1 :]]
    yield fields[:-1]
    yield [*fields, 1]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_of_other_types_is_refused_or_done(
    striking: Striking, served: anabranch.Router, name: str, share: Share
) -> None:
    """Each is answered, and harms nobody."""
    with Peer(striking.directory) as peer:
        numbers = {}
        for wrong in share.of(list(_wrong(REQUESTS[name], 1)), every=11):
            if (
                wrong[0] in (Op.RECEIVE, Op.RECEIVE_PATTERN) and isinstance(wrong[-2], float | None)
            ) or "map_wait" in wrong:
                continue  # for ever
            numbers[peer.send(*wrong)] = wrong
            while len(numbers) > 100:
                _answered(peer, numbers)
        while numbers:
            _answered(peer, numbers)


def _answered(peer: Peer, numbers: dict[int, list[Any]]) -> None:
    number, *_ = peer.next()
    del numbers[number]


# Too much


def test_a_receive_may_wait_longer_than_a_selector(striking: Striking, served: anabranch.Router) -> None:
    with Peer(striking.directory) as peer:
        number = peer.send(Op.RECEIVE, "queue://late", None, 1, threading.TIMEOUT_MAX, None)
        peer.send(Op.RECEIVE, "queue://late", None, 1, 1e300, None)
        assert peer.next()[1] is False
        served.queue("late").send(b"x")
        answer = peer.next()
        assert answer[:2] == [number, True] and len(answer[2]) == 1


def test_a_client_that_reads_nothing_is_not_read_either(striking: Striking, served: anabranch.Router) -> None:
    """Its requests stay with it, the owner works for others meanwhile, and goes on with it once it reads."""
    served.queue("large").send(bytes(1 << 14))
    with Peer(striking.directory) as peer:
        peer.sock.setblocking(False)
        asked = pack(1, [Op.CALL, "browse", ["queue://large", None, 1, 0, True]]) * 1000
        left = memoryview(asked * 1000)
        full = time.monotonic() + PATIENCE
        while time.monotonic() < full:
            _, writable, _ = select.select([], [peer.sock], [], 1.0)
            if not writable:
                break
            left = left[peer.sock.send(left) :]
        assert not writable, "the owner reads on"
        assert served.queue("q").depth() == 2

        def rests() -> bool:
            before = striking.cpu()
            time.sleep(0.5)
            return striking.cpu() - before < 0.05

        eventually(rests, lambda: "the owner is at work for who does not read")
        peer.sock.settimeout(PATIENCE)
        for _ in range(100):
            assert len(peer.next()[2]) == 1


def test_pages_for_a_client_that_reads_nothing_are_not_made(striking: Striking, served: anabranch.Router) -> None:
    """What waits for it is bounded, and so is the owner's memory; it gets all of them once it reads."""
    queue = served.queue("large")
    for n in range(8):
        queue.send(bytes([n]) * MIB)
    with Peer(striking.directory) as peer:
        before = striking.memory()
        asked = b"".join(pack(n, [Op.CALL, "browse", ["queue://large", None, 8, 0, True]]) for n in range(2, 1026))
        peer.sock.sendall(asked)
        made = [striking.memory()]

        def rests() -> bool:
            time.sleep(0.5)
            made.append(striking.memory())
            return made[-1] - made[-2] < MIB

        eventually(rests, lambda: "pages are made on and on")
        assert session.UNREAD_MAX // 2 < max(made) - before < 6 * session.UNREAD_MAX
        assert served.queue("q").depth() == 2, "others are not served"
        got = {peer.next()[0] for _ in range(40)}
        assert len(got) == 40 and max(made[-1], striking.memory()) - before < 6 * session.UNREAD_MAX
    queue.purge()


def test_a_receive_of_many_large_messages_is_answered_by_a_page(striking: Striking, served: anabranch.Router) -> None:
    """Those that wait for the first one, too."""
    queue = served.queue("large")
    queue.send_many([bytes([n]) * MIB for n in range(20)])
    first = queue.receive_many(100)
    assert [message.body[0] for message in first] == list(range(8))
    served.ack(first)
    queue.send_many([b"%d" % n for n in range(300)])
    second, third = queue.receive_many(100), queue.receive_many(500)
    assert [message.body[0] for message in second] == list(range(8, 16))
    assert [message.size for message in third[:4]] == [MIB] * 4 and len(third) == 304
    served.ack(second + third)
    with Parallel(lambda: queue.receive_many(100, PATIENCE)) as waiting:
        with striking.client() as other, other.transaction() as transaction:
            for n in range(10):
                transaction.send("large", bytes([n]) * MIB)
        received = waiting.result()
    assert [message.body[0] for message in received] == list(range(8))
    served.ack(received)
    queue.purge()


def test_large_requests_that_are_not_carried_out_yet_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their store hangs: their client is not read meanwhile."""
    config = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("s", [">"])])
    with ExitStack() as stack:
        router = stack.enter_context(anabranch.open(config))
        server = cast(Server, router.serve())
        router.queue("q").send(b"first")
        peer = stack.enter_context(Peer(config.directory))
        (of_peer,) = server._sessions.values()
        go_on = hang(monkeypatch)
        send = [Op.SEND, "queue://q", [bytes(4 * MIB), None, None, 4, 0, True, False, 0], True]
        sender = threading.Thread(target=peer.sock.sendall, args=(b"".join(pack(n, send) for n in range(2, 50)),))
        sender.start()
        eventually(lambda: of_peer.is_unread, lambda: "it is read on and on")
        time.sleep(0.2)
        assert session.IN_HAND_MAX < sum(of_peer.large.values()) <= session.IN_HAND_MAX + 8 * MIB
        go_on.set()
        left = set(range(2, 50))
        while left:
            number, ok, _ = peer.next()
            assert ok
            left.discard(number)  # 0: a notice, of which a slow machine sends some
        sender.join(PATIENCE)
        assert router.queue("q").depth() >= 48 and not of_peer.large


def test_half_a_frame_holds_what_has_come_of_it(striking: Striking, served: anabranch.Router) -> None:
    """Whatever was announced: no more than a request may have."""
    before = striking.memory()
    with ExitStack() as stack:
        for _ in range(50):
            peer = stack.enter_context(Peer(striking.directory))
            peer.sock.sendall(LENGTH.pack(REQUEST_MAX) + b"x" * 1000)
        assert served.queue("q").depth() == 2
        assert striking.memory() - before < 50 * MIB
    (_, _, error) = dropped(striking, LENGTH.pack(REQUEST_MAX + 1))[0]
    assert f"at most {REQUEST_MAX} " in error[1][0]


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(
    striking: Striking, served: anabranch.Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REQUEST_MAX", 2 * MIB)
    with pytest.raises(anabranch.MessageTooLargeError, match=r"beyond the limit of 2,097,152 for .* from a file"):
        served.queue("q").send(bytes(2 * MIB))
    receipt = served.queue("large").send(io.BytesIO(bytes(3 * MIB)), size=3 * MIB)
    assert receipt.seq
    with take(served.queue("large")) as message:
        assert message.open().read() == bytes(3 * MIB)


def test_a_client_may_have_many_receives_that_wait_and_is_heard_still(
    striking: Striking, served: anabranch.Router
) -> None:
    with Peer(striking.directory) as peer:
        for _ in range(session.UNANSWERED_MAX + 100):
            peer.send(Op.RECEIVE, "queue://late", None, 1, None, None)
        assert peer.ask(Op.CALL, "depth", ["queue://q", None]) == (True, 2)


def test_no_more_receives_wait_than_may(striking: Striking, served: anabranch.Router) -> None:
    with Peer(striking.directory) as peer:
        last = [peer.send(Op.RECEIVE, "queue://late", None, 1, None, None) for _ in range(reading.WAITING_MAX + 1)][-1]
        number, ok, _ = peer.next()
        assert (number, ok) == (last, False)


def test_a_thousand_clients_are_served_beside_each_other(striking: Striking, served: anabranch.Router) -> None:
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(striking.directory)) for _ in range(1000)]
        for peer in peers:
            peer.send(Op.SEND, "queue://many", [b"x", None, None, 4, 0, True, False, 0], True)
        assert all(peer.next()[1] for peer in peers)
        assert served.queue("many").depth() == 1000
    served.queue("many").purge()


def test_clients_that_find_no_room_come_in_later(striking: Striking, served: anabranch.Router) -> None:
    """The owner has no descriptor left. Who is in is served, and who has waited comes in once another has gone."""
    resource.prlimit(striking.owners[-1].pid or 0, resource.RLIMIT_NOFILE, (_highest(striking) + 8, 4096))
    with ExitStack() as stack:
        peers = [stack.enter_context(Peer(striking.directory, greets=False)) for _ in range(40)]
        late = stack.enter_context(Peer(striking.directory, greets=False))
        late.send(Op.HELLO, VERSION, "a-1", 1, "", [])
        assert served.queue("q").depth() == 2
        for peer in peers:
            peer.close()
        assert late.next()[1] is True


def _highest(striking: Striking) -> int:
    return max(int(path.name) for path in Path(f"/proc/{striking.owners[-1].pid}/fd").iterdir()) + 1
