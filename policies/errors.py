"""Every error that Anabranch raises on purpose, grouped by what the caller does next.

A message names the thing, the value and the next step. The families are few: catch the family, read the fields.
They live on the ground floor so that each layer can raise them; `anabranch` re-exports all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .text import count_of

HELD_SHOWN: Final = 10
"""The most destinations that an error names; of others it says how many there are."""


class AnabranchError(Exception):
    """The base of all errors that Anabranch raises on purpose."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a configuration: where, and what. `line` counts from 1; 0 where there is no file."""

    message: str
    line: int = 0
    of_variable: bool = False
    """True where a value is wrong that came from the environment: the configuration's text may be as it should."""


class ConfigError(AnabranchError):
    """The configuration is wrong; nothing was opened or created. `problems` holds all of them, not just the first."""

    def __init__(self, problems: Sequence[Problem | str], path: str | None = None) -> None:
        self.problems: list[Problem] = [p if isinstance(p, Problem) else Problem(p) for p in problems]
        self.path: str | None = path
        super().__init__("\n".join(self._line(p) for p in self.problems))

    def _line(self, problem: Problem) -> str:
        place = f"{self.path}:" if self.path else ""
        if problem.line:
            place = f"{self.path or 'line '}{':' if self.path else ''}{problem.line}:"
        return f"{place} {problem.message}" if place else problem.message


class DestinationError(AnabranchError, ValueError):
    """A destination name or a pattern is not one."""


class NoRouteError(AnabranchError, LookupError):
    """No pattern matches the destination. Nothing was created."""


class StoreLockedError(AnabranchError):
    """Another process (or another router of this one) owns the directory."""

    path: str = ""
    """The file that is locked; empty where it is a lease in a database."""


class PlacementError(AnabranchError):
    """The configuration would hide data that a store holds; or a recorded store is missing or is another one."""


class CorruptionError(AnabranchError):
    """Acknowledged data is damaged. Nothing was changed on disk."""

    def __init__(self, path: str, offset: int, reason: str, step: str = "") -> None:
        """Make the error. `step` says what to do about it, where somebody knows."""
        self.path: str = path
        self.offset: int = offset
        self.reason: str = reason
        self.step: str = step
        self.held: Mapping[str, int | None] = {}
        """The destinations whose messages lie in what is damaged, as far as that is known, and how many messages; None
        where nobody can tell how many."""
        super().__init__(self._text(""))

    def _text(self, held: str) -> str:
        return f"{self.path} at offset {self.offset}: {'; '.join(filter(None, (self.reason, held, self.step)))}"

    def _say(self, reason: str | None = None, step: str | None = None) -> None:
        """Let the message say more than who found the damage could know."""
        self.reason, self.step = reason or self.reason, step or self.step
        self.args: tuple[Any, ...] = (self._text(""),)

    def _name_held(self, held: Mapping[str, int | None], where: str) -> None:
        """Let the message name the destinations, and how many messages of theirs lie in `where`."""
        if held:
            self.held = dict(held)
            self.args = (self._text(shown_held(held, where)),)


def shown_held(held: Mapping[str, int | None], where: str) -> str:
    """Return the destinations with the most messages, and how many others there are. Each has its number if all are
    known."""
    names = sorted(held, key=lambda name: (-(held[name] or 0), name))
    shown, others = names[:HELD_SHOWN], names[HELD_SHOWN:]
    counts = [count for count in held.values() if count is not None]
    if len(counts) < len(held):
        rest = f" and {len(others)} more" if others else ""
        return f"destinations in {where}: {', '.join(shown)}{rest}"
    more = f" and {sum(held[name] or 0 for name in others)} in {count_of(len(others), 'more destination')}"
    rest = more if others else ""
    return f"messages in {where}: {', '.join(f'{held[name]} of {name}' for name in shown)}{rest}"


class StoreFailedError(AnabranchError):
    """The store met an error that it must not go on after; reopen it. `__cause__` says what happened."""


class StoreFullError(AnabranchError):
    """A limit was reached. The operation took no effect."""


class OutOfDescriptorsError(StoreFullError):
    """No more files and sockets can be open, in this process or on the machine. The operation took no effect; raise
    `ulimit -n`, or have fewer open, and try again."""


class MessageTooLargeError(AnabranchError, ValueError):
    """The message is larger than its store takes. Nothing was sent."""


class LargeMessageError(AnabranchError):
    """The body of a large message was asked for as bytes, which it is not: open the message, or read it whole."""


class UnknownMessageError(AnabranchError, LookupError):
    """The message is not there to be acked or released: already acked, or not leased by this process."""


class DeadLetterError(AnabranchError, ValueError):
    """The message is no dead letter, or cannot go back where it came from. Nothing was done with it."""


class DecodeError(AnabranchError, ValueError):
    """The codec of a queue, a subscription or a map does not take a body or a value. A message is as it was: leased, if
    it was received. `__cause__` says what the codec did not like, if it tried."""

    def __init__(self, text: str, message: Any) -> None:
        self.message = message
        """The Message, None for a map's value. Its `raw_body` has the bytes; release it or reject it."""
        super().__init__(text)


class SubscriptionError(AnabranchError, ValueError):
    """The durable subscription is there already, and is another one. Nothing was changed."""


class UnknownSubscriptionError(AnabranchError, LookupError):
    """The topic has no durable subscription of that client and name."""


class TransactionError(AnabranchError):
    """The transaction cannot do this, or was rolled back."""


class TransactionInDoubt(TransactionError):  # noqa: N818  the field's own word for it
    """Nobody knows yet whether the transaction is committed: the decision was on its way to the disk when that failed.
    Its participants stay prepared; the outcome shows once the decision log reads back."""

    def __init__(self, text: str, transaction: str, stores: Sequence[str]) -> None:
        self.transaction = transaction
        """The transaction's id, as `Router.in_doubt()` shows it."""
        self.stores: list[str] = list(stores)
        super().__init__(text)


class OutcomeUnknownError(StoreFailedError):
    """Nobody knows whether the operation took effect. Retry it with the same `message_id`."""


class ClockError(AnabranchError):
    """The machine's clock stands before 1970, so that what is done now cannot be given its time. Nothing was done."""


class ClosedError(AnabranchError):
    """The router or the store is closed, or this process is a fork of the one that opened it."""


def router_closed() -> ClosedError:
    """Return the error of a call of a closed router."""
    return ClosedError("the router is closed; open it with anabranch.open(...)")


class TraceError(AnabranchError):
    """A usage trace or a foreign journal cannot be used: what, where, and what to do."""


class SparkError(AnabranchError):
    """Spark, or the cluster that it should run on, did not do its work: what it said, and what to do."""


class MissingExtraError(AnabranchError, ImportError):
    """An optional part is not installed. The message names the `pip install` that brings it."""
