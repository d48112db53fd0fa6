"""Knowledge that a change of a map's keys needs while it is planned: whether a key is still as its caller saw it.

E3  A value is a message of its map, with the key as its message id. What is put later takes the place of what is there
    when it is applied (Table.put), so a put asks nothing. What depends on the value before is decided by its caller,
    who reads, and says behind which plan that was (`Unchanged`): if the key has been written by a later one, or may
    have been, the ticket is refused whole, and its caller looks again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from .....policies.errors import AnabranchError
from ....wal.ticket import SHRINKS
from ...operations.changes import Change, Naming, Send
from ...operations.plan import Effect, Plan
from ...state.duplicates import Key
from ...state.leases import DestinationState, Receiver

RECENT_MAX: Final = 256
"""Keys that may be remembered as fresh though they are applied."""
VERSIONS_MAX: Final = 10_000
"""Keys of which is remembered which plan wrote them last."""


class KeyChangedError(AnabranchError):
    """The key was written since its caller has read it, or perhaps was; nothing was done. Never shown to users."""


class Unchanged(Change):
    """The condition that these keys of a map, which the ticket writes next, are as they were after plan `number`. No
    backend is told of it."""

    __slots__ = ("keys", "names", "number", "state")

    size: int = 0
    leaves = SHRINKS

    def __init__(self, keys: Keys, state: DestinationState, names: Sequence[bytes], number: int) -> None:
        self.keys: Final = keys
        self.state: DestinationState = state
        self.names: Sequence[bytes] = names
        self.number: int = number

    def plan(self, plan: Plan) -> None:
        """Refuse the ticket if one of the keys may have been written since. Raises KeyChangedError."""
        effect, written = self.keys.effect(plan), [(self.state.number, name) for name in self.names]
        changed = self.state.removed or bool(plan.removed)
        if changed or any(effect.version(key, plan) > self.number for key in written):
            raise KeyChangedError(f"{self.state.destination} has changed")
        for key in written:
            effect.written[key] = None


class KeyEffect(Effect):
    """The keys that a plan writes."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self.written: dict[Key, Send | None] = {}
        """The keys, and what the plan puts there, be it a REMOVAL; None: nothing is left."""
        self.writes_any = False
        """True if the plan may write all keys of all maps."""

    def version(self, key: Key, plan: Plan) -> int:
        """Return the number of a plan after which none has written this key."""
        return plan.number if self.writes_any or key in self.written else self._keys.versions.get(key)

    def accept(self, plan: Plan) -> None:
        self._keys.versions.add(self.written, plan.number)
        if self.writes_any:
            self._keys.versions.add_all(plan.number)

    def take(self, plan: Plan, applied: int) -> None:
        self._keys.recent.take(self, plan.number, applied)

    def taken(self) -> None:
        for key in self.written:
            for receiver in list(self._keys.waiting.get(key, ())):
                receiver.wake()


class Keys(Naming):
    """The keys of one open store's maps: the meaning of message ids there."""

    def __init__(self) -> None:
        self.versions: Final = KeyVersions()
        self.recent: Final = RecentKeys()
        self.waiting: dict[Key, dict[Receiver, None]] = {}
        """Receivers that wait for the value of a key. They are among the receivers of the map's channel, too."""

    def effect(self, plan: Plan) -> KeyEffect:
        """Return a plan's effect on keys."""
        return plan.effect(KeyEffect, lambda: KeyEffect(self))

    def first(self, plan: Plan, send: Send) -> int | None:
        return None  # a value takes the place of the one before

    def given(self, plan: Plan, send: Send) -> None:
        assert send.name is not None
        self.effect(plan).written[send.state.number, send.name] = send

    def acked_many(self, plan: Plan) -> None:
        self.effect(plan).writes_any = True


class KeyVersions:
    """The plan that wrote each key last. Used by the thread that plans."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._floor = 0
        """The version of a key that is not in `_numbers`: this plan may have written it, and none after it has."""

    def get(self, key: Key) -> int:
        """Return the number of a plan after which none has written the key."""
        return self._numbers.get(key, self._floor)

    def add(self, keys: Iterable[Key], number: int) -> None:
        """Note that this plan writes these keys. Idempotent."""
        numbers = self._numbers
        for key in keys:
            numbers[key] = number
        if len(numbers) > VERSIONS_MAX:  # half at once, those that came first: a forgotten key costs a second look
            oldest = list(islice(numbers, len(numbers) // 2))
            self._floor = max(self._floor, *[numbers[key] for key in oldest])
            for key in oldest:
                del numbers[key]

    def add_all(self, number: int) -> None:
        """Note that this plan may write any key."""
        self._floor = number
        self._numbers.clear()


class Written(NamedTuple):
    """The effect of a plan on a key."""

    number: int
    """The plan's."""
    send: Send | None
    """The send that the plan has put there, be it a REMOVAL; None: nothing is left."""


class RecentKeys:
    """The effect on keys of plans that have taken effect and may not be applied yet. A reader of such a key need not
    wait until it is in the rows. Changed by whoever takes plans in, one thread at a time. Others read under the store's
    lock, and pass over what is applied, which may still be in it."""

    def __init__(self) -> None:
        self._written: dict[Key, Written] = {}
        """Replaced, not shrunk, so that others may read it."""
        self._most = RECENT_MAX
        """The number of keys beyond which it is looked which of them are applied."""
        self.whole_at: int = 0
        """The number of the latest plan that may have written any key: before it is applied nothing here counts."""

    def get(self, key: Key) -> Written | None:
        """Return what was done to a key last; None: what the rows say counts."""
        written = self._written.get(key)
        return written if written is not None and written.number > self.whole_at else None

    def take(self, effect: KeyEffect, number: int, applied: int) -> None:
        """Take in the effect of plan `number`; all up to `applied` are in the rows. May be done again."""
        written = self._written
        if len(written) > self._most:
            self._written = written = {key: one for key, one in written.items() if one.number > applied}
            self._most = 2 * len(written) + RECENT_MAX
        if effect.writes_any:
            self.whole_at = number
        for key, send in effect.written.items():
            written[key] = Written(number, send)
