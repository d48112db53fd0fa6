"""Room for what is sent, in all limits that concern it: of the store, of its destinations, of messages that are not
persistent, of the disk. And what happens where there is none (`WhenFull`).

R3  Room is looked for, and given out, under `_lock` and with all that has returned applied (Engine.asked). Whoever
    waits holds neither that nor any room.
R4  Who waits stands in one line. Who comes later passes those before it only where it needs no room that one of them
    lacks, or has lacked: so nobody is passed for ever, and a full destination holds up none but its own senders.
R5  Those in line are served by the first of them that waits in a thread; all of them by a background job where some do
    not wait in one (send_nowait): only that submits for them, so that what one thread sends keeps its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from .....policies.config.when_full import WhenFull
from .....policies.errors import AnabranchError, StoreFullError
from ....system.background import CoalescedJob
from ....system.conditions import unless_busy
from ...engine.hooks import Feature
from ...messages import Message
from ...operations.changes import Change
from ...state.gates import require_passage
from ...state.leases import DestinationState, Lease
from ...state.limits import NOTHING, Amount, Grant, NoRoomYetError, Room, may_wait
from ..parts import Parts
from .dropping import DropLog, Oldest
from .rooms import Request, Rooms

if TYPE_CHECKING:
    from ...operations.plan import Plan

POLL_SECONDS: Final = 0.1
"""Seconds after which the first in line looks whether there is room, beside being told. Some room is given back by who
may take no lock, or by the disk, which tells nobody."""
PATIENCE: Final = 1.0
"""Seconds after which the others look whether they are the first by now."""
WRITTEN_SECONDS: Final = 1.0
"""Under `drop_old`: how long one waits for what others are about to write, where all else is held by somebody."""


def _patience(room: Room) -> float:
    return room.timeout if room.when_full is WhenFull.BLOCK else WRITTEN_SECONDS


class Waiter:
    """One call that waits for room."""

    def __init__(self, request: Request, grant: Grant, seconds: float, submit: Callable[[Waiter], None] | None) -> None:
        self.request = request
        self.grant = grant
        self.submit = submit
        self.deadline: float = monotonic() + seconds
        self.lacking: set[Room] = set()
        """Rooms that were too small when the waiter was looked at, now or before."""
        self.granted = False
        self.error: AnabranchError | None = None
        self.signals: SimpleQueue[None] = SimpleQueue()
        self.why: StoreFullError | None = None
        """The error that the waiter gets when its time is over."""

    def wake(self) -> None:
        """Let it look. Takes no lock; any thread may."""
        if self.signals.empty():
            self.signals.put(None)


class Limits(Feature):
    """The quotas of one open store. Threads: all."""

    def __init__(self, parts: Parts) -> None:
        engine = parts.engine
        self.engine: Final = engine
        self._rooms = Rooms(engine, parts.directory, parts.index_directory)
        self.yields: bool = self._rooms.yields
        self._lock = threading.RLock()
        """Guards all of it. Taken before the store's lock, never after it."""
        self._line: dict[Waiter, None] = {}
        self._job = CoalescedJob(self._serve_in_background)
        self._serving = threading.Lock()
        self._oldest = Oldest(engine)
        self._dropped = DropLog(engine.name)
        self.tell_new: Final = self._dropped.new
        self.tell_old: Final = self._dropped.old
        self._held: dict[int, list[Grant]] = {}
        """Room that was reserved for plans, by number, until they are applied, and so are counted as held."""
        if self._rooms.limited:
            engine.quotas, hooks = self, engine.hooks
            hooks.taking = (*hooks.taking, self._written)
            hooks.applied = (*hooks.applied, self._applied)
            hooks.freed = (*hooks.freed, self.wake)
            hooks.stopped = (*hooks.stopped, self.wake_all)

    def require_disk(self, size: int) -> None:
        """Raise StoreFullError unless the disks have room for so much of a large body, which is about to be written."""
        with self._lock:
            self._rooms.require_disk(size)

    # Asking for room

    def reserve(
        self,
        sends: Sequence[Change],
        freed: Iterable[Message] = (),
        bodies: Sequence[int] = (),
        since: float | None = None,
        wait: bool = True,
    ) -> Grant:
        """Reserve room for these, and for what the limits say of those for which there is none. Waits for it if they
        say so: since `since` (monotonic), if that is given; not without `wait`: then it raises NoRoomYetError. Raises
        StoreFullError, what Engine.ensure_usable raises and MovedError, and then nothing is reserved."""
        grant = Grant(self.free)
        try:
            waiter = self._try(grant, lambda: Request(self._rooms, sends, freed, bodies), None)
            if waiter is not None:
                self._wait(waiter, since, wait)
        except BaseException:
            try:
                self._leave(grant)
            except BaseException:  # else nobody would take it out of the line
                self._leave(grant)
                raise
            raise
        return grant

    def reserve_all(self, parts: Sequence[Sequence[Change]]) -> list[Grant]:
        """Reserve room for parts that are written one after the other: for all of them, or none. Each part lets go of
        its room by itself. Only where nothing else happens at a quota than an error (not `yields`)."""
        whole = Grant()
        merged = [change for part in parts for change in part]
        amounts = self._rooms.each_amount(merged)
        waiter = self._try(whole, lambda: Request(self._rooms, merged, amounts=amounts), None)
        assert waiter is None
        grants = []
        with self._lock:
            for part in parts:
                grant = Grant()
                grants.append(grant)
                of_part, amounts = amounts[: len(part)], amounts[len(part) :]
                for room, need in Request(self._rooms, part, amounts=of_part).needs().items():
                    grant.parts.append(room.hold(need))
        whole.release()
        return grants

    def reserve_nowait(self, send: Change, submit: Callable[[Grant, AnabranchError | None], None]) -> None:
        """Reserve room for one send, without waiting. `submit` is called with its room or with an error, here or later
        on a thread of ours. Sends that need the same room keep their order."""
        grant = Grant(self.free)
        waiter = self._try(
            grant, lambda: Request(self._rooms, [send]), lambda waiter: submit(waiter.grant, waiter.error)
        )
        if waiter is None:
            submit(grant, None)

    def hold(self, sends: Sequence[Change], acks: Sequence[Any]) -> Grant:
        """Hold room for a prepared branch that was found, whether or not there is any. `acks`: its own, of which the
        whole message goes."""
        grant = Grant()
        with self._lock:
            request = Request(self._rooms, sends)
            for ack in acks:
                for room in self._rooms.of_state(ack.state, False):
                    count, size = request.freed.get(room, NOTHING)
                    request.freed[room] = count + 1, size
            for room, total in self._totals(request).items():
                freed = request.freed.get(room, NOTHING)[0]
                grant.parts.append(room.hold((max(0, total[0] - freed), total[1])))
        return grant

    def _totals(self, request: Request) -> dict[Room, list[int]]:
        totals: dict[Room, list[int]] = {}
        for at in range(len(request.sends)):
            for room in request.rooms[at]:
                request.add(totals, room, at)
        return totals

    def reserve_moved(self, state: DestinationState, amount: Amount) -> Grant:
        """Reserve room for messages that come from another store: neither they nor others are dropped for that, and who
        brings them does not wait. Raises StoreFullError."""
        with self._lock:
            return self._reserve_at_once(dict.fromkeys(self._rooms.of_state(state, False), amount))

    def reserve_at_once(self, sends: Sequence[Change]) -> Grant:
        """Reserve room for sends that wait in the database for the outcome of their transaction."""
        with self._lock:
            return self._reserve_at_once(Request(self._rooms, sends).needs())

    def _reserve_at_once(self, needs: dict[Room, Amount]) -> Grant:
        grant = Grant()

        def take() -> None:
            self._forget_dead()
            for room, need in needs.items():
                if room.lacking(need) != NOTHING:
                    raise room.error(need)
            for room, need in needs.items():
                grant.parts.append(room.hold(need))

        self.engine.asked(take)
        return grant

    def _forget_dead(self) -> None:
        if self.engine.bodies is not None:
            self.engine.bodies.forget_dead()

    def _require_no_reentry(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError(
                f"store {self.engine.name!r} was called from a signal handler that interrupted it in the same thread"
            )

    def _try(
        self, grant: Grant, request: Callable[[], Request], submit: Callable[[Waiter], None] | None
    ) -> Waiter | None:
        """Give it room, if there is; else it stands in line from now on."""
        self._require_no_reentry()
        with self._lock:
            waiter = Waiter(request(), grant, 0.0, submit)
            ahead = {room for other in self._line for room in other.lacking}
            if self.engine.asked(lambda: self._look(waiter, ahead)):
                return None
            waiter.deadline += max(map(_patience, waiter.lacking))
            if submit is not None:
                self._job.schedule(0)  # first: who is interrupted leaves none in line of which nobody knows
            self._line[waiter] = None
            return waiter

    def _leave(self, grant: Grant) -> None:
        """Leave the line: whoever asked for room needs it no more."""
        with self._lock:  # who serves the line just now may give it room
            for waiter in [waiter for waiter in self._line if waiter.grant is grant]:
                self._line.pop(waiter, None)
        grant.cancel()
        self.wake()

    def _look(self, waiter: Waiter, ahead: set[Room]) -> bool:
        """Give it what it needs; False if it has to wait for that. `ahead`: where it may not pass those before it. With
        both locks. May be done again. Raises StoreFullError, MovedError."""
        request, grant = waiter.request, waiter.grant
        grant.parts.clear()
        self._oldest.give_back(grant)
        require_passage(self.engine.sequencer.gates, request.sends)
        self._forget_dead()
        grant.dropped = self._new_ones(request)
        needs = {room: need for room, need in request.needs(grant.dropped).items() if need != NOTHING}
        lacking = {room: lack for room, need in needs.items() if (lack := room.lacking(need)) != NOTHING}
        for room in lacking:
            if room.when_full in (WhenFull.FAIL, WhenFull.DROP_NEW) or room.is_too_small(needs[room]):
                raise room.error(needs[room])
        waits = {room for room in lacking if room.when_full is WhenFull.BLOCK} | (ahead & needs.keys())
        if not waits and lacking:
            to_go = {room: room.to_go(needs[room], lack) for room, lack in lacking.items()}
            waits = self._oldest.take(to_go, grant, any(room.counts_bytes for room in needs))
            for room in waits:
                if not any(room.reserved()):
                    self._oldest.give_back(grant)
                    raise room.error(
                        needs[room], why=", and there is nothing that could go: it is held, or values of maps"
                    )
        if waits:
            self._oldest.give_back(grant)
            first = next(iter(waits))
            waiter.lacking |= waits
            waiter.why = first.error(needs[first])
            return False
        going = self._oldest.amounts(grant, needs)
        for room, (count, size) in needs.items():
            messages, gone = going[room]
            grant.parts.append(room.hold((max(0, count - messages), max(0, size - gone))))
        waiter.granted = True
        return True

    def _new_ones(self, request: Request) -> frozenset[int]:
        """Return which of the sends are dropped, since there is no room for them; none that `is_kept`."""
        dropped: set[int] = set()
        totals: dict[Room, list[int]] = {}
        for at, rooms in enumerate(request.rooms):
            if not request.amounts[at][0] or request.is_kept(at):
                continue
            narrow = [room for room in rooms if room.when_full is WhenFull.DROP_NEW]
            for room in narrow:
                more = list(totals.get(room, (0, 0, 0)))
                need = request.net(room, request.add({room: more}, room, at))
                if need != NOTHING and room.lacking(need) != NOTHING:
                    dropped.add(at)
                    break
            else:
                for room in narrow:
                    request.add(totals, room, at)
        return frozenset(dropped)

    # Waiting

    def _wait(self, waiter: Waiter, since: float | None, wait: bool) -> None:
        """Wait until a call has room, in this thread. Raises as `reserve`."""
        if not wait or not may_wait():
            raise NoRoomYetError(str(waiter.why))
        if since is not None:
            waiter.deadline += since - monotonic()
        while not waiter.granted:
            left = waiter.deadline - monotonic()
            if left <= 0:
                raise self._too_long(waiter)
            is_first = self._first() is waiter
            with suppress(Empty):
                waiter.signals.get(timeout=min(left, POLL_SECONDS if is_first else PATIENCE))
                while True:
                    waiter.signals.get_nowait()
            if waiter.error is not None:
                raise waiter.error
            require_passage(self.engine.sequencer.gates, waiter.request.sends)
            if self._first() is waiter or waiter.deadline <= monotonic():
                self.engine.ensure_usable()
                self._require_no_reentry()
                with self._lock:
                    self._serve()
        self.wake()  # the next in line is the first now

    def _too_long(self, waiter: Waiter) -> StoreFullError:
        return StoreFullError(f"{waiter.why}, and no room came in time (block_timeout)")

    @property
    def is_busy(self) -> bool:
        return bool(self._line)

    def statistics(self) -> Mapping[str, int]:
        return {"dropped": self._dropped.count}

    def _first(self) -> Waiter | None:
        while True:
            try:
                return next(iter(self._line), None)
            except RuntimeError:
                pass  # another has just come or gone

    def wake(self) -> None:
        """Wake the first in line: there may be room. Any thread, with whatever lock; takes none that is anybody's but
        the background's."""
        first = self._first()
        if first is None:
            return
        if first.submit is None:
            first.wake()
        else:
            self._job.schedule(0)

    def wake_all(self) -> None:
        """Tell all in line that the store stops."""
        for waiter in list(self._line):
            waiter.wake()
        if self._line:
            self._job.schedule(0)

    def _serve(self) -> None:
        """Give room to those in line for whom there is some, in order; of those that wait in no thread to the first.
        With `_lock`."""
        self.engine.asked(self._serve_all)

    def _serve_all(self) -> None:
        ahead: set[Room] = set()
        turn: Waiter | None = None
        for waiter in list(self._line):
            if waiter.submit is not None and (turn is not None or waiter.granted):
                ahead.update(waiter.lacking)
                continue
            try:
                given = waiter.granted or self._look(waiter, ahead)
            except AnabranchError as error:
                waiter.error, given = error, True
            if waiter.submit is not None and given:
                turn = waiter
                ahead.update(waiter.lacking)
                self._job.schedule(0)
            elif given:
                self._line.pop(waiter, None)
                waiter.wake()
            else:
                ahead.update(waiter.lacking)
                if self._rooms.of_store is not None and self._rooms.of_store in ahead:
                    break

    def _serve_in_background(self) -> None:
        """Serve those that wait in no thread."""
        if unless_busy(self._serving, self._submit_all) and any(
            waiter.submit is not None for waiter in list(self._line)
        ):
            self._job.schedule(POLL_SECONDS)

    def _submit_all(self) -> bool:
        while self._submit_next():
            pass
        return True

    def _submit_next(self) -> bool:
        """Submit the next of those that wait in no thread; return whether there may be another."""
        try:
            with self._lock:
                self._serve()
        except AnabranchError as error:
            for waiter in list(self._line):
                waiter.error = waiter.error or error
                waiter.wake()
        now = monotonic()
        for waiter in list(self._line):
            if waiter.submit is None:
                continue
            if not waiter.granted and waiter.error is None:
                try:
                    require_passage(self.engine.sequencer.gates, waiter.request.sends)
                except AnabranchError as error:
                    waiter.error = error
                if waiter.deadline <= now:
                    waiter.error = self._too_long(waiter)
            if waiter.granted or waiter.error is not None:
                waiter.submit(waiter)
                self._line.pop(waiter, None)
                return True
        return False

    def _written(self, plan: Plan) -> None:
        """Hold the room of a plan until it is applied, and log the messages that it dropped to make room. Takes no lock
        but the count's."""
        held = [ticket.held for ticket in plan.tickets if ticket.held is not None]
        if held:
            self._held[plan.number] = held
        for grant in held:
            if grant.evicted:
                self.tell_old(grant.evicted)

    def _applied(self, plan: Plan) -> None:
        for grant in self._held.get(plan.number, ()):
            grant.release()
        self._held.pop(plan.number, None)

    def free(self, leases: Sequence[Lease]) -> None:
        """Free messages that were to go and stay. Takes the store's lock; in a store that has stopped nobody holds
        anything."""
        engine = self.engine
        with suppress(AnabranchError, RuntimeError):
            engine.check()
            with engine.lock:
                engine.current()
                for lease in leases:
                    engine.delivery.unlease(lease, engine.rows)
