"""Reading messages back from the journal's files, while other threads ack, purge and reclaim them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

from ...policies.errors import CorruptionError
from ..base import Message, Store
from ..delivery import Feed, Note
from ..files import is_out_of_files, refused
from ..wal.log import Log
from ..wal.segment import Segment
from . import messages
from .applying import Applier
from .destinations import LENGTH, LSN, OFFSET, SEQ, DestinationState, Place

log = logging.getLogger(__name__)


class UnreadableError(CorruptionError):
    """The disk did not give a message's bytes, which may be whole: the same may be tried again."""


class Bodies:
    """The messages of one store. Reading takes no lock of the store; a message that is not where the index said is
    looked up once more, to tell one that has died meanwhile from damage."""

    def __init__(self, store: Store, the_log: Log, applier: Applier) -> None:
        self._store, self._log, self._applier = store, the_log, applier

    def one(self, state: DestinationState, place: Place, note: Note | None, deliveries: int = 0) -> Message | None:
        """The message at a place, leased for `note`; None if it has died meanwhile. Raises CorruptionError,
        UnreadableError, OutOfDescriptorsError."""
        segment = self._log.table.find(place[LSN])
        if segment is not None:
            try:
                record = messages.read_record(segment, place)
            except FileNotFoundError:
                record = b""
            except OSError as error:
                if is_out_of_files(error):
                    what = f"message {place[SEQ]} of {state.destination} cannot be read now"
                    raise refused(f"{self._log.name}: {what}: {error}", error) from error
                raise UnreadableError(str(segment.path), place[OFFSET], f"the disk cannot read it: {error}") from error
            message = messages.decode(self._store, state, segment.seed, place, record, note, deliveries)
            if message is not None:
                return message
        self._applier.check()
        with self._applier.lock:
            index = self._applier.current()
            alive = index.rows.find(state, place[SEQ])
        if alive != place:
            return None
        where = str(segment.path) if segment is not None else str(self._log.files.directory)
        raise CorruptionError(
            where,
            place[OFFSET],
            f"message {place[SEQ]} of {state.destination} does not read back: its bytes are damaged. "
            "Receivers go on behind it; restore the file from a backup to have it again",
        )

    def page(
        self, state: DestinationState, places: list[Place], counts: Mapping[int, int], feed: Feed | None
    ) -> Iterator[Message]:
        """The messages at these places, in order, without those that have died since they were looked up, of a topic's
        subscription those that it has acked. `counts`: how often they have come back, by seq, where they have."""
        for segment, run in self._segments_of(places):
            start, data = self._read_ahead(segment, run)
            for place in run:
                if feed is not None or self._applier.behind:
                    self._applier.check()
                    with self._applier.lock:
                        rows = self._applier.current().rows
                        if feed is not None and rows.place(feed, place[SEQ]) is None:
                            continue
                if segment is not None and segment.is_dead(place[LSN]):
                    continue
                message, count = None, counts.get(place[SEQ], 0)
                if segment is not None:
                    offset = place[OFFSET] - start
                    record = data[offset : offset + place[LENGTH]]
                    message = messages.decode(self._store, state, segment.seed, place, record, None, count)
                if message is None:
                    message = self.one(state, place, None, count)
                if message is not None:
                    if feed is not None:
                        message.subscription = feed.key
                    yield message

    def _segments_of(self, places: list[Place]) -> Iterator[tuple[Segment | None, list[Place]]]:
        """A page cut where the segment changes; by priority it may come back to one."""
        table = self._log.table
        lsns = [place[LSN] for place in places]
        segment = table.find(min(lsns))
        if segment is table.find(max(lsns)):
            yield segment, places
            return
        segment, run = table.find(places[0][LSN]), [places[0]]
        for place in places[1:]:
            found = table.find(place[LSN])
            if found is not segment:
                yield segment, run
                segment, run = found, []
            run.append(place)
        yield segment, run

    def _read_ahead(self, segment: Segment | None, places: list[Place]) -> tuple[int, bytes]:
        """The bytes of all these places; nothing if that would read too much or cannot be done: each is then read
        on its own, and errors are told there."""
        first, last = messages.span_of(places)
        if segment is not None and last - first <= messages.SPAN_BYTES:
            try:
                span = first, messages.read_span(segment, first, last)
            except OSError as error:
                log.debug("segment %s cannot be read ahead: %s", segment.path, error)
            else:
                return span
        return 0, b""
