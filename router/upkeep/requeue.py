"""Requeue sends dead letters back to where they come from: some that are in hand, or all of a queue
(api/dead_letter.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ...adapters.core.messages import Message, Outgoing, require_leased
from ...adapters.core.record.headers import pack_headers
from ...adapters.core.store_types import SubscriptionKey
from ...policies.errors import AnabranchError, DeadLetterError
from ...policies.names.destination import Destination, Kind
from ..api import dead_letter as labels
from ..api.dead_letter import number, subscription_of
from ..api.queue import Queue
from ..api.transaction import Transaction
from ..placement.registry import StoreRegistry
from .batches import give_back, received, send_on
from .copies import Copies

BATCH_MESSAGES: Final = 100
"""The number of a queue's dead letters that are put back in one transaction."""
BATCH_BYTES: Final = 4 << 20
"""Bytes of bodies that are put back in one transaction; a longer one goes back alone."""


class _Letter(NamedTuple):
    """A dead letter, and the message that it is sent back as."""

    message: Message[Any]
    source: Destination
    message_id: str | None
    headers: dict[str, Any]
    """The headers that it had before."""
    requeued: dict[str, Any]
    """The headers that say what it was meanwhile."""
    persistent: bool
    subscriptions: Collection[SubscriptionKey]
    """The subscriptions of its source, if that is a topic."""


class _Checker:
    """Reads where dead letters come from. For one call: it remembers what it has looked up."""

    def __init__(self, registry: StoreRegistry) -> None:
        self._registry = registry
        self._subscriptions: dict[Destination, set[SubscriptionKey]] = {}

    def letter(self, message: Message[Any]) -> _Letter:
        """Check a dead letter. Raises DeadLetterError if it cannot go back, UnknownMessageError if it is not leased
        here, TypeError."""
        if not isinstance(message, Message):
            raise TypeError(
                f"dead letters that were received can be put back, or all of a queue; not {type(message).__name__}: "
                f"{message!r}"
            )
        require_leased(message)
        self._registry.require_own(message)
        source = self._source(message)
        subscriptions = self._require_subscription(message, source) if source.kind is Kind.TOPIC else ()
        message_id = message.headers.get(labels.MESSAGE_ID)
        if not isinstance(message_id, str | None):
            raise DeadLetterError(f"{message!r} is no dead letter: its header {labels.MESSAGE_ID} is {message_id!r}")
        gone = (labels.REQUEUED_ERROR_TYPE, labels.REQUEUED_ERROR_TEXT)  # of the time before
        headers = {
            name: value
            for name, value in message.headers.items()
            if not name.startswith(labels.PREFIX) and name not in gone
        }
        requeued = self._requeued(message, source, headers, message_id)
        return _Letter(message, source, message_id, headers, requeued, message.persistent, subscriptions)

    def _requeued(
        self, message: Message, source: Destination, headers: Mapping[str, Any], message_id: str | None
    ) -> dict[str, Any]:
        """Return the headers that tell of the dead letter; none where its source's store would find it too large with
        them."""
        requeued: dict[str, Any] = {
            labels.REQUEUED_REASON: str(message.headers.get(labels.REASON, "")),
            labels.REQUEUED_COUNT: number(headers, labels.REQUEUED_COUNT) + 1,
            labels.REQUEUED_DELIVERIES: number(headers, labels.REQUEUED_DELIVERIES)
            + number(message.headers, labels.DELIVERIES),
        }
        errors = ((labels.REQUEUED_ERROR_TYPE, labels.ERROR_TYPE), (labels.REQUEUED_ERROR_TEXT, labels.ERROR_TEXT))
        requeued |= {name: value for name, of in errors if isinstance(value := message.headers.get(of), str)}
        most = self._registry.option_for(source, "message_bytes_max")
        size = len(message.content) + len(pack_headers({**headers, **requeued})) + len((message_id or "").encode())
        return requeued if most is None or size <= most else {}

    def _source(self, message: Message) -> Destination:
        """Return the destination that a dead letter comes from, which has a route."""
        name = message.headers.get(labels.SOURCE)
        if not isinstance(name, str):
            raise DeadLetterError(
                f"{message!r} is no dead letter: it has no header {labels.SOURCE}; messages that "
                f"somebody sent to {message.destination} stay there"
            )
        try:
            source = Destination.restored(name)
            self._registry.route(source)
        except AnabranchError as error:
            raise DeadLetterError(f"{message!r} cannot go back to {name}: {error}") from error
        if source == message.destination:
            raise DeadLetterError(
                f"{message!r} comes from {source} itself, where it is already; ack it, or send it where it belongs"
            )
        return source

    def _require_subscription(self, message: Message, topic: Destination) -> set[SubscriptionKey]:
        """Require a subscription that gets the message: without any it would be gone. Returns all of the topic."""
        known = self._subscriptions.get(topic)
        if known is None:
            known = self._subscriptions[topic] = {found.key for found in self._registry.subscriptions_of(topic)}
        key = subscription_of(message)
        if key is None and not known:
            raise DeadLetterError(
                f"{message!r} cannot go back to {topic}, which has no durable subscription: nobody would have it; "
                "subscribe first, or ack the message"
            )
        if key is not None and key not in known:
            raise DeadLetterError(
                f"{message!r} cannot go back to the subscription {key[1]!r} of {topic}, which is not there any more; "
                "subscribe again first, or ack the message"
            )
        return known


def requeue_given(
    registry: StoreRegistry,
    begin: Callable[[], Transaction],
    letters: Message[Any] | Iterable[Message[Any]] | Queue,
    limit: int | None,
) -> int:
    """Put back dead letters that are in hand, or those of a queue; returns how many. Raises as Router.requeue."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool)):
        raise TypeError(f"limit is a number of messages, not {type(limit).__name__}: {limit!r}")
    if limit is not None and limit < 0:
        raise ValueError(f"requeue takes a limit of 0 or more, or None for all; not {limit}")
    if isinstance(letters, Queue):
        return requeue_all(registry, begin, letters, limit)
    if limit is not None:
        raise ValueError("requeue takes a limit with a queue, not with messages: give it fewer of them")
    if isinstance(letters, Message):
        letters = [letters]
    elif not isinstance(letters, Iterable):
        raise TypeError(
            "requeue takes messages that were received, or their queue as text, as a Destination or a Queue, "
            f"not {type(letters).__name__}: {letters!r}"
        )
    return requeue(registry, begin, letters)


def requeue(registry: StoreRegistry, begin: Callable[[], Transaction], messages: Iterable[Message[Any]]) -> int:
    """Put these leased dead letters back, all of them in one transaction; returns how many. Raises what _Checker.letter
    and a commit raise, and ValueError for a message that is given twice."""
    checker = _Checker(registry)
    letters: list[_Letter] = []
    given: set[int] = set()
    for message in messages:
        letters.append(checker.letter(message))
        if id(message) in given:
            raise ValueError(f"{message!r} is given twice; give it once. Nothing was put back")
        given.add(id(message))
    _put_back(begin, letters, Copies())
    return len(letters)


def _put_back(begin: Callable[[], Transaction], letters: Sequence[_Letter], copies: Copies) -> None:
    """Put letters back in one transaction. `copies`: those of the call, which ends if the transaction fails."""
    if letters:
        send_on(begin, _sends(letters, copies), (letter.message for letter in letters))


def _sends(letters: Sequence[_Letter], copies: Copies) -> Iterator[tuple[Destination, Outgoing]]:
    later = Copies()
    for message, source, message_id, headers, requeued, persistent, subscriptions in letters:
        if source.kind is Kind.TOPIC and message_id is not None:
            key = subscription_of(message)
            together = copies if copies.were_there(message) else later
            if not together.is_first(message, headers, (source, message_id), key, subscriptions):
                continue
        yield source, Outgoing(
            message.content, headers | requeued, message_id, message.priority, persistent=persistent,
            requeued=True,  # also without an id: a full source refuses it, whatever its store drops
        )  # fmt: skip


def requeue_all(registry: StoreRegistry, begin: Callable[[], Transaction], queue: Queue, limit: int | None) -> int:
    """Put back the dead letters of a queue, at most `limit`, in order, batch by batch, each in one transaction; returns
    how many. Letters that come meanwhile may be left.

    Errors are those of `requeue`. Letters put back before stay so, and a note of the error says how many.
    """
    store = registry.store_of(queue.destination)
    if store is None:
        return 0
    copies = Copies(store)
    left = queue.depth() if limit is None else min(limit, queue.depth())
    count = 0
    try:
        while left > 0:
            done, wrong = _requeue_batch(registry, begin, queue, min(left, BATCH_MESSAGES), copies)
            count += done
            left -= done
            if wrong is not None:
                raise wrong
            if not done:
                break
    except AnabranchError as error:
        error.add_note(f"{count} dead letters of {queue.destination} were put back before this.")
        raise
    return count


def _requeue_batch(
    registry: StoreRegistry, begin: Callable[[], Transaction], queue: Queue, most: int, copies: Copies
) -> tuple[int, DeadLetterError | None]:
    """Put back the first letters, up to one that cannot go back; returns how many, and the error of that one."""
    checker = _Checker(registry)
    letters: list[_Letter] = []
    wrong: DeadLetterError | None = None
    taken = received(queue, most, BATCH_BYTES)
    try:
        for message in taken:
            try:
                letters.append(checker.letter(message))
            except DeadLetterError as error:
                wrong = error
                break
        _put_back(begin, letters, copies)
        del taken[: len(letters)]
    finally:
        give_back(taken)
    return len(letters), wrong
