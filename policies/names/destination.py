"""A destination: the place that messages are sent to, a queue or a topic with a dotted name, or that keyed values are
put into, a map.

Written `queue://orders.custom`, `topic://prices.eu` or `map://results`; a name alone is a queue. Several with commas
between are a composite: one atomic send to all of them, `queue://a,topic://b`. Names are case-sensitive, may hold any
character but NUL, and `.` separates their segments (an empty segment is a segment). The comma separates only where a
text is parsed:
`Destination.queue("Smith, J.")`, `Destination.topic(...)` and `Destination.map(...)` take any text as a name.

A wildcard of patterns (pattern.py) is a character like any other here. Where users write a name in a call it is refused
all the same (router/api/addresses.py): who sends to `a.*` means something else than a queue of that name.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import DestinationError

NAME_BYTES_MAX = 1024
"""The longest name, in bytes of UTF-8."""


class Kind(enum.Enum):
    """The kinds of destinations. The values are those on disk: never change them."""

    QUEUE = 0, "queue://"
    TOPIC = 1, "topic://"
    MAP = 2, "map://"

    scheme: str

    def __new__(cls, value: int, scheme: str = "") -> Kind:
        kind = object.__new__(cls)
        kind._value_, kind.scheme = value, scheme
        return kind


@dataclass(frozen=True)
class Destination:
    """One queue, one topic or one map. Hashable; equal by kind and name."""

    # Every operation looks its destination up, twice: each has its name's own hash, which runs no Python.
    __slots__ = ("__hash__", "kind", "name")

    kind: Kind
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise DestinationError("a destination needs a name; an empty one was given")
        if "\0" in self.name:
            raise DestinationError(f"destination name {self.name!r} holds a NUL character; leave it out")
        try:
            size = len(self.name.encode())
        except UnicodeEncodeError as error:
            raise DestinationError(f"destination name {self.name!r} is not valid unicode: {error}") from None
        if size > NAME_BYTES_MAX:
            raise DestinationError(
                f"destination name {self.name[:40]!r}... takes {size} bytes; at most {NAME_BYTES_MAX} are allowed"
            )

        object.__setattr__(self, "__hash__", self.name.__hash__)

    def __getstate__(self) -> list[Kind | str]:
        return [self.kind, self.name]

    def __setstate__(self, state: list[Any]) -> None:
        Destination.__init__(self, *state)

    def __str__(self) -> str:
        return self.kind.scheme + self.name

    @classmethod
    def queue(cls, name: str) -> Destination:
        """Return the queue of exactly this name, whatever characters it holds. Raises DestinationError for an empty
        name, one that holds NUL, and one of more than NAME_BYTES_MAX bytes."""
        return cls(Kind.QUEUE, name)

    @classmethod
    def topic(cls, name: str) -> Destination:
        """Return the topic of exactly this name. Raises DestinationError as `queue` does."""
        return cls(Kind.TOPIC, name)

    @classmethod
    def map(cls, name: str) -> Destination:
        """Return the map of exactly this name. Raises DestinationError as `queue` does."""
        return cls(Kind.MAP, name)

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Parse `queue://name`, `topic://name`, `map://name`, or a bare name, which is a queue. Raises
        DestinationError, for a comma too: it separates the parts of a composite."""
        return _parse(text)

    @classmethod
    def restored(cls, text: str) -> Destination:
        """Return the destination whose `str` this is; a bare name is a queue. A comma is a character of the name.
        Raises DestinationError."""
        return _split(text)

    @classmethod
    def parse_composite(cls, text: str) -> tuple[Destination, ...]:
        """Parse the parts of `queue://a,topic://b`, in order and each once. Raises DestinationError."""
        return tuple(dict.fromkeys(_parse(part.strip()) for part in text.split(",")))


def wildcard_in(name: str) -> str | None:
    """Return the first wildcard that a name would hold if it were a pattern; None if it holds none."""
    found = _WILDCARD.search(name)
    return found[0] if found is not None else None


_WILDCARD = re.compile(r"[*?[]|(?<![^.])>(?![^.])")


def mistyped_scheme(text: str) -> bool:
    """Tell whether a text without a scheme probably begins with a mistyped one: `queue:/x`, `queue//x`."""
    return re.match(r"(queue|topic|map)(:|//)", text, re.IGNORECASE) is not None


@lru_cache(maxsize=16384)
def _parse(text: str) -> Destination:
    if "," in text:
        raise DestinationError(
            f"destination {text!r} holds a comma, which separates the parts of a composite; name one destination, or "
            "give one that is really named so as Destination.queue(name), Destination.topic(name) or "
            "Destination.map(name)"
        )
    return _split(text)


def _split(text: str) -> Destination:
    scheme, separator, name = text.partition("://")
    if text[:1].isspace() or (not separator and text[-1:].isspace()):
        raise DestinationError(f"destination {text!r} begins or ends with a blank; leave it out")
    if not separator:
        if mistyped_scheme(text):
            raise DestinationError(
                f"destination {text!r} looks mistyped; two slashes after a colon: queue://, topic:// or map://"
            )
        return Destination(Kind.QUEUE, text)
    for kind in Kind:
        if kind.scheme == scheme + separator:
            return Destination(kind, name)
    raise DestinationError(f"unknown scheme {scheme!r} in destination {text!r}; use queue://, topic:// or map://")


def dead_letter_name(pattern: str, name: str) -> str:
    """Return the name of the dead-letter queue of a destination."""
    return pattern.replace("{name}", name)
