"""The large bodies of a store: written before the message that names them, removed once no message does (rule J9).

B3  A body is there as long as its StoredBody is, or longer. Who holds one: who stages or sends it, what is queued,
    planned or prepared, `_live` for a message that is not dead, a Message in hand, a stream. The last to let go, Ctrl-C
    or not, puts its name into `unreferenced`.
B4  What is in `unreferenced` is removed once all that the store has written is synced: the ack, if it was an ack that
    let go. A crash before that leaves a body that no message names: the next open removes it.
B5  A body is whole, and synced unless its message is not to survive anyway, before the record that names it is queued:
    whatever the store's policy, so that of what remains after a power failure no message lacks its body.
B6  Which message names a body is noted in the body later, and may be missing, or wrong after a power failure: the open
    believes no note, but looks at the message; if that does not name it, at all that came behind the body's `low`.
    What names a body and cannot be read keeps all that nobody names.
B7  A message that takes over another one's body in the same store (a dead letter) shares it. Before the second one is
    queued that is noted, durably: else an open would find the first, and remove the body once that is dead. A copy in
    another store (repartitioning, a dead letter there) has the same name, so that the records are the same.

What tells that a message is dead is its row, which is looked up when something has happened that may have ended it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Final

from google_crc32c import extend as crc32c

from .....policies.errors import AnabranchError, ClosedError, CorruptionError, StoreFailedError, StoreFullError
from ....system.background import CoalescedJob
from ....system.conditions import unless_busy
from ...engine.hooks import Feature
from ...messages import Outgoing, Readable, plain_body
from ...operations.branches import Branch
from ...operations.changes import Ack, AckRange, Change, Send
from ...operations.destination_changes import Remove, Unsubscribe
from ...operations.plan import Effect, Plan
from ...record.encoding import is_large, reference_in
from ...record.large import (
    CHUNK_BYTES,
    NEVER,
    REFERENCE,
    BodyRef,
    KeepsBodies,
    Kept,
    LargeStorage,
    LargeStream,
    Sized,
    StoredBody,
    chunk_of,
    named_by,
    not_as_said,
    read_bytes,
    read_start,
    require_size,
    start_of,
)
from ...record.place import SEQ
from ...state.leases import DestinationState
from ..parts import Parts
from .files import LargeFiles

log: logging.Logger = logging.getLogger(__name__)

SOON_SECONDS: Final = 0.2
"""Until what is to be noted or removed is, in the background."""
PAGE: Final = 256
LOOK_CHUNKS: Final = 16
"""After so many of a body it is looked whether there is still as much room on the disk as has to stay free."""


class Named(Effect):
    """The messages of a plan whose bodies are kept apart."""

    def __init__(self, bodies: LargeBodies) -> None:
        self._bodies = bodies
        self.sends: list[Send] = []

    def taken(self) -> None:
        for send in self.sends:
            self._bodies.named(send)


class LargeBodies(Feature):
    """The large bodies of one open store. Threads: all."""

    storage: LargeStorage

    def __init__(self, parts: Parts) -> None:
        self._engine = engine = parts.engine
        self._directory, self._file_mode, self._sync = parts.directory, parts.file_mode, parts.sync
        engine.bodies = self
        settings = engine.backend.settings
        self._threshold = min(settings.large_message_size, settings.message_bytes_max)
        self._lock = threading.RLock()
        """Guards `_by_name`, and who adds to `_live` or takes out of it."""
        self._by_name: dict[bytes, BodyRef] = {}
        self._found: dict[bytes, tuple[StoredBody, Kept]] = {}
        """While the store is opened."""
        self._live: dict[int, dict[int, StoredBody]] = {}
        """By destination's number and seq, of messages that are not known to be dead. Added to by who writes, in
        order."""
        self._sizes: dict[int, int] = {}
        """Bytes of those, by destination's number: a body that several messages share counts for each."""
        self.total_bytes: int = 0
        """Bytes of all destinations' bodies."""
        self._apart: dict[int, dict[int, None]] = {}
        """Transient messages among those in `_live`, likewise by number and seq."""
        self.transient_bytes: int = 0
        """Bytes of the transient messages' bodies."""
        self._maybe_dead: dict[tuple[int, int], None] = {}
        """Messages that may be dead by now: number and seq."""
        self._to_note: deque[tuple[StoredBody, int, int]] = deque()
        self.unreferenced: deque[BodyRef] = deque()
        """Bodies that nobody holds any more. Appended to by whoever lets go of one."""
        self.streams: weakref.WeakSet[LargeStream] = weakref.WeakSet()
        self._adopting = threading.RLock()
        """Held by who copies a body from another store, or shares one."""
        self._noting = threading.RLock()
        """Held by who notes whose a body is, and who notes that it is several's: that is never written over."""
        self._passing: set[bytes] = set()
        """Names of bodies that are not to survive the store's being closed."""
        self._work = threading.RLock()
        """Held by who removes and notes, and while a body that was let go of is taken up again."""
        self._soon = CoalescedJob(self.tidy)
        self.used: bool = False
        """There is something here, or was."""
        self._holds = 0
        """How many want the files that are there to stay. Under `_lock`."""
        self._follows = False
        """Some message names a body, or did."""

    # Opening and closing

    def open(self) -> None:
        """Find what is there. The backend is open; nothing is prepared yet. Raises OSError, CorruptionError."""
        backend = self._engine.backend
        own = backend.large_storage if isinstance(backend, KeepsBodies) else None
        self.storage = own or LargeFiles(self._engine.name, self._directory, self._file_mode)
        for name, start in self.storage.kept():
            self.used = True
            kept = read_start(name, start) if start is not None and not self._engine.backend.volatile else None
            if start is not None and kept is None and not self._engine.backend.volatile:
                where = self.storage.place(name, 0)[0]
                log.warning("store %s: the start of a large body is damaged: %s", self._engine.name, where)
                kept = Kept(name, 0, 0, 0)
            if kept is None:
                self._know(StoredBody(self, name), owned=True)  # nobody holds it
                continue
            body = StoredBody(self, name)
            body.promised = True
            self._know(body, owned=True)
            self._found[name] = body, kept

    @property
    def highest_seq(self) -> int:
        """Return the highest `low` found by `open`: a message that names a body comes behind its `low` (rules B6,
        A5)."""
        return max((kept.low for _, kept in self._found.values() if kept.low != NEVER), default=0)

    def _know(self, body: StoredBody, owned: bool) -> None:
        """Know a body from now on: its name finds it, and who lets go of it last puts it into `unreferenced`."""
        ref = BodyRef(body, self.unreferenced.append)
        ref.name, ref.owned = body.name, owned
        with self._lock:
            self._by_name[body.name] = ref

    def _known(self, name: bytes) -> StoredBody | None:
        ref = self._by_name.get(name)
        return ref() if ref is not None else None

    def attach(self, branch: Branch) -> None:
        """Attach the large bodies that a branch sends which is read back."""
        for send in branch.sends:
            self.attach_send(send)

    def attach_send(self, send: Send) -> None:
        """Attach the large body of a message that is read back, whose body is here."""
        if is_large(send.record):
            send.large = self.body_of(reference_in(send.record))
            send.large.promised = send.large.shared = True

    def start(self) -> None:
        """Find which messages name the bodies there, and let go of bodies that no message names. Prepared branches are
        known by then."""
        found, self._found = self._found, {}
        with self._engine.lock:
            self._engine.reading(lambda: self._settle(found))
        self.tidy()

    def _settle(self, found: dict[bytes, tuple[StoredBody, Kept]]) -> None:
        try:
            left = {name: kept for name, (_, kept) in found.items() if not self._is_named_as_noted(kept)}
            self._look_for(left)
            for body, _ in found.values():
                body.shared = body.shared or body.names > 1
        except (CorruptionError, StoreFailedError) as error:
            self._disown()
            log.warning(
                "store %s: which large bodies are nobody's cannot be told, all stay: %s", self._engine.name, error
            )
            return
        finally:
            live = {body.name for those in self._live.values() for body in those.values()}
            count = sum(name not in live for name in found)
            found.clear()
        if count:
            log.info("store %s: %d large bodies belong to no message that is there", self._engine.name, count)

    def _is_named_as_noted(self, kept: Kept) -> bool:
        engine = self._engine
        state = engine.catalog.by_number.get(kept.number) if kept.seq else None
        place = engine.rows.row(state, None, kept.seq) if state is not None else None
        if state is None or place is None:
            return False
        return any(self._named_in(state, kept.seq, one) == kept.name for one in engine.rows.bodies(state, [place]))

    def _named_in(self, state: DestinationState, seq: int, record: bytes | None) -> bytes | None:
        """Return the name of the found body that this record names, if any; that body is live then."""
        if record is None or not is_large(record):
            return None
        reference = reference_in(record)
        name = REFERENCE.unpack(reference)[0]
        body = self._known(name)
        if body is None:
            return None
        body.describe(reference)
        self._add(state.number, seq, body)
        return body.name

    def _look_for(self, left: dict[bytes, Kept]) -> None:
        """Look for bodies whose note is missing or wrong, among all messages that came behind them."""
        low = min((kept.low for kept in left.values()), default=NEVER)
        if low >= self._engine.sequencer.last_seq:
            return
        log.info("store %s: looking for the messages of %d large bodies", self._engine.name, len(left))
        for state in list(self._engine.catalog.destinations.values()):
            after = low
            while places := self._engine.rows.rows(state, None, None, after, PAGE):
                after = places[-1][SEQ]
                for place, record in zip(places, self._engine.rows.bodies(state, places), strict=True):
                    if self._named_in(state, place[SEQ], record) is not None:
                        self._to_note.append((self._live[state.number][place[SEQ]], state.number, place[SEQ]))

    def close(self) -> None:
        """Remove what is to be removed, as far as that can be done now: the next open does the rest."""
        if self._engine.failed is None:
            self.tidy()

    def end(self, clean: bool) -> None:
        """Let go of the bodies: all that was written is durable, and nothing is written any more. If `clean`, with the
        store's lock held and the backend still open: what no message names, nor a prepared branch, is removed, whoever
        holds it."""
        try:
            if clean and self.used:
                self.forget_dead()
                needed = {name for name in self._needed() if name not in self._passing}
                for ref in [*self._by_name.values(), *self.unreferenced]:
                    if ref.owned and ref.name not in needed:
                        self.storage.remove(ref.name)
        except (OSError, AnabranchError) as error:
            log.debug("store %s: large bodies are left to the next open: %s", self._engine.name, error)
        self._disown()
        if hasattr(self, "storage"):
            self.storage.close()

    def _disown(self) -> None:
        """Keep all bodies that are there, whoever lets go of them."""
        for ref in [*self._by_name.values(), *self.unreferenced]:
            ref.owned = False

    def _needed(self) -> Iterator[bytes]:
        """Yield the names of the bodies that messages name, or prepared branches."""
        for those in list(self._live.values()):
            yield from [body.name for body in list(those.values())]
        for branch in list(self._engine.sequencer.prepared.values()):
            yield from [send.large.name for send in branch.sends if send.large is not None]

    @property
    def is_busy(self) -> bool:
        """Return whether somebody reads a body, or has one that no message names yet. The store must not be closed for
        being idle then."""
        if not self.used or self._holds:
            return bool(self._holds)
        live = {body.name for those in list(self._live.values()) for body in list(those.values())}
        waiting = any(ref() is not None for name, ref in list(self._by_name.items()) if name not in live)
        return waiting or any(not stream.closed for stream in list(self.streams))

    def require_open(self) -> None:
        """Raise what Engine.ensure_usable raises."""
        self._engine.ensure_usable()

    # Writing

    def kept(self, body: object, persistent: bool = True) -> bytes | StoredBody:
        """Return a body as it goes into a message of this store: bytes, or one that is whole here. A short file becomes
        bytes. Raises TypeError and ValueError for what is no body, or not as long as was said; what the file raises;
        StoreFullError, StoreFailedError, ClosedError. Then nothing is left of it."""
        size = None
        if type(body) is Sized:
            body, size = body
            require_size(size)
        if isinstance(body, StoredBody):
            if size is not None and body.size != size:
                raise not_as_said(body.size, size)
            return self.adopted(body, persistent)
        if isinstance(body, bytes | bytearray | memoryview) or not isinstance(body, Readable):
            plain = plain_body(body)
            if size is not None and len(plain) != size:
                raise not_as_said(len(plain), size)
            return plain
        return self._written(body, size, persistent)

    def outgoing(self, message: Outgoing) -> Outgoing:
        """Return a message that is about to be queued, with its body as `kept`: from now on the body is promised to the
        message."""
        body = self.kept(message.body, message.persistent)
        if isinstance(body, StoredBody):
            self._promise(body)
        return message._replace(body=body)

    def looked_at(self, message: Outgoing) -> Outgoing:
        """Return a message that is queued later, with its body as `kept`."""
        return message._replace(body=self.kept(message.body, message.persistent))

    def _written(self, file: Readable, size: int | None, persistent: bool) -> bytes | StoredBody:
        self._engine.ensure_usable()
        first = read_bytes(file, self._threshold + 1)
        if len(first) <= self._threshold:
            if size is not None and len(first) != size:
                raise not_as_said(len(first), size)
            return bytes(first)
        body = self._begun(os.urandom(16), persistent)
        try:
            self._fill(body, _chunks(first, file), size)
            self._publish(body)
        except BaseException:
            self._discard(body)
            raise
        return body

    def _begun(self, name: bytes, persistent: bool) -> StoredBody:
        """Begin a body that is to be written, and return it."""
        body = StoredBody(self, name)
        body.lasting = persistent and not self._engine.backend.volatile
        self.used = True
        self._know(body, owned=True)
        if not body.lasting:
            self._passing.add(name)
        # Not `highest_seq`: one that was given to a message that is not persistent may be given again after a restart.
        self.storage.begin(name, start_of(name, self._engine.sequencer.last_seq if body.lasting else NEVER))
        return body

    def _discard(self, body: StoredBody) -> None:
        """Remove a body that is not to be sent after all."""
        with suppress(OSError, AnabranchError):
            self.storage.remove(body.name)

    def _fill(self, body: StoredBody, chunks: Iterable[bytes | memoryview], size: int | None) -> None:
        most = self._engine.backend.settings.max_bytes
        try:
            for number, data in enumerate(chunks):
                self._engine.ensure_usable()
                if number % LOOK_CHUNKS == 0 and self._engine.quotas is not None:
                    self._engine.quotas.require_disk(min(size or CHUNK_BYTES, LOOK_CHUNKS * CHUNK_BYTES))
                body.size += len(data)
                if size is not None and body.size > size:
                    raise not_as_said(body.size, size, "at least ")
                if most is not None and body.size > most:
                    raise StoreFullError(
                        f"store {self._engine.name!r}: a body of {body.size} bytes or more is larger than "
                        f"{self._engine.backend.settings.max_bytes_option}, {most}; raise the limit. Nothing was sent"
                    )
                body.crc = crc32c(body.crc, bytes(data))
                self.storage.append(body.name, number, chunk_of(body.name, number, data), body.chunk_bytes)
        except ClosedError as error:  # what was read of the file is gone: not to be tried again
            raise StoreFailedError(f"store {self._engine.name!r} was closed while a body was written to it") from error
        if size is not None and body.size != size:
            raise not_as_said(body.size, size)

    def _publish(self, body: StoredBody) -> None:
        self.storage.publish(body.name, body.lasting)

    def adopted(self, body: StoredBody, persistent: bool = True) -> StoredBody:
        """Return a body here that is the same as one in this store, or in another. Raises as `kept`, and
        CorruptionError."""
        lasts = persistent and not self._engine.backend.volatile
        if body.bodies is self and (body.lasting or not lasts):
            return body
        with self._adopting:  # one copies at a time: two would copy the same body
            own: StoredBody | None = body if body.bodies is self else self._taken_up(body)
            if own is None:
                return self._copied(body, body.name, persistent)
            return self._copied(body, os.urandom(16), persistent) if lasts and not own.lasting else own

    def migrated(self, body: StoredBody) -> StoredBody:
        """Return a copy of a body in another store, under its name, for a message that comes from there. Raises as
        `kept`, and CorruptionError."""
        own = self.adopted(body)
        if own.name != body.name:
            raise StoreFailedError(f"store {self._engine.name!r} has another body under the name {body.name.hex()}")
        self._promise(own)
        return own

    def _promise(self, body: StoredBody) -> None:
        with self._lock:
            first, body.promised = not body.promised, True
        if not first:
            self._share(body)

    def _share(self, body: StoredBody) -> None:
        """Let more than one message name a body (rule B7). Raises StoreFullError, StoreFailedError."""
        with self._noting:
            if not body.shared and body.lasting:
                self.storage.note(body.name, named_by(0, 0), sync=True)
            body.shared = True

    def _copied(self, body: StoredBody, name: bytes, persistent: bool) -> StoredBody:
        own = self._begun(name, persistent)
        try:
            own.chunk_bytes = body.chunk_bytes
            self._fill(own, (body.chunk(number) for number in range(body.chunks)), body.size)
            self._publish(own)
            wrong = "its copy has another CRC" if own.crc != body.crc else own.verify()
            if wrong is not None:
                raise CorruptionError(self.storage.place(own.name, 0)[0], 0, f"a large body: {wrong}")
        except BaseException:
            self._discard(own)
            raise
        return own

    def _taken_up(self, body: StoredBody) -> StoredBody | None:
        """Return a body of that name that is whole here already, if there is one. One that was let go of is removed
        first."""
        with self._work:
            own = self._known(body.name)
            if own is not None and self._by_name[body.name].owned and (own.size, own.crc) == (body.size, body.crc):
                return own
            if any(ref.name == body.name for ref in list(self.unreferenced)):
                self._remove_unreferenced()
        return None

    # The fate of bodies

    def body_of(self, reference: bytes) -> StoredBody:
        """Return the body that a message's record refers to."""
        name = REFERENCE.unpack(reference)[0]
        with self._lock:
            body = self._known(name)
            if body is None:  # its file is lost, or it was acked just now
                body = StoredBody(self, name)
                body.describe(reference)
                if name not in self._by_name:
                    self._know(body, owned=False)
            elif not body.size:
                body.describe(reference)
            return body

    def named(self, send: Send, apart: bool = False) -> None:
        """Note that a message which names a body takes effect; `apart`: it is transient, beside persistent ones. Called
        by who writes, in order; may be done again."""
        body = send.large
        if body is None or (send.state.is_topic and not send.recipients):
            return
        self._add(send.state.number, send.seq, body, apart)
        self._to_note.append((body, send.state.number, send.seq))
        self._soon.schedule(SOON_SECONDS)

    def _add(self, number: int, seq: int, body: StoredBody, apart: bool = False) -> None:
        with self._lock:
            those = self._live.setdefault(number, {})
            others = self._apart.setdefault(number, {}) if apart else None
            before = self._sizes.get(number, 0)
            if seq not in those:
                size = body.size
                those[seq] = body  # no call between these: Ctrl-C comes before or after
                self._sizes[number] = before + size
                self.total_bytes += size
                if others is not None:
                    others[seq] = None
                    self.transient_bytes += size
                body.names += 1
        if not self._follows:
            self._engine.hooks.follow((Ack, AckRange, Remove, Unsubscribe), self.look)
            self.used = self._follows = True

    def planned(self, plan: Plan, send: Send) -> None:
        """Note a message of a plan that names a body."""
        plan.effect(Named, lambda: Named(self)).sends.append(send)

    def look(self, change: Change) -> None:
        """Note the messages with large bodies that may be dead by a change, which is in the rows. Under the store's
        lock; may be done again."""
        if type(change) is Ack:
            if change.seq in self._live.get(change.state.number, ()):
                self._maybe_dead[change.state.number, change.seq] = None
        elif type(change) is AckRange:
            for seq in list(self._live.get(change.state.number, ())):
                if change.first <= seq <= change.last:
                    self._maybe_dead[change.state.number, seq] = None
        elif isinstance(change, Remove | Unsubscribe):
            self.may_be_dead(change.state)
        if self._maybe_dead:
            self._soon.schedule(SOON_SECONDS)

    def may_be_dead(self, state: DestinationState) -> None:
        """Note that all messages of a destination may be dead by now."""
        for seq in list(self._live.get(state.number, ())):
            self._maybe_dead[state.number, seq] = None

    @property
    def messages(self) -> int:
        """Return how many messages have a large body."""
        return sum([len(those) for those in list(self._live.values())])

    def size_of(self, state: DestinationState) -> int:
        """Return how many bytes the large bodies of a destination have."""
        return self._sizes.get(state.number, 0)

    def size_at(self, state: DestinationState, seq: int) -> int:
        """Return the size of one message's large body; 0 if it has none."""
        body = self._live.get(state.number, {}).get(seq)
        return body.size if body is not None else 0

    def tidy(self, soon: bool = False) -> None:
        """Note and remove what there is to note and remove, as far as that can be done. Not on a path that anybody
        waits for; any thread."""
        if not self.used:
            return
        if not soon:
            unless_busy(self._work, self._tidy)
        elif self.unreferenced or self._maybe_dead:
            self._soon.schedule(0)

    def _tidy(self) -> None:
        try:
            self._engine.ensure_usable()
            self._engine.asked(lambda: None)  # what has been acked is among the maybe_dead then
            self._note_some()
            while self._maybe_dead:
                if not self._engine.asked(self._find_dead):
                    break
            self._remove_unreferenced()
        except (AnabranchError, RuntimeError) as error:  # RuntimeError: in a signal handler (rule G3)
            log.debug("store %s: large bodies are left to the next time: %s", self._engine.name, error)

    def _note_some(self) -> None:
        while self._to_note:
            body, number, seq = self._to_note.popleft()
            with self._noting:
                if seq in self._live.get(number, ()) and not body.shared:
                    self.storage.note(body.name, named_by(number, seq), sync=False)

    def forget_dead(self) -> None:
        """Stop counting the bodies of acked messages, though a body may be there for a little while. With the store's
        lock held and all that has returned applied."""
        while self._maybe_dead:
            self._find_dead()

    def _find_dead(self) -> bool:
        """Find the dead among some of the maybe_dead, with the store's lock held. Returns whether there were any."""
        catalog, rows = self._engine.catalog, self._engine.rows
        some = list(self._maybe_dead)[:PAGE]
        if self._engine.behind:  # a message that has taken effect since is among them perhaps, and in no row yet
            self._engine.drain()
        for number, seq in some:
            state = catalog.by_number.get(number)
            if state is None or state.removed or rows.row(state, None, seq) is None:
                self._drop(number, seq)
            self._maybe_dead.pop((number, seq), None)
        return bool(some)

    def _drop(self, number: int, seq: int) -> None:
        """Drop the body of a message that is dead. Idempotent."""
        with self._lock:
            those = self._live.get(number, {})
            body, before = those.get(seq), self._sizes.get(number, 0)
            others = self._apart.get(number, {})
            if body is not None:
                size = body.size
                del those[seq]  # as in `_add`
                self._sizes[number] = before - size
                self.total_bytes -= size
                if seq in others:
                    del others[seq]
                    self.transient_bytes -= size
                body.names -= 1
            if not others:
                self._apart.pop(number, None)
            if not those:
                self._live.pop(number, None)
                self._sizes.pop(number, None)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the files of all bodies that are there while the block runs, and the store open."""
        with self._lock:
            self._holds += 1
        try:
            yield
        finally:
            with self._lock:
                self._holds -= 1
            self.tidy()

    def _remove_unreferenced(self) -> None:
        if not self.unreferenced or self._holds:
            return
        refs = list(self.unreferenced)
        self._sync()
        for ref in refs:
            with self._lock:
                if self._by_name.get(ref.name) is ref:
                    del self._by_name[ref.name]
                current = self._by_name.get(ref.name)
            if ref.owned and (current is None or not current.owned):
                try:
                    self.storage.remove(ref.name)
                except OSError as error:
                    log.warning("store %s: a large body is left to the next open: %s", self._engine.name, error)
            self.unreferenced.remove(ref)

    # Asking

    def violations(self) -> Iterable[str]:
        return self._engine.reading(lambda: list(self._violations()))

    def statistics(self) -> Mapping[str, int]:
        return {"large_messages": self.messages, "large_bytes": self.total_bytes}

    def _violations(self) -> Iterator[str]:
        """Yield a violation for each body that a message names and is not there whole. A body that is there without a
        message is one, too."""
        if not self.used:
            return
        known = {
            *list(self._by_name),
            *(ref.name for ref in list(self.unreferenced)),
        }  # first: they may just be removed
        for name, _ in self.storage.kept():
            if name not in known and name not in self._by_name:
                yield f"{self.storage.place(name, 0)[0]}: a body that belongs to no message"
        for state in list(self._engine.catalog.destinations.values()):
            after, named = 0, set()
            while places := self._engine.rows.rows(state, None, None, after, PAGE):
                after = places[-1][SEQ]
                for place in places:
                    try:
                        record = next(iter(self._engine.rows.bodies(state, [place])))
                    except CorruptionError as error:
                        named.update({place[SEQ]} & self._live.get(state.number, {}).keys())  # as far as is known
                        yield str(error)
                        continue
                    if record is not None and is_large(record):
                        named.add(place[SEQ])
                        wrong = self.body_of(reference_in(record)).verify()
                        if wrong is not None:
                            yield f"message {place[SEQ]} of {state.destination}: {wrong}"
            counted = set(self._live.get(state.number, ())) - {seq for _, seq in self._maybe_dead}
            if not counted <= named or not named <= set(self._live.get(state.number, ())):
                yield (
                    f"{state.destination} has large bodies for {sorted(named)[:10]}, and counts them for "
                    f"{sorted(counted)[:10]}"
                )


def _chunks(first: bytearray, file: Readable) -> Iterator[bytes | memoryview]:
    """Yield the chunks of what was read of a file already, and of the rest of it."""
    while True:
        if len(first) < CHUNK_BYTES:
            first += read_bytes(file, CHUNK_BYTES - len(first))
        data = bytes(first[:CHUNK_BYTES])
        if not data:
            return
        del first[:CHUNK_BYTES]
        yield data
