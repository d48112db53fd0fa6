"""The disk of a store whose owner is another process: what a test asks of it goes there."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message, Outgoing, Receipt, Undelivered
from anabranch.adapters.core.state.leases import ACKED, CLAIMED, LEAVING
from anabranch.adapters.core.store_types import Change, Done, Prepared, StoreStats, Subscription
from anabranch.adapters.system.background import shared
from anabranch.policies.errors import ClosedError, StoreLockedError
from anabranch.policies.names.destination import Destination
from anabranch.router.sharing.client.connection import Connection
from anabranch.router.sharing.client.greeting import Greeter
from anabranch.router.sharing.client.store import RemoteStore
from anabranch.router.sharing.protocol import destination_of

from ..contract.disk import Disk
from ..contract.large import kept
from ..contract.when_full import waiting
from .owner import STORE, Owner

INSIDE = ("failed", "last_seq", "highest_seq")


class SharedRoom:
    """Room that the owner has reserved."""

    def __init__(self, store: SharedStore, number: int) -> None:
        self._store, self.number = store, number

    def cancel(self) -> None:
        """Let go of it."""
        self._store._owner.ask("let_go", self._store.directory, self.number)

    __del__ = cancel


class SharedStore(RemoteStore):
    """The store of a directory as a client has it. What no client asks for, the owner is asked directly."""

    def __init__(self, owner: Owner, directory: Path, kind: str, options: dict[str, Any]) -> None:
        super().__init__(directory, None)
        self.kind, self.options = kind, options
        self._owner = owner
        self._opened = False
        self._lease_times = SimpleNamespace(run=lambda: owner.ask("look"))

    def open(self) -> None:
        """Let it be owned, and connect."""
        if self._opened:
            raise StoreLockedError(f"{self.directory} is open already, in this process")
        store_id, volatile, limited = self._owner.ask("open", self.directory, self.kind, self.options)
        super().__init__(self.directory, None)
        self.name = STORE
        self.store_id, self.volatile, self.limited = store_id, volatile, limited
        self.connect(Connection(self.directory, Greeter(self._nobody), self.held))
        self._opened, self._pid = True, os.getpid()

    def _nobody(self) -> None:
        raise ClosedError(f"nobody owns {self.directory}")

    def close(self) -> None:
        """Close both ends."""
        if not self._opened:
            return
        self._opened = False
        super().close()
        if os.getpid() == self._pid:
            self._owner.ask("close", self.directory)

    # What no client asks for

    def _ask(self, name: str, *given: Any) -> Any:
        if not self._opened:
            raise ClosedError(f"store {self.name!r} is not open")
        return self._owner.ask(name, self.directory, *given)

    def _inside(self, name: str, *given: Any) -> Any:
        return self._ask("of_store", name, *given)

    def __getattr__(self, name: str) -> Any:
        if name in INSIDE:
            return self._inside(name)
        if name == "connection":
            raise ClosedError(f"store {self.name!r} is not open")
        raise AttributeError(name)

    def check(self) -> Iterator[str]:
        return iter(self._inside("check"))

    def stats(self) -> StoreStats:
        stats: StoreStats = self._inside("stats")
        return stats

    def destinations(self) -> Sequence[Destination]:
        found: Sequence[Destination] = self._inside("destinations")
        return found

    def subscriptions(self) -> Sequence[Subscription]:
        found: Sequence[Subscription] = self._inside("subscriptions")
        return found

    def sync(self) -> None:
        self._inside("sync")

    def reclaim(self) -> int:
        return int(self._inside("reclaim"))

    def compact(self) -> int:
        return int(self._inside("compact"))

    def retire(self, to_remove: bool = False) -> bool:
        return bool(self._inside("retire", to_remove))

    def take_undelivered(self, limit: int = 100) -> Sequence[Undelivered]:
        self.abandoned.give_back()
        found = self._ask("take_undelivered", self.connection.client, limit)
        undelivered = [Undelivered(self._message(fields), reason) for fields, reason in found]
        for message, _ in undelivered:
            message._note.kept = True  # it stays leased, whether the test holds it or not
        return undelivered

    def count_expired(self, messages: Iterable[Message[Any]]) -> None:
        tokens = [message._note.token for message in messages]
        self._ask("count_expired", tokens)

    def leased(self, token: str) -> Message:
        return self._message(self._ask("leased", self.connection.client, token))

    # Branches, which are the coordinator's

    def reserve(
        self, sends: Sequence[tuple[Destination, Outgoing]], acks: Sequence[Message] = (), since: float | None = None,
        wait: bool = True,
    ) -> SharedRoom | None:  # fmt: skip
        given = [(str(one), message) for one, message in sends]
        number = self._ask("reserve", given, [message._note.token for message in acks], since, wait)
        return None if number is None else SharedRoom(self, number)

    def prepare(
        self, transaction: bytes, participants: Sequence[bytes], sends: Sequence[tuple[Destination, Outgoing]],
        acks: Sequence[Message], sync: bool, room: SharedRoom | None = None, changes: Sequence[Change] = (),
    ) -> Done[None]:  # fmt: skip
        leases = self._take(acks, CLAIMED, LEAVING)
        try:
            self._ask("prepare", self.connection.client, transaction, participants,
                [(str(destination), message) for destination, message in sends], [one.token for one in leases], sync,
                None if room is None else room.number,
                changes,
            )  # fmt: skip
        except BaseException:
            for lease in leases:
                lease.hold = CLAIMED
            raise
        for lease in leases:
            self._ended(lease.token, ACKED)
        return Done(None)

    def commit_nowait(
        self, sends: Sequence[tuple[Destination, Outgoing]], acks: Sequence[Message], sync: bool | None = None,
        changes: Sequence[Change] = (),
    ) -> Future[list[Receipt]]:  # fmt: skip
        """As a router does it, which asks no store for it."""
        return shared().call(lambda: self.commit(sends, acks, sync, changes))

    def commit_prepared(self, transaction: bytes) -> Done[list[Receipt]]:
        answer = self._ask("commit_prepared", transaction)
        return Done([Receipt(destination_of(text), seq, duplicate) for text, seq, duplicate in answer])

    def rollback_prepared(self, transaction: bytes) -> Done[bool]:
        return Done(self._ask("rollback_prepared", transaction))

    def recover_prepared(self) -> Sequence[Prepared]:
        found: Sequence[Prepared] = self._inside("recover_prepared")
        return found

    def committed(self) -> Sequence[bytes]:
        found: Sequence[bytes] = self._inside("committed")
        return found

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._inside("forget", transactions)


@kept.register
def _(store: SharedStore) -> int:  # type: ignore[misc]
    gc.collect()
    store.call("bodies_end", [])
    return int(store._owner.ask("kept", store.directory))


@waiting.register
def _(store: SharedStore) -> int:  # type: ignore[misc]
    return int(store._owner.ask("waiting", store.directory))


class SharedDisk(Disk):
    """Directories of one store of a kind each, which the owner has open; `disk` says what is told of that kind."""

    def __init__(self, owner: Owner, path: Path, like: type[Disk], kind: str, **options: Any) -> None:
        super().__init__()
        self._owner, self._path, self._kind, self._options = owner, path, kind, options
        self.volatile = like.volatile  # type: ignore[misc]
        self.idle = like.idle  # type: ignore[misc]
        self.many_priorities = 40 if self.volatile and "max_bytes" in options else like.many_priorities
        self._made = 0

    def create(self, **options: Any) -> SharedStore:  # type: ignore[override]
        if self.volatile and "max_bytes" in options:  # the rest is swapped
            options["max_stored_bytes"] = options.pop("max_bytes")
        return self._at(self._new_path(), {**self._options, **options})

    def _new_path(self) -> Path:
        self._made += 1
        return self._path / f"directory-{self._made}"

    def _at(self, directory: Path, options: Mapping[str, Any]) -> SharedStore:
        store = SharedStore(self._owner, directory, self._kind, dict(options))
        store.open()
        self.opened.append(store)  # type: ignore[arg-type]
        return store

    def unopened(self, store: Store) -> SharedStore:  # type: ignore[override]
        return SharedStore(self._owner, store.directory, self._kind, store.options)

    def reopen(self, store: Store, **options: Any) -> SharedStore:  # type: ignore[override]
        store.close()
        return self._at(store.directory, {**store.options, **options})

    def crash(self, store: Store, **options: Any) -> SharedStore:  # type: ignore[override]
        copy = self._new_path()
        self._owner.ask("copy", store.directory, copy)
        return self._at(copy, {**store.options, **options})
