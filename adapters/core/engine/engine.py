"""From what is written to what is seen: plans wait here until somebody reads, and are then applied in order (rule X2).

E1  A plan counts once it is in `_new`, or in `_pending`. There it goes when somebody receives, and its messages go to
    receivers that keep up (arrivals.py). Applied it is under the lock, in order, once; who was interrupted in between
    leaves `interrupted`, and whoever takes the lock next makes it whole.
E2  Holds end before the backend applies: the other way round a dead message would stay held. Those of messages that
    are leased to their senders begin then: the other way round somebody else could hold one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, TypeVar

from ....policies.errors import AnabranchError, ClosedError, StoreFailedError
from ....policies.names.destination import Destination
from ...system import locking
from ...system.acceleration import inner_loop
from ...system.conditions import RLock
from ..backend import Backend
from ..operations.branches import Commit, Forget, Rollback
from ..operations.changes import Ack, Change, Send, SendMany
from ..operations.destination_changes import Remove, Unsubscribe
from ..operations.pending_counts import PendingCounts
from ..operations.plan import Plan, Sequencer
from ..operations.tickets import Ticket
from ..state.delivery import Delivery
from ..state.gates import MovedError
from ..state.leases import Channel, DestinationState, Receiver
from ..state.rows import Rows
from ..state.states import Catalog
from . import arrivals
from .hooks import Bodies, Feature, Hooks, KeyedValues, Outbox, Quotas, Schedule, Transient

log: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

APPLY_AT: Final = 120
"""A sender that leaves so many changes pending applies them. With each some five objects wait
that the garbage collector knows: it looks at them whenever there are 700 more, and so finds none that wait here."""
PENDING_MAX: Final = 20_000
"""Changes; beyond it a sender waits until they are applied (invariant 10)."""
TOGETHER_MAX: Final = 1024
"""Plans that are applied together, and changes, but for those of the last plan."""
_SENDS: Final = frozenset((Send, SendMany))
COUNT_SECONDS: Final = 0.25
"""Seconds that a question for a count waits until what is pending is applied, where it cannot be told before."""
COUNT_PAUSE: Final = 0.001
COUNT_PAUSE_MAX: Final = 0.02
COMMITTED_MAX: Final = 100_000
"""Transactions over several stores that are remembered as committed until their coordinator forgets them."""


class Engine:
    """The state of one store that is open: catalog, deliveries, what is pending. `lock` guards all that is not said to
    be the writer's."""

    __slots__ = ("__dict__", "__weakref__", "_new", "_pending", "batches", "hooks", "pending_changes", "taken")

    def __init__(self, name: str, backend: Backend) -> None:
        self.name = name
        self.backend = backend
        self.rows: Rows = backend
        """The rows, which tell which messages there are."""
        self.submit: Callable[[Ticket], object] = self._refuse
        """Writer.submit, or what stands in front of it."""
        self.hooks: Final = Hooks()
        self.features: list[Feature] = []
        """The features of the store, in the order in which they are opened."""
        self.quotas: Quotas | None = None
        self.bodies: Bodies | None = None
        self.transient: Transient | None = None
        """Once a transient message was sent."""
        self.make_transient: Callable[[], Transient] | None = None
        """Be ready for transient messages. None: they are kept as the others are."""
        self.schedule: Schedule | None = None
        self.knows_groups = False
        self.outbox: Outbox | None = None
        self.maps: KeyedValues | None = None
        self.owner: object = None
        """The router's: kept, and never looked at (invariant 8)."""
        settings = backend.settings
        self.lock: threading.RLock = RLock()
        """Taken by `with` itself, never inside a function that returns with it: only so can Ctrl-C not leak it."""
        self._reader = 0
        """The thread that reads bodies with the lock held."""
        self._passes_on = backend.tells_places and not settings.priorities
        self.catalog: Catalog = Catalog()
        self.delivery: Final = Delivery(name, settings.max_leases, settings.max_deliveries, settings.priorities)
        self.sequencer: Sequencer = Sequencer(self.catalog, settings.duplicate_window)
        self.committed: dict[bytes, None] = {}
        """Transactions that are committed here and not forgotten, oldest first."""
        self.hooks.follow((Commit,), self._committed)
        self.hooks.follow((Rollback,), self._rolled_back)
        self.hooks.follow((Forget,), self._forgotten)
        self.hooks.follow((Remove, Unsubscribe), self._removed)
        self.sequencer.on_expiring = self._look_at_sends
        if settings.priorities:
            self._look_at_sends()
        self.sends: int = 0
        self.acks: int = 0
        self.redelivered: int = 0
        self.batches: int = 0
        self.closed: bool = True
        self.failed: BaseException | None = None
        self.on_failed: Callable[[BaseException], object] = lambda cause: None
        """Called once, by whoever finds that it has failed, perhaps with locks held: it must not wait."""
        self.pending_changes: int = 0
        self._guard: Callable[[], None] | None = None
        self._generation = locking.generation
        self._new: deque[Plan] = deque()
        """Plans that nobody has looked at yet."""
        self._pending: deque[Plan] = deque()
        """Plans before those of `_new` that are not applied yet."""
        self._changed = 0
        """Number of the latest plan that changes subscriptions."""
        self._applied = 0
        self.applied_seq: int = 0
        """No message with a lower seq is still to come into the rows, but a transient one."""
        self.taken: int = 0
        """Number of the last plan that has taken effect."""
        self.interrupted: bool = False
        """Rows, or what follows from them, may be changed by halves: the backend is asked to recover before anything
        else. A backend sets it around what it does to its rows beside `apply`."""
        self.on_leaving: Callable[[], None] = lambda: None
        """Called when there may be something in `Catalog.leaving`."""
        self.writing_out = False
        """The backend holds the lock for long: who only wants to help does not wait for it."""
        self.counts_stand = False
        """The backend holds the lock for long, and changes none of the counts: who asks for no more does not wait for
        it either."""
        self.written: Plan | None = None
        """A plan that took effect and was not taken in yet, where whoever calls writes: see `finish`."""

    # Whether it may be used

    @property
    def forked(self) -> bool:
        return self._generation != locking.generation

    def ensure_usable(self) -> None:
        """Raise if closed, forked or failed."""
        if self.closed:
            raise ClosedError(f"store {self.name!r} is closed; open it again")
        if self._generation != locking.generation:
            raise ClosedError(f"store {self.name!r} was opened by the parent process; open it anew in a forked child")
        if self.failed is not None:
            raise self.failure()
        if self._guard is not None:
            self._guard()

    def require_here(self, destination: Destination) -> None:
        """Raise for a destination that is not found: what `ensure_usable` raises, or MovedError. MovedError means that
        the destination has moved to another store, or is about to."""
        self.ensure_usable()
        gate = self.sequencer.gates.get(destination)
        if gate is not None:
            raise MovedError(gate)

    def failure(self) -> StoreFailedError:
        """Return the error that callers of a failed store get."""
        error = StoreFailedError(
            f"store {self.name!r} has stopped after an error: {self.failed}; close it and open it again"
        )
        error.__cause__ = self.failed
        return error

    def refusal(self) -> AnabranchError:
        """Return the error that says why nothing is written any more."""
        return self.failure() if self.failed is not None else ClosedError(f"store {self.name!r} is closed")

    def _refuse(self, ticket: Ticket) -> object:
        raise self.refusal()

    def fail(self, cause: BaseException) -> None:
        """Stop for good (invariant 7)."""
        if self.failed is None:
            log.error("store %s has failed: %s", self.name, cause)
            self.stop(cause)

    def stop(self, cause: BaseException) -> None:
        """Stop for good where the failure has been logged already."""
        first, self.failed = self.failed is None, cause
        self.wake_all()
        if first:
            self.on_failed(cause)

    def check(self) -> None:
        """Raise, before taking the lock, what `ensure_usable` raises, since in a forked child another thread's hold on
        the lock would last for ever; and RuntimeError in a signal handler that interrupted its own thread (G3)."""
        if self.closed or self._generation != locking.generation or self.failed is not None or self._guard is not None:
            self.ensure_usable()
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self.name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def wake_all(self) -> None:
        """Let all who wait see that the store stops."""
        for channel in self.catalog.channels():
            channel.wake_all()
        for hook in self.hooks.stopped:
            hook()

    # Opening

    def start(self, submit: Callable[[Ticket], object]) -> None:
        """Start once the backend has filled the catalog. `submit`: the writer's."""
        self.submit = submit
        self.applied_seq = self.sequencer.last_seq
        self._guard = self.backend.guard
        self.closed = False
        self.failed = None
        self._generation = locking.generation

    def mix(self, rows: Rows, submit: Callable[[Ticket], object]) -> None:
        """Have messages that no backend sees from now on, with the lock held: in these rows, and submitted so. Their
        seqs are given out between plans."""
        self.sequencer.mix()
        self.delivery.mixed = True
        self._passes_on = False
        self.rows, self.submit = rows, submit

    # Taking plans in

    def take(self, plan: Plan) -> None:
        """Take in a plan that has become as durable as the policy asks. Called by who writes, in order; again after an
        interruption, for the same."""
        changes = plan.changes
        if plan.number > self.taken:
            for effect in plan.effects:
                effect.take(plan, self._applied)  # before it counts as taken: see `Maps`
            for hook in self.hooks.taking:
                hook(plan)
            self.pending_changes += len(changes) + plan.more
            if self._new or len(changes) != 1 or type(changes[0]) is not Ack:
                self._new.append(plan)
            else:
                self._pending.append(plan)  # there is nothing to pass on
            self.taken = plan.number
            for hook in self.hooks.taken:
                hook(plan)
        if plan.is_more:
            if plan.subscribed:
                self._changed = plan.number
            for effect in plan.effects:
                effect.taken()
        for change in changes:
            if type(change) is Ack:
                if change.state.at_limit:
                    self.wake_at_limit(change.state, change.number)
            elif type(change) is Send and not change.state.is_topic:
                channel = change.state.channel
                if channel.receivers and not change.state.is_map:  # who waits for a key is woken by the plan's effect
                    channel.wake()
            else:
                for state in change.states():
                    for channel in state.channels():
                        if channel.receivers:
                            channel.wake()
        for freed in self.hooks.freed:  # as `tell_freed`, less a call
            freed()

    def wake_at_limit(self, state: DestinationState, number: int) -> None:
        """Wake those who wait for one more lease, of a topic for the subscription with this number."""
        for channel in state.channels(number):
            if channel in state.at_limit:
                try:
                    state.at_limit.pop(channel, None)
                    channel.wake()
                except BaseException:
                    state.at_limit[channel] = None
                    raise

    def finish(self) -> None:
        """Take in what is written, with the lock held. Every step may be done twice, so an interruption leaves the rest
        to the next caller."""
        plan = self.written
        if plan is not None:
            if self.sequencer.number < plan.number:
                self.batches += 1
            self.sequencer.accept(plan)
            self.take(plan)
            for ticket in plan.tickets:
                ticket.finish(None)
            self.written = None

    @property
    def unsubscribing(self) -> bool:
        """Return whether a change of subscriptions is pending: what was fetched for one may not be its own any more."""
        return self._changed > self._applied

    @property
    def behind(self) -> bool:
        """Return whether anything is pending."""
        return self.written is not None or bool(self._new or self._pending)

    @inner_loop
    def lease_ready(self, channel: Channel, receiver: Receiver) -> bool:
        """Give `receiver` the first message of a channel, if it is ready (Delivery.lease_ready): most receives take no
        more than this. Raises what `check` raises."""
        self.check()
        delivery = self.delivery
        with self.lock:
            if self.closed or self.interrupted or self.written is not None or self.failed is not None:
                return False
            if delivery.mixed:
                return False  # what is pending may come before what is ready
            if self._new:
                self.look()
            if channel.subscription is not None and self.unsubscribing:
                return False
            return not channel.receivers and delivery.lease_ready(channel, receiver)

    def lease_stacked(self, channel: Channel, receiver: Receiver) -> bool:
        """Give `receiver` the last message of a channel, if it is known (Delivery.lease_stacked). Raises what `check`
        raises."""
        self.check()
        with self.lock:
            stack = channel.stack
            if (
                stack is None or stack.number < self._applied or channel.receivers or self.closed or self.interrupted
                or self.written is not None or self.failed is not None or self.delivery.mixed
            ):  # fmt: skip
                return False
            if stack.number < self.taken:
                self.look()
                channel.stack = None  # it is away while it is changed (rule O5)
                if not arrivals.follow(stack, channel, self._pending, self.delivery):
                    return False
                channel.stack = stack
            return self.delivery.lease_stacked(channel, receiver)

    def lease_in_line(self, channel: Channel, receiver: Receiver) -> bool:
        """As `lease_ready`, with the lock held, for who stands in line, and leaves it then. Not for a subscription:
        nothing is passed on to one (arrivals.py)."""
        if (
            not self._passes_on or channel.subscription is not None or self.closed or self.interrupted
            or self.written is not None or self.failed is not None or self.sequencer.gates
        ):  # fmt: skip
            return False
        self.look()
        if channel.state.removed or not channel.is_next(receiver) or not self.delivery.lease_ready(channel, receiver):
            return False
        channel.receivers.pop(receiver, None)
        channel.wake()
        return True

    @inner_loop
    def look(self) -> None:
        """Pass on, with the lock held, what has come to consumers that keep up. May be done again."""
        new, passes_on = self._new, self._passes_on
        while new:
            plan = new[0]
            if passes_on:
                arrivals.pass_on(plan.changes, self.delivery)
            self._pending.append(plan)
            new.popleft()

    def current(self, drained: bool = True) -> None:
        """See, with the lock held and after `check`, that the store is usable. If `drained`, also apply all that has
        returned."""
        if self.closed or self.failed is not None or self._guard is not None:
            self.ensure_usable()
        if drained or self.interrupted or self.written is not None:
            self.drain()

    def hand_over(self, channel: Channel) -> None:
        """Give waiting consumers, with the lock held, what there is for them. Messages taken in once they stand in line
        wake them. Messages taken in just before woke nobody, and are looked for again. A failure of the store is looked
        for too: nobody in line would be told of it."""
        if self.failed is not None:
            self.ensure_usable()
        self.delivery.hand_over(channel, self.rows)
        if channel.receivers and self.behind:
            self.drain()
            if not channel.state.removed and not self.is_gone(channel):  # by what was just taken in
                self.delivery.hand_over(channel, self.rows)

    def help(self) -> None:
        """Apply what is pending, if there is much of it; wait for who has the lock for long only if there is very
        much."""
        if self.pending_changes >= APPLY_AT and (not self.writing_out or self.pending_changes > PENDING_MAX):
            try:
                self.check()
                with self.lock:
                    if self.pending_changes >= APPLY_AT:  # else another thread has, meanwhile
                        self.current()
            except (AnabranchError, RuntimeError) as error:  # what the caller did has taken effect all the same
                log.debug("store %s: nothing applied: %s", self.name, error)

    def drain(self) -> None:
        """Apply, with the lock held, what is pending."""
        if self.written is not None:
            self.finish()
        for hook in self.hooks.draining:
            hook()
        if self.interrupted:
            applied = self.backend.recover()
            for plan in list(self._pending):  # the interruption may have come between the rows and what follows
                if self._applied < plan.number <= applied:
                    self._follow(plan.changes)
                    if plan.beside is not None:
                        plan.beside.apply(plan)
            self._applied = applied
            self.interrupted = False
        self.look()
        pending = self._pending
        while pending:
            count, leaving = self._apply_some(), self.hooks.applied
            for _ in range(count):
                for leave in leaving:
                    leave(pending[0])
                pending.popleft()
        if self.delivery.records:
            self.delivery.records.clear()
        if self.pending_changes:
            self.pending_changes = sum([plan.count for plan in list(self._new)]) if self._new else 0

    def undo(self, plan: Plan) -> None:
        """Undo a plan that has not taken effect, whose callers were told that this is not known. Nobody else gives back
        what they would have acked, or claimed for good. May be done again."""
        with self.lock:
            self.drain()
            for change in plan.every_change:
                change.undo(self.delivery, self.rows)

    def _apply_some(self) -> int:
        """Apply the first pending plans; returns how many. Numbers tell what was applied already by somebody who was
        interrupted before it could take it out."""
        pending, number = self._pending, self._applied
        plans = list(pending) if len(pending) <= TOGETHER_MAX else [pending[at] for at in range(TOGETHER_MAX)]
        changes: list[Change] = []
        last: Plan | None = None
        count = more = 0
        for plan in plans:
            count += 1
            if plan.number > number:  # not so of one that is in there twice
                number = plan.number
                if plan.changes:
                    changes += plan.changes
                    more += plan.more
                    last = plan
            if len(changes) + more >= TOGETHER_MAX or plan.beside is not None:
                break
        if number == self._applied:
            return count
        kinds = set(map(type, changes))
        self.interrupted = True
        if not kinds <= _SENDS:
            for change in changes:
                if type(change) is Ack and not change.state.is_topic:
                    change.state.channel.held.pop(change.seq, None)  # as its `settle` does: most are such
                elif type(change) is not Send:
                    change.settle(self.delivery)
        if last is not None:
            self.backend.apply(changes, last)
            self.applied_seq = last.last_seq
        if not kinds.isdisjoint(self.hooks.followers):
            self._follow(changes)
        if plan.beside is not None:
            plan.beside.apply(plan)
        self._applied = number
        self.interrupted = False
        return count

    def _follow(self, changes: Sequence[Change]) -> None:
        """Do what follows once changes are in the rows. May be done again."""
        for change in changes:
            self.follow(change)

    def follow(self, change: Change) -> None:
        """Do what follows once a change is in the rows, with the lock held. May be done again."""
        for follow in self.hooks.followers.get(type(change), ()):
            follow(change)

    def tell_freed(self) -> None:
        """Tell that some room may have become free."""
        for hook in self.hooks.freed:
            hook()

    def _look_at_sends(self) -> None:
        """Have each message in the rows looked at from now on: some expire, or come by priority."""
        self.hooks.follow((Send,), self.delivery.added)
        self.sequencer.on_expiring = _nothing  # each message that expires would ask for it

    def _committed(self, change: Commit) -> None:
        self.committed[change.branch.transaction] = None
        while len(self.committed) > COMMITTED_MAX:
            self.committed.pop(next(iter(self.committed)), None)

    def _rolled_back(self, change: Rollback) -> None:
        for lease in change.branch.leases:
            self.delivery.unlease(lease, self.rows, delivered=True)
        for lease in change.branch.evicted:
            self.delivery.unlease(lease, self.rows)

    def _forgotten(self, change: Forget) -> None:
        for transaction in change.transactions:
            self.committed.pop(transaction, None)

    def _removed(self, change: Remove | Unsubscribe) -> None:
        for state in change.states():
            self.catalog.drop(state)
        if self.leaving:
            self.on_leaving()

    @property
    def leaving(self) -> bool:
        """Return whether messages of what is gone are still to go."""
        return bool(self.catalog.leaving) or (self.transient is not None and bool(self.transient.mirrors.leaving))

    # Asking

    def settle(self) -> None:
        """Wait until what this thread has committed in a database transaction of its own is seen. Without the lock."""
        for hook in self.hooks.settling:
            hook()

    def asked(self, question: Callable[[], T]) -> T:
        """Return the answer, with all that has returned applied."""
        self.check()
        with self.lock:
            self.current()
            return question()

    def look_soon(self) -> None:
        """Apply what was just written, so that who comes next need not look for it. It stands, too, where the store has
        failed since, or was closed: that is raised to who does more with it."""
        with suppress(AnabranchError):
            self.asked(lambda: None)

    def reading(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which reads bodies with the lock held and all that has returned applied. `work`
        looks its places up since, and none of them dies before the lock is let go. A backend that looks a place up once
        more need not ask for what is pending. The backend uses `looked_up` for that."""
        before = self._reader
        try:
            self._reader = threading.get_ident()
            return work()
        finally:
            self._reader = before

    def looked_up(self, question: Callable[[], T]) -> T:
        """Return the answer, as of now: for who reads bodies, with the lock held or not."""
        if self._reader == threading.get_ident():
            return question()
        return self.asked(question)

    def counted(self, question: Callable[[PendingCounts], T]) -> T:
        """Answer a question about counts alone, and add what is pending. The answer comes at once, even while the
        backend holds the lock since its disk hangs. Where what is pending does not tell a count that is asked for, that
        takes COUNT_SECONDS. The answer is then as of the last that was applied."""
        self.settle()
        until, pause = time.monotonic() + COUNT_SECONDS, COUNT_PAUSE
        while self.counts_stand and not self.unsubscribing:
            self.ensure_usable()
            applied, pending = self._applied, self.pending_counts()
            answer = question(pending)
            if pending.is_guess and time.monotonic() < until:
                time.sleep(pause)
                pause = min(2 * pause, COUNT_PAUSE_MAX)
            elif self.counts_stand and self._applied == applied:
                return answer
        return self.asked(lambda: question(self.pending_counts()))

    def pending_counts(self) -> PendingCounts:
        """Count what has returned and is not applied."""
        counts = PendingCounts(self.catalog)
        for plan in dict.fromkeys((*self._new, *self._pending)):
            if plan.number > self._applied:
                for change in plan.every_change:
                    change.add_to(counts)
        return counts

    @property
    def followed(self) -> int | None:
        """Return the number of the last plan that is in the rows; None where what comes later does not tell where its
        messages are."""
        return self._applied if self._passes_on else None

    @property
    def applied(self) -> int:
        """Return the number of the last plan that is in the rows."""
        return self._applied

    def is_gone(self, channel: Channel) -> bool:
        """Return whether the subscription of a channel has ended."""
        subscriber = channel.subscription
        return subscriber is not None and channel.state.subscriptions.get(subscriber.subscription.key) is not subscriber


def _nothing() -> None:
    """Do nothing."""
