"""The backend: from a call to a message and back, and one attempt of a task.

A call is one transaction: its record into the map `django.<alias>.results`, and the record's id into the queue
`django.<alias>.queue.<queue_name>`. The outcome and the end of the lease are one transaction, too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timedelta
from functools import cached_property, partial
from traceback import format_exception
from typing import Any, Final

from django.core import checks
from django.db import connections, transaction
from django.tasks import TaskContext, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TASK_MIN_PRIORITY, TaskError
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_enqueued, task_finished, task_started
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.json import normalize_json

import anabranch

from .options import missing, read, router_of

log: logging.Logger = logging.getLogger(__name__)

_TIMES: Final = {"enqueued_at", "started_at", "last_attempted_at", "finished_at", "run_after"}


_LARGE: Final = 1 << 20
"""Bytes of a record from which on an error of its transaction is that it is too large."""

_TRACEBACK_MAX: Final = 100_000
"""Characters of a traceback that are kept, of its beginning and its end: an error may tell a whole file."""


def change(result: TaskResult, **values: Any) -> None:
    """Set fields of a result, which is frozen for others."""
    for name, value in values.items():
        object.__setattr__(result, name, value)


def _json(value: Any, what: str) -> Any:
    try:
        return normalize_json(value)
    except (TypeError, ValueError) as error:
        shown = f"{value!r:.200}, which has to be JSON"
        raise TypeError(f"{what} {shown}. {error}; pass what it is made of, or a key to it") from error


def _times(values: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) if name in _TIMES and value else value for name, value in values.items()}


_plain = partial(_times, change=datetime.isoformat)
_with_times = partial(_times, change=datetime.fromisoformat)


class AnabranchBackend(BaseTaskBackend):
    """Django's interface, and `run` for a worker. Django makes one for each thread; they share a router."""

    supports_defer = supports_async_task = supports_get_result = supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        self._given = read(alias, self.options)

    def check(self, **_: Any) -> list[Any]:
        """Say whether the directory is there, for `manage.py check`."""
        wrong = missing(self.alias, self._given)
        return [checks.Error(wrong, id="anabranch.E001")] if wrong is not None else []

    @cached_property
    def router(self) -> anabranch.Router:
        """The router, opened on first use."""
        return router_of(self.alias, self._given)

    @cached_property
    def records(self) -> anabranch.Map:
        """The records of calls, by the result's id."""
        return self.router.map(f"django.{self.alias}.results")

    def queue(self, name: str) -> anabranch.Queue:
        """Return the queue of a `queue_name`, which may be any text."""
        return self.router.queue(anabranch.Destination.queue(f"django.{self.alias}.queue.{name}"))

    # Results as they are kept

    def _encoded(self, result: TaskResult) -> bytes:
        record = {field.name: getattr(result, field.name) for field in fields(result)}
        task = {field.name: getattr(result.task, field.name) for field in fields(result.task)}
        record["task"] = _plain(task | {"func": result.task.module_path})
        record["errors"] = [_pair(error) for error in result.errors]
        return json.dumps(_plain(record)).encode()

    def _decoded(self, body: bytes) -> TaskResult:
        record = _with_times(json.loads(body))
        value = record.pop("_return_value")
        record["task"] = self.task_class._reconstruct(_with_times(record["task"]))
        record["status"] = TaskResultStatus(record["status"])
        record["errors"] = [TaskError(exception_class_path=path, traceback=text) for path, text in record["errors"]]
        result = TaskResult(**record)
        change(result, _return_value=value)
        return result

    # The interface

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> TaskResult:
        """Send a task: now, or in an atomic block of the database once that is committed, or within it."""
        self.validate_task(task)
        what = f"{task.module_path} is called with"
        result = TaskResult(
            task=task, id=get_random_string(32), status=TaskResultStatus.READY, enqueued_at=timezone.now(),
            started_at=None, last_attempted_at=None, finished_at=None, args=_json(args, what),
            kwargs=_json(kwargs, what), backend=self.alias, errors=[], worker_ids=[],
        )  # fmt: skip
        database = self._given.database
        if database is None or not connections[database].in_atomic_block:
            self._send(result)
        elif self._given.in_transaction:
            self._send_within(result, connections[database])
        else:
            transaction.on_commit(partial(self._send, result), using=database)
        return result

    def get_result(self, result_id: str) -> TaskResult:
        """Read a result. Raises TaskResultDoesNotExist."""
        try:
            body = self.records.get(result_id)
        except ValueError:  # no key of ours
            body = None
        if body is None:
            raise TaskResultDoesNotExist(result_id)
        return self._decoded(body)

    def _sending(self, task: Any, when: datetime | None) -> dict[str, Any]:
        if when is not None and timezone.is_naive(when):
            when = timezone.make_aware(when)
        return {"priority": task.priority - TASK_MIN_PRIORITY, "deliver_at": when}

    def _add(self, tx: anabranch.Transaction, result: TaskResult, when: datetime | None) -> None:
        task = result.task
        tx.put(self.records, result.id, self._encoded(result))
        tx.send(self.queue(task.queue_name), result.id.encode(), **self._sending(task, when))

    def _send(self, result: TaskResult) -> None:
        with self.router.transaction() as tx:
            self._add(tx, result, result.task.run_after)
        task_enqueued.send(type(self), task_result=result)

    def _send_within(self, result: TaskResult, connection: Any) -> None:
        """Send the record itself, in the ORM's transaction, in which no map can be changed."""
        body, task = self._encoded(result), result.task
        sending = self._sending(task, task.run_after)
        self.queue(task.queue_name).send(body, connection=connection, **sending)

        def committed() -> None:
            self.records.put_if_absent(result.id, body)  # a worker may have been faster
            task_enqueued.send(type(self), task_result=result)

        transaction.on_commit(committed, using=connection.alias)

    # The work

    def run(self, message: anabranch.Message, worker_id: str) -> None:
        """Execute the task of a leased message once. Raises AnabranchError where its outcome could not be written: then
        it is to be executed again."""
        sent: bytes = message.body
        name = json.loads(sent)["id"] if sent.startswith(b"{") else sent.decode()
        body = self.records.get(name) or (sent if sent.startswith(b"{") else None)
        if body is None:
            log.warning("Task %s is not executed: its record was removed.", name)
            message.ack()
            return
        try:
            result = self._decoded(body)
        except Exception as error:
            log.exception("Task %s has failed, since it cannot be read: %s", name, body.decode())
            record = json.loads(body)
            record["errors"].append(_pair(_error(error)))
            record |= {"status": str(TaskResultStatus.FAILED), "finished_at": timezone.now().isoformat()}
            self._end(message, name, json.dumps(record).encode())
            return
        if result.is_finished:
            message.ack()
            return
        now, task = timezone.now(), result.task
        change(result, status=TaskResultStatus.RUNNING, last_attempted_at=now, started_at=result.started_at or now)
        result.worker_ids.append(worker_id)
        self.records.put(name, self._encoded(result))
        task_started.send(type(self), task_result=result)
        try:
            given = [TaskContext(task_result=result)] if task.takes_context else []
            value = task.call(*given, *result.args, **result.kwargs)
            change(result, _return_value=_json(value, f"{task.module_path} has returned"))
        except BaseException as error:  # a thread is told of no signal: they are the task's own
            self._failed(message, result, error, again=len(result.errors) < self._given.retries)
            return
        change(result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now())
        body = self._encoded(result)
        try:
            self._end(message, name, body)
        except (anabranch.MessageTooLargeError, anabranch.TransactionError) as error:
            if len(body) < _LARGE:
                raise
            result.errors.append(_error(error))
            change(result, status=TaskResultStatus.FAILED, _return_value=None)
            self.records.put(name, self._encoded(result), ttl=self._given.result_ttl)
            with suppress(anabranch.UnknownMessageError):  # the transaction gave it back; it comes again
                message.ack()
        task_finished.send(type(self), task_result=result)

    def _failed(self, message: anabranch.Message, result: TaskResult, error: BaseException, again: bool) -> None:
        """Write down that an attempt has failed. Where it is handled: Django's log tells the exception."""
        result.errors.append(_error(error))
        if not again:
            change(result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
            self._end(message, result.id, self._encoded(result))
            task_finished.send(type(self), task_result=result)
            return
        change(result, status=TaskResultStatus.READY)
        delay = self._given.retry_delay * 2 ** (len(result.errors) - 1)
        log.warning("Task %s has raised %.1000r; it is executed again in %s seconds.", result.id, error, delay)
        with self.router.transaction() as tx:
            tx.ack(message)
            self._add(tx, result, timezone.now() + timedelta(seconds=delay))

    def _end(self, message: anabranch.Message, name: str, body: bytes) -> None:
        with self.router.transaction() as tx:
            tx.ack(message)
            tx.put(self.records, name, body, ttl=self._given.result_ttl)


def _error(error: BaseException) -> TaskError:
    kind = type(error)
    path = f"{kind.__module__}.{kind.__qualname__}"
    text = "".join(format_exception(error))
    if len(text) > _TRACEBACK_MAX:
        half = _TRACEBACK_MAX // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters are left out]\n{text[-half:]}"
    return TaskError(exception_class_path=path, traceback=text)


def _pair(error: TaskError) -> list[str]:
    return [error.exception_class_path, error.traceback]
