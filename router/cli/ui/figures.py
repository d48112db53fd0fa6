"""The figures of the page: those of the other commands, as tables of text. None is worked out here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, Generic

from ....adapters.core.messages import Message, T
from ....adapters.core.store_types import StoreStats, SubscriptionKey
from ....policies.errors import DestinationError
from ....policies.names.destination import Destination
from ....policies.text import count_of, human_bytes, printable
from ...api.consumer import Consumer
from ...api.dead_letter import PREFIX, dead_letter_of
from ...api.queue import Queue
from ...router import Router, inspection_of
from ...upkeep.batches import give_back, received
from ...upkeep.explanation_text import SEGMENT_HEADS, other_text, segment_rows, summary
from ...upkeep.overview import by_waiting
from ..operating import health_shown
from ..queues import HEADS, require_lasting_sources, row_of, shown
from ..showing import hint, plain_value, text_of
from ..top import Look, look_at, rows_of_stores

Table = dict[str, Any]
"""`heads`: the names of columns; `left`: how many of the first are text, while the others are numbers; `rows`: cells as
text; `keys`: of each row what its buttons act on, where it has some."""

FRESH: Final = 1.0
"""Seconds for which all pages are shown the same look."""
CHECKED: Final = 5.0
"""Seconds for which they are told the same of what is asked less often, and costs more."""
STALE: Final = 30.0
"""Seconds after which rates since a look say nothing of now."""
DESTINATIONS: Final = 50
"""Queues and subscriptions that are shown: those whose first message has waited longest."""
LETTERS: Final = 50
"""Dead letters of a queue that are shown, and can be put back or discarded one by one: the first."""
LETTERS_BYTES: Final = 64 << 20
"""Bytes of dead letters that are received at once, to settle some of them."""
SEGMENTS: Final = 200
"""Rows of segments of a store that are shown; `anabranch explain` has all."""
BODY: Final = 2000
"""Characters of a body that are shown."""


class _Shared(Generic[T]):
    """A figure that all pages share for some seconds, or the error in its place. Threads: all; one finds it, the others
    wait."""

    def __init__(self, seconds: float, find: Callable[[], T]) -> None:
        self._seconds, self._find = seconds, find
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._found: Future[T] | None = None
        self._at = 0.0

    def __call__(self) -> T:
        with self._lock:
            if self._found is None or time.monotonic() - self._at >= self._seconds:
                self._found = Future()
                try:
                    self._found.set_result(self._find())
                except Exception as error:
                    self._found.set_exception(error)
                self._at = time.monotonic()
            return self._found.result()


class Figures:
    """Asks one router for all pages. Threads: all. Errors are the router's."""

    def __init__(self, router: Router, *, bodies: bool) -> None:
        """`bodies`: dead letters are shown with their headers and bodies."""
        self._router, self._bodies = router, bodies
        self._before: Look | None = None
        """The latest look; for the thread that looks."""
        self.look: Final = _Shared(FRESH, self._looked)
        """Returns what changes from second to second: stores, the fullest destinations, and dead-letter queues."""
        self.health: Final = _Shared(CHECKED, self._checked)
        """Returns whether each store can be used, and what is wrong. Each store syncs for it."""
        self.transactions: Final = _Shared(CHECKED, self._waiting)
        """Returns the transactions that wait for an outcome."""
        self.explain: Final = _Shared(CHECKED, self._explained)
        """Returns why each segment is kept. Each journal store waits meanwhile."""

    def _looked(self) -> dict[str, Any]:
        look, stats, before = look_at(self._router), self._router.stats(), self._before
        if before is not None and look.at - before.at >= STALE:
            before = None
        self._before = look
        letters = [found for store in look.stores for found in store["dead_letter_queues"].items()]
        letters.sort(key=lambda one: (-one[1], one[0]))
        return {
            "owner_pid": look.owner_pid,
            "stores": _stores(look, before, stats.stores),
            "destinations": self._destinations(look) | {"total": sum(store["holding"] for store in look.stores)},
            "letters": _table(
                ("dead-letter queue", "letters"), 1,
                [(printable(name), f"{count:,}") for name, count in letters],
                [name for name, _ in letters],
            ),
            "notes": [
                *(f"Store {name} does not answer; these are old figures." for name in stats.unresponsive),
                *(f"Store {one['store']} cannot be used: {one['failed']}" for one in look.stores if one["failed"]),
            ],
        }  # fmt: skip

    def _destinations(self, look: Look) -> Table:
        """Return the queues and subscriptions that wait longest: those that do in each store, merged."""
        each = sorted((one for store in look.stores for one in store["waiting_longest"]), key=by_waiting)
        topics: dict[Destination, Mapping[SubscriptionKey, Consumer[Any]]] = {}
        rows = []
        for name, pair, _, _ in each[:DESTINATIONS]:
            destination, key = Destination.restored(name), None if pair is None else tuple(pair)
            consumer: Consumer[Any] | None = None
            if key is None:
                consumer = self._router.queue(destination)
            else:
                if destination not in topics:
                    there = self._router.topic(destination).subscriptions()
                    topics[destination] = {one.subscription.key: one for one in there}
                consumer = topics[destination].get(key)
            if consumer is not None:  # else it has ended meanwhile
                rows.append(_without_dead(shown(row_of(self._router, consumer, 0))))
        return _table(_without_dead(HEADS), 1, rows)

    def _checked(self) -> dict[str, Any]:
        found = self._router.health()
        (heads, *rows), wrong = health_shown(found, self._router.config)
        return {"ok": found.ok, "wrong": wrong, "stores": _table(heads, 3, rows)}

    def _waiting(self) -> dict[str, Any]:
        heads = ("transaction", "stores", "outcome", "why it waits", "sends", "acks")
        rows = [
            (
                str(one.xid or one.transaction), ", ".join(one.stores), one.outcome or "none yet", one.reason,
                f"{one.sends:,}", f"{one.acks:,}",
            )
            for one in self._router.in_doubt()
        ]  # fmt: skip
        return {"transactions": _table(heads, 4, rows)}

    def letters(self, name: str) -> dict[str, Any]:
        """Return the first dead letters of a queue. Raises DestinationError for one that is not shown as such."""
        queue = self._letters_of(name)
        heads = ["message", "from", "reason", "error", "sent", "deliveries", "bytes"]
        heads[5:5] = ["headers", "body"] if self._bodies else []
        rows, keys = [], []
        for message in queue.browse(LETTERS):
            rows.append(self._letter(message))
            keys.append(str(message.seq))
        return {"letters": _table(heads, len(heads) - 2, rows, keys), "depth": queue.depth()}

    def _letter(self, message: Message[Any]) -> list[str]:
        letter = dead_letter_of(message)
        name = message.message_id if letter is None or letter.message_id is None else letter.message_id
        source, reason, error, deliveries = "somebody sent it here", "", "", message.deliveries
        if letter is not None:
            source, reason, deliveries = str(letter.source), letter.reason, letter.deliveries
            source += f" {letter.subscription[1]}" if letter.subscription is not None else ""
            error = ": ".join(filter(None, (letter.error_type, letter.error_text)))
        sent = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(message.timestamp_ms // 1000))
        texts = [name or f"number {message.seq}", source, reason, error, sent]
        if self._bodies:
            headers = [f"{key}: {plain_value(value)}" for key, value in message.headers.items()
                       if not key.startswith(PREFIX)]  # fmt: skip
            text = hint(message) if message.is_large else text_of(message) or hint(message)
            texts += ["\n".join(headers), text if len(text) <= BODY else f"{text[:BODY]} ..."]
        return [*map(_printable_lines, texts), f"{deliveries:,}", human_bytes(message.size)]

    def _letters_of(self, name: str) -> Queue:
        """Return a dead-letter queue that is shown: no other one is read, or changed."""
        if name not in self.look()["letters"]["keys"]:
            raise DestinationError(f"{name} is none of the dead-letter queues that are shown here, or it is empty")
        return self._router.queue(Destination.restored(name))

    def settle(self, name: str, seqs: Sequence[str] | None, put_back: bool) -> str:
        """Put dead letters back where they came from, or remove them for good: those with these numbers, or all of the
        queue. Returns what became of them. Raises as Router.requeue, having changed no letter of those named."""
        queue = self._letters_of(name)
        verb = "put back" if put_back else "discarded"
        if seqs is None:
            if put_back:
                require_lasting_sources(self._router, queue.browse())
            done = self._router.requeue(queue) if put_back else queue.purge()
            return f"{count_of(done, 'dead letter')} of {queue.destination} {verb}."
        left = received(queue, LETTERS, LETTERS_BYTES)
        try:
            wanted = set(seqs)
            chosen = [one for one in left if str(one.seq) in wanted]
            if put_back:
                require_lasting_sources(self._router, chosen)
                self._router.requeue(chosen)
            else:
                self._router.ack(chosen)
            left = [one for one in left if str(one.seq) not in wanted]
        finally:
            give_back(left)
        missed = len(wanted) - len(chosen)
        rest = f" {missed:,} could not be received: somebody holds them, or they are gone." if missed else ""
        return f"{count_of(len(chosen), 'dead letter')} of {queue.destination} {verb}.{rest}"

    def _explained(self) -> dict[str, Any]:
        found = inspection_of(self._router).explain()
        stores = []
        for store in found.stores:
            rows = segment_rows(store, found.at_ms)
            more = f" {len(rows) - SEGMENTS:,} more rows: see `anabranch explain`." if len(rows) > SEGMENTS else ""
            table = _table((*SEGMENT_HEADS[:1], SEGMENT_HEADS[3], *SEGMENT_HEADS[1:3]), 2,
                           [(row[0], row[3], row[1], row[2]) for row in rows[:SEGMENTS]])  # fmt: skip
            text = " ".join([summary(store) + more, *(f"Damage: {one}" for one in store.damages)])
            stores.append({"name": store.name, "text": text, "segments": table})
        broken = [f"{one.name}: cannot be explained: {one.error}" for one in found.unreadable]
        return {"notes": [*found.notes, *map(other_text, found.others), *broken], "stores": stores}


def _stores(look: Look, before: Look | None, stats: Mapping[str, StoreStats]) -> Table:
    heads, *rows = rows_of_stores(look, before)
    at = heads.index("sync")  # which their health says, in a table that has room for it
    heads, *rows = [(*row[:at], *row[at + 1 :]) for row in (heads, *rows)]
    disk = [stats.get(store["store"]) for store in look.stores]
    cells = [("-", "-") if one is None else (human_bytes(one.live_bytes), human_bytes(one.held_bytes)) for one in disk]
    return _table((*heads, "disk live", "disk held"), 2, [(*row, *more) for row, more in zip(rows, cells, strict=True)])


def _without_dead(row: Sequence[str]) -> Sequence[str]:
    """Leave a column out: which letters come from where takes a walk over all of them."""
    at = HEADS.index("dead")
    return (*row[:at], *row[at + 1 :])


def _printable_lines(text: str) -> str:
    return "\n".join(map(printable, text.splitlines()))


def _table(heads: Sequence[str], left: int, rows: Sequence[Sequence[str]], keys: Sequence[str] | None = None) -> Table:
    return {"heads": heads, "left": left, "rows": rows, "keys": keys}
