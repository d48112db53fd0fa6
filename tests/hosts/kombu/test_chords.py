"""A process dies at each request that it makes of the owner for a part of a chord; the body is called all the same."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kombu
import pytest
from celery import Celery, chain, chord
from celery.app.trace import ExceptionInfo, trace_task_ret
from celery.exceptions import WorkerLostError
from celery.worker.request import Request

from anabranch.hosts.kombu import broker_of
from anabranch.router.sharing.client.connection import Connection

QUEUE = "chords"


@pytest.fixture(scope="module")
def app(directory: Path) -> Celery:
    url = f"anabranch://{directory}"
    app = Celery("chords", broker=url, backend=url, set_as_current=False)
    app.conf.update(task_acks_late=True, task_reject_on_worker_lost=True, task_default_queue=QUEUE)

    @app.task(name="part")
    def part(number: int) -> int:
        return number

    @app.task(name="failing")
    def failing(number: int) -> None:
        raise ValueError(number)

    @app.task(name="not_again", reject_on_worker_lost=False)
    def not_again(number: int) -> int:
        return number

    @app.task(name="body")
    def body(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(name="errback")
    def errback(task_id: str) -> None:
        """Do nothing."""

    return app


def received(app: Celery, message: Any) -> Request:
    return Request(message, app=app, on_ack=message.ack_log_error, on_reject=message.reject_log_error)


def killed(request: Request, at: int) -> bool:
    """Execute a task in a process that dies as it makes its request of that number; return whether it did."""
    child = os.fork()
    if child == 0:
        try:
            send, numbers = Connection._send, itertools.count(1)

            def counted(self: Connection, asked: Any) -> None:
                if next(numbers) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                send(self, asked)

            Connection._send = counted  # type: ignore[method-assign]
            message = request.message
            given = request.request_dict, message.body, message.content_type, message.content_encoding
            trace_task_ret(request.name, request.id, *given, app=request.app)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def by_worker(request: Request) -> None:
    """Let a worker do what it does once it finds that the process of a task has died."""
    try:
        raise WorkerLostError
    except WorkerLostError:
        request.on_failure(ExceptionInfo())


def without_worker(request: Request) -> None:
    """Let nobody do anything: the worker has died too."""
    request.message.requeue()


def executed(
    app: Celery, connection: kombu.Connection, dies: int, at: int, end: Callable[[Request], None]
) -> tuple[list[Any], bool]:
    """Execute all tasks that wait, the one with the argument `dies` first in a process that dies at a request. Return
    what the body and the errback were called with, each time, and whether that process came so far."""
    calls, has_died = [], False
    while (message := connection.default_channel.basic_get(QUEUE)) is not None:
        (given,), *_ = message.payload
        request = received(app, message)
        if request.name in {"body", "errback"}:
            calls.append(given)
            message.ack()
        elif given != dies or has_died:
            request.execute()
        elif killed(request, at):
            has_died = True
            end(request)
        else:
            request.on_success((0, None, 0.0))
    return calls, has_died


@pytest.mark.parametrize("dies", range(2))
@pytest.mark.parametrize("end", [by_worker, without_worker])
def test_a_chord_is_called_wherever_a_process_dies(
    app: Celery, directory: Path, dies: int, end: Callable[[Request], None]
) -> None:
    times = []
    router = broker_of(directory).router
    with app.connection() as connection:
        for at in itertools.count(1):
            result = chord([app.tasks["part"].s(number) for number in range(2)], app.tasks["body"].s())()
            calls, has_died = executed(app, connection, dies, at, end)
            assert calls and all(given == [0, 1] for given in calls), f"killed at request {at}: {calls}"
            assert [one.state for one in result.parent.results] == ["SUCCESS", "SUCCESS"], at
            assert not router.exists(f"map://kombu.chord-unlock-{result.parent.id}"), at
            if not has_died:
                break
            times.append(len(calls))
    # Twice where it died after the send, and before it had noted that.
    assert times.count(1) > 4 and times.count(2) <= 2 and set(times) <= {1, 2}, times


def test_a_chord_fails_wherever_a_process_dies_that_fails_a_part(app: Celery) -> None:
    """A part that was to come after a task, which failed."""
    part, failing, body = (app.tasks[name] for name in ("part", "failing", "body"))
    with app.connection() as connection:
        for at in itertools.count(1):
            result = chord([part.s(0), chain(failing.s(1), part.s())], body.s())()
            calls, has_died = executed(app, connection, 1, at, without_worker)
            assert (calls, result.state) == ([], "FAILURE"), at
            if not has_died:
                break
    assert at > 5


@pytest.mark.parametrize(("dies", "is_late"), [(0, False), (0, True), (1, False)])
def test_a_part_whose_process_dies_has_returned_or_failed(app: Celery, dies: int, is_late: bool) -> None:
    """Without `task_reject_on_worker_lost`: the body is called, or the errback, and never both, also where the worker
    finds the process dead once the other part has returned."""
    part, body, errback = (app.tasks[name] for name in ("not_again", "body", "errback"))
    outcomes = []
    with app.connection() as connection:
        for at in itertools.count(1):
            parts = [part.s(number).on_error(errback.s()) for number in range(2)]
            result = chord(parts, body.s().on_error(errback.s()))()
            late: list[Request] = []
            calls, has_died = executed(app, connection, dies, at, late.append if is_late else by_worker)
            for request in late:
                by_worker(request)
                calls += executed(app, connection, dies, at, by_worker)[0]
            if [0, 1] in calls:
                states = [one.state for one in result.parent.results]
                assert (calls, states) == ([[0, 1]] * len(calls), ["SUCCESS", "SUCCESS"]), f"at {at}: {calls}, {states}"
            else:
                failed = {result.parent.results[dies].id, result.id}
                assert ({*calls}, len(calls), result.state) == (failed, 2, "FAILURE"), f"at {at}: {calls}"
            if not has_died:
                break
            outcomes.append([0, 1] in calls)
    assert outcomes == sorted(outcomes) and {*outcomes} == {True, False}, outcomes


def test_a_part_that_is_revoked_once_it_has_counted_is_a_success(app: Celery) -> None:
    part, body = app.tasks["part"], app.tasks["body"]
    outcomes: list[bool] = []
    with app.connection() as connection:
        while not any(outcomes):  # until it has counted
            result = chord([part.s(number) for number in range(2)], body.s())()
            at = len(outcomes) + 1
            calls, has_died = executed(
                app, connection, 1, at, lambda request: request._announce_revoked("terminated", True, "9", False)
            )
            assert has_died
            states = [one.state for one in result.parent.results]
            assert ([0, 1] in calls, states) in [
                (True, ["SUCCESS", "SUCCESS"]), (False, ["SUCCESS", "REVOKED"])
            ], f"at {at}: {calls}, {states}"  # fmt: skip
            outcomes.append([0, 1] in calls)
    assert outcomes[0] is False


def test_a_part_that_is_out_of_time_has_failed_though_it_returns(app: Celery) -> None:
    part, body, errback = (app.tasks[name] for name in ("not_again", "body", "errback"))
    with app.connection() as connection:
        result = chord([part.s(0).on_error(errback.s()), part.s(1)], body.s().on_error(errback.s()))()
        request = received(app, connection.default_channel.basic_get(QUEUE))
        request.on_timeout(soft=False, timeout=1)
        request.execute()
        calls, _ = executed(app, connection, -1, 0, by_worker)
    assert ({*calls}, len(calls), result.state) == ({request.id, result.id}, 2, "FAILURE")


def test_a_chord_is_called_however_long_its_parts_take_together(app: Celery, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as each comes in `result_expires`; where this machine was slower, the chord begins again."""
    monkeypatch.setattr(app.backend, "expires", 1)
    part, body = app.tasks["part"], app.tasks["body"]
    with app.connection() as connection:
        for _ in range(20):
            began, slowest = time.monotonic(), 0.0
            result = chord([part.s(number) for number in range(4)], body.s())()
            for _ in range(4):
                time.sleep(0.7)
                received(app, connection.default_channel.basic_get(QUEUE)).execute()
                began, before = time.monotonic(), began
                slowest = max(slowest, began - before)
            calls, _ = executed(app, connection, -1, 0, by_worker)
            if slowest < 1:
                break
    assert (calls, slowest < 1) == ([[0, 1, 2, 3]], True), (result.state, slowest)


def test_a_chord_is_called_however_long_its_first_part_waits(app: Celery, directory: Path) -> None:
    results = broker_of(directory).router.map("kombu.results")
    with app.connection() as connection:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app.backend, "expires", 1)
            result = chord([app.tasks["part"].s(number) for number in range(2)], app.tasks["body"].s())()
            results.put("later", b"", ttl=1)
        group = app.backend.get_key_for_group(result.parent.id)
        while results.get("later") is not None:
            time.sleep(0.05)
        assert results.get(group) is not None
        calls, _ = executed(app, connection, -1, 0, by_worker)
        assert calls == [[0, 1]]
        assert results.get(group) is None
