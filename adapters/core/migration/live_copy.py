"""One destination, copied from a store that is in use into another, of whatever kind.

    copy = LiveCopy(source, target, destination)
    copy.reserve()
    copy.begin()
    copy.follow(on_page)          # page after page, while others send, receive and ack in the source
    copy.close(gate)           # from here on whoever comes to the destination waits at the gate
    copy.finish()              # what came last; verified, durable
    ...                        # the placement record says the target
    copy.switch()              # who holds a message holds it there; then the gate is opened
    copy.abandon()             # or: all is as it was

K13  What happens in the source to a message that is copied already is told by a tap of its plans, in order, and done to
    the copy, unless it is done there. Each thing that is told is absolute: so it does not matter whether a message was
    read before or after it.
     Of a map, a value that is put is told as well: the copy of the one before is dead.
K14  Whatever changes the destination as a whole (a subscription begins or ends, it is removed) is not followed: the
    copy is deleted and begun anew.
K15  Nobody is given a message of the copy before the switch: its channels count as being purged. Neither of the two
    stores is closed for being idle meanwhile: a listener that wants nothing stands at both.
K16  A page is read again in the target once it is written, and compared by its digest. At the end the numbers of
    messages are compared, for a queue their bytes too, for a topic what each subscription has yet to ack.
K17  The gate is closed to sends first, then to leases: what is on its way to be acked or given back ends in the source,
    nothing more is leased there, and what is held is MOVING. Only then is the last of it copied.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from ....policies.errors import CorruptionError, PlacementError
from ....policies.names.destination import Destination
from ..operations.changes import Ack, AckRange, Change, Mark, Postponed, Returned, Send, SendMany
from ..operations.destination_changes import CloseGate, Declare
from ..record.encoding import name_of
from ..record.place import DELIVERIES, OWN, SEQ
from ..service.listening import Listener
from ..state.gates import Gate
from ..state.leases import LEFT_BEHIND, MOVED, MOVING, Channel, DestinationState, Lease, Receiver, SubscriptionState
from ..state.rows import KeyedRows
from .copying import PAGE, Bringing, Item, Stored, amount, digest, messages, pages, read, remove
from .seq_map import SeqMap

if TYPE_CHECKING:
    from ..operations.plan import Plan
    from ..store import Store

REPEAT_MAX: Final = 200_000
"""Changes of the source that wait to be done to the copy; beyond it the move is given up (invariant 10)."""
ANEW_MAX: Final = 20
"""How often a copy is begun anew before it is given up."""
ROUNDS_MAX: Final = 20
"""After so many rounds, or when they do not get shorter, the gate is closed though more than one page is left: senders
are as fast as the copy."""
SETTLE_SECONDS: Final = 10.0
"""At the gate, what is being acked or given back has so long to end."""
LOOK_SECONDS: Final = 0.001

Settled = Ack | AckRange | Returned | Postponed


class Replaced(NamedTuple):
    """A change of a map: the value of this key before this seq is dead."""

    name: bytes
    seq: int


_SENDS: Final = (Send, SendMany, Declare, Mark)


class GivenUpError(PlacementError):
    """One destination cannot be moved now; it is where it was, and others may be moved."""


class LiveCopy:
    """The live copy of one destination. Used by one thread. After any error `abandon` makes all as it was; only one
    copy is taken of a store at a time."""

    def __init__(self, source: Store, target: Store, destination: Destination) -> None:
        self._source, self._destination = source, destination
        self.target = target
        self._from, self._to = source._engine, target._engine
        self._mark = object()
        self._idle = Receiver()
        self._to_repeat: deque[Settled | Replaced] = deque()
        self._anew = False
        self._overflow = False
        self._gate: Gate | None = None
        self._frozen: dict[Lease, int] = {}
        self._state: DestinationState
        self._reserved = self._begun = self._switched = False
        self._seqs: SeqMap | None = None
        self.count: int = 0
        """Messages copied since it was begun, or begun anew."""

    # Copying

    def reserve(self) -> None:
        """Reserve the destination in the target: from here on nobody sends there. A destination that is there then has
        no row in the placement record, unless it has one by now: what is copied is put in its place. Raises
        StoreFailedError, ClosedError."""
        self.target._sending.write([CloseGate(Gate.passed(self._destination))])
        self._reserved = True

    def begin(self) -> None:
        """Begin to copy, after `reserve`. Raises StoreFailedError, ClosedError."""
        self._from.ensure_usable()
        self._from.asked(lambda: None)
        self._state = self._from.catalog.state(self._destination)
        self._begun = True
        self._from.hooks.watch(self._tap)
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Begin again with nothing copied, and all that the source holds ahead."""
        if self._seqs is not None:
            self._seqs.close()
        self._remove_copy()
        self._seqs = SeqMap()
        self._to_repeat.clear()
        self._anew = False
        self._after = self._looked = self._names_until = self.count = 0
        self._from.asked(lambda: None)
        self._state = state = self._from.catalog.state(self._destination)
        with self._from.lock:
            state.channel.listeners[self._idle] = None
        self._keys = {one.number: key for key, one in state.subscriptions.items()}
        copied = self._to.catalog.state(self._destination)
        with self._to.lock:
            self._to.current()
            copied.channel.listeners[self._idle] = None
            copied.channel.purging.clear()  # what an earlier move that was cut off may have left there
            copied.channel.purging.add(self._mark)
        self._page: list[tuple[Stored, int]] = []
        subscriptions = amount(self._source, self._destination).subscriptions
        self._bringing = Bringing(self.target, self._destination, subscriptions, self._placed)

    def _remove_copy(self) -> None:
        """Remove the copy. Durable on return."""
        state = self._to.catalog.destinations.get(self._destination)
        if state is None:
            return
        state.channel.listeners.pop(self._idle, None)
        try:
            remove(self.target, self._destination)
        except BaseException:
            state.channel.listeners[self._idle] = None  # it is there still, and nobody shall be given anything of it
            raise
        state.channel.purging.discard(self._mark)  # if nothing was written of it, it is not gone

    def follow(self, on_page: Callable[[int], None], go_on: Callable[[], None]) -> None:
        """Copy what is there, and what comes meanwhile, until little is left. `go_on` is called now and then, and
        raises to end it. Raises GivenUpError, CorruptionError, StoreFullError, MessageTooLargeError,
        StoreFailedError."""
        for _ in range(ANEW_MAX):
            if self._copied(on_page, go_on):
                return
            self._begin_anew()
        raise GivenUpError(f"{self._destination}: its subscriptions change too often to be copied; try again later")

    def _copied(self, on_page: Callable[[int], None], go_on: Callable[[], None]) -> bool:
        """Copy until little is left; return False if the copy has to be begun anew."""
        last = 0
        for number in range(ROUNDS_MAX):
            before = self.count
            for _ in self._round():
                go_on()
                on_page(self.count)
            if self._anew:
                return False
            came, last = last, self.count - before
            if last <= PAGE or (number > 1 and last >= came):
                break
        self._bringing.end()
        return not self._anew

    def _round(self) -> Iterator[None]:
        """Copy what has come since the last round until this one begins, a page at a time."""
        assert self._seqs is not None
        seqs = self._seqs
        until = self._from.asked(lambda: self._from.sequencer.last_seq)
        since = self._names_until

        def wanted(seq: int) -> bool:
            return seq > self._after or (seq > since and seqs.get(seq) is None)

        for page in pages(read(self._source, self._destination, self._after, wanted, self._look)):
            self._write(page)
            self._repeat()
            if self._anew:
                return
            yield
            if self._after >= until:
                break
        self._names_until = until
        self._repeat()

    def _look(self, seq: int) -> None:
        self._looked = seq

    def _write(self, page: Sequence[Item]) -> None:
        if self._state.is_map:
            page = _latest(page)
        self._page.clear()
        self._bringing.page(page)
        assert self._seqs is not None
        ours = self._page
        for item, seq in ours:
            self._seqs.add(item.seq, seq)
        if not ours:
            return
        self._after = ours[-1][0].seq
        self.count += len(ours)
        expected = digest(item for item, _ in ours)
        there = messages(read(self.target, self._destination, ours[0][1] - 1, None))
        found = digest(islice(there, len(ours)))
        if (found.count, found.hex()) != (expected.count, expected.hex()):
            raise self._differs(f"{expected.count} messages that were just written read back otherwise")
        ours.clear()  # their large bodies are not held any longer

    def _placed(self, item: Item, seq: int) -> None:
        if isinstance(item, Stored):
            self._page.append((item, seq))

    def _differs(self, reason: str) -> CorruptionError:
        return CorruptionError(
            str(self.target.directory), 0,
            f"the copy of {self._destination} in store {self.target.name!r} is not what store {self._source.name!r} "
            f"holds: {reason}",
            "what was there is untouched; see to the disk, and run it again: the copy is begun anew",
        )  # fmt: skip

    # Changes made meanwhile (rule K13)

    def _tap(self, plan: Plan) -> None:
        """Note what is settled or replaced in the source. Called by whoever writes there."""
        for change in plan.changes:
            state = getattr(change, "state", None)
            if state is None or state.destination != self._destination:
                continue
            if type(change) in _SENDS:
                if type(change) is Send and state is self._state and state.is_map:
                    assert change.name is not None
                    self._to_repeat.append(Replaced(change.name, change.seq))
                continue
            if isinstance(change, Settled):
                if state is self._state:
                    self._to_repeat.append(change)
            else:
                self._anew = True
        if len(self._to_repeat) > REPEAT_MAX:
            self._to_repeat.clear()
            self._overflow = True

    def _repeat(self) -> None:
        """Do to the copy what was told."""
        if self._overflow:
            raise GivenUpError(
                f"{self._destination}: more than {REPEAT_MAX} acks came while a page of it was copied to store "
                f"{self.target.name!r}, which is too slow; try again when there is less to do"
            )
        state = self._to.catalog.state(self._destination)
        ahead: list[Settled | Replaced] = []
        while self._to_repeat and not self._anew:
            some: list[Settled | Replaced] = []
            while self._to_repeat and len(some) < PAGE:
                change = self._to_repeat.popleft()
                if isinstance(change, Replaced):
                    some.append(change)
                    if self._after < change.seq and self._after < self._looked:  # likewise
                        ahead.append(change)
                    continue
                first, last = (change.first, change.last) if isinstance(change, AckRange) else (change.seq, change.seq)
                if first <= self._looked and last > self._after:  # it was looked up before, and is not written yet
                    ahead.append(change)
                if first <= self._after:
                    some.append(change)
            changes = self._to.asked(partial(self._all_repeated, some, state)) if some else []
            if changes:
                self.target._sending.write(changes, unsynced=True, moves=True)
        self._to_repeat.extendleft(reversed(ahead))

    def _all_repeated(self, settled: Sequence[Settled | Replaced], state: DestinationState) -> list[Change]:
        """Return the changes that repeat what was told. With the target's lock held."""
        changes: list[Change] = []
        replaced: set[int] = set()
        for change in settled:
            if not isinstance(change, Replaced):
                changes += self._repeated(change, state)
            elif (seq := self._replaced(change, state)) and seq not in replaced:
                replaced.add(seq)
                changes.append(Ack(state, seq, 0))
        return changes

    def _replaced(self, change: Replaced, state: DestinationState) -> int:
        """Return the seq of the value that was copied of a key and is dead now; 0 if none is. With the target's lock
        held."""
        assert self._seqs is not None
        rows = self._to.backend
        there = rows.keyed(state, [change.name]) if state.declared and isinstance(rows, KeyedRows) else {}
        place = there.get(change.name)
        copied = self._seqs.between(1, change.seq - 1)
        return place[SEQ] if place is not None and copied is not None and place[SEQ] <= copied[1] else 0

    def _repeated(self, change: Settled, state: DestinationState) -> Iterator[Change]:
        assert self._seqs is not None
        number, subscriber = 0, None
        if change.number:
            key = self._keys.get(change.number)
            subscriber = state.subscriptions.get(key) if key is not None else None
            if subscriber is None:
                return  # nothing was copied that it has yet to ack
            number = subscriber.number
        if isinstance(change, AckRange):
            between = self._seqs.between(change.first, change.last)
            if between is not None:
                yield AckRange(state, *between, number)
            return
        seq = self._seqs.get(change.seq)
        if seq is None or self._to.rows.row(state, subscriber, seq) is None:
            return  # it was acked when it was read: some backends count each ack
        if isinstance(change, Postponed):
            yield Postponed(state, seq, number, change.due)
        else:
            yield Ack(state, seq, number) if isinstance(change, Ack) else Returned(state, seq, number, change.count)

    # At the gate (rule K17)

    def close(self, gate: Gate) -> None:
        """Close the source: nobody sends, receives or settles there from now on. Raises GivenUpError."""
        self._gate = gate
        self._source._sending.write([CloseGate(gate)])
        with self._from.lock:
            self._from.current()
            for channel in self._channels(self._state):
                channel.purging.add(self._mark)
                channel.wake_all()
        deadline = time.monotonic() + SETTLE_SECONDS
        while not self._from.delivery.freeze(self._channels(self._state), gate, self._frozen):
            if time.monotonic() > deadline:
                raise GivenUpError(
                    f"{self._destination}: messages of it have been on their way to be acked for {SETTLE_SECONDS:g} s; "
                    "try again when that has ended"
                )
            time.sleep(LOOK_SECONDS)
        self._from.asked(lambda: None)

    @staticmethod
    def _channels(state: DestinationState) -> list[Channel]:
        return [state.channel, *(subscriber.channel for subscriber in state.subscriptions.values())]

    def finish(self) -> bool:
        """Copy the last of it; durable and verified on return. False if that cannot be gone on with, and has to be
        begun anew."""
        while not self._anew:
            before = self.count
            for _ in self._round():
                pass
            if self.count == before:
                break
        if self._anew or self._state.removed:
            return False
        volatile = self._state.volatile
        if volatile is not None and volatile.count:
            raise nonpersistent(self._destination, self._source, volatile.count)
        self._bringing.end()
        self._compare()
        return True

    def _compare(self) -> None:
        copied = self._to.catalog.state(self._destination)
        here = self._from.asked(lambda: self._counts(self._state))
        there = self._to.asked(lambda: self._counts(copied))
        if here != there:
            raise self._differs(f"{there} instead of {here}")

    @staticmethod
    def _counts(state: DestinationState) -> object:
        if not state.is_topic:
            return state.count, state.bytes
        return {key: subscriber.count for key, subscriber in state.subscriptions.items()}

    # The end

    def switch(self) -> dict[Lease, Lease]:
        """Let the target hold the destination from now on; return the leases there by those here. Those without a
        successor, all after an error, end: the record says the target already."""
        try:
            return self._switch()
        except BaseException:
            self._open_target()
            raise
        finally:
            self._end_leases()
            self._switched = True
            self._let_go()

    def _open_target(self) -> None:
        """Let the target hold the destination with no lease. It may have failed for a while only, and is used on
        then."""
        copied = self._to.catalog.state(self._destination)
        with self._to.lock:
            for channel in self._channels(copied):
                channel.held.clear()  # by leases that nobody has: it was not to be received there yet
            self._receive_there(copied)
        self._move_listeners(copied)

    def _receive_there(self, copied: DestinationState) -> None:
        """Take the marks away that keep the destination from being used in the target, with its lock held."""
        for channel in self._channels(copied):
            channel.rewind()
            channel.purging.discard(self._mark)
        self._to.sequencer.gates.pop(self._destination, None)
        copied.channel.listeners.pop(self._idle, None)

    def _end_leases(self) -> None:
        """End the leases that have not moved. An ack of theirs would be told as done, and the target would not know
        it."""
        left = {lease: hold for lease, hold in self._frozen.items() if lease.hold == MOVING}
        with self._from.lock:
            for lease in left:
                for channel in lease.channels:
                    self._from.delivery.end(channel, lease.seq)
        for lease, hold in left.items():
            lease.hold = hold
        self._source._settling.note_ends(left, LEFT_BEHIND)

    def source_deleted(self) -> None:
        """Unmark the source's channels: what the source held has been deleted since the switch. Where nothing had ever
        been written there, that has removed nothing. The destination may come back then, and is there as any other."""
        for channel in self._channels(self._state):
            channel.purging.discard(self._mark)

    def _switch(self) -> dict[Lease, Lease]:
        copied = self._to.catalog.state(self._destination)
        moved: dict[Lease, Lease] = {}
        self._to.check()
        with self._to.lock:
            self._to.current()
            for lease, hold in self._frozen.items():
                successor = self._successor(lease, hold, copied)
                if successor is not None:
                    moved[lease] = successor
            self._receive_there(copied)
        for lease, successor in moved.items():
            time = lease.time_limit
            if time is not None:  # what is left of it
                self.target._lease_times.carry(successor, time.seconds, time.until)
            lease.successor = self.target, successor
            lease.hold = MOVED
        self._move_listeners(copied)
        return moved

    def _successor(self, lease: Lease, hold: int, copied: DestinationState) -> Lease | None:
        """Return the lease in the target that follows one in the source. With the target's lock held."""
        assert self._seqs is not None
        seq = self._seqs.get(lease.seq)
        channels = [channel for mine in lease.channels if (channel := self._same(mine, copied)) is not None]
        if seq is None or not channels:
            return None  # it was dead by then: nothing is held
        place = self._to.rows.row(copied, channels[0].subscription, seq, None)
        if place is None:
            return None
        if not lease.whole:  # what is in the rows may count this delivery
            place = (*place[:DELIVERIES], lease.place[DELIVERIES], place[OWN])
        successor = Lease(tuple(channels), place, hold, lease.whole)
        successor.number = lease.number
        successor.kept, successor.counted = lease.is_kept, lease.is_counted
        for channel in channels:
            channel.held[seq] = successor
        return successor

    @staticmethod
    def _same(channel: Channel, copied: DestinationState) -> Channel | None:
        subscription: SubscriptionState | None = channel.subscription
        if subscription is None:
            return copied.channel
        same = copied.subscriptions.get(subscription.subscription.key)
        return same.channel if same is not None else None

    def _move_listeners(self, copied: DestinationState) -> None:
        for channel in self._channels(self._state):
            there = self._same(channel, copied)
            for listener in list(channel.listeners):
                if isinstance(listener, Listener) and there is not None:
                    listener.move(self.target._receiving, there)

    def abandon(self, keep: bool = False) -> None:
        """Abandon the move: all is as it was, and the copy is deleted, if that can be done: else, or if it is to be
        kept, nobody is given anything of it as long as the target is open. Where it is kept it may be the one that
        counts, so the leases end. May be called at any point, after the switch too."""
        if self._switched or not self._reserved:
            return
        self._reserved = False
        if not self._begun:
            self._to.sequencer.gates.pop(self._destination, None)
            return
        if keep:
            self._end_leases()
        for lease, hold in self._frozen.items():
            lease.hold = hold
        self._frozen.clear()
        with self._from.lock:
            for channel in self._channels(self._state):
                if keep:
                    channel.rewind()  # to what was held, if the record says in the end that it is here
                channel.purging.discard(self._mark)
            if self._gate is not None and self._from.sequencer.gates.get(self._destination) is self._gate:
                self._from.sequencer.gates.pop(self._destination)
        for channel in self._channels(self._state):
            channel.wake()
            for listener in list(channel.listeners):
                listener.wake()
        self._let_go()
        if not keep:
            self._remove_copy()
            self._to.sequencer.gates.pop(self._destination, None)

    def _let_go(self) -> None:
        self._from.hooks.watch(None, instead=self._tap)
        self._state.channel.listeners.pop(self._idle, None)
        if self._seqs is not None:
            self._seqs.close()


def _latest(page: Sequence[Item]) -> list[Item]:
    """Return the last value of each key of a map, since another may have been put while the page was read, behind the
    ids."""
    latest = {name_of(item.record): item for item in messages(page)}
    ids = (item for item in page if not isinstance(item, Stored))
    return [*ids, *sorted(latest.values(), key=lambda item: item.seq)]


def nonpersistent(destination: Destination, store: Store, count: int) -> GivenUpError:
    """Return the error for a destination some of whose messages are transient."""
    return GivenUpError(
        f"{destination}: {count} message(s) of it in store {store.name!r} are not persistent, and would not come "
        "along; receive them first, or close the router and run `anabranch repartition`, which lets them go"
    )


def volatile_count(store: Store, destination: Destination) -> int:
    """Return how many transient messages a store holds of a destination."""
    state = store._engine.catalog.destinations.get(destination)
    return state.volatile.count if state is not None and state.volatile is not None else 0
