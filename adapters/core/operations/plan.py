"""Plans, which put what many callers asked for in order: the one place where seqs are given out and duplicates fall
away (rule X7).

P1  A plan changes nothing but the tickets' outcomes, the seqs of its sends, and what is refused since one before it
    was (`Ticket.then`), so that it may be made again after an interruption. It counts from `Sequencer.accept` on: what
    is planned next builds on it.
P2  Plans are made and accepted by one thread at a time, in the order in which they are written.
P3  Messages that are not persistent get seqs between plans, from any thread. `mixed` says that there are such, and who
    plans then holds `lock`; who was at it when the first one came has said before what it plans (`_planning`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from ....policies.errors import AnabranchError
from ....policies.names.destination import Destination
from ..features.keyed.keyed import KeyVersions
from ..record.encoding import REMOVAL, is_requeued
from ..state.duplicates import DuplicateWindow, Key
from ..state.gates import Gate, require_passage
from ..state.limits import Grant, release
from ..state.states import Catalog, DestinationState, SubscriptionState
from ..store_types import SubscriptionKey
from .branches import Branch, Commit
from .changes import Change, Refused, Send, SendMany, VolatileChange
from .destination_changes import Declare
from .tickets import Ticket

Subscribed = dict[SubscriptionKey, SubscriptionState]
"""The subscriptions of a topic. Replaced, never changed."""


class Plan:
    """The changes of some tickets."""

    # Values that most plans leave as they are stand here, not in each plan. They are replaced, never changed.
    ids: dict[Key, int] = {}  # noqa: RUF012
    """New in the duplicate window."""
    keys: dict[Key, Send | None] = {}  # noqa: RUF012
    """Keys of maps that the plan writes, and what it puts there, be it a REMOVAL; None: nothing is left."""
    writes_any_key = False
    """True if the plan may write all keys of all maps."""
    declared: Sequence[DestinationState] = ()
    removed: Sequence[DestinationState] = ()
    successors: dict[DestinationState, DestinationState] = {}  # noqa: RUF012
    """By one of `removed`: what has its name from then on."""
    subscribed: dict[int, Subscribed] = {}  # noqa: RUF012
    """By destination's number: the subscriptions of topics where they change."""
    dropped = 0
    """Messages of topics without subscriptions."""
    prepared: Sequence[Branch] = ()
    settled: Sequence[Branch] = ()
    volatile: list[VolatileChange] = []  # noqa: RUF012
    """Changes of transient messages, which take effect with the plan, and no backend is told of."""
    large: Sequence[Send] = ()
    """Messages whose bodies are kept apart."""
    volatile_ids: dict[Key, int] = {}  # noqa: RUF012
    """Ids of the transient messages."""
    is_more = False
    """True if the plan does more than to send messages without ids, and to ack: one of the above says what, or
    `own`."""
    more = 0
    """Messages beside the first of each SendMany."""
    own: Any = None
    """The backend's."""
    room: Sequence[Grant | None] = ()
    """Room that was reserved for the plan's messages, until they are applied, and so are counted as held."""

    def __init__(self, sequencer: Sequencer, tickets: Iterable[Ticket], last_seq: int | None = None) -> None:
        """`last_seq`: the highest that was given out, if others than the sequencer's plans were."""
        self._sequencer = sequencer
        self.number = sequencer.number + 1
        """One more than that of the plan before."""
        self.last_seq = sequencer.last_seq if last_seq is None else last_seq
        self.changes: list[Change] = []
        self.tickets: list[Ticket] = []
        """Tickets that were not refused."""
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
            else:
                self.tickets.append(ticket)

    @property
    def count(self) -> int:
        """Return how much there is to apply: each message counts."""
        return len(self.changes) + self.more

    @property
    def sync(self) -> bool:
        """Return whether a caller waits for the disk, whatever the policy."""
        return any(ticket.sync for ticket in self.tickets)

    def hold_room(self) -> None:
        """Take over from its tickets what is reserved for it. May be done again."""
        self.room = [*self.room, *[ticket.held for ticket in self.tickets]]

    def release_room(self) -> None:
        """Release the room of a plan that is applied. May be done again."""
        for reservation in self.room:
            release(reservation)
        self.room = ()

    # Questions that changes ask while they are planned

    def seq_of(self, key: Key) -> int | None:
        """Return the seq of the message that has been sent with this id."""
        first = self.ids.get(key)
        if first is None and not any(state.number == key[0] for state in self.removed):
            first = self._sequencer.window.get(key)
        return first

    def volatile_seq_of(self, key: Key) -> int | None:
        """Return the seq of the message with this id, for a transient message. A transient message is a duplicate of
        either kind; a persistent one, of its kind alone."""
        return self.seq_of(key) or self.volatile_ids.get(key) or self._sequencer.volatile_window.get(key)

    def remember(self, key: Key, seq: int) -> None:
        """Remember that a message has been sent with this id."""
        if not self.ids:
            self.ids = {}
            self.is_more = True
        self.ids[key] = seq

    def version(self, key: Key) -> int:
        """Return the number of a plan after which none has written this key of a map."""
        if self.writes_any_key or key in self.keys:
            return self.number
        return self._sequencer.key_versions.get(key)

    def touch(self, key: Key, send: Send | None) -> None:
        """Note that a key of a map is written: this is put there."""
        if not self.keys:
            self.keys = {}
            self.is_more = True
        self.keys[key] = send

    def touch_all(self) -> None:
        """Note that many keys of a map may be written."""
        self.writes_any_key = self.is_more = True

    def remember_volatile(self, key: Key, seq: int) -> None:
        """Remember that a transient message has been sent with this id."""
        if not self.volatile_ids:
            self.volatile_ids = {}
        self.volatile_ids[key] = seq

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
            self.is_more = True
            self.changes.append(Declare(state))

    def remove(self, state: DestinationState) -> None:
        """Remove a destination with its ids and subscriptions, for good: what is sent there from then on is
        another's."""
        self.removed = [*self.removed, state]
        self.is_more = True
        self.declared = [other for other in self.declared if other is not state]
        self.ids = {key: seq for key, seq in self.ids.items() if key[0] != state.number}
        self.subscribed = {**self.subscribed, state.number: {}}

    def drop(self) -> None:
        """Drop a message that is sent to a topic without subscriptions."""
        self.dropped += 1
        self.is_more = True

    def subscriptions(self, state: DestinationState) -> Subscribed:
        """Return the subscriptions of a topic by then."""
        changed = self.subscribed.get(state.number)
        return self._sequencer.subscribed.get(state.number, {}) if changed is None else changed

    def subscribe(self, subscriber: SubscriptionState) -> None:
        """Add a subscription."""
        topic = subscriber.topic
        self.is_more = True
        those = {**self.subscriptions(topic), subscriber.subscription.key: subscriber}
        self.subscribed = {**self.subscribed, topic.number: those}

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        """Remove a subscription."""
        others = self.subscriptions(subscriber.topic).items()
        self.is_more = True
        those = {key: other for key, other in others if other is not subscriber}
        self.subscribed = {**self.subscribed, subscriber.topic.number: those}

    def close(self, gate: Gate) -> None:
        """Close a gate: the tickets behind have nothing for its destination."""
        self._sequencer.gates[gate.destination] = gate

    def expire(self) -> None:
        """Note a message that expires."""
        self._sequencer.expiring = True

    def name_body(self, send: Send) -> None:
        """Note a message whose body is kept apart."""
        self.large = [*self.large, send]
        self.is_more = True

    def keep_apart(self, change: VolatileChange) -> None:
        """Keep apart a change that no backend is told of."""
        if not self.volatile:
            self.volatile = []
            self.is_more = True
        self.volatile.append(change)

    def prepare(self, branch: Branch) -> None:
        """Add a branch that waits for its outcome."""
        self.prepared = [*self.prepared, branch]
        self.is_more = True

    def settle(self, branch: Branch) -> None:
        """Note that a branch has its outcome."""
        self.settled = [*self.settled, branch]
        self.is_more = True

    def is_prepared(self, branch: Branch) -> bool:
        """Return whether a branch still waits for its outcome by then."""
        if self.settled and any(branch is other for other in self.settled):
            return False
        return self._sequencer.prepared.get(branch.transaction) is branch or branch in self.prepared


class Sequencer:
    """The knowledge of the thread that writes. Others may look at `prepared` and `last_seq`."""

    def __init__(self, catalog: Catalog, duplicate_window: int) -> None:
        self.catalog = catalog
        self.window = DuplicateWindow(duplicate_window)
        self.volatile_window = DuplicateWindow(duplicate_window)
        """The duplicate window of transient messages. Filled under the store's lock."""
        self.subscribed: dict[int, Subscribed] = {}
        """By destination's number: the subscriptions of topics that have some."""
        self.dropped = 0
        """Messages that were sent to a topic without any subscription."""
        self.prepared: dict[bytes, Branch] = {}
        """Branches that wait for their outcome, by transaction."""
        self.last_seq = 0
        """The highest of a message that was accepted."""
        self.key_versions = KeyVersions()
        """The versions of maps' keys."""
        self.gates: dict[Destination, Gate] = {}
        """Gates of destinations that are on their way to another store, or have gone there. Closed by who plans."""
        self.expiring = False
        """Some messages that were sent since it was made expire."""
        self.mixed = False
        """Some messages are not persistent."""
        self.lock = threading.RLock()
        """Guards `_given`, and who plans while `mixed`."""
        self._given = 0
        """No seq above it was given out, be it not accepted; counts if `mixed`."""
        self._planning: Sequence[Ticket] = ()
        """Tickets that are planned and not accepted yet, if any."""
        self.number = 0
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
            self._accept(plan)
        self.last_seq, self.number = plan.last_seq, plan.number
        self._planning = ()  # last

    def _accept(self, plan: Plan) -> None:
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
        if plan.ids:
            self.window.add(plan.ids)
        if plan.keys:
            self.key_versions.add(plan.keys, plan.number)
        if plan.writes_any_key:
            self.key_versions.add_all(plan.number)
        for number, subscriptions in plan.subscribed.items():
            for one in subscriptions.values():
                self.catalog.subscriptions[one.number] = one
            for one in self.subscribed.get(number, {}).values():
                if subscriptions.get(one.subscription.key) is not one:
                    self.catalog.subscriptions.pop(one.number, None)
            self.subscribed[number] = subscriptions
            if not subscriptions:
                del self.subscribed[number]
        for branch in plan.prepared:
            self.prepared[branch.transaction] = branch
        for branch in plan.settled:
            self.prepared.pop(branch.transaction, None)
            branch.reservation = None

    def each_amount(self, sends: Iterable[Change]) -> list[tuple[int, int]]:
        """Return how many messages and bytes each takes of the store's room; one that is stored already, nothing, nor
        one with the id of one before it of the same kind."""
        counted: set[tuple[bool, Key]] = set()
        amounts = []
        for change in sends:
            if type(change) is SendMany:
                amounts.append((len(change), change.record_bytes))
                continue
            send = change.change if type(change) is VolatileChange else change
            assert type(send) is Send
            if send.state.is_map and send.expires_at_ms == REMOVAL:
                amounts.append((0, 0))
                continue
            if self._is_known(send, send is change, counted):
                amounts.append((0, 0))
            else:
                amounts.append((1, len(send.record) + (0 if send.large is None else send.large.size)))
        return amounts

    def _is_known(self, send: Send, persistent: bool, counted: set[tuple[bool, Key]]) -> bool:
        if send.name is None or send.state.is_map or is_requeued(send.record):
            return False
        key = (send.state.number, send.name)
        if self.window.get(key) is not None or (not persistent and self.volatile_window.get(key)):
            return True
        known = (persistent, key) in counted
        counted.add((persistent, key))
        return known


def _seqs(change: Change) -> int:
    """Return at most how many seqs a change takes."""
    if type(change) is SendMany:
        return len(change)
    return len(change.branch.changes) if type(change) is Commit else 1
