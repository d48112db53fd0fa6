"""Which errors say that a message's bytes are damaged, and what a store that does not salvage makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.adapters.core.backend import ReadError
from anabranch.adapters.core.service.damaged import is_damage, readable
from anabranch.policies.config.durability import OnCorruption
from anabranch.policies.errors import CorruptionError, StoreFailedError

from ..contract.disk import A
from ..contract.keyed import M
from ..journal.disk import JournalDisk
from ..journal.test_lost_messages import damaged, told


def test_what_the_disk_did_not_give_is_not_damaged() -> None:
    assert is_damage(CorruptionError("file", 0, "flipped"))
    assert not is_damage(ReadError("file", 0, "not now"))
    assert not is_damage(StoreFailedError("away"))


def test_a_value_is_named_by_its_key(tmp_path: Path) -> None:
    """In the call that meets it; put anew it is whole."""
    with JournalDisk(tmp_path) as disk:
        store = disk.create()
        for key in ("a", "b"):
            store.maps.put(M, key, key.encode())
        damaged(store, 2, destination=M)
        for call in (lambda: store.maps.get(M, "b"), lambda: store.maps.pop(M, "b"), lambda: list(store.maps.items(M))):
            with pytest.raises(CorruptionError, match=r"the value of 'b' in map://m: .* damaged; put another one, or"):
                call()
        store.maps.put(M, "b", b"c")
        assert list(store.maps.items(M)) == [("a", b"a"), ("b", b"c")]


@pytest.mark.parametrize("salvages", [True, False])
def test_what_reads_is_given(tmp_path: Path, salvages: bool) -> None:
    with JournalDisk(tmp_path) as disk:
        store = disk.create(on_corruption=OnCorruption.SALVAGE if salvages else OnCorruption.REFUSE)
        store.send_many(A, [b"1", b"2", b"3"])
        damaged(store, 1, 3)
        engine = store._engine
        state = engine.catalog.destinations[A]
        places = engine.asked(lambda: engine.rows.rows(state, None, None, 0, 10))
        records = readable(engine, state, places, ["one", "two", "three"])
        if salvages:
            assert [record is not None for record in records] == [False, True, False]
            assert [one.message_id for report in told(store) for one in report.messages] == ["one", "three"]
        else:
            with pytest.raises(CorruptionError, match="message 1 of queue://a"):
                next(records)
            assert told(store) == []
        assert store.depth(A) == 3
