"""Copies of one message that several subscriptions of a topic have given up: put back together, they are sent once."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection
from typing import Final, cast

from ...adapters.core import Store
from ...adapters.core.messages import Headers, Message
from ...adapters.core.record.headers import pack_headers
from ...adapters.core.record.large import StoredBody
from ...adapters.core.store_types import SubscriptionKey
from ...policies.names.destination import Destination

REMEMBERED_MAX: Final = 100_000
"""The number of messages remembered while a queue is emptied, some 35 MB (invariant 10). A copy of an earlier one is
sent again."""


class Copies:
    """The subscriptions that have given up each message sent back, in one call.

    A dead letter that comes while the call goes on may be of the message that the call has just sent. That one was
    given up again, by another subscription perhaps, and would be lost if it were taken for a copy. So the sends of
    earlier transactions count only for letters that were in the queue before the first of them, which their seqs tell.
    """

    def __init__(self, store: Store | None = None) -> None:
        """Begin a call. `store`: the one of the queue that is emptied; None: all that is added is in one
        transaction."""
        self._store = store
        self._highest_seq = 0 if store is None else store.highest_seq
        self._given_up: dict[bytes, Counter[SubscriptionKey | None]] = {}
        """How often each subscription has, by digest; the message was sent as often as the most often of these."""
        self._keys: dict[SubscriptionKey | None, SubscriptionKey | None] = {}
        """One object for each key, however many letters name it."""

    def were_there(self, letter: Message) -> bool:
        """Return whether a dead letter was in the queue before the call."""
        return letter._store is self._store and letter.seq <= self._highest_seq

    def is_first(
        self,
        letter: Message,
        headers: Headers,
        sent_as: tuple[Destination, str],
        key: SubscriptionKey | None,
        subscriptions: Collection[SubscriptionKey],
    ) -> bool:
        """Return whether a dead letter that subscription `key` has given up is to be sent: the others' copies of the
        message were not. `headers`, `sent_as`: what the message had before; `subscriptions`: those that the topic has
        now."""
        if len(subscriptions) < 2:
            return True  # there are no others
        digest = _digest(letter, headers, sent_as)
        given_up = self._given_up.setdefault(digest, Counter())
        sent = max(given_up.values(), default=0)
        given_up[self._keys.setdefault(key, key)] += 1
        first = given_up[key] > sent
        if all(given_up[other] == sent + first for other in subscriptions):  # no other copy is still to come
            del self._given_up[digest]
        elif len(self._given_up) > REMEMBERED_MAX:
            del self._given_up[next(iter(self._given_up))]
        return first


def _digest(letter: Message, headers: Headers, sent_as: tuple[Destination, str]) -> bytes:
    """Return a digest that the copies of one message share. Its id alone says too little: once the duplicate window had
    forgotten it, another message took it."""
    destination, message_id = sent_as
    digest = hashlib.blake2b(digest_size=16)
    digest.update(pack_headers({"": [str(destination), message_id, letter.priority, letter.persistent]}))
    digest.update(pack_headers(headers))  # which says where it ends
    content = letter.content
    digest.update(content.reference if isinstance(content, StoredBody) else cast("bytes", content))
    return digest.digest()
