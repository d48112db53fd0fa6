"""The leases that a client holds, and how they end: the half of its store that settles (store.py has the other)."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar
from weakref import WeakValueDictionary

from ....adapters.core.engine.lease_times import require_seconds
from ....adapters.core.messages import Message, Reason, note_received, note_settled, require_leased, warn_abandoned
from ....adapters.core.service.failures import Failure, failure_of
from ....adapters.core.state.due import delay_ms
from ....adapters.core.state.leases import ACKED, CLAIMED, LEASED, LEAVING, REJECTED, RELEASED, ROLLED_BACK
from ....adapters.core.store_types import Settlement, SubscriptionKey
from ....policies.errors import AnabranchError, StoreFailedError, TransactionError, UnknownMessageError, router_closed
from ....policies.names.destination import Destination
from ...api.dead_letter import require_message
from ...api.transaction import Transaction
from ...upkeep.dead_letters import SWEEP_SECONDS
from ..protocol import Ack, Call, Held, Request, Settle, destination_of, unpack_error
from .bodies import Bodies, RemoteBody, taken_out
from .exchange import RETRY_SECONDS, Exchange

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

GONE: Final = "its queue or subscription was removed"
ENDS: Final = {Settlement.ACK: ACKED, Settlement.RELEASE: RELEASED, Settlement.REJECT: REJECTED}
"""How leases end that are settled by their tokens."""
NOT_SHARED: Final = (
    "cannot be given to a shared directory, whose owner is another process; open the directory without `shared`"
)
FOR_GOOD: Final = sys.float_info.max
"""Seconds for which what a transaction has claimed is leased: its time has stopped."""
_NOT_HELD: Final = " is not leased here any more: "


class RemoteLease:
    """The hold that this client has on a message."""

    __slots__ = ("__weakref__", "end", "held", "hold", "is_lost", "is_timed", "kept", "reason", "rejection", "store")

    def __init__(self, store: RemoteLeases, held: Held, is_timed: bool) -> None:
        self.store: RemoteLeases = store
        self.held: Held = held
        self.is_timed: bool = is_timed
        """It runs out, unless a transaction has claimed it."""
        self.hold: int = LEASED
        self.kept: bool = False
        """Somebody has its token."""
        self.end: str = ""
        """How it ended."""
        self.is_lost: bool = False
        """Its holder did not end it."""
        self.reason: Failure | None = None
        """Why it is about to be given back."""
        self.rejection: Failure | None = None
        """Why the transaction that has claimed it rejects it, if it does."""

    def __del__(self) -> None:
        """Give it back if nobody has got its message: its caller was interrupted."""
        try:
            if self.hold == LEASED and not (self.kept or self.store.connection.is_closed or sys.is_finalizing()):
                self.store.give_back(self)
        except AttributeError:
            pass  # the interpreter ends

    @property
    def token(self) -> str:
        """Return the token by which the client knows it."""
        return self.held.token

    @property
    def is_settled(self) -> bool:
        """True if its holder has done with it, or a transaction has it."""
        return self.hold in (CLAIMED, LEAVING) and not self.is_lost


class _Abandoned:
    """Messages that this client has received and let go of without settling them."""

    def __init__(self, store: RemoteLeases) -> None:
        self._store = store
        self._tokens: deque[str] = deque()

    def note(self, message: Message[Any]) -> None:
        """Note a message that nobody holds any more. Any thread, with any lock."""
        lease, store = message._note, self._store
        if lease.kept or lease.hold != LEASED or store.connection.is_closed or sys.is_finalizing():
            return
        lease.hold = LEAVING
        is_first = not self._tokens
        self._tokens.append(lease.token)
        if is_first:
            store.connection.schedule(SWEEP_SECONDS, self.give_back)  # as an owner's own are
        warn_abandoned(message)

    def give_back(self) -> None:
        """Give back what was noted."""
        tokens = taken_out(self._tokens)
        try:
            self._store.settle(tokens, Settlement.RELEASE)
        except StoreFailedError as error:  # its owner does not answer
            log.debug("messages that nobody holds are given back later: %s", error)
            self._tokens += tokens
            self._store.connection.schedule(SWEEP_SECONDS, self.give_back)
        except AnabranchError as error:
            log.debug("messages that nobody holds could not be given back: %s", error)


class RemoteLeases:
    """The messages that a client holds, and the ends of its leases, as Store has them. Threads: all."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.connection: Exchange
        self.abandoned: Final = _Abandoned(self)
        self.bodies: Bodies = Bodies(directory, self.ask, lambda: self.connection)
        self._leases: WeakValueDictionary[str, RemoteLease] = WeakValueDictionary()
        """What this client holds, by token. One that nobody has is none: who was given it was interrupted."""
        self._kept: dict[str, RemoteLease] = {}
        """Those whose tokens somebody has."""
        self._going_back: deque[Request] = deque()
        """Requests that give back what nobody here holds, of which an owner that does not answer has yet to hear."""
        self._is_retried = False
        """They are told soon."""

    def ask(
        self, request: Request, on_answer: Callable[[Any], Any] | None = None,
        on_late: Callable[[Any], object] | None = None,
    ) -> Any:  # fmt: skip
        """Ask the owner, and wait."""
        if self.bodies.unused:
            unused = taken_out(self.bodies.unused)
            try:
                self.connection.ask(Call("bodies_end", (unused,)))
            except BaseException:
                self.bodies.unused += unused
                raise
        return self.connection.ask(request, on_answer, on_late)

    def call(self, name: str, *given: Any) -> Any:
        """Call a function of the owner (owner/calls.py)."""
        return self.ask(Call(name, given))

    def held(self) -> list[Held]:
        """Return what this client holds, for an owner that does not know."""
        return [
            one.held._replace(lease=FOR_GOOD) if one.is_timed and one.hold == CLAIMED else one.held
            for one in list(self._leases.values())
        ]

    def _forget_leases(self) -> None:
        """Hold nothing: in a forked child."""
        for lease in list(self._leases.values()):
            lease.hold, lease.end = LEAVING, "it is the parent process's"
        self._leases.clear()
        self._kept.clear()
        self.bodies.unused.clear()
        self._going_back.clear()
        self._is_retried = False

    # What comes

    def _received(self, seconds: float | None, answer: list[Any] | None) -> list[Message]:
        try:
            messages = [self._message(fields, seconds) for fields in answer or ()]
            for message in messages:
                note_received(message)
        except BaseException:
            self._came_late(answer)
            raise
        return messages

    def _came_late(self, answer: list[Any] | None) -> None:
        """Give back what has come for a caller that was interrupted."""
        if answer:
            self._settle_later([fields[0] for fields in answer])

    def _message(self, fields: list[Any], seconds: float | None = None) -> Message:
        token, seq, body, headers, name, timestamp_ms, priority, expires_at_ms, deliveries, lasts, text, key, timed = (
            fields
        )
        subscription: SubscriptionKey | None = None if key is None else (key[0], key[1])
        note = token
        if type(token) is str:
            note = self._leases[token] = RemoteLease(self, Held(token, text, subscription, seq, seconds), timed)
        if type(body) is list:
            body = RemoteBody(self.bodies, *body)
        return Message(
            self, destination_of(text), seq, body, headers, name, timestamp_ms, note is not token, note, priority,  # type: ignore[arg-type]
            expires_at_ms, deliveries, subscription, lasts,
        )  # fmt: skip

    def give_back(self, lease: Any) -> None:
        """Give back what is leased so."""
        self._settle_later([lease.token])

    def _settle_later(self, tokens: list[str]) -> None:
        """Give leases back without waiting, from the thread that reads."""
        self.connection.later(lambda: self._quietly(tokens))

    def _quietly(self, tokens: list[str], request: Request | None = None) -> None:
        """Give leases back that nobody has seen, or as this request says, however long the owner does not answer."""
        for token in tokens:
            self._ended(token, RELEASED if request is None else ROLLED_BACK)
        self._going_back.append(request or Settle(tokens, Settlement.RELEASE, delivered=False))
        if not self._is_retried:  # else they are told soon, this one with them
            self._tell_going_back()

    def _tell_going_back(self) -> None:
        """Tell the owner what goes back. While it does not answer no thread waits for it."""
        self._is_retried = False
        for _ in range(len(self._going_back)):
            try:
                request = self._going_back.popleft()
            except IndexError:  # another thread tells them too
                break
            try:
                self.connection.ask(request)
            except AnabranchError as error:
                log.debug("messages could not be given back: %s", error)
                # It has heard nothing, or its store has failed; else it does it, or the next one does.
                if type(error) is StoreFailedError:
                    self._going_back.append(request)
        if self._going_back and not self._is_retried:
            self._is_retried = True
            self.connection.schedule(RETRY_SECONDS, self._tell_going_back)

    # Moving leases

    def _take(
        self, messages: Sequence[Message[Any]], hold: int, next_hold: int, leases: list[RemoteLease] | None = None
    ) -> list[RemoteLease]:
        """Move the leases of messages that are held so, all or none, and add them to a list: interrupted from there on,
        whoever has that moves them back. Raises UnknownMessageError."""
        if self.connection.is_closed:
            raise router_closed()
        leases = [] if leases is None else leases
        for message in messages:
            lease = message._note
            if not isinstance(lease, RemoteLease) or lease.hold != hold:  # also one that is named twice
                for taken in leases:
                    taken.hold = hold
                raise _not_held(message)
            leases.append(lease)
            lease.hold = next_hold
        return leases

    def _ended(self, token: str, end: str, is_lost: bool = False) -> None:
        lease = self._leases.pop(token, None)
        self._kept.pop(token, None)
        if lease is not None:
            lease.hold, lease.end, lease.is_lost = LEAVING, end, is_lost

    def _lost(self, message: Message[Any], error: UnknownMessageError) -> None:
        """Note that a message is not held any more, as the owner says; what it says of a token is said of it."""
        token = message._note.token
        text = str(error).replace(f"the message of token {token}", repr(message))
        if text != str(error):
            self._ended(token, text.rpartition(_NOT_HELD)[2], is_lost=True)
            error.args = (text,)

    def _gone(self, destination: Destination, key: SubscriptionKey | None = None) -> None:
        """Note that nothing is left of what this client held of a destination, or for a subscription."""
        for lease in list(self._leases.values()):
            if lease.held.destination == str(destination) and key in (None, lease.held.key):
                self._ended(lease.token, GONE)

    def _finished(
        self, messages: Sequence[Message[Any]], leases: list[RemoteLease], hold: int, end: str, answer: list[Any] | None
    ) -> None:
        """Note what has become of leases, all of which were to end so. Raises the first error."""
        if answer is None:
            for lease in leases:
                self._ended(lease.token, end)
            note_settled(messages)
            return
        wrong = _errors(answer, len(leases))
        for lease, error, message in zip(leases, wrong, messages, strict=True):
            if error is None:
                self._ended(lease.token, end)
            elif isinstance(error, UnknownMessageError):
                self._lost(message, error)
            else:
                lease.hold = hold
        note_settled(message for message, error in zip(messages, wrong, strict=True) if error is None)
        first = next((error for error in wrong if error is not None), None)
        if first is not None:
            raise first

    def _asked_of(
        self, messages: Sequence[Message[Any]], hold: int, leases: list[RemoteLease], ask: Callable[[list[str]], T]
    ) -> T:
        """Ask by the tokens of messages that are held so, whose leases leave, and are added to a list; after an error
        they are held as before."""
        try:
            self._take(messages, hold, LEAVING, leases)
            return ask([lease.token for lease in leases])
        except BaseException:
            for lease in leases:
                lease.hold = hold
            raise

    def _settled(
        self, messages: Sequence[Message[Any]], hold: int, end: str, request_of: Callable[[list[str]], Request]
    ) -> None:
        """Settle messages that are held so by a request of their tokens."""
        leases: list[RemoteLease] = []
        try:
            answer = self._asked_of(messages, hold, leases, lambda tokens: self.ask(request_of(tokens)))
        except UnknownMessageError as error:
            if len(leases) == len(messages):
                self._all_lost(messages, error)
            raise
        self._finished(messages, leases, hold, end, answer)

    def _all_lost(self, messages: Sequence[Message[Any]], error: UnknownMessageError) -> None:
        """Note which of these is not held any more, for which the owner has refused all."""
        for message in messages:
            self._lost(message, error)

    def _held_still(self, messages: Sequence[Message[Any]], leases: list[RemoteLease], error: Exception) -> None:
        """Note that leases have not ended, for there was an error; those that have by themselves are as they are."""
        for lease in leases:
            if not lease.end:
                lease.hold = LEASED
        if isinstance(error, UnknownMessageError):
            self._all_lost(messages, error)

    def _settled_nowait(
        self, messages: list[Message[Any]], end: str, request_of: Callable[[list[str]], Request]
    ) -> Future[None]:
        leases: list[RemoteLease] = []
        done = partial(self._finished, messages, leases, LEASED, end)
        failed, ask = partial(self._held_still, messages, leases), self.connection.ask_nowait
        return self._asked_of(messages, LEASED, leases, lambda tokens: ask(request_of(tokens), done, failed))

    # Settling messages

    def ack(self, messages: Sequence[Message[Any]]) -> None:
        """Ack messages, as Store.ack."""
        if messages:
            self._settled(messages, LEASED, ACKED, Ack)

    def ack_nowait(self, messages: Sequence[Message[Any]]) -> Future[None]:
        """Ack messages without waiting, as Store.ack_nowait."""
        return self._settled_nowait(list(messages), ACKED, Ack)

    def ack_within(self, connection: Any, messages: Sequence[Message[Any]]) -> None:
        """Refuse: a database connection belongs to its process."""
        raise TransactionError(f"a connection {NOT_SHARED}")

    def release(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> None:
        """Give messages back, as Store.release."""
        request_of = self._release_of(messages, delivered, delay, reason)
        if messages:
            self._settled(messages, LEASED, RELEASED, request_of)

    def release_nowait(
        self,
        messages: Sequence[Message[Any]],
        delivered: bool = True,
        delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[None]:
        """Give messages back without waiting, as Store.release_nowait."""
        return self._settled_nowait(list(messages), RELEASED, self._release_of(messages, delivered, delay, reason))

    def _release_of(
        self, messages: Sequence[Message[Any]], delivered: bool, delay: float | None, reason: Reason | None = None
    ) -> Callable[[list[str]], Request]:
        """Return what makes the request that gives messages back. Raises TypeError, ValueError."""
        if reason is not None:
            self.note_failure(messages, reason)
        self.delay_ms(delay)
        note = messages[0]._note if messages else None
        failure = note.reason if isinstance(note, RemoteLease) else None
        return lambda tokens: Settle(tokens, Settlement.RELEASE, failure, delivered, delay, whole=True)

    def reject(self, message: Message[Any], reason: Reason) -> None:
        """Put a message into its dead-letter queue, as Router.reject."""
        require_message(message)
        failure = failure_of(reason)
        self._settled([message], LEASED, REJECTED, lambda tokens: Settle(tokens, Settlement.REJECT, failure))

    def reject_within(self, transaction: Transaction, message: Message[Any], reason: Reason) -> None:
        """Put a message into its dead-letter queue when a transaction commits: the owner does, as it commits."""
        lease, failure = message._note, failure_of(reason)
        if lease.hold != LEASED:  # a transaction that rejects it has its reason there
            raise _not_held(message)
        lease.rejection = failure
        try:
            transaction._reject(message, None, lambda: None)
        except BaseException:
            lease.rejection = None
            raise

    def extend(self, message: Message[Any], seconds: float | None = None) -> None:
        """Lease a message for longer, as Store.extend."""
        lease = message._note
        if not isinstance(lease, RemoteLease) or lease.hold != LEASED:
            raise _not_held(message)
        require_lease(seconds)
        try:
            self.call("extend", lease.token, seconds)
        except UnknownMessageError as error:
            self._lost(message, error)
            raise
        if seconds is not None:
            lease.held, lease.is_timed = lease.held._replace(lease=seconds), True

    def claim(self, message: Message[Any]) -> None:
        """Claim a message for a transaction of this client. Its time stops at the owner, who is not waited for."""
        (lease,) = self._take([message], LEASED, CLAIMED)
        if lease.is_timed:
            self.connection.later(partial(self._stop_time, lease))

    def _stop_time(self, lease: RemoteLease) -> None:
        """Let the owner stop the time of a lease, as long as a transaction has claimed it."""
        if lease.hold == CLAIMED:
            with suppress(AnabranchError):  # if it had run out by then its commit says so
                self.call("extend", lease.token, FOR_GOOD)

    def unclaim(self, messages: Sequence[Message[Any]], delivered: bool = True, delay: float | None = None) -> None:
        """Give back what a transaction held."""
        if not messages:
            return
        request_of = self._release_of(messages, delivered, delay)
        try:
            self._settled(messages, CLAIMED, ROLLED_BACK, request_of)
        except StoreFailedError:  # its owner does not answer
            self._release_later(messages, request_of)

    def _release_later(
        self, messages: Sequence[Message[Any]], request_of: Callable[[list[str]], Request] | None = None
    ) -> None:
        """Give back what a transaction held, however long the owner does not answer."""
        tokens = [message._note.token for message in messages]
        request = (request_of or self._release_of(messages, True, None))(tokens)
        self.connection.later(lambda: self._quietly(tokens, request))

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Note why messages are about to be given back."""
        failure = failure_of(reason)
        for message in messages:
            if isinstance(message._note, RemoteLease):
                message._note.reason = failure

    # Settling by tokens

    def token(self, message: Message[Any]) -> str:
        """Return the token of a leased message."""
        lease = message._note
        if not isinstance(lease, RemoteLease) or lease.token not in self._leases:
            raise _not_held(message)
        lease.kept = True
        self._kept[lease.token] = lease
        return lease.token

    def settle(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> list[AnabranchError | None]:  # fmt: skip
        """Settle messages by their tokens, as Store.settle; also rejects them."""
        request, ends_of = self._settling(tokens, how, delivered, delay, reason)
        return ends_of(self.ask(request))

    def settle_nowait(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None,
        reason: Reason | None = None,
    ) -> Future[list[AnabranchError | None]]:  # fmt: skip
        """Settle messages by their tokens without waiting."""
        return self.connection.ask_nowait(*self._settling(tokens, how, delivered, delay, reason))

    def _settling(
        self, tokens: Sequence[str], how: Settlement, delivered: bool, delay: float | None, reason: Reason | None
    ) -> tuple[Settle, Callable[[Any], list[AnabranchError | None]]]:
        """Return the request, and what makes the result of its answer. No token is asked for that a transaction of this
        client has. Raises TypeError for what is no str."""
        for one in tokens:
            if not isinstance(one, str):
                raise TypeError(f"a token is a str, not {type(one).__name__}: {one!r}")
        asked = [one for one in tokens if one not in self._leases or self._leases[one].hold != CLAIMED]
        failure = None if reason is None else failure_of(reason)
        self.delay_ms(delay)
        return Settle(asked, how, failure, delivered, delay), partial(self._ends_of, how, tokens, asked)

    def _ends_of(
        self, how: Settlement, tokens: Sequence[str], asked: list[str], answer: list[Any] | None
    ) -> list[AnabranchError | None]:
        """Note what has become of leases by their tokens; returns what was wrong with each."""
        wrong = _errors(answer, len(asked))
        for token, error in zip(asked, wrong, strict=True):
            if error is None:
                self._ended(token, ENDS[how])
            elif isinstance(error, UnknownMessageError):
                self._ended(token, str(error).rpartition(_NOT_HELD)[2], is_lost=True)
        if len(asked) < len(tokens):
            left, unclaimed = iter(wrong), set(asked)
            wrong = [
                next(left)
                if token in unclaimed
                else UnknownMessageError(f"the message of token {token}{_NOT_HELD}a transaction has claimed it")
                for token in tokens
            ]
        return wrong

    # What the owner does by itself

    def delay_ms(self, delay: float | None) -> int | None:
        """Return a delay in milliseconds. Raises TypeError, ValueError."""
        return None if delay is None else delay_ms(delay)

    def note_rejected(self, message: Message[Any]) -> None:
        """Do nothing: the owner knows."""

    def tell_spent(self, messages: Sequence[Message[Any]]) -> None:
        """Do nothing: the owner sees it."""

    def count_expired(self, messages: Iterable[Message[Any]]) -> None:
        """Do nothing: the owner counts them."""


def require_lease(seconds: float | None) -> None:
    """Raise TypeError or ValueError for what is no time that a lease may last."""
    if seconds is not None:
        require_seconds(seconds, "lease")


def _errors(answer: list[Any] | None, count: int) -> list[Any]:
    """Return what was wrong with each; None as the answer: nothing with any."""
    return [None] * count if answer is None else [None if one is None else unpack_error(one) for one in answer]


def _not_held(message: Message[Any]) -> UnknownMessageError:
    """Return the error of a message that this client does not hold so."""
    lease = message._note
    if not isinstance(lease, RemoteLease):
        require_leased(message)
        return UnknownMessageError(f"{message!r} was received from another router; ack it there")
    claimed = "a transaction has claimed it, or acked it" if lease.hold == CLAIMED else "it is just being settled"
    return UnknownMessageError(f"{message!r}{_NOT_HELD}{lease.end or claimed}")
