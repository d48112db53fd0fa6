"""What a client is told whose configuration is not its owner's."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch


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
