"""Transient messages (`persistent=False`): no backend ever sees them, and they are in one order with the others.

They lie in memory, in swap files what does not fit (in_memory/rows.py). Their destinations and subscriptions are their
own, which mirror those of the catalog: `DestinationState.volatile`. Channels and leases are those of the others.

A1  Seqs come from the store's one counter (plan.py, P3). What concerns these messages alone is done at once, on the
    thread of whoever calls and under the store's lock: it waits for no disk.
A2  What is in one ticket with changes that are persistent goes with its plan (`Plan.beside`), and takes effect under
    the lock in one with that.
A3  So a write under way may bring lower seqs than are there already. Whoever applies it sets cursors back
    (`Delivery.set_back`), and these messages have two levels of each order in memory, both in order of seq: one for
    what is done at once, one for what goes with a plan.
A4  What is in `_written` takes effect, whatever Ctrl-C does: whoever takes the lock next goes on with it.
A5  After a crash no backend knows of their seqs. But what is durable may speak of one: a subscription begins behind it,
    a large body's `low` is it. The next open goes on behind all of these: else what is sent then would come before.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .....policies import config as configs
from ....system.reservation import Reservation
from ...engine.hooks import Feature
from ...in_memory.rows import NEW_COST, MemoryRows
from ...operations.branches import Branch
from ...operations.changes import Ack, AckRange, Change, Mark, Postponed, Returned, Send, sent
from ...operations.changes import SendMany as Many
from ...operations.destination_changes import Remove, Subscribe, Unsubscribe
from ...operations.table import SEQ_MAX
from ...record.encoding import is_requeued
from ...record.place import is_volatile
from ...state.duplicates import DuplicateWindow, Key
from ...state.gates import require_passage
from ...state.leases import Channel, DestinationState, Lease, SubscriptionState
from ...state.limits import Grant, release
from ...state.states import Catalog
from ..parts import Parts
from .changes import TransientChange, TransientEffect
from .rows import AT_ONCE, PLANNED, MixedRows, mirror_of

if TYPE_CHECKING:
    from ...engine.engine import Engine
    from ...operations.plan import Plan
    from ...operations.tickets import Ticket

log: logging.Logger = logging.getLogger(__name__)

SWAP: Final = "swap"
"""The directory of the swap files, in the store's own."""

_COMMITTED: Final = (b"",)
"""Stands for room that is reserved: nothing is refused any more."""


def sweep(directory: Path) -> None:
    """Remove what the swap files of a killed process have left. With the store's lock on its directory."""
    try:
        shutil.rmtree(directory / SWAP)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("what was swapped by a process that was killed cannot be removed: %s", error)


class _Written(NamedTuple):
    """The changes that take effect together."""

    changes: list[Change]
    """Changes of mirrors."""
    ids: dict[Key, int]
    transaction: bytes | None
    """The transaction of the branch whose outcome it is."""
    effect: TransientEffect | None
    """The plan's, if the changes are one's."""


class TransientFeature(Feature):
    """The transient messages of one store, which are there once the first one is sent."""

    def __init__(self, parts: Parts) -> None:
        self._engine = parts.engine
        self._directory, self._file_mode = parts.directory, parts.file_mode
        self._made: TransientMessages | None = None
        if not self._engine.backend.volatile:  # such a store keeps them as the others
            self._engine.make_transient = self._make

    def _make(self) -> TransientMessages:
        """Be ready for transient messages. Any thread. Raises as Engine.check."""
        engine = self._engine
        engine.check()
        with engine.lock:
            engine.current()
            if engine.transient is None:  # else each step is done once more, with the same: Ctrl-C may strike anywhere
                if self._made is None:
                    self._made = TransientMessages(engine, engine.submit, self._directory, self._file_mode)
                made, hooks = self._made, engine.hooks
                engine.mix(made.rows, made.submit)
                hooks.follow((Remove, Subscribe, Unsubscribe), made.follow)
                hooks.follow((Send, Many), made.set_back)
                if made.finish not in hooks.draining:
                    hooks.draining = (*hooks.draining, made.finish)
                engine.transient = made
            assert self._made is not None
            return self._made

    def start(self) -> None:
        if not self._engine.backend.volatile:
            sweep(self._directory)

    def end(self, clean: bool) -> None:
        if self._made is not None:
            self._made.close(clean)

    @property
    def is_busy(self) -> bool:
        return self._made is not None and self._made.holds_anything

    def violations(self) -> Iterable[str]:
        return self._made.check() if self._made is not None else ()

    def statistics(self) -> Mapping[str, int]:
        made = self._made
        if made is None:
            return {}
        return {"memory_bytes": made.memory_bytes, "swap_bytes": made.swap_bytes, "dropped": made.dropped}


class TransientMessages:
    """The transient messages of one open store. Under the store's lock, if not said otherwise."""

    def __init__(
        self, engine: Engine, submit: Callable[[Ticket], object], directory: Path, file_mode: int | None
    ) -> None:
        """`submit`: the writer's. `directory`: the store's, for swap files."""
        self._engine, self._submit = engine, submit
        self.mirrors: Catalog = Catalog()
        """The mirrors."""
        name = f"{engine.name} (not persistent)"
        settings = engine.backend.settings
        options = configs.MemoryOptions(
            file_mode=file_mode, max_bytes=settings.nonpersistent_memory, roll_over_size=settings.roll_over_size
        )
        self._kept = MemoryRows(name, directory, options, True, self.mirrors, engine.lock)
        self.mirror_rows: Callable[..., Any] = self._kept.rows
        """The rows of a mirror and its subscriptions, as Rows.rows."""
        self.rows: MixedRows = MixedRows(engine.catalog, engine.backend, self._kept)
        """The rows of all messages of the store."""
        self.rows_alone: Final = self.rows.volatile_rows
        self._priorities = settings.priorities
        self.window: Final = DuplicateWindow(settings.duplicate_window)
        """The duplicate window. Filled under the store's lock."""
        self._written: _Written | None = None
        self._applying = False
        """`_written` may be applied by halves."""
        self._keys = itertools.count()
        self._freed: deque[bytes] = deque()
        self.prepared: dict[bytes, Branch] = {}
        """Branches that concern these messages alone, by transaction."""
        self.dropped: int = 0
        """Messages that were sent to a topic without any subscription."""

    # Writing, on the thread of whoever calls

    def takes(self, changes: MutableSequence[Change]) -> bool:
        """Return whether all changes of a ticket concern transient messages, and so are for `write`. If only some do
        they are marked, and have room from now on. Any thread. Raises StoreFullError, StoreFailedError."""
        for at, change in enumerate(changes):
            if (
                isinstance(change, Ack | Returned | Postponed)
                and change.place is not None
                and is_volatile(change.place)
            ):
                changes[at] = TransientChange(self._effect, change)
        volatile = [change for change in changes if type(change) is TransientChange]
        if volatile and len(volatile) + sum(type(change) is Mark for change in changes) == len(changes):
            return True
        sends = [one for one in volatile if type(one.change) is Send]
        if sends:
            room = self._engine.asked(lambda: self._reserve(sends))
            for one in sends:
                one.room = room
        return False

    def _effect(self) -> TransientEffect:
        return TransientEffect(self.window, self.apply)

    def mark(self, send: Send) -> Change:
        """Return the send of a transient message, as it goes into a ticket."""
        return TransientChange(self._effect, send)

    def submit(self, ticket: Ticket) -> None:
        """Stand in front of Writer.submit: what concerns transient messages alone is done by then. Any thread. Raises
        as Writer.submit, `takes` and `write`."""
        changes = list(ticket.content)
        if self.takes(changes):
            ticket.outcomes = self.write(changes, ticket.held)
            ticket.finish(None)
        else:
            ticket.content = changes
            self._submit(ticket)

    def write(self, changes: Sequence[Change], reservation: Grant | None = None) -> list[Any]:
        """Do it at once, in the room that is reserved in the store. Returns what comes of each. Any thread. Raises what
        Engine.check raises, StoreFullError and StoreFailedError; then nothing took effect."""

        def done() -> list[Any]:
            require_passage(self._engine.sequencer.gates, changes)
            outcomes = self._write(changes)
            if reservation is not None and reservation.evicted:
                self._tell_old(reservation.evicted)
            release(reservation)
            return outcomes

        return self._engine.asked(done)

    def sent_with(self, key: Key) -> int | None:
        """Return the seq of the transient message of this id, if there is one."""
        return self.window.get(key)

    def _tell_old(self, leases: Sequence[Lease]) -> None:
        if self._engine.quotas is not None:
            self._engine.quotas.tell_old(leases)

    def _reserve(self, sends: Sequence[Change]) -> Reservation[bytes]:
        """Reserve memory for messages that are committed later."""
        self._free()
        room = Reservation(b"ticket %d" % next(self._keys), self._freed)
        self._kept.reserve(room.what, _sends(sends))
        return room

    def _free(self) -> None:
        while self._freed:
            self._kept.free(self._freed.popleft())

    def _write(
        self, changes: Sequence[Change], transaction: bytes | None = None, reserved: Sequence[bytes] = ()
    ) -> list[Any]:
        doing: list[Change] = []
        ids: dict[Key, int] = {}
        outcomes = [self._do(change.inner, doing, ids) for change in changes]
        self._take_effect(_Written(doing, ids, transaction, None), reserved)
        return outcomes

    def _do(self, change: Change, doing: list[Change], ids: dict[Key, int]) -> tuple[int, bool] | None:
        """Do a change at once; return its outcome."""
        if type(change) is Mark:  # of a transaction that is gone once its messages are
            ids[change.state.number, change.name] = seq = self._engine.sequencer.next_seq()
            return seq, True
        if type(change) is not Send:
            doing += _mirrored(change)
            return None
        sequencer, state = self._engine.sequencer, self._engine.catalog.current(change.state)
        if change.name is not None:
            key = (state.number, change.name)
            first = sequencer.window.get(key) or ids.get(key) or self.window.get(key)
            if first is not None and not is_requeued(change.record):
                return first, bool(change.name[0])  # as Send.plan
        seq = sequencer.next_seq()
        if change.name is not None:
            ids[state.number, change.name] = seq
        self._add(change, state, seq, AT_ONCE, doing)
        return seq, False

    def _add(self, send: Send, state: DestinationState, seq: int, level: int, doing: list[Change]) -> None:
        mirror = state.volatile or self._mirror(state)
        if send.is_grouped:
            self._engine.sequencer.on_grouped(state, state.subscriptions.values())
        kept = Send(mirror, send.record, send.name, 2 * send.order + level, send.expires_at_ms)
        kept.seq, kept.large = seq, send.large
        if mirror.is_topic:
            kept.recipients = list(mirror.subscriptions.values())
            if not kept.recipients:
                self.dropped += 1
                return
        doing.append(kept)
        if send.deliver_at_ms:
            doing.append(Postponed(mirror, seq, 0, send.deliver_at_ms))

    def _take_effect(self, written: _Written, reserved: Sequence[bytes]) -> None:
        """Let changes take effect. Raises StoreFullError, StoreFailedError, and then none does; not if there is room
        `reserved`."""
        self._free()
        sends = [change for change in written.changes if type(change) is Send]
        if sends:
            size = sum([send.size for send in sends]) + NEW_COST * len(sends)
            self._kept.require_room(sends, size, reserved)
        self._written = written
        self.finish()

    def finish(self) -> None:
        """Go on with what takes effect. May be done again."""
        written = self._written
        if written is None:
            return
        if self._applying:
            self._kept.mend()
        self._applying = True
        changes, transaction, delivery = written.changes, written.transaction, self._engine.delivery
        follow = self._engine.follow
        for change in changes:
            change.settle(delivery)  # first: the other way round a dead message would stay held
        self._kept.apply_changes(changes)
        bodies = self._engine.bodies
        for change in changes:
            if bodies is None:
                break
            if type(change) is Send and change.large is not None:
                bodies.named(change, apart=True)
            elif type(change) in (Ack, AckRange):
                bodies.look(change)
        self.window.add(written.ids)
        if transaction is not None:
            self.prepared.pop(transaction, None)
            self._kept.free(transaction)
        for change in changes:
            if type(change) is Postponed:
                state = self._engine.catalog.by_number.get(change.state.number)
                if state is not None:
                    follow(Postponed(state, change.seq, change.number, change.due))
            elif type(change) is Send:
                if written.effect is not None or self._priorities:
                    self._set_back(change, change.order >> 1)
                state = self._engine.catalog.by_number.get(change.state.number)
                if change.expires_at_ms and state is not None:
                    place = (change.order >> 1, change.seq, change.expires_at_ms, 0, None)
                    delivery.may_be_expired(state, place)
        if written.effect is not None:
            written.effect.apart = []
        for change in changes:
            if type(change) is Send:
                for channel in change.state.channels():
                    channel.wake()
            elif type(change) is Ack:
                for channel in change.state.channels(change.number):
                    if channel.state.at_limit:
                        self._engine.wake_at_limit(channel.state, change.number)
        self._written = None
        self._applying = False
        self._engine.tell_freed()

    # With a plan

    def apply(self, plan: Plan, effect: TransientEffect) -> None:
        """Apply the transient changes of a plan whose other changes are applied. May be done again."""
        doing: list[Change] = []
        ids: dict[Key, int] = {}
        rooms: dict[bytes, None] = {}
        for one in effect.apart:
            change = one.change
            if one.room is not None:
                rooms[one.room.what] = None
            if type(change) is not Send:
                doing += _mirrored(change)
            elif not change.state.removed:  # since it was planned, or later in the same plan
                state = self._engine.catalog.current(change.state)
                if change.name is not None:
                    key = (state.number, change.name)
                    if self.window.get(key) not in (None, change.seq) and not is_requeued(change.record):
                        continue  # it was sent by another meanwhile
                    ids[key] = change.seq
                self._add(change, state, change.seq, PLANNED, doing)
        self._take_effect(_Written(doing, ids, None, effect), [*rooms] or _COMMITTED)

    def follow(self, change: Change) -> None:
        """Do to the mirrors what a change of an applied plan means to them. May be done again."""
        self._kept.finish_all()  # what an interrupted send has written ahead is nobody's
        if type(change) is Remove:
            self._remove(change.state)
        elif type(change) is Subscribe:
            if change.state.volatile is not None:
                self._subscribe(change.state.volatile, change.subscriber)
                if not change.retroactive:  # what is there is not for it
                    self._kept.apply_changes([AckRange(change.state.volatile, 0, SEQ_MAX, change.subscriber.number)])
        elif type(change) is Unsubscribe:
            mirror = change.subscriber.topic.volatile
            ended = mirror_of(mirror, change.subscriber) if mirror is not None else None
            if mirror is not None and ended is not None:
                self._end(mirror, ended)

    def set_back(self, send: Send | Many) -> None:
        """Set cursors back: a message of the backend has come, or some."""
        self._set_back(send, send.order)

    def _set_back(self, send: Send | Many, order: int) -> None:
        channels = [send.state.channel]
        if send.state.is_topic and type(send) is Send:
            channels = [subscriber.channel for subscriber in send.recipients]
        for channel in channels:
            self._engine.delivery.set_back(channel, order, send.seq)

    # Mirrors

    def _mirror(self, state: DestinationState) -> DestinationState:
        """Return a destination's mirror, made with its first message; taken up again if that was interrupted."""
        mirror = self.mirrors.by_number.get(state.number)
        if mirror is None:
            mirror = DestinationState(state.number, state.destination)
            mirror.channel = state.channel
            mirror.declared = True
            self.mirrors.add(mirror)
        self._kept.declare(mirror)
        for subscriber in state.subscriptions.values():
            self._subscribe(mirror, subscriber)
        state.volatile = mirror
        return mirror

    def _subscribe(self, mirror: DestinationState, subscriber: SubscriptionState) -> None:
        same = mirror.own.subscriptions.get(subscriber.number)
        if same is None:
            same = SubscriptionState(subscriber.number, mirror, subscriber.subscription, 0)
            same.channel = subscriber.channel
            self._kept.subscribe(same)
        mirror.join(same)
        subscriber.volatile = same

    def _end(self, mirror: DestinationState, ended: SubscriptionState) -> None:
        if ended.channel.state is not mirror:
            ended.channel = Channel(mirror, ended)  # the other one is known to the catalog of the backend
        self._kept.unsubscribe(ended)
        mirror.leave(ended)
        if self.is_leaving:
            self._engine.on_leaving()

    def remove(self, state: DestinationState) -> None:
        """Remove a destination that goes, with its messages, leased ones too."""
        for channel in state.channels():
            for seq, lease in list(channel.held.items()):
                if is_volatile(lease.place):
                    channel.held.pop(seq, None)
            channel.rewind()
        self._remove(state)
        self._engine.catalog.drop(state)

    def _remove(self, state: DestinationState) -> None:
        if self._engine.bodies is not None:
            self._engine.bodies.may_be_dead(state)
        mirror = state.volatile
        if mirror is not None:
            if mirror.channel.state is not mirror:
                mirror.channel = Channel(mirror)  # as in `_end`
            mirror.removed = True
            self._kept.remove(mirror)
            self.window.forget(state.number)
            mirror.declared = False
            self.mirrors.forget(mirror)
            state.volatile = None
            if self.is_leaving:
                self._engine.on_leaving()

    @property
    def is_leaving(self) -> bool:
        """Return whether messages of what is gone are still to go."""
        return bool(self.mirrors.leaving)

    def write_mirrors(self, changes: Sequence[Change]) -> None:
        """Do to mirrors what only frees memory. Any thread, without the lock. Raises what Engine.check raises."""
        self._engine.asked(lambda: self._kept.apply_changes(changes))
        self._engine.tell_freed()

    # Transactions over several stores: branches that concern these messages alone

    def prepare(self, branch: Branch) -> None:
        """Prepare a branch. Raises as `write`."""
        self._free()
        self._kept.reserve(branch.transaction, _sends(branch.changes))
        self.prepared[branch.transaction] = branch

    def commit_prepared(self, branch: Branch) -> list[Any] | None:
        """Commit a branch; return the outcomes of its changes, None if it has been told its outcome before."""
        if self.prepared.get(branch.transaction) is not branch:
            return None
        outcomes = self._write(branch.changes, branch.transaction, [branch.transaction])
        if branch.evicted:
            self._tell_old(branch.evicted)
        branch.reservation = None
        return outcomes

    def rollback_prepared(self, branch: Branch) -> bool:
        """Roll a branch back; return whether it was prepared."""
        if self.prepared.get(branch.transaction) is not branch:
            return False
        for lease in branch.leases:
            self._engine.delivery.unlease(lease, self.rows, delivered=True)
        for lease in branch.evicted:
            self._engine.delivery.unlease(lease, self.rows)
        self._write(branch.returned, branch.transaction)
        branch.reservation = None
        return True

    # Asking

    @property
    def messages(self) -> int:
        """Return how many messages are held, leased ones included."""
        return self.mirrors.messages

    @property
    def bytes(self) -> int:
        """Return how many bytes the transient messages have."""
        return self.mirrors.bytes

    @property
    def memory_bytes(self) -> int:
        """Return how many bytes of memory transient messages take. Without the lock: as counted last."""
        if not self._engine.lock._is_owned():  # type: ignore[attr-defined]
            return self._kept.counted_bytes
        self._free()
        return self._kept.memory_bytes

    @property
    def swap_bytes(self) -> int:
        """Return how many bytes the swap files have."""
        return self._kept.swap_bytes

    @property
    def holds_anything(self) -> bool:
        """Return whether closing the store would lose something."""
        return bool(self.messages or len(self.window) or self.prepared)

    def check(self) -> Iterator[str]:
        """Yield violations, as Backend.check."""
        return self._kept.violations()

    def close(self, clean: bool) -> None:
        """Let go of all messages; of the swap files too if `clean`: else they may be another's."""
        self._kept.let_go(clean)


def _sends(changes: Iterable[Change]) -> list[Send]:
    return [send for send in map(sent, changes) if send is not None]


def _mirrored(change: Change) -> list[Change]:
    """Return the same change for its destination's mirror; nothing if that is gone."""
    assert isinstance(change, Ack | Returned | AckRange | Postponed)
    mirror = change.state.volatile
    if mirror is None:
        return []
    if type(change) is Ack:
        return [Ack(mirror, change.seq, change.number, change.place)]
    if type(change) is Returned:
        return [Returned(mirror, change.seq, change.number, change.count)]
    if type(change) is Postponed:
        return [Postponed(mirror, change.seq, change.number, change.due)]
    assert type(change) is AckRange
    return [AckRange(mirror, change.first, change.last, change.number)]
