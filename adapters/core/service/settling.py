"""The ways in which messages leave those who hold them: acked, given back, or claimed by a transaction.

Whoever is interrupted anywhere in here holds what it held, or the write took effect: a lease that is LEAVING and whose
ack was not written is LEASED again; one whose ack was written ends when that is applied.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from ....policies.errors import (
    AnabranchError,
    OutcomeUnknownError,
    StoreFailedError,
    StoreFullError,
    UnknownMessageError,
)
from ...system.acceleration import inner_loop
from ...system.background import shared
from ...system.conditions import Promise
from ..backend.writers import Queued, Writer
from ..engine.engine import APPLY_AT, Engine
from ..messages import Message, note_settled
from ..operations.changes import Ack, Change, acks_of, give_back_room, returned_of, uncounted_of
from ..operations.tickets import Ticket
from ..state.delivery import Delivery, is_late
from ..state.gates import LeaseMovedError
from ..state.leases import ACKED, CLAIMED, LEASED, LEAVING, MOVING, RELEASED, ROLLED_BACK, Lease, unknown_lease
from ..state.limits import Grant
from ..store_types import Settlement

if TYPE_CHECKING:
    from ..messages import MessageStore

log: logging.Logger = logging.getLogger(__name__)

_TOKEN: Final = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})\.([0-9a-f]{1,16})")

_size = attrgetter("size")

ENDS_KEPT: Final = 10_000
"""Tokens of which it is remembered how they were settled."""
COUNTED_AT_ONCE: Final = 1000
"""Messages given back whose deliveries are written together."""


class Settling:
    """The settling of leases in one open store. Threads: all."""

    def __init__(
        self, store: MessageStore, engine: Engine, writer: Writer, write: Callable[[Sequence[Change]], list[Any]]
    ) -> None:
        """`write` waits until changes are written."""
        self._store, self._engine, self._writer, self._write = store, engine, writer, write
        self._ends: dict[int, str] = {}
        """How leases ended that were known by a token, by their number; the latest."""

    # Acks

    def ack(
        self,
        messages: Sequence[Message],
        hold: int,
        first: Sequence[Change] = (),
        sync: bool = False,
        reservation: Grant | None = None,
    ) -> list[Any]:
        """Ack what is held so, behind other changes; all or none of it. Returns what comes of those. Raises, and then
        nothing took effect and the messages are held as before; not so after OutcomeUnknownError."""
        engine = self._engine
        changes: Sequence[Change] = ()
        try:
            if messages:
                changes = leave(engine.delivery, self._store, messages, hold)
            if first:
                changes = [*first, *changes]
            if not changes:
                return []
            ticket = _ticket(changes, not first, sync, reservation, hold)
            del reservation
            engine.submit(ticket)
            outcomes = self._writer.wait(ticket)
        except (UnknownMessageError, LeaseMovedError, OutcomeUnknownError):
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):  # the last in a signal handler (rule G3)
            engine.delivery.put_back(_leases(messages), hold)  # what the ack has reached is not held any more
            give_back_room(changes)
            raise
        for message in messages:
            message.__class__ = message._plain  # as note_settled
        engine.acks += len(messages)
        if engine.pending_changes >= APPLY_AT:
            engine.help()
        return outcomes

    def ack_nowait(
        self,
        messages: Sequence[Message],
        hold: int,
        first: Sequence[Change] = (),
        sync: bool = False,
        reservation: Grant | None = None,
        result: Callable[[list[Any]], Any] = lambda outcomes: None,
    ) -> Future[Any]:
        """Ack without waiting. The future resolves on a thread of ours with `result` of the other changes' outcomes. An
        error that shows at once is raised at once."""
        try:
            leases = self._engine.delivery.take(self._store, messages, hold, LEAVING)
            return self._ack_leaving(leases, hold, first, sync, reservation, result, list(messages))
        except (UnknownMessageError, LeaseMovedError):  # another thread may be settling them
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):
            self._engine.delivery.put_back(_leases(messages), hold)
            raise

    def _ack_leaving(
        self,
        leases: Sequence[Lease],
        hold: int,
        first: Sequence[Change] = (),
        sync: bool = False,
        reservation: Grant | None = None,
        result: Callable[[list[Any]], Any] = lambda outcomes: None,
        messages: list[Message] | None = None,
    ) -> Future[Any]:
        """Ack leases that are LEAVING. An error means that nothing took effect, and the caller puts the leases back.
        The `messages` are held until then. A message that cannot be acked, and nobody else has, is then given back
        (abandoned.py)."""
        future: Future[Any] = Promise()
        future.set_running_or_notify_cancel()  # it may be on its way to the disk: no cancel() can call it back
        changes = [*first, *acks_of(leases)]
        ticket = _ticket(changes, not first, sync, reservation, hold)
        del reservation
        ticket.future = (future, lambda done: result(done.outcomes))
        future.add_done_callback(lambda done: self._acked(done, leases, hold, changes, messages))
        self._engine.submit(ticket)
        self._writer.proceed()
        return future

    def _acked(
        self,
        future: Future[Any],
        leases: Sequence[Lease],
        hold: int,
        changes: Sequence[Change],
        messages: list[Message] | None,
    ) -> None:
        error = future.exception()
        if error is None:
            self._engine.acks += len(leases)
        elif not isinstance(error, OutcomeUnknownError):
            self._engine.delivery.put_back(leases, hold)
            give_back_room(changes)
        if messages is not None:
            if error is None:
                note_settled(messages)
            messages.clear()  # the future, which knows of this, may be kept for long

    # Giving back

    def give_back(self, messages: Sequence[Message], hold: int, delivered: bool, delay_ms: int | None = None) -> None:
        """Give back all or none of the messages, wherever Ctrl-C strikes. `delay_ms`: for so long they wait; None: as
        the store's `redelivery` says, where it counts as a delivery."""
        try:
            leases = self._engine.delivery.take(self._store, messages, hold, LEAVING)
            self._give_back(leases, delivered, delay_ms)
            note_settled(messages)
            if hold == CLAIMED:
                for lease in leases:
                    lease.end = ROLLED_BACK
        except (UnknownMessageError, LeaseMovedError):  # another thread may be settling them
            raise
        except (AnabranchError, KeyboardInterrupt, RuntimeError):
            self._engine.delivery.put_back(_leases(messages), hold)  # unless they are all given back
            raise

    def give_back_nowait(
        self, messages: Sequence[Message], hold: int, delivered: bool, delay_ms: int | None = None
    ) -> Future[None]:
        """Give messages back on a thread of ours, as `give_back`. A message that is not held is refused at once."""
        try:
            leases = self._engine.delivery.take(self._store, messages, hold, LEAVING)
            future = self._give_back_leaving(leases, hold, delivered, delay_ms)
            future.add_done_callback(partial(_kept_until, list(messages)))
            return future
        except KeyboardInterrupt:
            self._engine.delivery.put_back(_leases(messages), hold)
            raise

    def _give_back_leaving(
        self, leases: Sequence[Lease], hold: int, delivered: bool, delay_ms: int | None = None
    ) -> Future[None]:
        """Give back, on a thread of ours, leases that are LEAVING."""

        def give_back() -> None:
            try:
                self._give_back(leases, delivered, delay_ms)
            except BaseException:
                self._engine.delivery.put_back(leases, hold)
                raise

        return shared().call(give_back)

    def give_back_delivered(self, leases: Sequence[Lease]) -> None:
        """Give back leases that are LEAVING without their holders' doing; each counts as a delivery."""
        self._give_back(leases, delivered=True)
        self.note_ends([lease for lease in leases if lease.is_kept])

    def give_back_taken(self, leases: Sequence[Lease]) -> None:
        """Free leases that are LEAVING, since a caller that had claimed them did not ack them after all. Each counts as
        a delivery."""
        try:
            self._give_back(leases, delivered=True)
        except BaseException:
            self._engine.delivery.put_back(leases, CLAIMED)
            raise

    def _give_back(self, leases: Sequence[Lease], delivered: bool, delay_ms: int | None = None) -> None:
        engine = self._engine
        # Each lease says who counts when, not this store: the lease may have come from another store, which counts when
        # it hands out.
        uncounted = (lease for lease in leases if not lease.is_counted)
        changes = returned_of(uncounted) if delivered else uncounted_of(leases)
        if engine.schedule is not None:
            changes += engine.schedule.postponements(leases, delivered, delay_ms)
        if changes:
            self._count_deliveries(changes)
        engine.check()
        with engine.lock:
            engine.current()
            try:
                engine.delivery.give_back(leases, engine.rows, delivered)
            except KeyboardInterrupt:
                # The rest; nobody can have leased any of them yet.
                engine.delivery.give_back(leases, engine.rows, delivered)
                raise

    def _count_deliveries(self, changes: list[Change]) -> None:
        """Write how often they were given back, and until when they wait; nobody waits for the disk. A caller that is
        interrupted here and tries again writes the same. If it cannot be written they are free all the same."""
        try:
            self._write_unsynced(changes)
        except StoreFailedError:
            if self._engine.failed is not None:
                raise
            log.warning("store %s: %d deliveries are not counted, nor do they wait", self._engine.name, len(changes))
        except StoreFullError as error:
            log.warning(
                "store %s: %d deliveries are not counted, nor do they wait: %s", self._engine.name, len(changes), error
            )

    def _write_unsynced(self, changes: Sequence[Change]) -> None:
        for start in range(0, len(changes), COUNTED_AT_ONCE):
            part = changes[start : start + COUNTED_AT_ONCE]
            ticket = Ticket(part, sum(change.size for change in part), unsynced=True)
            self._engine.submit(ticket)
            self._writer.wait(ticket)

    def count_handed_out(self, leases: Sequence[Lease]) -> None:
        """Write how often these have been handed out, this time too, before anybody sees them; nobody waits for the
        disk. On a full disk they are handed out uncounted: it could not be emptied else (rule J10). Raises
        StoreFailedError and OutcomeUnknownError, and then they are not handed out."""
        try:
            self._write_unsynced(returned_of(leases))
        except StoreFullError as error:
            log.warning("store %s: %d deliveries are not counted: %s", self._engine.name, len(leases), error)
            return
        for lease in leases:
            lease.counted = True

    def claim(self, message: Message) -> None:
        """Claim a leased message for a transaction."""
        self._engine.delivery.take(self._store, [message], LEASED, CLAIMED)

    # By token

    def note_ends(self, leases: Iterable[Lease], end: str | None = None) -> None:
        """Note how these leases ended, for callers that come with their tokens."""
        for lease in leases:
            if end is not None:
                lease.end = end
            self._ends[lease.number] = lease.how_it_ended
        while len(self._ends) > ENDS_KEPT:
            self._ends.pop(next(iter(self._ends), 0), None)

    def token(self, lease: Lease) -> str:
        """Return the token of a lease, for callers that keep no message."""
        channel = lease.channels[0]
        return (
            f"{self._store.store_id.hex()}.{channel.state.number:x}.{channel.number:x}.{lease.seq:x}.{lease.number:x}"
        )

    def lease(self, token: str) -> Lease:
        """Return the lease of a token. Raises UnknownMessageError for what is no token, or if the lease is held no
        more."""
        store_id, destination, subscription, seq, number = _parsed(token)
        if store_id != self._store.store_id.hex():
            raise UnknownMessageError(f"the message of token {token} is in another store than {self._store.name!r}")
        ended = self._ends.get(number)  # first: an ack may not be applied yet
        state = self._engine.catalog.by_number.get(destination) if ended is None else None
        for channel in state.channels(subscription) if state is not None else ():
            lease = channel.held.get(seq)
            if lease is not None and lease.number == number:
                return lease
        raise unknown_lease(token, ended)

    def settle(
        self, tokens: Sequence[str], how: Settlement, delivered: bool, delay_ms: int | None
    ) -> list[AnabranchError | None]:
        """Ack or release each, as `give_back` has it; returns what was wrong with it, None where nothing was. All that
        can be settled is written together."""
        results: list[AnabranchError | None] = [None] * len(tokens)
        taken: dict[int, Lease] = {}
        try:
            self._take(tokens, results, taken)
            leases = list(taken.values())
            if leases and how is Settlement.ACK:
                self._write(acks_of(leases))
                self._engine.acks += len(leases)
            elif leases:
                self._give_back(leases, delivered, delay_ms)
            self.note_ends(leases, ACKED if how is Settlement.ACK else RELEASED)
        except BaseException as error:
            if not isinstance(error, OutcomeUnknownError):
                self._engine.delivery.put_back(taken.values(), LEASED)
            if not isinstance(error, AnabranchError):
                raise
            for at in taken:
                results[at] = error
        return results

    def require(self, tokens: Iterable[str]) -> None:
        """Raise UnknownMessageError for the first of these tokens by which nothing can be settled now."""
        for token in tokens:
            lease = self.lease(token)
            if lease.hold != LEASED or is_late(lease):
                raise _not_leased(token, lease)

    def begin_ack(self, tokens: Sequence[str]) -> BegunAck:
        """Queue the acks of leases by their tokens, for a caller that waits for them once it has queued others."""
        results: list[AnabranchError | None] = [None] * len(tokens)
        taken: dict[int, Lease] = {}
        try:
            self._take(tokens, results, taken)
            begun = BegunAck(self, self._writer, results, taken)
            if taken:
                begun.ticket = _ticket(acks_of(list(taken.values())), True, False, None, LEASED)
                self._engine.submit(begun.ticket)
            return begun
        except BaseException:
            self._engine.delivery.put_back(taken.values(), LEASED)
            raise

    def finish_ack(self, begun: BegunAck) -> list[AnabranchError | None]:
        """Wait for acks that are queued; returns what was wrong with each, as `settle`."""
        leases, results = list(begun.taken.values()), begun.results
        if begun.ticket is None:
            return results
        try:
            self._writer.wait(begun.ticket)
        except AnabranchError as error:
            if not isinstance(error, OutcomeUnknownError):
                self._engine.delivery.put_back(leases, LEASED)
            for at in begun.taken:
                results[at] = error
            return results
        self._engine.acks += len(leases)
        self.note_ends(leases, ACKED)
        if self._engine.pending_changes >= APPLY_AT:
            self._engine.help()
        return results

    def settle_nowait(
        self, tokens: Sequence[str], how: Settlement, delivered: bool, delay_ms: int | None
    ) -> Future[list[AnabranchError | None]]:
        """Settle leases by their tokens without waiting: the future resolves on a thread of ours."""
        results: list[AnabranchError | None] = [None] * len(tokens)
        taken: dict[int, Lease] = {}
        future: Future[list[AnabranchError | None]] = Promise()
        future.set_running_or_notify_cancel()

        def settled(done: Future[Any]) -> None:
            error = done.exception()
            if error is not None and not isinstance(error, AnabranchError):
                future.set_exception(error)
                return
            for at in taken:
                results[at] = error
            if error is None:
                self.note_ends(taken.values(), ACKED if how is Settlement.ACK else RELEASED)
            future.set_result(results)

        try:
            self._take(tokens, results, taken)
            leases = list(taken.values())
            if not leases:
                future.set_result(results)
            elif how is Settlement.ACK:
                self._ack_leaving(leases, LEASED).add_done_callback(settled)
            else:
                self._give_back_leaving(leases, LEASED, delivered, delay_ms).add_done_callback(settled)
        except BaseException as error:
            self._engine.delivery.put_back(taken.values(), LEASED)
            if not isinstance(error, AnabranchError):
                raise
            for at in taken:
                results[at] = error
            future.set_result(results)
        return future

    def _take(self, tokens: Sequence[str], results: list[AnabranchError | None], taken: dict[int, Lease]) -> None:
        """Move what is leased to LEAVING, into `taken` by its place among the tokens; what is wrong with the others
        goes into `results`."""
        for at, token in enumerate(tokens):
            try:
                lease = self.lease(token)
                taken[at] = lease  # first: who is interrupted knows which to put back
                if not self._engine.delivery.move(lease, LEASED, LEAVING):
                    del taken[at]
                    if lease.hold >= MOVING:
                        raise LeaseMovedError(lease.gate)
                    raise _not_leased(token, lease)
            except (UnknownMessageError, LeaseMovedError) as error:
                results[at] = error


def _not_leased(token: str, lease: Lease) -> UnknownMessageError:
    why = "it is being settled, or claimed"
    if lease.time_limit is not None and is_late(lease):
        why = lease.time_limit.says_it_is_over
    return unknown_lease(token, why)


class BegunAck(Queued):
    """Acks that are queued: a Pending of what was wrong with each."""

    __slots__ = ("_settling", "results", "taken", "ticket")

    def __init__(
        self, settling: Settling, writer: Writer, results: list[AnabranchError | None], taken: dict[int, Lease]
    ) -> None:
        super().__init__(writer)
        self._settling = settling
        self.results: Final = results
        self.taken: dict[int, Lease] = taken
        """The leases that are being acked, by their place among the tokens."""
        self.ticket: Ticket | None = None
        """None: there is nothing to write."""

    def wait(self) -> list[AnabranchError | None]:
        """Return what was wrong with each, None where nothing was."""
        return self._settling.finish_ack(self)


@inner_loop
def leave(delivery: Delivery, store: MessageStore, messages: Sequence[Message], hold: int) -> list[Change]:
    """Return the acks of messages that are held so; all of them are LEAVING from now on, or none. Raises as
    Delivery.take."""
    return acks_of(delivery.take(store, messages, hold, LEAVING))


def _kept_until(messages: list[Message], done: Future[Any]) -> None:
    """Let messages go once their future is done, not before: as in Settling._ack_leaving."""
    messages.clear()


def _ticket(changes: Sequence[Change], acks_alone: bool, sync: bool, reservation: Grant | None, hold: int) -> Ticket:
    """Return a ticket of these changes, with the room that changes other than acks need."""
    if acks_alone and hold == LEASED:
        return Ticket(changes, len(changes) * Ack.size, sync)
    ticket = Ticket(changes, sum(map(_size, changes)), sync)
    ticket.held, ticket.transaction = reservation, True
    return ticket


def _parsed(token: str) -> tuple[str, int, int, int, int]:
    """Return the parts of a token: the store's id, and the numbers of the destination, of the subscription (0: a
    queue), of the message and of the lease. Raises TypeError, and UnknownMessageError for what is no token."""
    if not isinstance(token, str):
        raise TypeError(f"a token is a str, not {type(token).__name__}: {token!r}")
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise UnknownMessageError(f"{token!r} is no token of a message: message.token says it")
    destination, subscription, seq, number = (int(text, 16) for text in match.groups()[1:])
    return match[1], destination, subscription, seq, number


def _leases(messages: Iterable[Message]) -> list[Lease]:
    return [message._note for message in messages if type(message._note) is Lease]
