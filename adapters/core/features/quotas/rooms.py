"""The quotas that concern a send, and how much of each the send needs (state/limits.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from .....policies.config.when_full import WhenFull
from .....policies.names.routes import RouteTable
from ....system.volumes import volume_of
from ...messages import Message
from ...operations.changes import Change, Send, SendMany, sent
from ...record.encoding import REMOVAL, is_requeued
from ...state.duplicates import Key
from ...state.leases import DestinationState, Lease
from ...state.limits import NOTHING, Amount, DiskRoom, Room

if TYPE_CHECKING:
    from .....policies.config import LimitOptions
    from ...engine.engine import Engine


class Rooms:
    """The limits of one store. Under the lock of who gives out room (reserving.py)."""

    def __init__(self, engine: Engine, directory: Path, index_directory: Path | None = None) -> None:
        """`directory`: the store's, on whose disk some space may have to stay free."""
        self.engine = engine
        self._paths = [path for path in (directory, index_directory) if path is not None]
        settings = engine.backend.settings
        when_full, timeout = settings.when_full, settings.block_timeout
        name = f"store {engine.name!r}"
        self.of_store: Room | None = None
        """The room of all messages."""
        if settings.max_messages is not None or settings.max_bytes is not None:
            self.of_store = Room(
                name, settings.max_messages, settings.max_bytes, self._held, settings.max_bytes_option,
                when_full=when_full, timeout=timeout,
            )  # fmt: skip
        self._of_nonpersistent: Room | None = None
        most = settings.nonpersistent_max_messages, settings.nonpersistent_max_bytes
        if most != (None, None) and not engine.backend.volatile:
            self._of_nonpersistent = Room(
                name, *most, self._held_nonpersistent, "nonpersistent_max_bytes", "nonpersistent_max_messages",
                "messages that are not persistent", when_full, timeout, volatile=True,
            )  # fmt: skip
        self._of_disks: list[Room] | None = None if settings.min_free_disk is not None else []
        """None: not known before the store is open."""
        self._by_pattern = RouteTable((pattern, limit) for limit in settings.limits for pattern in limit.match)
        self._has_patterns = bool(settings.limits)
        self.limited: bool = bool(
            self.of_store or self._of_nonpersistent or self._of_disks is None or self._has_patterns
        )
        """True if there is any quota."""
        policies = {when_full, *(limit.when_full for limit in settings.limits)} - {None, WhenFull.FAIL}
        self.yields: Final = self.limited and bool(policies)
        """True if something else happens at a quota than an error."""

    def _held(self) -> Amount:
        """Return how many messages and bytes the store holds. With the store's lock held."""
        engine = self.engine
        catalogs = [engine.catalog] if engine.transient is None else [engine.catalog, engine.transient.mirrors]
        size = sum([catalog.bytes for catalog in catalogs])
        if engine.bodies is not None:
            size += engine.bodies.total_bytes
        return sum([catalog.messages for catalog in catalogs]), size

    def _held_nonpersistent(self) -> Amount:
        engine = self.engine
        if engine.transient is None:
            return NOTHING
        held = engine.transient.mirrors
        return held.messages, held.bytes + (engine.bodies.transient_bytes if engine.bodies is not None else 0)

    def of(self, change: Change) -> list[Room]:
        """Return all rooms that a message needs, the narrowest first. Under `_lock`."""
        if type(change) is SendMany:
            return self.of_state(change.state, False)
        send = sent(change)
        if send is None:
            return []
        rooms = self.of_state(send.state, change.inner is not change)
        # A large body is on the disk already, which was looked at while it was written.
        return rooms if send.large is None else [room for room in rooms if not isinstance(room, DiskRoom)]

    def each_amount(self, sends: Iterable[Change]) -> list[tuple[int, int]]:
        """Return how many messages and bytes each takes of the store's room; one that is stored already, nothing, nor
        one with the id of one before it of the same kind."""
        counted: set[tuple[bool, Key]] = set()
        amounts = []
        for change in sends:
            if type(change) is SendMany:
                amounts.append((len(change), change.record_bytes))
                continue
            send = change.inner
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
        key, engine = (send.state.number, send.name), self.engine
        if engine.sequencer.window.get(key) is not None:
            return True
        if not persistent and engine.transient is not None and engine.transient.sent_with(key) is not None:
            return True
        known = (persistent, key) in counted
        counted.add((persistent, key))
        return known

    def require_disk(self, size: int) -> None:
        """Raise StoreFullError if the disks have no room for so many bytes, whatever is to happen then."""
        if self._of_disks is None:
            self._of_disks = self._disks()
        for room in self._of_disks:
            if room.lacking((1, size))[1]:
                raise room.error((1, size))

    def at(self, message: Message) -> list[Room]:
        """Return the rooms of a message that is there, the narrowest first."""
        lease = message._note
        state = lease.channels[0].state if type(lease) is Lease else None
        return self.of_state(state, not message.persistent and not self.engine.backend.volatile) if state else []

    def of_state(self, state: DestinationState, volatile: bool) -> list[Room]:
        """Return the rooms of a destination, the narrowest first."""
        rooms: list[Room] = []
        if self._has_patterns:
            room: Room | None = state.room or self._room_of(state)
            if room is not None:
                rooms.append(room)
        if volatile and self._of_nonpersistent is not None:
            rooms.append(self._of_nonpersistent)
        if self.of_store is not None:
            rooms.append(self.of_store)
        if self._of_disks is None:
            self._of_disks = self._disks()
        return rooms + self._of_disks if not volatile else rooms

    def _room_of(self, state: DestinationState) -> Room | None:
        found = self._by_pattern.route(state.destination)
        if found is None:
            return None
        limit: LimitOptions = found.target
        settings = self.engine.backend.settings

        def held() -> Amount:
            mirror = state.volatile
            size = state.bytes + (self.engine.bodies.size_of(state) if self.engine.bodies is not None else 0)
            return state.total, size + (mirror.bytes if mirror is not None else 0)

        state.room = room = Room(
            f"{state.destination} in store {self.engine.name!r}", limit.max_messages, limit.max_bytes, held,
            when_full=settings.when_full if limit.when_full is None else limit.when_full,
            timeout=settings.block_timeout if limit.block_timeout is None else limit.block_timeout, state=state,
        )  # fmt: skip
        return room

    def _disks(self) -> list[Room]:
        settings = self.engine.backend.settings
        assert settings.min_free_disk is not None
        volumes = {}
        for path in self._paths:
            with suppress(OSError):  # whoever writes there is told
                volumes[volume_of(path)] = path
        return [
            DiskRoom(
                f"store {self.engine.name!r}", path, volume, settings.min_free_disk, settings.when_full,
                settings.block_timeout,
            )
            for volume, path in volumes.items()
        ]  # fmt: skip


class Request:
    """The amount that a call wants to store, less what the call removes."""

    def __init__(
        self,
        rooms: Rooms,
        sends: Sequence[Change],
        freed: Iterable[Message] = (),
        bodies: Sequence[int] = (),
        amounts: Sequence[Amount] | None = None,
    ) -> None:
        """`freed`: messages of which nothing is left once it is written. `bodies`: of each send the bytes of its body
        alone, where some are freed. `amounts`: of each send, if it is known."""
        self.sends = sends
        self.amounts: Final = rooms.each_amount(sends) if amounts is None else amounts
        self.bodies = bodies
        self.rooms: Final = [rooms.of(change) for change in sends]
        self.freed: dict[Room, Amount] = {}
        for message in freed:
            for room in rooms.at(message):
                count, size = self.freed.get(room, NOTHING)
                self.freed[room] = count + 1, size + message.size

    def is_kept(self, at: int) -> bool:
        """Return whether one of the sends is never dropped for being new. A put into a map is kept, since its caller
        would take the value for stored. A requeued message is kept, since it is gone from its old place once this is
        written."""
        send = sent(self.sends[at])
        return send is not None and (send.state.is_map or is_requeued(send.record))

    def needs(self, dropped: frozenset[int] = frozenset()) -> dict[Room, Amount]:
        """Return what the request needs in each room, without those of its sends that are dropped. The need is nothing
        if as many messages go as come and their bodies are as long. So dead letters, which have more headers, leave a
        full store."""
        totals: dict[Room, list[int]] = {}
        for at, amount in enumerate(self.amounts):
            if at not in dropped and amount[0]:
                for room in self.rooms[at]:
                    self.add(totals, room, at)
        return {room: self.net(room, total) for room, total in totals.items()}

    def add(self, totals: dict[Room, list[int]], room: Room, at: int) -> list[int]:
        """Count one of its sends."""
        total = totals.setdefault(room, [0, 0, 0])
        count, size = self.amounts[at]
        total[0] += count
        total[1] += size
        total[2] += self.bodies[at] if self.bodies else 0
        return total

    def net(self, room: Room, total: Sequence[int]) -> Amount:
        """Return the need for so much in a room, less what is freed there."""
        count, size, bodies = total
        freed, freed_size = self.freed.get(room, NOTHING)
        if freed and count <= freed:
            size = min(size, bodies)
        return max(0, count - freed), max(0, size - freed_size)
