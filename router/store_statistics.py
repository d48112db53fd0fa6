"""What the stores say of themselves, asked so that one whose disk hangs holds up nobody, and only one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from ..adapters.background import shared
from ..adapters.store_types import StoreStats

ANSWER_SECONDS: Final = 1.0
"""A store that is open and does not say in this time how it is, is unresponsive."""

Question = Callable[[], StoreStats]


class StoreStatistics:
    """Threads: all. Each step of what changes the fields is a single one."""

    def __init__(self) -> None:
        self._latest: dict[str, StoreStats] = {}
        """What each store said last, by its name."""
        self._unanswered: dict[str, float] = {}
        """Since when a store has been asked (monotonic) and not answered."""

    def ask(
        self, closed: Mapping[str, Question], opened: Mapping[str, Question]
    ) -> tuple[dict[str, StoreStats], tuple[str, ...]]:
        """The statistics of stores, by name, and the names of the unresponsive ones: of those what they said last, if
        anything. Those that are `closed` are opened by their question, and waited for. Raises a store's error."""
        answers = self._answers(closed, None)
        hanging = monotonic() - ANSWER_SECONDS
        asked = {name: ask for name, ask in opened.items() if self._unanswered.get(name, hanging) >= hanging}
        answers |= self._answers(asked, ANSWER_SECONDS)
        names = [*closed, *opened]
        latest = {name: answers.get(name) or self._latest.get(name) for name in names}
        self._latest = {name: stats for name, stats in latest.items() if stats is not None}
        return dict(self._latest), tuple(name for name in names if name not in answers)

    def _answers(self, questions: Mapping[str, Question], timeout: float | None) -> dict[str, StoreStats]:
        def ask(name: str) -> StoreStats:
            self._unanswered.setdefault(name, monotonic())
            try:
                stats = self._latest[name] = questions[name]()
            finally:
                self._unanswered.pop(name, None)
            return stats

        answers: dict[str, StoreStats] = {}
        for name, stats, error in shared().for_each(questions, ask, timeout):
            if error is not None:
                raise error
            if stats is not None:
                answers[name] = stats
        return answers
