"""The parts of its store that a backend is given, and what a writer of ours asks of a backend."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol, TypeVar

from ....policies.errors import AnabranchError, CorruptionError, StoreFailedError
from ..operations.plan import Plan, Sequencer
from ..state.states import Catalog
from .settings import Settings

T = TypeVar("T")


class ReadError(CorruptionError):
    """The disk did not give a message's bytes, which may be whole: the same may be tried again."""


class NotTakenError(StoreFailedError):
    """One of the changes of a write is something that the backend does not take; the others may well do without it."""


class Host(Protocol):
    """The store of a backend: its engine, as every kind of store may use it."""

    name: str
    lock: threading.RLock
    """The store's, under which all but `bodies` and `sync` are called."""
    catalog: Catalog
    sequencer: Sequencer
    written: Plan | None
    """A plan that took effect and was not taken in yet, where whoever calls writes."""
    batches: int
    """Writes that took effect."""
    pending_changes: int
    """How much waits to be applied."""
    interrupted: bool
    """The rows may be changed by halves: the backend is asked to recover before anything else."""
    writing_out: bool
    """The backend holds the lock for long: who only wants to help does not wait for it."""
    counts_stand: bool
    """The backend holds the lock for long, and changes none of the counts."""
    closed: bool

    @property
    def failed(self) -> BaseException | None:
        """Return why the store has stopped, if it has."""

    @property
    def forked(self) -> bool:
        """Return whether another process has opened the store."""

    @property
    def behind(self) -> bool:
        """Return whether anything is pending."""

    # Whether it may be used

    def ensure_usable(self) -> None:
        """Raise ClosedError or StoreFailedError if the store is not usable."""

    def check(self) -> None:
        """Raise, before taking the lock, what `ensure_usable` raises, and RuntimeError in a signal handler."""

    def refusal(self) -> AnabranchError:
        """Return the error that says why nothing is written any more."""

    def failure(self) -> StoreFailedError:
        """Return the error that callers of a failed store get."""

    def fail(self, cause: BaseException) -> None:
        """Stop the store for good: a disk has failed, say (invariant 7)."""

    def stop(self, cause: BaseException) -> None:
        """Stop for good where the failure has been logged already."""

    # From written to seen

    def take(self, plan: Plan) -> None:
        """Take in a plan that has become as durable as the policy asks. In order; again after an interruption."""

    def undo(self, plan: Plan) -> None:
        """Undo a plan that has not taken effect, whose callers were told that this is not known."""

    def finish(self) -> None:
        """Take in what is `written`, with the lock held."""

    def drain(self) -> None:
        """Apply, with the lock held, what is pending."""

    def current(self, drained: bool = True) -> None:
        """See, with the lock held, that the store is usable, and apply what is pending."""

    def settle(self) -> None:
        """Wait until what this thread has committed elsewhere is seen. Without the lock."""

    # Asking

    def asked(self, question: Callable[[], T]) -> T:
        """Return the answer, with all that has returned applied."""

    def looked_up(self, question: Callable[[], T]) -> T:
        """Return the answer, as of now: for who reads bodies, with the lock held or not."""


class Writes(Protocol):
    """A backend that leaves its writing to Direct or Threaded (writers.py), as they ask it."""

    settings: Settings

    def write(self, plan: Plan) -> None:
        """Make all changes of a plan durable, as the store's policy says, all or none. It is done: then its changes are
        applied under the store's lock, and seen. It is refused: an AnabranchError, and nothing of it happened. Or it is
        unknown, a COMMIT or a sync that was cut off: OutcomeUnknownError, whose cause is what to raise should nothing
        of it have happened, and nothing more is shown before `took_effect` has told."""

    def took_effect(self, plan: Plan) -> bool:
        """Return whether a write that ended in OutcomeUnknownError has taken effect. Raises AnabranchError if that
        cannot be told yet. Not asked of a store that has failed with it."""
