"""Messages and changes that go into a store, as tickets, and the room they need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import Any, Final, NamedTuple

from ....policies.errors import AnabranchError, ConfigError, OutcomeUnknownError, StoreFullError
from ....policies.names.destination import Destination
from ...system.acceleration import inner_loop
from ...system.background import shared
from ...system.conditions import Promise
from .. import store_types
from ..backend.writers import Queued, Writer
from ..engine.engine import APPLY_AT, Engine
from ..engine.hooks import Quotas, Schedule, Transient
from ..messages import DEFAULT_PRIORITY, DROPPED, GROUP, Outgoing, Receipt, plain_body, require_time
from ..operations.changes import SMALL_BYTES, Change, Send, SendMany, acks_of
from ..operations.destination_changes import Subscribe, Unsubscribe
from ..operations.leased_sends import LeasedSend
from ..operations.tickets import Ticket
from ..record.encoding import HEAD, encode, encode_outgoing
from ..record.large import StoredBody
from ..record.place import order_of
from ..state.leases import DestinationState
from ..state.limits import Grant, cancel, release
from ..state.priorities import FETCH
from ..state.rows import ScheduledRows
from .subscriptions import checked

_destination_of = itemgetter(0)
_message_of = itemgetter(1)

CHUNK: Final = 512
"""Messages of a send of many that are made at once: Ctrl-C may have to wait for so many."""


class WaitingFuture(Promise[Receipt]):
    """The future of a send that may have to wait for room. Its destination may have moved to another store before."""


class Sending:
    """The sending to one open store. Threads: all."""

    def __init__(self, engine: Engine, writer: Writer) -> None:
        self._engine, self._writer = engine, writer
        self._settings = engine.backend.settings

    _intake: Intake
    """The ways in which messages are kept that are sent."""
    staging: Intake
    """Likewise of those that are looked at before they are sent."""

    def know_features(self) -> None:
        """Learn how the features of the store keep messages: they are there before the first one comes."""
        engine, bodies, make = self._engine, self._engine.bodies, self._engine.make_transient
        waits = engine.schedule is not None and isinstance(engine.backend, ScheduledRows)
        intake = Intake(
            self._settings.message_bytes_max, self._settings.priorities,
            None if make is None else lambda: engine.transient or make(), _plain,
            None if waits else lambda: require_schedule(engine).require(), engine.knows_groups,
        )  # fmt: skip
        self._intake = intake if bodies is None else intake._replace(kept=bodies.outgoing)
        self.staging = intake if bodies is None else intake._replace(kept=bodies.looked_at)

    @property
    def quotas(self) -> Quotas:
        """Return the store's quotas. Only where it has some."""
        assert self._engine.quotas is not None
        return self._engine.quotas

    # Tickets

    def ticket(self, destination: Destination, message: Outgoing | bytes, sync: bool | None) -> Ticket:
        """Return the ticket of one message. Raises what Store.send raises before anything is queued."""
        engine = self._engine
        state = engine.catalog.destinations.get(destination) or self.state(destination)
        send = new_send(state, message, self._intake)
        engine.sends += 1
        return Ticket((send,), send.size, sync or False)

    def state(self, destination: Destination) -> DestinationState:
        """Return a destination's state, made if it is new here. Raises as `require_here`."""
        state = self._engine.catalog.destinations.get(destination)
        self._engine.ensure_usable() if state is not None else self._engine.require_here(destination)
        return state or self._engine.catalog.state(destination)

    def sends(
        self, sends: Sequence[tuple[Destination, Outgoing | bytes]], intake: Intake | None = None
    ) -> list[Change]:
        """Return the sends of a transaction. Raises what Store.send raises before anything is queued. `intake`: of what
        is not to be queued yet."""
        intake = intake or self._intake
        there = self._engine.catalog.destinations
        made: list[Change] = []
        for destination, run in groupby(sends, _destination_of):
            state = there.get(destination) or self.state(destination)
            made += new_sends(state, map(_message_of, run), intake)
        return made

    def change(self, change: store_types.Change) -> Subscribe | Unsubscribe:
        """Return the change of a subscription that a transaction, or a caller, asks for. Raises DestinationError,
        TypeError, SubscriptionError."""
        subscription = checked(change.subscription)
        state = self.state(subscription.topic)
        if not change.subscribe:
            return Unsubscribe(state, subscription.key)
        plain = subscription._replace(no_local=bool(subscription.no_local))
        return Subscribe(state, self._engine.catalog.next_number(), plain, change.retroactive)

    # Writing

    def write(
        self,
        changes: Sequence[Change],
        sync: bool = False,
        unsynced: bool = False,
        reservation: Grant | None = None,
        moves: bool = False,
    ) -> list[Any]:
        """Write the changes together, in the room that is reserved for them, and wait until that is done. Returns the
        outcome of each. `moves`: no gate keeps them out."""
        ticket = Ticket(changes, sum([change.size for change in changes]), sync, unsynced)
        if moves:
            ticket.moves = True
        if reservation is not None:
            ticket.held = reservation
        try:
            self._engine.submit(ticket)
            return self.wait(ticket)
        except BaseException as error:
            self.let_go(reservation, error)
            raise

    def let_go(self, grant: Grant | None, error: BaseException) -> None:
        """Let go of the grant of a call that this error has ended, whose traceback may hold the grant for long."""
        if isinstance(error, OutcomeUnknownError) and grant is not None:
            grant.release_room()
        elif isinstance(error, AnabranchError):
            cancel(grant)
        else:
            self.abandon(grant)

    def abandon(self, grant: Grant | None) -> None:
        """Give back, in the background, what is not used of an interrupted caller's grant, once that is known. The call
        for which the grant was given may be queued or not."""
        if grant is None:
            return

        def give_back() -> None:
            with suppress(AnabranchError):
                self._writer.flush()
            grant.cancel()

        shared().lead(give_back)

    def wait(self, ticket: Ticket) -> list[Any]:
        """Wait until a ticket is done; then help to apply it if too much waits for that."""
        outcomes = self._writer.wait(ticket)
        if self._engine.pending_changes >= APPLY_AT:
            self._engine.help()
        return outcomes

    def begin_each(self, sends: Sequence[tuple[Destination, Outgoing]], sync: bool) -> BegunSends:
        """Queue messages of many callers, as Store.begin_sends."""
        engine = self._engine
        there, intake = engine.catalog.destinations, self._intake
        changes: list[Change] = []
        refused: dict[int, Exception] = {}
        for at, (destination, message) in enumerate(sends):
            try:
                changes.append(new_send(there.get(destination) or self.state(destination), message, intake))
            except (AnabranchError, TypeError, ValueError) as error:
                refused[at] = error
        tickets = [Ticket(part, size, sync) for part, size in self._parts(changes)]
        for ticket, then in pairwise(tickets):  # what comes behind one that is refused is refused too
            ticket.then = then
        try:
            if len(tickets) == 1:
                engine.submit(tickets[0])
            elif tickets:
                self._writer.submit_all(tickets)
        except AnabranchError as error:
            for ticket in tickets:
                ticket.finish(error)
        engine.sends += len(changes)
        return BegunSends(self, self._writer, tickets, refused)

    def send_nowait(self, destination: Destination, ticket: Ticket) -> Future[Receipt]:
        """Return the future of a ticket for one message."""
        future: Future[Receipt] = Promise()
        future.set_running_or_notify_cancel()  # it may be on its way to the disk: no cancel() can call it back
        ticket.future = (future, lambda done: Receipt(destination, *done.outcomes[0]))
        self._writer.submit_all([ticket])
        self._writer.proceed()
        self._engine.help()
        return future

    def send_transient_nowait(self, destination: Destination, message: Outgoing) -> Future[Receipt]:
        """Send a transient message: it is there on return, and the future resolves on a thread of ours."""
        (send,) = self.sends([(destination, message)])
        future: Future[Receipt] = Promise()
        future.set_running_or_notify_cancel()
        try:
            (outcome,) = self.write([send])
        except AnabranchError as error:
            shared().resolve([(future, None, error)])
        else:
            self._engine.sends += 1
            shared().resolve([(future, Receipt(destination, *outcome), None)])
        return future

    # Where there are limits

    def send_limited(self, destination: Destination, message: Outgoing | bytes, sync: bool) -> Receipt:
        """Send a message as Store.send, where there are quotas."""
        (send,) = self.sends([(destination, message)])
        grant = self.quotas.reserve([send])
        return self._send_in([(destination, send)], grant, sync)[0]

    def send_as(self, change: LeasedSend, destination: Destination, sync: bool) -> Receipt:
        """Send a message by a change that stands for it, where there are quotas, too."""
        if self._engine.quotas is not None:
            return self._send_in([(destination, change)], self.quotas.reserve([change.inner]), sync)[0]
        (outcome,) = self.write([change], sync)
        self._engine.sends += 1
        return Receipt(destination, *outcome)

    def _send_in(self, sends: Sequence[tuple[Destination, Change]], grant: Grant, sync: bool) -> list[Receipt]:
        """Write these in the room that they were given."""
        kept = [send for at, (_, send) in enumerate(sends) if at not in grant.dropped]
        outcomes: Iterator[tuple[int, bool]] = iter(())
        if kept:
            outcomes = iter(self.write([*kept, *acks_of(grant.evicted)], sync, reservation=grant))
        self._engine.sends += len(kept)
        if grant.dropped:
            self.quotas.tell_new(sends[at][0] for at in grant.dropped)
        return [
            Receipt(destination, DROPPED) if at in grant.dropped else Receipt(destination, *next(outcomes))
            for at, (destination, _) in enumerate(sends)
        ]

    def send_limited_nowait(self, destination: Destination, message: Outgoing, sync: bool) -> Future[Receipt]:
        """Send a message as Store.send_nowait, where there are quotas. Messages that have to wait for room keep their
        order."""
        (send,) = self.sends([(destination, message)])
        future: Future[Receipt] = WaitingFuture()
        future.set_running_or_notify_cancel()

        def submit(grant: Grant, error: AnabranchError | None) -> None:
            if error is not None:
                grant.cancel()
                shared().resolve([(future, None, error)])
                return
            if grant.dropped:
                self.quotas.tell_new([destination])
                shared().resolve([(future, Receipt(destination, DROPPED), None)])
                return
            changes: list[Change] = [send, *acks_of(grant.evicted)]
            ticket = Ticket(changes, sum(change.size for change in changes), sync)
            ticket.held = grant
            ticket.future = (future, lambda done: Receipt(destination, *done.outcomes[0]))
            try:
                self._engine.submit(ticket)
            except (AnabranchError, RuntimeError) as refused:
                grant.cancel()
                shared().resolve([(future, None, refused)])
                return
            except BaseException:
                self.abandon(grant)
                raise
            self._engine.sends += 1
            self._writer.proceed()
            self._engine.help()

        self.quotas.reserve_nowait(send, submit)
        return future

    def _send_many_limited(
        self, destination: Destination, sends: Sequence[Change], sync: bool, done: list[Receipt]
    ) -> None:
        """Send as many at once as there is room for; where there is none for the next one, do what the quotas say."""
        at, count = 0, CHUNK
        while at < len(sends):
            some, _ = next(self._parts(sends[at : at + count]))
            try:
                grant = self.quotas.reserve(some, wait=len(some) == 1)
            except StoreFullError:
                if len(some) == 1:
                    raise
                count = (len(some) + 1) // 2
                continue
            done += self._send_in([(destination, send) for send in some], grant, sync)
            at, count = at + len(some), min(2 * count, CHUNK)

    def send_many(
        self,
        destination: Destination,
        messages: Iterable[Outgoing | bytes],
        sync: bool | None = None,
        done: list[Receipt] | None = None,
    ) -> list[Receipt]:
        """Send many messages, as Store.send_many."""
        engine = self._engine
        engine.ensure_usable()
        done = [] if done is None else done
        state = engine.catalog.state(destination)
        messages = tuple(messages)
        quotas = engine.quotas
        yields = quotas is not None and quotas.yields
        takes_many = engine.backend.takes_many and not (self._settings.priorities or yields)
        takes_many = takes_many and len(messages) > FETCH and not state.is_topic
        sends = (takes_many and self._many(state, messages)) or self.each(state, messages)
        if yields:
            self._send_many_limited(destination, sends, bool(sync), done)
            return done
        if engine.transient is not None and any(send.inner is not send for send in sends):
            self._send_mixed(destination, sends, bool(sync), done)
            return done
        parts = list(self._parts(sends))
        tickets = [Ticket(part, size, bool(sync)) for part, size in parts]
        for ticket, then in pairwise(tickets):
            ticket.then = then
        if quotas is not None:
            grants = quotas.reserve_all([part for part, _ in parts])
            for ticket in reversed(tickets):
                ticket.held = grants.pop()  # the traceback of an error shall hold none
        self._writer.submit_all(tickets)
        engine.sends += len(messages)
        for ticket, (part, _) in zip(tickets, parts, strict=True):
            outcomes, first = self.wait(ticket), part[0]
            if type(first) is SendMany:
                done += receipts_from(destination, outcomes[0], len(first))
            else:
                done += receipts(destination, outcomes)
        return done

    def each(self, state: DestinationState, messages: Sequence[Outgoing | bytes]) -> list[Change]:
        """Return a send for each message. An error of one refuses all."""
        rest, sends = iter(messages), list[Change]()
        while some := new_sends(state, islice(rest, CHUNK), self._intake):
            sends += some
        return sends

    def _many(self, state: DestinationState, messages: tuple[Any, ...]) -> list[Change]:
        """Return the messages in parts as large as a ticket may be. Returns none if one of them is not a body alone, or
        too large."""
        settings, first = self._settings, 0
        head, _ = encode(state.destination, b"", None, None, 0)
        parts: list[Change] = []
        while first < len(messages):
            count, size = plain_bodies(messages, first, settings.message_bytes_max, settings.ticket_bytes_max)
            if not count:
                return []
            parts.append(SendMany(state, head, messages[first : first + count], size))
            first += count
        return parts

    def _send_mixed(self, destination: Destination, sends: Sequence[Change], sync: bool, done: list[Receipt]) -> None:
        """Send many of which some are transient: not all at once, since these are put in under the store's lock."""
        chunks = [sends[start : start + CHUNK] for start in range(0, len(sends), CHUNK)]
        parts = [part for chunk in chunks for part, _ in self._parts(chunk)]
        quotas = self._engine.quotas
        grants = quotas.reserve_all(parts) if quotas is not None else [None] * len(parts)
        try:
            for part, grant in zip(parts, grants, strict=True):
                done += receipts(destination, self.write(part, sync, reservation=grant))
                self._engine.sends += len(part)
        finally:
            for grant in grants:
                release(grant)

    def _parts(self, sends: Sequence[Change]) -> Iterator[tuple[Sequence[Change], int]]:
        """Yield sends in parts as large as a ticket may be, each with its size."""
        size_max = self._settings.ticket_bytes_max
        first = size = 0
        for position, send in enumerate(sends):
            if position > first and size + send.size > size_max:
                yield sends[first:position], size
                first, size = position, 0
            size += send.size
        if sends:
            yield sends[first:], size


class Intake(NamedTuple):
    """The ways in which a store keeps messages."""

    limit: int
    """A message has so many bytes at most."""
    priorities: bool
    """The store orders by priority."""
    apart: Callable[[], Transient] | None
    """Returns what keeps transient messages; None: they are kept as the others are."""
    kept: Callable[[Outgoing], Outgoing]
    """Returns a message whose body is bytes, or is kept apart."""
    refuse_delayed: Callable[[], object] | None
    """Raises ConfigError. None: messages can wait for their time."""
    knows_groups: bool
    """Messages may have groups."""


def _plain(message: Outgoing) -> Outgoing:
    """Return a message of a store that keeps no body apart."""
    return message._replace(body=plain_body(message.body))


def require_schedule(engine: Engine) -> Schedule:
    """Return what brings back messages that wait. Raises ConfigError for a store without it."""
    if engine.schedule is None:
        raise ConfigError([f"store {engine.name!r} has no schedule: no message can wait there; use no delay"])
    return engine.schedule


@inner_loop
def new_send(state: DestinationState, message: Outgoing | bytes, intake: Intake) -> Change:
    """Return the send of a message, for the store whose `intake` it is. Raises what `encode` raises, and ConfigError
    for a message that cannot wait there."""
    if not isinstance(message, Outgoing):
        record, name = encode(state.destination, message, None, None, intake.limit)
        return Send(state, record, name, order_of(DEFAULT_PRIORITY, intake.priorities), 0)
    plain = type(message.body) is bytes and not message.deliver_at_ms
    if not plain:
        message = intake.kept(message)
    record, name = encode_outgoing(state.destination, message, intake.limit)
    order = order_of(message.priority, True) if intake.priorities else 0
    send = Send(state, record, name, order, message.expires_at_ms)
    if not plain:
        _set_extras(send, message)
    if message.group is not None or (message.headers and GROUP in message.headers):
        if not intake.knows_groups:
            raise ConfigError([f"{state.destination} is in a store without message groups; send without a group"])
        send.is_grouped = True
    if message.persistent or intake.apart is None:
        if send.deliver_at_ms and intake.refuse_delayed is not None:
            intake.refuse_delayed()
        return send
    return intake.apart().mark(send)


def _set_extras(send: Send, message: Outgoing) -> None:
    """Say of a message what is kept beside its record."""
    if isinstance(message.body, StoredBody):
        send.large = message.body
    if message.deliver_at_ms:
        require_time("deliver_at_ms", message.deliver_at_ms)
        send.wait_until(message.deliver_at_ms)


@inner_loop
def new_sends(state: DestinationState, messages: Iterable[Outgoing | bytes], intake: Intake) -> list[Change]:
    """Return sends of many messages, as `new_send`."""
    return [new_send(state, message, intake) for message in messages]


@inner_loop
def plain_bodies(messages: tuple[Any, ...], first: int, limit: int, size_max: int) -> tuple[int, int]:
    """Return how many messages from this one on are bodies alone, of so many bytes at most, and take at most `size_max`
    together when they are written; one may take more. And the bytes of their records."""
    count = size = 0
    for body in islice(messages, first, None):
        record_bytes = HEAD.size + len(body) if type(body) is bytes and len(body) <= limit else 0
        if not record_bytes or (count and size + record_bytes + SMALL_BYTES * (count + 1) > size_max):
            break
        count += 1
        size += record_bytes
    return count, size


@inner_loop
def receipts_from(destination: Destination, first: int, count: int) -> list[Receipt]:
    """Return the receipts of so many messages with seqs from this one on."""
    return [Receipt(destination, seq) for seq in range(first, first + count)]


@inner_loop
def receipts(destination: Destination, outcomes: Sequence[tuple[int, bool]]) -> list[Receipt]:
    """Return the receipts of sends with these outcomes."""
    return [Receipt(destination, *outcome) for outcome in outcomes]


class BegunSends(Queued):
    """Sends of many callers that are queued: a Pending of what becomes of each."""

    __slots__ = ("_refused", "_sending", "_tickets")

    def __init__(
        self, sending: Sending, writer: Writer, tickets: Sequence[Ticket], refused: dict[int, Exception]
    ) -> None:
        super().__init__(writer)
        self._sending, self._tickets = sending, tickets
        self._refused = refused
        """By its place among them, in order: why one is not queued."""

    def wait(self) -> list[tuple[int, bool] | Exception]:
        """Return for each its seq and whether it is a duplicate, or why it is not stored."""
        results: list[tuple[int, bool] | Exception] = []
        for ticket in self._tickets:
            try:
                results += self._sending.wait(ticket)
            except AnabranchError as error:
                results += [error] * len(ticket.content)
        for at, refusal in self._refused.items():
            results.insert(at, refusal)
        return results
