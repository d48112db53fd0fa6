"""A Celery result backend: `anabranch:///srv/tasks`, the same directory as the broker's (kombu.py) or another.

Celery finds it by itself, as an entry point. Results are the map `kombu.results`, each for `result_expires`. The parts
of a chord that have returned are a map of their own, with what they have returned. The first that a part has returned
counts. It may be done again, since its worker was killed, or taken for lost, since its process was. So the chord's body
is called, or its errbacks, and never both.

A part returns before its result is stored, and the last one calls the chord's body before that. Once a result is
SUCCESS, Celery acks its task even where the process that executed it has died, and does no more for the chord. It also
passes over the parts behind a failed task once their results are FAILURE.

A chord is kept until its first part has returned, and then as long as each part returns in `result_chord_expires` after
the one before, or in `result_expires` if that is not set.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

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
_CALLED: Final = "called"
_ALL_SUCCEEDED: Final = b":succeeded"
"""Follows the id of the part that has called a chord's body, if no part has failed."""


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


@contextmanager
def _fitting() -> Iterator[None]:
    """Make what is too large to be stored an EncodeError."""
    try:
        yield
    except MessageTooLargeError as error:
        raise EncodeError(
            f"the result is too large to be stored: {error}. Return where it is, or raise message_bytes_max"
        ) from error


def _put_once(held: Map, key: str, value: bytes, ttl: float | None) -> bytes:
    """Give a key a value, unless it has one; return the one that it has then."""
    while True:
        with suppress(OutcomeUnknownError):  # the owner was killed: look
            if held.put_if_absent(key, value, ttl=ttl):
                return value
            there = held.get(key)
            if there is not None:
                return there


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
        with _fitting():
            self._results.put(key, _bytes(value), ttl=self.expires or None)

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

    def _apply_chord_incr(self, header_result_args: Any, body: Any, **given: Any) -> None:
        """Keep a chord's list of parts, however long these wait for a worker."""
        super()._apply_chord_incr(header_result_args, body, **given)
        self._results.touch(self.get_key_for_group(header_result_args[0]), None)

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
            self._return(request, state, result, is_ignored=True)

    def mark_as_failure(
        self, task_id: str, exc: Any, traceback: Any = None, request: Any = None, store_result: bool = True,
        *given: Any, **options: Any,
    ) -> None:  # fmt: skip
        """Mark a task as failed, unless it is a part that has returned, and lost its process before its result was
        stored: store that."""
        if not self._has_returned(task_id, request, store_result):
            super().mark_as_failure(task_id, exc, traceback, request, store_result, *given, **options)

    def mark_as_revoked(
        self, task_id: str, reason: str = "", request: Any = None, store_result: bool = True, *given: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        """Mark a task as revoked, unless it is a part that has returned, as `mark_as_failure`."""
        if not self._has_returned(task_id, request, store_result):
            super().mark_as_revoked(task_id, reason, request, store_result, *given, **options)

    def _has_returned(self, task_id: str, request: Any, store_result: bool) -> bool:
        """Return whether a task is a part of a chord that has counted as a success; store its result, if it is
        known still."""
        if request is None or not request.chord or not request.group:
            return False
        returned = self._parts(self.get_key_for_chord(request.group)).get(request.id)
        if returned is None:
            returned = self._results.get(self._note(request, request.id))
        meta = {} if returned is None else self.decode_result(returned)
        if meta.get("status") == SUCCESS:
            self.mark_as_done(task_id, meta["result"], request, store_result)
            return True
        called = self._results.get(self._note(request, _CALLED))
        return called is not None and called.endswith(_ALL_SUCCEEDED)

    def _parts(self, key: str) -> Map:
        return self._broker.router.map(f"kombu.{key}")

    def _note(self, request: Any, about: str) -> str:
        """Return the key of what is noted of a chord beside its parts, for as long as its results are kept."""
        return f"{self.get_key_for_chord(request.group)}.{about}"

    def _return(self, request: Any, state: str, result: Any, is_ignored: bool = False) -> None:
        """Count a part of a chord. The one that finds all done calls the chord's body; if it is done again after that,
        since its worker was killed before it could ack, it calls again only if it had not come to its end."""
        if not request.group:
            return
        parts = self._parts(self.get_key_for_chord(request.group))
        group = self._restore_group(request.group)
        if group is not None:
            meta = {"status": state, "result": self.encode_result(result, state), "is_ignored": is_ignored}
            with _fitting():
                _put_once(parts, request.id, _bytes(self.encode(meta)), self._keep(request, parts))
            size = request.chord.get("chord_size")
            _joined.size = len(group["result"]) if size is None else size
            if parts.count() < _joined.size:
                return
            metas = {task_id: self.decode_result(value) for task_id, value in parts.items()}
            if not self._may_call(request, metas):
                return
            _joined.metas = metas
        elif self._results.get(self._note(request, _CALLED)) is not None:
            parts.delete()  # in place of the one that has called, which may have been killed before it could
            return
        try:
            super().on_chord_part_return(request, state, result)
        finally:
            _joined.metas = {}

    def incr(self, key: str) -> int:
        """Return how many parts are done: all, since nobody else comes here."""
        return int(_joined.size)

    def _may_call(self, request: Any, metas: dict[str, dict[str, Any]]) -> bool:
        """Return whether this part is to call the chord's body, of several that see that all are done. Keep what has
        been returned and is not stored yet: the parts are gone after the call."""
        expires = self.chord_expires or None
        succeeded = {task_id: meta for task_id, meta in metas.items() if meta["status"] == SUCCESS}
        stored = self._results.get_many(self.get_key_for_task(task_id) for task_id in succeeded)
        for task_id, meta in succeeded.items():
            if not meta["is_ignored"] and self.get_key_for_task(task_id) not in stored:
                self._results.put(self._note(request, task_id), _bytes(self.encode(meta)), ttl=expires)
        ours: bytes = request.id.encode() + _ALL_SUCCEEDED * (len(succeeded) == len(metas))
        return _put_once(self._results, self._note(request, _CALLED), ours, expires) == ours

    def _keep(self, request: Any, parts: Map) -> float | None:
        """Return how long what a part has returned is kept. Once in `chord_expires` seconds, as parts come, all that
        the chord has is kept for twice as long from then on."""
        expires: int | None = self.chord_expires
        if not expires:
            return None
        note = self._note(request, "kept")
        if self._results.get(note) is None:
            self._results.touch(self.get_key_for_group(request.group), 2 * self._chord_result_expires or None)
            for task_id in dict(parts.items()):
                parts.touch(task_id, 2 * expires)
            self._results.put(note, b"", ttl=expires)
        return 2 * expires
