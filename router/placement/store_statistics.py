"""Statistics of all stores, asked so that a store whose disk hangs holds up nobody, and only one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic
from typing import Final

from ...adapters.core.engine.engine import COUNT_SECONDS
from ...adapters.core.store_types import StoreStats
from ...adapters.system.background import shared
from .record import StoreRow

ANSWER_SECONDS: Final = 4 * COUNT_SECONDS
"""The time in seconds after which an open store that does not answer is unresponsive: far longer than one waits for its
own counts."""


class StoreStatistics:
    """Asks stores for their statistics. Threads: all. Each step of what changes the fields is a single one."""

    def __init__(
        self, is_open: Callable[[StoreRow], bool], ask: Callable[[StoreRow], StoreStats], seconds: float | None = None
    ) -> None:
        """Make an asker. `ask` opens a store that is not open. `seconds`: how long an answer may take."""
        self._is_open, self._ask, self._seconds = is_open, ask, seconds
        self._latest: dict[str, StoreStats] = {}
        """The latest answer of each store, by its name."""
        self._unanswered: dict[str, float] = {}
        """The time (monotonic) since which a store has been asked and not answered."""

    def of(
        self, rows: Mapping[str, StoreRow], errors: dict[str, BaseException]
    ) -> tuple[dict[str, StoreStats], tuple[str, ...]]:
        """Return the statistics of stores, by name, and the names of the unresponsive ones, for which the latest answer
        stands, if any. Stores that are not open are waited for. A store's error is put into `errors`; its latest answer
        stands, too."""
        seconds = ANSWER_SECONDS if self._seconds is None else self._seconds
        opened = {name: row for name, row in rows.items() if self._is_open(row)}
        answers = self._answers({name: row for name, row in rows.items() if name not in opened}, None, errors)
        hanging = monotonic() - seconds
        asked = {name: row for name, row in opened.items() if self._unanswered.get(name, hanging) >= hanging}
        answers |= self._answers(asked, seconds, errors)
        latest = {name: answers.get(name) or self._latest.get(name) for name in rows}
        self._latest = {name: stats for name, stats in latest.items() if stats is not None}
        return dict(self._latest), tuple(name for name in rows if name not in answers and name not in errors)

    def unanswered_seconds(self, name: str) -> float:
        """Return how long a store has been asked and not answered."""
        return monotonic() - self._unanswered.get(name, monotonic())

    def _answers(
        self, rows: Mapping[str, StoreRow], timeout: float | None, errors: dict[str, BaseException]
    ) -> dict[str, StoreStats]:
        def ask(name: str) -> StoreStats:
            self._unanswered.setdefault(name, monotonic())
            try:
                stats = self._latest[name] = self._ask(rows[name])
            finally:
                self._unanswered.pop(name, None)
            return stats

        answers: dict[str, StoreStats] = {}
        for name, stats, error in shared().for_each(rows, ask, timeout):
            if error is not None:
                errors[name] = error
            if stats is not None:
                answers[name] = stats
        return answers
