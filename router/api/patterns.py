"""The queues that a listener or a receiver names: one, some, or all that a pattern names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from ...adapters.core.messages import Message
from ...policies.errors import DestinationError
from ...policies.names.destination import Destination, Kind
from ...policies.names.pattern import Pattern, escape
from .addresses import Address, queue_of
from .codecs import Codec, codec_of, wrap
from .endpoint import Endpoint


class Patterns:
    """Several patterns of queues, which name what any of them names."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        """Take them. Raises ValueError if there is none."""
        self.all: Final = tuple(patterns)
        if not self.all:
            raise ValueError("no queue was named to listen to: give a pattern, or one queue or more")

    @classmethod
    def of(cls, queues: Address | Iterable[Address]) -> Patterns:
        """Return those that users name. Raises as Router.listen."""
        return cls(map(_pattern_of, listed(queues)))

    def matches(self, destination: Destination) -> bool:
        """Return whether one of them names this destination."""
        return any(pattern.matches(destination) for pattern in self.all)

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))


def listed(queues: Address | Iterable[Address]) -> list[Address]:
    """Return the queues and patterns that users give."""
    return [queues] if isinstance(queues, str | Destination | Endpoint) else list(queues)


def _pattern_of(queue: Address) -> Pattern:
    many = parsed_queues(queue) if isinstance(queue, str) else None
    return many or Pattern.parse(f"{Kind.QUEUE.scheme}{escape(queue_of(queue).name)}")


def decoded(
    queues: Address | Iterable[Address], on_message: Callable[[Message[Any]], object], codec: str | Codec[Any] | None
) -> Callable[[Message[Any]], object]:
    """Return what is called with messages whose bodies are bytes: with a codec, or a queue's own, they are decoded."""
    decoder = codec_of(codec)
    own = {
        one.destination: one._codec for one in listed(queues) if isinstance(one, Endpoint) and one._codec is not None
    }
    if decoder is None and not own:
        return on_message

    def heard(message: Message[Any]) -> object:
        given = decoder or own.get(message.destination)
        return on_message(message if given is None else wrap(given, message))

    return heard


def parsed_queues(text: str) -> Pattern | None:
    """Return the pattern of queues that a text is; None if the text is the name of one queue. Raises
    DestinationError."""
    pattern = Pattern.parse(text)
    if pattern.kinds == {Kind.MAP}:
        raise DestinationError(
            f"{text} names maps, from which nothing is received: router.map(name).get(key) gives a value, and "
            "wait(key) waits for one; give a pattern of queues"
        )
    if Kind.QUEUE not in pattern.kinds:
        raise DestinationError(
            f"{text} names topics, and messages are received from their durable subscriptions: "
            "router.topic(name).subscribe(name).receive(); give a pattern of queues"
        )
    return None if pattern.exact else pattern
