"""What the face of a store does by itself: opening and closing."""

from __future__ import annotations

import pytest

from anabranch.policies.errors import StoreFailedError

from ..contract.disk import A, bodies
from .made import onefile


def test_a_close_that_fails_frees_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it fails: the store can be opened again in the same process."""
    with onefile() as disk:
        store = disk.create()
        store.send(A, b"1")
        close = store._writer.close

        def fail() -> None:
            close()
            raise StoreFailedError("the disk")

        monkeypatch.setattr(store._writer, "close", fail)
        with pytest.raises(StoreFailedError):
            store.close()
        again = disk.unopened(store)
        again.open()
        disk.opened.append(again)
        assert bodies(again) == [b"1"]
