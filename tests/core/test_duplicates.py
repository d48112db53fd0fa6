"""The duplicate window."""

from __future__ import annotations

from anabranch.adapters.core.state.duplicates import DuplicateWindow


class TestDuplicateWindow:
    def test_the_oldest_goes_first(self) -> None:
        window = DuplicateWindow(3)
        for seq, name in enumerate((b"a", b"b", b"c", b"d"), 1):
            window.add({(1, name): seq})
        assert window.get((1, b"a")) is None
        assert window.items() == [((1, b"b"), 2), ((1, b"c"), 3), ((1, b"d"), 4)]

    def test_adding_again_changes_nothing(self) -> None:
        window = DuplicateWindow(2)
        for _ in range(3):
            window.add({(1, b"a"): 1, (1, b"b"): 2})
        assert window.items() == [((1, b"a"), 1), ((1, b"b"), 2)]

    def test_forgetting_a_destination(self) -> None:
        window = DuplicateWindow(5)
        window.add({(1, b"a"): 1, (2, b"a"): 2})
        window.forget(1)
        assert window.items() == [((2, b"a"), 2)]

    def test_what_is_forgotten_is_found_from_the_latest_back(self) -> None:
        """Interrupted or not, once and again, whatever came or went before."""
        window = DuplicateWindow(4)
        for _ in range(2):
            window.add({(1, b"a"): 1, (2, b"a"): 2, (1, b"b"): 3})
        window.add({(1, b"a"): 4})  # requeued
        window.add({(3, b"a"): 5, (1, b"c"): 6})  # (2, a) falls out
        window.forget(2)
        assert window.items() == [((1, b"b"), 3), ((1, b"a"), 4), ((3, b"a"), 5), ((1, b"c"), 6)]
        window.forget(1)
        window.forget(1)
        assert window.items() == [((3, b"a"), 5)]
        window.add({(1, b"d"): 7})
        window.forget(1)
        assert window.items() == [((3, b"a"), 5)]

    def test_no_window(self) -> None:
        window = DuplicateWindow(0)
        window.add({(1, b"a"): 1})
        assert window.items() == []
