"""Events of an owner's router, as its clients hear of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from .. import events as kinds
from ..events import Event, EventListener, Events
from .protocol import Op
from .remote_store import RemoteStore

_KINDS: Final[dict[str, type[Event]]] = {
    name: one for name, one in vars(kinds).items() if isinstance(one, type) and issubclass(one, Event)
}


class RemoteEvents(Events):
    """The listeners of one client. The owner is asked for its events once there is one."""

    def __init__(self, store: RemoteStore) -> None:
        super().__init__()
        self._store = store
        store.on_event = self._heard

    def listen(self, on_event: Callable[[Event], object]) -> EventListener:
        """Add a listener. Raises TypeError for what cannot be called."""
        listener = super().listen(on_event)
        self._store.stand((Op.CALL, "events"))
        return listener

    def _heard(self, packed: list[Any]) -> None:
        name, fields = packed
        if name in _KINDS:  # else a newer owner has told of it
            self.tell(msgspec.convert(fields, _KINDS[name]))
