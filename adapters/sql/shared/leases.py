"""The messages that this router holds of a shared store, and how it settles them.

A lease has a number of its own, in the row: whoever names an older one comes too late. So a token, which says queue, id
and that number, settles a message from anywhere, also from another machine.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ....policies.errors import AnabranchError, UnknownMessageError
from ...core.engine.lease_times import require_seconds
from ...core.messages import Message, Reason, note_settled, require_leased, warn_abandoned
from ...core.service.failures import Failure, Failures, failure_of
from ...core.state.due import delay_ms
from ...core.state.leases import ACKED, CLAIMED, LEASED, LEAVING, RELEASED, ROLLED_BACK, unknown_lease
from ...core.store_types import Settlement
from .database import Ask, NotAllError, SharedDatabase
from .statements import FIELDS

if TYPE_CHECKING:
    from ....policies.config.options import SqlOptions

LOST: Final = "its lease ran out, its queue was deleted, or this process was taken for dead"
NOT_HELD: Final = " is not leased here any more: "
DELIVERIES: Final = FIELDS.split(", ").index("deliveries")


class Place(NamedTuple):
    """A lease as the tables have it."""

    queue: int
    id: int
    take: int


class SharedLease:
    """The hold that this router has on a message."""

    __slots__ = ("deadline", "deliveries", "end", "hold", "is_lost", "kept", "place", "seconds")

    def __init__(self, place: Place, deliveries: int, seconds: float | None) -> None:
        self.place: Place = place
        self.deliveries: int = deliveries
        """How often it has come back."""
        self.seconds: float | None = seconds
        """For so long it was leased; None: without an end."""
        self.deadline: float = _deadline(seconds)
        """When that is over, about (monotonic)."""
        self.hold: int = LEASED
        self.kept: bool = False
        """Somebody has its token."""
        self.end: str = ""
        """How it ended."""
        self.is_lost: bool = False
        """Its holder did not end it."""

    @property
    def time_limit(self) -> float | None:
        """Return `seconds`, as of other leases what says when they end."""
        return self.seconds

    @property
    def is_settled(self) -> bool:
        """True if its holder has done with it, or a transaction has it."""
        return self.hold in (CLAIMED, LEAVING) and not self.is_lost


class Abandoned:
    """Messages that were received, and let go of without being settled."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._noted: deque[SharedLease] = deque()

    def __bool__(self) -> bool:
        return bool(self._noted)

    def note(self, message: Message[Any]) -> None:
        """Note a message that nobody holds any more. Any thread, with any lock."""
        lease = message._note
        if lease.kept or lease.hold != LEASED or not self._leases.is_open() or sys.is_finalizing():
            return
        lease.hold = LEAVING
        self._noted.append(lease)
        warn_abandoned(message)

    def give_back(self) -> None:
        """Give back what was noted. Raises StoreFailedError; then it stays noted."""
        leases = [self._noted.popleft() for _ in range(len(self._noted))]
        try:
            if leases:
                self._leases.free(leases, self._leases.counted(True), delivered=True)
        except BaseException:
            self._noted.extend(leases)
            raise


class Leases:
    """The leases of one open store. Threads: all."""

    def __init__(
        self, store: Any, database: SharedDatabase, options: SqlOptions, router: Callable[[], int],
        wake: Callable[[Iterable[int]], None], is_open: Callable[[], bool], counts_first: bool,
    ) -> None:  # fmt: skip
        """`store` is the one that its messages name. `router` returns the number of this one. `wake` wakes who waits
        for messages of queues that came back."""
        self._store, self._prefix, self._database, self._options = store, store.store_id.hex(), database, options
        self._counts_first = counts_first
        self._router, self._wake = router, wake
        self.is_open = is_open
        self.abandoned: Final = Abandoned(self)
        self.held: dict[Place, SharedLease] = {}
        """What this router holds."""
        self._failures = Failures()
        """By queue and id."""
        self.on_acked: Callable[[Sequence[Place]], None] = lambda places: None

    def forget_late(self) -> None:
        """Let go of leases whose time is over."""
        now = time.monotonic()
        for lease in list(self.held.values()):
            if lease.hold == LEASED and lease.deadline < now:
                self._lose(lease, f"its lease of {lease.seconds:g} s ran out")

    def _lose(self, lease: SharedLease, why: str) -> None:
        lease.hold, lease.end, lease.is_lost = LEAVING, why, True
        self.held.pop(lease.place, None)

    # Moving leases

    def taken(self, messages: Sequence[Message[Any]], hold: int) -> list[SharedLease]:
        """Take the leases of messages that are held so, all or none. Raises UnknownMessageError."""
        leases: list[SharedLease] = []
        for message in messages:
            lease = message._note
            if message._store is not self._store or lease is None or lease.hold != hold:  # also one that is named twice
                self._put_back(leases, hold)
                raise not_held(message)
            leases.append(lease)
            lease.hold = LEAVING
        return leases

    @staticmethod
    def _put_back(leases: Iterable[SharedLease], hold: int) -> None:
        for lease in leases:
            if not lease.end:
                lease.hold = hold

    def settling(
        self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], hold: int, end: str,
        work: Callable[[Ask, list[Place]], set[Place]],
    ) -> None:  # fmt: skip
        """Settle messages whose leases were taken out, all or none, by what returns the places of those that are
        held still. Raises UnknownMessageError."""
        try:
            self._database.change(lambda ask: self._require_all(messages, leases, work(ask, _places(leases))))
        except BaseException:
            self._put_back(leases, hold)
            raise
        self.ended(leases, end)
        note_settled(messages)

    def _require_all(self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], done: set[Place]) -> None:
        """Raise UnknownMessageError unless all are among those that are held still; the transaction is then rolled
        back."""
        for message, lease in zip(messages, leases, strict=True):
            if lease.place not in done:
                self._lose(lease, LOST)
                raise not_held(message)

    def ended(self, leases: Iterable[SharedLease], end: str) -> None:
        """Note that these have ended so."""
        for lease in leases:
            lease.hold, lease.end = LEAVING, end
            self.held.pop(lease.place, None)

    def ended_by_branch(self, places: Iterable[Place], end: str) -> None:
        """Note that a branch has ended so what it had taken over. It is held here yet if the answer to its prepare was
        lost."""
        taken_over = [self.held.get(place._replace(take=abs(place.take))) for place in places]
        self.ended([lease for lease in taken_over if lease is not None], end)

    # Settling messages

    def ack(self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease]) -> None:
        """Ack messages, all or none, whose leases were taken out."""
        told: set[int] = set()
        if messages:
            try:
                (self._ack_one if len(messages) == 1 else self._ack_all)(messages, leases, told)
            except BaseException:
                self._put_back(leases, LEASED)
                raise
            self.ended(leases, ACKED)
            note_settled(messages)
        self.on_acked(_places(leases))
        if told:
            self._wake(told)

    def _ack_one(self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], told: set[int]) -> None:
        """Ack one message in one statement."""
        (lease,) = leases
        place = lease.place

        def lost(_: list[int]) -> list[Any]:  # it is gone, or it was not held
            return [] if self._database.look("find", place.queue, place.id) else [(place.id, True)]

        found = self._database.once("ack_one", *place, lost=lost)
        if not found:
            self._lose(lease, LOST)
            raise not_held(messages[0])
        if found[0][1]:  # others of its group are free now
            told.add(place.queue)

    def _ack_all(self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], told: set[int]) -> None:
        """Ack several messages in one statement."""
        places = _places(leases)
        queues = {place.queue for place in places}
        try:
            found = self._database.once("ack_all", *_columns(places), len(places), lost=lambda _: [(list(queues), 1)])
        except NotAllError:  # this says which
            self._database.change(lambda ask: self._require_all(messages, leases, self.acked(ask, places, told)))
        else:
            told.update(queues.intersection(found[0][0]))

    def acked(self, ask: Ask, places: Sequence[Place], told: set[int]) -> set[Place]:
        """Remove messages; returns the places of those that were held still. Puts into `told` the queues in which
        others of a group are free now."""
        found = ask("ack", *_columns(places))
        told.update(queue for queue, *_, is_grouped in found if is_grouped)
        return {Place(*place) for *place, _ in found}

    def release(
        self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], hold: int, delivered: bool,
        delay_ms_given: int | None,
    ) -> None:  # fmt: skip
        """Give messages back, all or none, whose leases were taken out."""
        if not messages:
            return
        end = ROLLED_BACK if hold == CLAIMED else RELEASED

        def give_back(ask: Ask, places: list[Place]) -> set[Place]:
            return self.released(ask, places, self.counted(delivered), delivered, delay_ms_given)

        self.settling(messages, leases, hold, end, give_back)
        self._wake({message._note.place.queue for message in messages})

    def free(self, leases: Sequence[SharedLease], counted: int, delivered: bool = False) -> None:
        """Give back what nobody has, by how much the number of its deliveries rises: no error for what is not held any
        more."""
        self._database.change(lambda ask: self.released(ask, _places(leases), counted, delivered))
        self.ended(leases, RELEASED)
        self._wake({lease.place.queue for lease in leases})

    def released(
        self, ask: Ask, places: Sequence[Place], counted: int, delivered: bool = True, delay_ms_given: int | None = None
    ) -> set[Place]:
        """Free messages, whose deliveries rise by `counted`; returns the places of those that were held still."""
        delays = [self._delay(ask, place, delivered, delay_ms_given) for place in places]
        return {Place(*one) for one in ask("release", counted, *_columns(places), delays)}

    def counted(self, delivered: bool) -> int:
        """Return by how much the number of deliveries rises."""
        if self._counts_first:
            return 0 if delivered else -1
        return 1 if delivered else 0

    def _delay(self, ask: Ask, place: Place, delivered: bool, given_ms: int | None) -> int:
        """Return for how long (ms) a message waits that is given back."""
        policy, lease = self._options.redelivery, self.held.get(place)
        if given_ms is not None or not delivered or policy is None:
            return given_ms or 0
        # If it is not held here, another router has leased it, or it was prepared.
        deliveries = lease.deliveries if lease else sum(row[DELIVERIES] for row in ask("find", place.queue, place.id))
        seconds = policy.seconds(deliveries + (not self._counts_first))
        return max(1, round(seconds * 1000 * (1 + policy.jitter * random.uniform(-1, 1))))

    def extend(self, message: Message[Any], seconds: float | None = None) -> None:
        """Lease a message for longer, as Store.extend."""
        if seconds is not None:
            require_seconds(seconds, "lease")
        lease = message._note
        if not isinstance(lease, SharedLease) or lease.hold != LEASED:
            raise not_held(message)
        seconds = lease.seconds if seconds is None else seconds
        self._hold([message], [lease], seconds)
        lease.seconds, lease.deadline = seconds, _deadline(seconds)

    def _hold(self, messages: Sequence[Message[Any]], leases: Sequence[SharedLease], seconds: float | None) -> None:
        places = _places(leases)
        self._database.change(lambda ask: self._require_all(messages, leases, self.kept_for(ask, places, seconds)))

    def kept_for(
        self, ask: Ask, places: Sequence[Place], seconds: float | None, for_branch: bool = False
    ) -> set[Place]:
        """Lease messages for so long from now on; returns the places of those that were held still."""
        by = (0, -1) if for_branch else (self._router(), 1)
        return {Place(*one) for one in ask("hold", milliseconds(seconds), *by, *_columns(places))}

    def claim(self, message: Message[Any]) -> None:
        """Claim a message for a transaction, as Store.claim: its time stops."""
        (lease,) = self.taken([message], LEASED)
        try:
            if lease.seconds is not None:
                lease.deadline = math.inf  # first: if nobody can tell the outcome, it may have no end
                self._hold([message], [lease], None)
            lease.hold = CLAIMED
        except BaseException:
            self._put_back([lease], LEASED)
            raise

    # Settling by tokens

    def token(self, message: Message[Any]) -> str:
        """Return the token of a leased message, which settles it in any router of the store."""
        lease = message._note
        if not isinstance(lease, SharedLease) or lease.end:
            require_leased(message)
            raise not_held(message)
        lease.kept = True
        return self.token_of(lease)

    def token_of(self, lease: SharedLease) -> str:
        """Return the token of a lease."""
        return f"{self._prefix}.{lease.place.queue:x}-{lease.place.id:x}-{lease.place.take:x}"

    def place_of(self, token: str) -> Place | None:
        """Return the place of a token; None for what is none of this store."""
        if not isinstance(token, str):
            raise TypeError(f"a token is a str, not {type(token).__name__}: {token!r}")
        prefix, _, numbers = token.partition(".")
        with suppress(ValueError, TypeError):
            if prefix == self._prefix:
                return Place(*(int(number, 16) for number in numbers.split("-")))
        return None

    def settle(
        self, tokens: Sequence[str], how: Settlement, delivered: bool = True, delay: float | None = None
    ) -> list[AnabranchError | None]:
        """Settle messages by their tokens, those that are held; returns what was wrong with each."""
        given_ms = None if delay is None else delay_ms(delay)
        places = [self.place_of(token) for token in tokens]
        claimed = {place for place, lease in list(self.held.items()) if lease.hold == CLAIMED}
        right = [place for place in dict.fromkeys(places) if place is not None and place not in claimed]

        told: set[int] = set()

        def settle(ask: Ask) -> set[Place]:
            if how is Settlement.ACK:
                return self.acked(ask, right, told)
            return self.released(ask, right, self.counted(delivered), delivered, given_ms)

        settled = self._database.change(settle) if right else set()
        known = [self.held[place] for place in settled if place in self.held]
        self.ended(known, ACKED if how is Settlement.ACK else RELEASED)
        if how is Settlement.ACK:
            self.on_acked(list(settled))
            self._wake(told)
        else:
            self._wake({place.queue for place in settled})
        wrong: list[AnabranchError | None] = []
        for token, place in zip(tokens, places, strict=True):
            why = "a transaction has claimed it" if place in claimed else None
            wrong.append(None if place in settled else unknown_lease(token, why))
            settled.discard(place)  # named twice, it is settled once
        return wrong

    # Failures

    def note_failure(self, messages: Sequence[Message[Any]], reason: Reason) -> None:
        """Note why messages are about to be given back, for the dead letters that they may become here."""
        held = [message._note for message in messages if message._store is self._store]
        keys = [one.place[:2] for one in held if isinstance(one, SharedLease) and one.hold in (LEASED, CLAIMED)]
        self._failures.note(keys, failure_of(reason))

    def failure_of(self, message: Message[Any]) -> Failure | None:
        """Return the last failure of a message that is leased."""
        lease = message._note
        return self._failures.of(lease.place[:2]) if isinstance(lease, SharedLease) else None


def _deadline(seconds: float | None) -> float:
    return math.inf if seconds is None else time.monotonic() + seconds


def milliseconds(seconds: float | None) -> int:
    """Return for how long a lease lasts; 0: without an end."""
    return 0 if seconds is None else max(1, round(seconds * 1000))


def _places(leases: Iterable[SharedLease]) -> list[Place]:
    return [lease.place for lease in leases]


def _columns(places: Sequence[Place]) -> tuple[list[int], list[int], list[int]]:
    return [one.queue for one in places], [one.id for one in places], [one.take for one in places]


def not_held(message: Message[Any]) -> UnknownMessageError:
    """Return the error of a message that this router does not hold so."""
    lease = message._note
    if not isinstance(lease, SharedLease) or (lease.hold == LEASED and not lease.end):
        require_leased(message)
        return UnknownMessageError(f"{message!r} was received from another router; ack it there")
    claimed = "a transaction has claimed it, or acked it" if lease.hold == CLAIMED else "it is just being settled"
    return UnknownMessageError(f"{message!r}{NOT_HELD}{lease.end or claimed}")
