"""What a client is told that is refused here, and works in the owner's own process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.errors import ClosedError, ConfigError, StoreFailedError, StoreLockedError
from anabranch.router.sharing.owner import session

from ..contract.disk import PATIENCE
from ..taking import take
from .peers import Op, Peer


def test_another_configuration_than_the_owners_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "data"
    one = anabranch.Config(path, [anabranch.StoreConfig("all", [">"])])
    with anabranch.open(one) as owner:
        server = owner.serve()
        for same in (one, path, anabranch.Config(path, one.stores, shared=True)):
            with anabranch.open(same, shared=True) as client:
                client.queue("q").send(b"1")
        assert not caplog.messages
        other = anabranch.Config(path, [anabranch.StoreConfig("some", ["a.>"]), *one.stores])
        with anabranch.open(other, shared=True) as client:
            client.queue("a.b").send(b"1")
            assert "end the owner, and the next one goes by it" in caplog.text
            assert list(client.stats().stores) == ["all"]
        server.stop()


def test_a_directory_is_not_shared_by_who_says_so(tmp_path: Path) -> None:
    config = anabranch.Config(tmp_path, [anabranch.StoreConfig("all", [">"])], shared=True)
    with anabranch.open(config, shared=False) as router:
        assert type(router) is anabranch.Router
        with anabranch.open(config) as client:
            assert type(client) is not anabranch.Router


def test_a_client_does_not_serve(tmp_path: Path) -> None:
    with anabranch.open(tmp_path) as owner:
        owner.serve()
        with anabranch.open(tmp_path, shared=True) as client, pytest.raises(StoreLockedError, match="a client of it"):
            client.serve()


def test_a_transaction_of_sends_alone_of_a_client_that_was_closed(tmp_path: Path) -> None:
    with anabranch.open(tmp_path) as owner:
        owner.serve()
        client = anabranch.open(tmp_path, shared=True)
        transaction = client.transaction()
        transaction.send("q", b"x")
        client.close()
        with pytest.raises(ClosedError):
            transaction.commit()
        assert not owner.destinations()


def test_a_directory_that_may_not_be_made_is_not(tmp_path: Path) -> None:
    """A disk that is not mounted looks like that."""
    given = anabranch.Config(tmp_path / "data", [anabranch.StoreConfig("all", [">"])], create_directory=False)
    with pytest.raises(ConfigError, match="create_directory is false"):
        anabranch.open(given, shared=True)
    assert not given.directory.exists()


@pytest.mark.parametrize("anew", [False, True])
def test_a_directory_that_is_deleted_is_told_of(tmp_path: Path, anew: bool) -> None:
    """What is there now is another, in which nothing is sent, nor taken for acked."""
    place = tmp_path / "data"
    owner = anabranch.open(place)
    server = owner.serve()
    with anabranch.open(place, shared=True) as client:
        client.queue("q").send(b"x")
        message = take(client.queue("q"))
        place.rename(tmp_path / "gone")
        if anew:
            place.mkdir()
        assert server.wait(PATIENCE)
        for call in (message.ack, lambda: client.queue("q").send(b"y"), lambda: client.queue("q").counts()):
            with pytest.raises(StoreFailedError, match="deleted or renamed"):
                call()
        assert place.exists() == anew and not list(place.glob("*"))
    with suppress(StoreFailedError):
        owner.close()


def test_a_send_that_does_not_wait_of_a_client_that_was_closed(tmp_path: Path) -> None:
    with anabranch.open(tmp_path) as owner:
        owner.serve()
        client = anabranch.open(tmp_path, shared=True)
        queue = client.queue("q")
        client.close()
        with pytest.raises(ClosedError, match="the router is closed"):
            queue.send_nowait(b"x")
        assert not owner.destinations()


def test_calls_that_take_long_are_as_many_as_there_may_be_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LONG_MAX", 3)
    with anabranch.open(tmp_path) as owner:
        owner.serve()
        peer = Peer(tmp_path)
        numbers = [peer.send(Op.RECEIVE_PATTERN, "many.>", 60, None) for _ in range(4)]
        number, ok, error = peer.next()
        assert (number, ok) == (numbers[3], False) and "no more are taken until one ends" in error[1][0]
        owner.queue("many.q").send_many([b"x"] * 3)
        assert sorted(peer.next()[:2] for _ in range(3)) == [[number, True] for number in numbers[:3]]
        peer.close()
