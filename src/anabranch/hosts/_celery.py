"""A Celery result backend: `anabranch:///srv/tasks`, the same directory as the broker's (kombu.py) or another.

Celery finds it by itself, as an entry point. Results are the map `kombu.results`, each for `result_expires`. The parts
of a chord that have returned are a map of their own, with what they have returned: a part that is done again, since its
worker was killed, or counted again, since the owner was, counts once.

A part returns before its result is stored, and the last one calls the chord's body before that. Once a result is
SUCCESS, Celery acks its task even where the process that executed it has died, and does no more for the chord. It also
passes over the parts behind a failed task once their results are FAILURE.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from celery.backends.base import KeyValueStoreBackend
from celery.states import SUCCESS
from kombu.exceptions import EncodeError
from kombu.utils.url import parse_url

from anabranch import Map, MessageTooLargeError, OutcomeUnknownError

from .kombu import Broker, broker_of, directory_of

__all__ = ["Backend"]


class _Joined(threading.local):
    """The chord whose body a thread calls."""

    def __init__(self) -> None:
        self.size = 0
        self.metas: dict[str, dict[str, Any]] = {}
        """What its parts have returned, by their ids."""


_joined = _Joined()


class Backend(KeyValueStoreBackend):
    """Results of tasks in a directory."""

    implements_incr = True
    key_t = str

    def __init__(self, app: Any, *, url: str | None = None, **options: Any) -> None:
        super().__init__(app, url=url, **{"expires_type": int, **options})

    @property
    def _broker(self) -> Broker:
        parts = parse_url(self.url or "")
        return broker_of(directory_of(parts["virtual_host"], parts["hostname"]))

    @property
    def _results(self) -> Map:
        return self._broker.results

    def get(self, key: str) -> bytes | None:
        """Return what was stored under a key."""
        return self._results.get(key)

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        """Return what was stored under each key."""
        names = list(keys)
        found = self._results.get_many(names)
        return [found.get(key) for key in names]

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value. Raises EncodeError for one that is too large: Celery makes it the result, a failure."""
        self._put(self._results, key, value, self.expires)

    def _put(self, held: Map, key: str, value: str | bytes, expires: int | None) -> None:
        body = value.encode() if isinstance(value, str) else value
        try:
            held.put(key, body, ttl=expires or None)
        except MessageTooLargeError as error:
            raise EncodeError(
                f"the result is too large to be stored: {error}. Return where it is, or raise message_bytes_max"
            ) from error

    def delete(self, key: str) -> None:
        """Forget a key."""
        if key.startswith(self.chord_keyprefix):
            self._parts(key).delete()
        else:
            broker = self._broker
            with broker.router.transaction() as tx:
                tx.remove(broker.results, key)

    def expire(self, key: str, value: int) -> None:
        """Give a key another time than `set` did."""
        if value != self.expires and not key.startswith(self.chord_keyprefix):
            self._results.touch(key, value or None)

    def wait_for(
        self, task_id: str, timeout: float | None = None, interval: float = 0.5, no_ack: bool = True,
        on_interval: Callable[[], object] | None = None,
    ) -> Any:  # fmt: skip
        """Return the result of a task once it is ready. Its first state is waited for, later ones are asked for."""
        if task_id in _joined.metas:
            return _joined.metas[task_id]
        began = time.monotonic()
        self._results.wait(self.get_key_for_task(task_id), timeout)
        left = None if timeout is None else max(timeout - (time.monotonic() - began), 0)
        return super().wait_for(task_id, left, interval, no_ack, on_interval)

    # Chords

    def store_result(
        self, task_id: str, result: Any, state: str, traceback: Any = None, request: Any = None, **options: Any
    ) -> Any:
        """Store a result; that of a chord's part once the part has returned."""
        if state in self.READY_STATES and request is not None and request.chord:
            if self._get_task_meta_for(task_id)["status"] != SUCCESS:
                self._return(request, state, result)
            request.has_returned = True
        return super().store_result(task_id, result, state, traceback, request, **options)

    def on_chord_part_return(self, request: Any, state: str, result: Any, **options: Any) -> None:
        """Let a part return whose result was not stored: Celery ignores it."""
        if not request.get("has_returned"):
            self._return(request, state, result)

    def _parts(self, key: str) -> Map:
        return self._broker.router.map(f"kombu.{key}")

    def _return(self, request: Any, state: str, result: Any) -> None:
        """Count a part of a chord. The one that finds all done calls the chord's body; if it is done again after that,
        since its worker was killed before it could ack, it calls again only if it had not come to its end."""
        if not request.group:
            return
        parts = self._parts(self.get_key_for_chord(request.group))
        group = self._restore_group(request.group)
        if group is not None:
            meta = {"status": state, "result": self.encode_result(result, state)}
            self._put(parts, request.id, self.encode(meta), self.chord_expires)
            size = request.chord.get("chord_size")
            _joined.size = len(group["result"]) if size is None else size
            if parts.count() < _joined.size or not self._may_call(request):
                return
            _joined.metas = {task_id: self.decode_result(value) for task_id, value in parts.items()}
        elif self._results.get(self._call_key(request)) is not None:
            parts.delete()  # in place of the one that has called, which may have been killed before it could
            return
        try:
            super().on_chord_part_return(request, state, result)
        finally:
            _joined.metas = {}

    def incr(self, key: str) -> int:
        """Return how many parts are done: all, since nobody else comes here."""
        return int(_joined.size)

    def _call_key(self, request: Any) -> str:
        return f"{self.get_key_for_chord(request.group)}.called"

    def _may_call(self, request: Any) -> bool:
        """Return whether this part is to call the chord's body, of several that see that all are done."""
        key, ours, results = self._call_key(request), request.id.encode(), self._results
        while (called_by := results.get(key)) is None:
            with suppress(OutcomeUnknownError):  # the owner was killed: look
                results.put_if_absent(key, ours, ttl=self.chord_expires or None)
        return bool(called_by == ours)
