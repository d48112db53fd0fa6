"""The reasons why messages were given back last, for the dead letters that they may become.

It is kept in memory alone, of so many messages of a store as FAILURES_MAX says, so that a release costs no more with a
reason than without one. It has to last no longer than to the next attempt, which brings a reason of its own: once there
is none the message is a dead letter, whose headers say it (router/upkeep/dead_letters.py).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..messages import Reason
from ..state.leases import CLAIMED, LEASED, Lease

if TYPE_CHECKING:
    from ..messages import Message

FAILURES_MAX: Final = 10_000
TYPE_MAX: Final = 200
"""Characters of an exception's type that are kept."""
TEXT_MAX: Final = 1000
"""Characters of its text, or of a reason."""


class Failure(NamedTuple):
    """An exception, or what was said instead of one."""

    type: str | None
    """Its name, with its module if that is not Python's own; None: it is no exception."""
    text: str


def failure_of(reason: Reason) -> Failure:
    """Return the failure of a reason. Raises TypeError for what is neither text nor an exception."""
    if isinstance(reason, str):
        return Failure(None, _short(reason, TEXT_MAX))
    if not isinstance(reason, BaseException):
        raise TypeError(f"a reason is a str or an exception, not {type(reason).__name__}: {reason!r}")
    kind = type(reason)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(reason)
    except Exception as error:
        text = f"its text cannot be had: {type(error).__name__}"
    return Failure(_short(name, TYPE_MAX), _short(text, TEXT_MAX))


def _short(text: str, most: int) -> str:
    """Return valid unicode of at most so many characters."""
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return text.encode(errors="replace").decode()


Key = tuple[int, int, int]
"""Numbers of a destination and of a subscription (0: a queue's), and a seq."""


def keys_of(messages: Iterable[Message[Any]]) -> Iterator[Key]:
    """Yield the keys of messages that their holders are about to give back."""
    for message in messages:
        lease = message._note
        if type(lease) is Lease and lease.hold in (LEASED, CLAIMED) and lease.is_held:
            yield _key(lease)


def key_of(message: Message[Any]) -> Key | None:
    """Return the key of a message that is leased."""
    lease = message._note
    return _key(lease) if type(lease) is Lease and not lease.whole else None


def _key(lease: Lease) -> Key:
    channel = lease.channels[0]
    return channel.state.number, channel.number, lease.seq


class Failures:
    """The last failures of messages in one open store, by keys of its own. Threads: all."""

    def __init__(self) -> None:
        self._failures: dict[Hashable, Failure] = {}
        self._lock = threading.RLock()  # a signal handler may come back to it in the same thread

    def note(self, keys: Iterable[Hashable], failure: Failure) -> None:
        """Note the failure of messages."""
        with self._lock:
            for key in keys:
                self._failures.pop(key, None)  # else it would keep its place
                self._failures[key] = failure
            while len(self._failures) > FAILURES_MAX:
                del self._failures[next(iter(self._failures))]

    def of(self, key: Hashable) -> Failure | None:
        """Return the last failure of a message."""
        return self._failures.get(key)
