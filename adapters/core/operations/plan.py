"""Plans, which put what many callers asked for in order: the one place where seqs are given out and duplicates fall
away (rule X7).

P1  A plan changes nothing but the tickets' outcomes, the seqs of its sends, and what is refused since one before it
    was (`Ticket.then`), so that it may be made again after an interruption. It counts from `Sequencer.accept` on: what
    is planned next builds on it.
P2  Plans are made and accepted by one thread at a time, in the order in which they are written.
P3  Transient messages get seqs between plans, from any thread. `mixed` says that there are such, and who plans then
    holds `lock`; who was at it when the first one came has said before what it plans (`_planning`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeVar

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination, Kind
from ..state.duplicates import DuplicateWindow, Key
from ..state.gates import Gate, require_passage
from ..state.leases import DestinationState, SubscriptionState
from ..state.states import Catalog
from ..store_types import SubscriptionKey
from .branches import Branch, Commit, Rollback
from .changes import Change, Naming, Refused, Send, SendMany
from .destination_changes import Declare
from .tickets import Ticket

Subscribed = dict[SubscriptionKey, SubscriptionState]
"""The subscriptions of a topic. Replaced, never changed."""

NO_IDS: Final[dict[Key, int]] = {}
"""The ids of a plan without any. Never changed."""

E = TypeVar("E", bound="Effect")


class Effect:
    """The part that a feature has in a plan, beside the plan's changes. Each step may be done again after an
    interruption."""

    def accept(self, plan: Plan) -> None:
        """Note that the plan is about to be written, or was: what is planned next builds on it. By who plans."""

    def take(self, plan: Plan, applied: int) -> None:
        """Note that the plan takes effect; all up to number `applied` are in the rows."""

    def apply(self, plan: Plan) -> None:
        """Do what follows once the plan's changes are in the rows, under the store's lock. Only of `Plan.beside`."""

    def taken(self) -> None:
        """Do what follows once the plan is pending, as waking those who wait for it."""

    def changes(self) -> Sequence[Change]:
        """Return the changes that no backend is told of."""
        return ()


class Plan:
    """The changes of some tickets."""

    __slots__ = ("__dict__", "_sequencer", "changes", "ids", "is_more", "last_seq", "number", "own", "tickets")

    # Values that most plans leave as they are stand here, not in each plan. They are replaced, never changed.
    declared: Sequence[DestinationState] = ()
    removed: Sequence[DestinationState] = ()
    successors: dict[DestinationState, DestinationState] = {}  # noqa: RUF012
    """By one of `removed`: what has its name from then on."""
    subscribed: dict[int, Subscribed] = {}  # noqa: RUF012
    """By destination's number: the subscriptions of topics where they change."""
    dropped: int = 0
    """Messages of topics without subscriptions."""
    prepared: Sequence[Branch] = ()
    settled: Sequence[Branch] = ()
    effects: Sequence[Effect] = ()
    """What the plan does beside its changes: the features' part."""
    beside: Effect | None = None
    """One of `effects`, if it does something once the changes are applied."""
    alters: bool = False
    """True if one of the above but `prepared` and `settled` says what."""
    more = 0
    """Messages beside the first of each SendMany."""

    def __init__(self, sequencer: Sequencer, tickets: Sequence[Ticket], last_seq: int | None = None) -> None:
        """`last_seq`: the highest that was given out, if others than the sequencer's plans were."""
        self._sequencer = sequencer
        self.number: Final = sequencer.number + 1
        """One more than that of the plan before."""
        self.last_seq: int = sequencer.last_seq if last_seq is None else last_seq
        self.changes: list[Change] = []
        self.ids: dict[Key, int] = NO_IDS
        """New in the duplicate window."""
        self.tickets: Sequence[Ticket] = tickets
        """Tickets that were not refused."""
        self.is_more: bool = False
        """True if the plan does more than to send messages, and to ack: one of the above says what, or `own`."""
        self.own: Any = None
        """The backend's."""
        gates = sequencer.gates
        for ticket in tickets:  # one that is refused leaves nothing
            done, content = len(self.changes), ticket.content
            try:
                if gates and content:
                    require_passage(gates, content, getattr(ticket, "moves", False))  # a log has others of its own
                if len(content) == 1:
                    ticket.outcomes = [content[0].plan(self)]
                else:
                    ticket.outcomes = [change.plan(self) for change in content]
            except AnabranchError as error:
                if len(self.changes) != done:
                    raise AssertionError(f"a ticket was refused half way: {error}") from error
                ticket.error = error
                then = getattr(ticket, "then", None)  # as above
                if then is not None:
                    then.content = (Refused(error),)
                self.tickets = [other for other in self.tickets if other is not ticket]

    @property
    def count(self) -> int:
        """Return how much there is to apply: each message counts."""
        return len(self.changes) + self.more

    @property
    def every_change(self) -> list[Change]:
        """Return its changes, and those that no backend is told of."""
        return [*self.changes, *(change for effect in self.effects for change in effect.changes())]

    @property
    def sync(self) -> bool:
        """Return whether a caller waits for the disk, whatever the policy."""
        return any(ticket.sync for ticket in self.tickets)

    # Questions that changes ask while they are planned

    def seq_of(self, key: Key) -> int | None:
        """Return the seq of the message that has been sent with this id."""
        first = self.ids.get(key)
        if first is None and not any(state.number == key[0] for state in self.removed):
            first = self._sequencer.window.get(key)
        return first

    def remember(self, key: Key, seq: int) -> None:
        """Remember that a message has been sent with this id."""
        if self.ids is NO_IDS:
            self.ids = {}
        self.ids[key] = seq

    def naming(self, state: DestinationState) -> Naming:
        """Return what message ids mean in a destination."""
        return self._sequencer.naming[state.destination.kind]

    def effect(self, kind: type[E], make: Callable[[], E]) -> E:
        """Return the plan's effect of this kind, made if there is none."""
        for effect in self.effects:
            if type(effect) is kind:
                return effect
        made = make()
        self.effects = [*self.effects, made]
        self.is_more = self.alters = True
        return made

    def current(self, state: DestinationState) -> DestinationState:
        """Return the state of the same destination that is there by then, or may be."""
        return self._latest(self._sequencer.catalog.current(state))

    def find(self, state: DestinationState) -> DestinationState:
        """Return the same destination's state, if there is one; else this."""
        return self._latest(self._sequencer.catalog.destinations.get(state.destination, state))

    def _latest(self, state: DestinationState) -> DestinationState:
        while state in self.removed:
            if state not in self.successors:
                new = DestinationState(self._sequencer.catalog.next_number(), state.destination)
                self.successors = {**self.successors, state: new}
            state = self.successors[state]
        return state

    def is_declared(self, state: DestinationState) -> bool:
        """Return whether a destination is there by then."""
        return state in self.declared or (state.declared and state not in self.removed)

    def declare(self, state: DestinationState) -> None:
        """See that a destination is there."""
        if not self.is_declared(state):
            self.declared = [*self.declared, state]
            self.is_more = self.alters = True
            self.changes.append(Declare(state))

    def remove(self, state: DestinationState) -> None:
        """Remove a destination with its ids and subscriptions, for good: what is sent there from then on is
        another's."""
        self.removed = [*self.removed, state]
        self.is_more = self.alters = True
        self.declared = [other for other in self.declared if other is not state]
        self.ids = {key: seq for key, seq in self.ids.items() if key[0] != state.number}
        self.subscribed = {**self.subscribed, state.number: {}}

    def drop(self) -> None:
        """Drop a message that is sent to a topic without subscriptions."""
        self.dropped += 1
        self.is_more = self.alters = True

    def subscriptions(self, state: DestinationState) -> Subscribed:
        """Return the subscriptions of a topic by then."""
        changed = self.subscribed.get(state.number)
        return self._sequencer.subscribed.get(state.number, {}) if changed is None else changed

    def subscribe(self, subscriber: SubscriptionState) -> None:
        """Add a subscription."""
        topic = subscriber.topic
        self.is_more = self.alters = True
        those = {**self.subscriptions(topic), subscriber.subscription.key: subscriber}
        self.subscribed = {**self.subscribed, topic.number: those}

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        """Remove a subscription."""
        others = self.subscriptions(subscriber.topic).items()
        self.is_more = self.alters = True
        those = {key: other for key, other in others if other is not subscriber}
        self.subscribed = {**self.subscribed, subscriber.topic.number: those}

    def close(self, gate: Gate) -> None:
        """Close a gate: the tickets behind have nothing for its destination."""
        self._sequencer.gates[gate.destination] = gate

    def expire(self) -> None:
        """Note a message that expires."""
        self._sequencer.on_expiring()

    def group(self, send: Send) -> None:
        """Note a message that has a group."""
        self._sequencer.on_grouped(send.state, send.recipients)

    def settle(self, outcome: Commit | Rollback, brings: Iterable[Change]) -> list[Any] | None:
        """Add the outcome of a branch, behind the changes that it brings, and return what comes of these; None if the
        branch waits for no outcome by then."""
        branch, outcomes = outcome.branch, []
        is_prepared = self._sequencer.prepared.get(branch.transaction) is branch or branch in self.prepared
        if not is_prepared or branch in self.settled:
            return None
        for change in brings:
            outcomes.append(change.plan(self))  # noqa: PERF401  no comprehension, which is a call
        self.settled = (*self.settled, branch)
        self.is_more = True
        self.changes.append(outcome)
        return outcomes


class Sequencer:
    """The knowledge of the thread that writes. Others may look at `prepared` and `last_seq`."""

    __slots__ = ("__dict__", "_planning", "gates", "last_seq", "mixed", "number", "window")

    def __init__(self, catalog: Catalog, duplicate_window: int) -> None:
        self.catalog = catalog
        self.window: Final = DuplicateWindow(duplicate_window)
        self.naming: dict[Kind, Naming] = dict.fromkeys(Kind, Naming())
        """The meaning of message ids, by kind of destination."""
        self.subscribed: dict[int, Subscribed] = {}
        """By destination's number: the subscriptions of topics that have some."""
        self.dropped: int = 0
        """Messages that were sent to a topic without any subscription."""
        self.prepared: dict[bytes, Branch] = {}
        """Branches that wait for their outcome, by transaction."""
        self.last_seq: int = 0
        """The highest of a message that was accepted."""
        self.gates: dict[Destination, Gate] = {}
        """Gates of destinations that are on their way to another store, or have gone there. Closed by who plans."""
        self.on_expiring: Callable[[], object] = lambda: None
        """Called when a message is planned that expires."""
        self.on_grouped: Callable[[DestinationState, Iterable[SubscriptionState]], object] = lambda state, own: None
        """Called when a message that has a group is planned, or, of a transient one, is about to be seen: with its
        destination, and the subscriptions that a topic's is for."""
        self.mixed: bool = False
        """Some messages are not persistent."""
        self.lock: Final = threading.RLock()
        """Guards `_given`, and who plans while `mixed`."""
        self._given = 0
        """No seq above it was given out, be it not accepted; counts if `mixed`."""
        self._planning: Sequence[Ticket] = ()
        """Tickets that are planned and not accepted yet, if any."""
        self.number: int = 0
        """The number of the last plan that was accepted."""

    def load(self, last_seq: int, ids: Iterable[tuple[Key, int]]) -> None:
        """Load the state at open; the catalog is filled. `ids`: of the duplicate window, oldest first. Seqs go on
        behind `last_seq`, and behind where any subscription begins (rule A5)."""
        subscribers = (one for state in self.catalog.destinations.values() for one in state.subscriptions.values())
        self.last_seq = max([last_seq, *(one.start for one in subscribers)])
        latest: dict[Key, int] = {}
        for key, seq in ids:
            latest.pop(key, None)  # requeued: it is among the latest
            latest[key] = seq
        self.window.add(latest)
        for state in self.catalog.destinations.values():
            if state.subscriptions:
                self.subscribed[state.number] = state.subscriptions

    def plan(self, tickets: Sequence[Ticket]) -> Plan:
        """Return the plan of these tickets, behind all that was accepted."""
        self._planning = tickets  # before it looks: see `mix`
        if not self.mixed:
            return Plan(self, tickets)
        with self.lock:
            plan = Plan(self, tickets, max(self.last_seq, self._given))
            self._given = plan.last_seq
            return plan

    def rest(self) -> None:
        """Forget what was planned last and not accepted: its thread was interrupted, and nobody plans now."""
        self._planning = ()

    def mix(self) -> None:
        """Give out seqs to transient messages from now on. Whoever began to plan before is told by `_planning`, and
        whoever begins later sees `mixed`. Idempotent. Any thread."""
        self.mixed = True
        most = sum(_seqs(change) for ticket in self._planning for change in ticket.content)
        with self.lock:
            self._given = max(self._given, self.last_seq + most)

    def next_seq(self) -> int:
        """Return the next seq, for a transient message, after `mix`. Any thread. Raises RuntimeError in a signal
        handler that interrupted its own thread while it planned (rule G3)."""
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("a store was called from a signal handler that interrupted it in the same thread")
        with self.lock:
            self._given = seq = max(self._given, self.last_seq) + 1
            return seq

    @property
    def highest_seq(self) -> int:
        """Return a seq above which none was given out, to whatever message. Any thread."""
        return max(self._given, self.last_seq)

    def accept(self, plan: Plan) -> None:
        """Take over a plan that is about to be written, or was. Idempotent."""
        if plan.is_more:
            if plan.alters:
                self._accept_altered(plan)
            for branch in plan.prepared:
                self.prepared[branch.transaction] = branch
            for branch in plan.settled:
                self.prepared.pop(branch.transaction, None)
                branch.reservation = None
        if plan.ids:
            self.window.add(plan.ids)
        self.last_seq, self.number = plan.last_seq, plan.number
        self._planning = ()  # last

    def _accept_altered(self, plan: Plan) -> None:
        """Take over what a plan alters beside branches."""
        if self.number < plan.number:
            self.dropped += plan.dropped
        if plan.removed or plan.declared:
            with self.catalog.lock:  # nobody shall find neither what is removed nor what has its name from now on
                for state in plan.removed:
                    self.catalog.remove(state)
                for state in plan.declared:
                    state.declared = True
                    self.catalog.add(state)
        for state in plan.removed:
            self.window.forget(state.number)
        for effect in plan.effects:
            effect.accept(plan)
        for number, subscriptions in plan.subscribed.items():
            for one in subscriptions.values():
                self.catalog.subscriptions[one.number] = one
            for one in self.subscribed.get(number, {}).values():
                if subscriptions.get(one.subscription.key) is not one:
                    self.catalog.subscriptions.pop(one.number, None)
            self.subscribed[number] = subscriptions
            if not subscriptions:
                del self.subscribed[number]


def _seqs(change: Change) -> int:
    """Return at most how many seqs a change takes."""
    if type(change) is SendMany:
        return len(change)
    return len(change.branch.changes) if type(change) is Commit else 1
