"""What is told of routers, as the SDK of OpenTelemetry has it."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import anabranch
from anabranch import aio
from anabranch.hosts import opentelemetry as host
from anabranch.hosts.opentelemetry import instrument, uninstrument

PATIENCE = 120.0


class Told:
    """What an SDK was told."""

    def __init__(self) -> None:
        self.exporter, self.reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracer_provider = TracerProvider()
        self.tracer_provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.meter_provider = MeterProvider([self.reader])

    def spans(self) -> list[Any]:
        return sorted(self.exporter.get_finished_spans(), key=lambda span: (span.start_time, span.end_time))

    def span(self, name: str) -> Any:
        (span,) = (span for span in self.spans() if span.name == name)
        return span

    def points(self, metric: str) -> dict[tuple[str, ...], int]:
        """Counts by operation, template and type of error, as far as they have them."""
        data = self.reader.get_metrics_data()
        names = ("messaging.operation.name", "messaging.destination.template", "error.type")
        return {
            tuple(point.attributes[name] for name in names if name in point.attributes): getattr(
                point, "count", getattr(point, "value", 0)
            )
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for one in scope.metrics
            if one.name == metric
            for point in one.data.data_points
        }


def links_of(span: Any) -> list[int]:
    return [link.context.span_id for link in span.links]


@pytest.fixture
def told() -> Iterator[Told]:
    told = Told()
    instrument(tracer_provider=told.tracer_provider, meter_provider=told.meter_provider, durations_a_second=math.inf)
    yield told
    uninstrument()


@pytest.fixture
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[anabranch.Router]:
    memory = anabranch.MemoryOptions(max_deliveries=2, dead_letter="dead.{name}", message_bytes_max=100)
    stores = [anabranch.StoreConfig("orders", ["orders.>"], memory=memory), anabranch.StoreConfig("rest", [">"])]
    with anabranch.open(anabranch.Config(tmp_path / "data", stores), shared=getattr(request, "param", False)) as router:
        yield router


@pytest.mark.parametrize("router", [False, True], indirect=True, ids=["own", "shared"])
def test_from_a_sender_to_who_processes(told: Told, router: anabranch.Router) -> None:
    queue = router.queue("orders.new")
    receipt = queue.send(b"1", {"a": 1}, "id-1")
    assert receipt.seq >= 0
    queue.receive_many(5)[0].release()
    with queue.receive() as message:  # type: ignore[union-attr]
        assert message.headers["a"] == 1 and "traceparent" in message.headers
        inside = trace.get_current_span()
    assert not trace.get_current_span().get_span_context().is_valid
    names = ["send", "receive", "release", "receive", "process", "ack"]
    spans = told.spans()
    assert [span.name for span in spans] == [f"{name} orders.>" for name in names]
    send, received, _, _, process, ack = spans
    kinds = [span.kind for span in spans]
    assert kinds == [SpanKind.PRODUCER, *[SpanKind.CLIENT] * 3, SpanKind.CONSUMER, SpanKind.CLIENT]
    assert inside.get_span_context() == process.context and ack.parent == process.context
    assert process.parent.span_id == send.context.span_id, "nothing else is its parent"
    assert all(links_of(span) == [send.context.span_id] for span in spans[1:])
    assert dict(send.attributes) == {
        "messaging.system": "anabranch",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "queue://orders.new",
        "messaging.destination.template": "orders.>",
        "messaging.message.id": "id-1",
    }
    assert received.attributes["messaging.batch.message_count"] == 1
    assert "messaging.message.id" not in received.attributes
    assert process.attributes["messaging.message.id"] == "id-1"
    assert process.attributes["messaging.anabranch.message.deliveries"] == 2
    durations = told.points("messaging.client.operation.duration")
    expected = {"send": 1, "receive": 2, "release": 1, "ack": 1}
    assert durations == {(name, "orders.>"): count for name, count in expected.items()}
    assert told.points("messaging.process.duration") == {("process", "orders.>"): 1}
    assert told.points("messaging.client.sent.messages") == {("send", "orders.>"): 1}
    assert told.points("messaging.client.consumed.messages") == {("receive", "orders.>"): 2}


def test_what_is_current_is_the_parent(told: Told, router: anabranch.Router) -> None:
    queue, tracer = router.queue("orders.new"), told.tracer_provider.get_tracer("user")
    with tracer.start_as_current_span("request") as request:
        queue.send(b"1")
    with tracer.start_as_current_span("job") as job:
        for message in queue.consume(0):
            with message:
                pass
    assert told.span("send orders.>").parent == request.get_span_context()
    process = told.span("process orders.>")
    assert process.parent == job.get_span_context()
    assert links_of(process) == [told.span("send orders.>").context.span_id]


def test_a_context_that_a_message_has_stays(told: Told, router: anabranch.Router) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    queue = router.queue("orders.new")
    queue.send(b"1", {"traceparent": parent})
    queue.send_many([anabranch.Outgoing(b"2", {"traceparent": parent}), b"3"])
    first, second, third = queue.receive_many(3)
    assert first.headers["traceparent"] == second.headers["traceparent"] == parent != third.headers["traceparent"]
    custom, both = (span for span in told.spans() if span.name == "send orders.>")
    assert custom.kind is SpanKind.CLIENT and links_of(custom) == [0xB7AD6B7169203331]
    assert both.attributes["messaging.batch.message_count"] == 2 and len(both.links) == 1
    assert len(told.span("receive orders.>").links) == 3
    router.ack(iter([first, second, third]))
    assert told.span("ack orders.>").attributes["messaging.batch.message_count"] == 3
    assert told.points("messaging.client.sent.messages") == {("send", "orders.>"): 3}


def test_errors(told: Told, router: anabranch.Router) -> None:
    queue = router.queue("orders.new")
    with pytest.raises(anabranch.MessageTooLargeError):
        queue.send(b"x" * 101)
    with pytest.raises(TypeError):
        queue.send(b"x", headers=7)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        queue.send_many(b"x")  # type: ignore[arg-type]
    with pytest.raises(anabranch.DestinationError):
        router.receive("orders..[")
    assert queue.receive() is None and router.receive("orders.>") is None
    send = told.spans()[0]
    assert send.status.status_code is StatusCode.ERROR and "100" in send.status.description
    assert send.attributes["error.type"] == "MessageTooLargeError"
    queue.send(b"x")
    with pytest.raises(ZeroDivisionError), queue.receive():  # type: ignore[union-attr]
        raise ZeroDivisionError
    process = told.span("process orders.>")
    assert process.attributes["error.type"] == "ZeroDivisionError"
    assert ("process", "orders.>", "ZeroDivisionError") in told.points("messaging.process.duration")
    message = queue.receive()
    assert message is not None
    message.reject("no")
    assert told.span("reject orders.>").status.status_code is StatusCode.UNSET
    sent = told.points("messaging.client.sent.messages")
    assert sent["send", "orders.>", "MessageTooLargeError"] == 1 and sent["send", "orders.>"] == 1


def test_listeners_process(told: Told, router: anabranch.Router) -> None:
    topic = router.topic("prices.eu")
    audit = topic.subscribe("audit")

    def hear(message: anabranch.Message) -> None:
        with message:
            router.queue("orders.new").send(message.body)

    listener = audit.listen(hear, 10)
    topic.send_nowait(b"1").result(PATIENCE)
    message = router.receive("orders.>", PATIENCE)
    assert message is not None
    message.ack_nowait().result(PATIENCE)
    listener.close()
    deadline = time.monotonic() + PATIENCE
    while "process >" not in [span.name for span in told.spans()]:
        assert time.monotonic() < deadline
    process = told.span("process >")
    assert process.attributes["messaging.destination.subscription.name"] == "audit"
    assert process.attributes["messaging.destination.name"] == "topic://prices.eu"
    assert told.span("send orders.>").parent == process.context
    consumed = told.points("messaging.client.consumed.messages")
    assert consumed == {("process", ">"): 1, ("receive", "orders.>"): 1}


def test_a_listener_to_many_queues_processes(told: Told, router: anabranch.Router) -> None:
    heard = SimpleQueue[bytes]()

    def hear(message: anabranch.Message) -> None:
        with message:
            heard.put(message.body)

    with closing(router.listen("orders.>", hear)):
        router.queue("orders.new").send(b"1")
        assert heard.get(timeout=PATIENCE) == b"1"
        deadline = time.monotonic() + PATIENCE
        while "process orders.>" not in [span.name for span in told.spans()]:
            assert time.monotonic() < deadline


def test_a_message_that_is_leased_to_its_sender_is_sent(told: Told, router: anabranch.Router) -> None:
    message = router.queue("orders.new").send_leased(b"1")
    assert message is not None
    with message:
        pass
    send = told.span("send orders.>")
    assert send.kind is SpanKind.PRODUCER and links_of(told.span("process orders.>")) == [send.context.span_id]
    assert told.points("messaging.client.sent.messages") == {("send", "orders.>"): 1}


def test_transactions(told: Told, router: anabranch.Router) -> None:
    with router.transaction() as tx:
        tx.send("orders.new", b"1")
        tx.send(router.queue("other"), b"2")
        tx.put("map://states", "a", b"3")
    router.send("queue://orders.new,topic://prices", b"4")
    router.ack(router.queue("other").receive_many(2))
    create = told.span("create >")
    assert create.kind is SpanKind.PRODUCER
    assert links_of(told.span("receive >")) == [create.context.span_id]
    assert [span.attributes["messaging.batch.message_count"] for span in told.spans() if span.name == "commit"] == [
        3,
        2,
    ]
    sent = told.points("messaging.client.sent.messages")
    assert sent == {("commit", "orders.>"): 2, ("commit", ">"): 2}


def test_dead_letters_keep_their_context(told: Told, router: anabranch.Router) -> None:
    queue = router.queue("orders.new")
    queue.send(b"1")
    for _ in range(2):
        (message,) = queue.receive_many(1)
        message.release()
    letter = router.queue("dead.orders.new").receive(PATIENCE)
    assert letter is not None
    letter.ack()
    assert links_of(told.spans()[-1]) == [told.span("send orders.>").context.span_id]
    assert told.points("messaging.client.sent.messages") == {("send", "orders.>"): 1}


def test_event_loops(told: Told, tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open(tmp_path) as router:
            queue = router.queue("q")
            with told.tracer_provider.get_tracer("user").start_as_current_span("request"):
                await queue.send(b"1")
            before = context.get_current()
            message = await queue.receive(PATIENCE)
            assert message is not None
            async with message:
                await router.queue("next").send(b"2")
            assert context.get_current() == before
            async with router.transaction() as tx:
                await tx.send("next", b"3")

    asyncio.run(main())
    send, process = (told.span(name) for name in ("create >", "process >"))
    first, following = (span for span in told.spans() if span.name == "send >")
    assert first.parent == told.span("request").context
    assert process.parent.span_id == first.context.span_id and following.parent == process.context
    assert told.span("ack >").parent == process.context and send.kind is SpanKind.PRODUCER


def test_tasks_of_one_turn_have_spans_of_their_own(told: Told, tmp_path: Path) -> None:
    async def task(queue: aio.AsyncQueue[bytes], number: int) -> None:
        with told.tracer_provider.get_tracer("user").start_as_current_span(f"task {number}"):
            message = await queue.receive(PATIENCE)
            assert message is not None
            await message.ack()

    async def main() -> None:
        async with aio.open(tmp_path) as router:
            queue = router.queue("q")
            await queue.send_many([b"1", b"2", b"3"])
            await asyncio.gather(*(task(queue, number) for number in range(3)))

    asyncio.run(main())
    tasks = {told.span(f"task {number}").context.span_id for number in range(3)}
    for name in ("receive >", "ack >"):
        spans = [span for span in told.spans() if span.name == name]
        assert len(spans) == 3 and {span.parent.span_id for span in spans if span.parent is not None} == tasks


@pytest.fixture
def metrics() -> Iterator[Told]:
    told = Told()
    instrument(meter_provider=told.meter_provider, durations_a_second=1 / (PATIENCE * 100))
    yield told
    uninstrument()


@pytest.mark.parametrize("router", [False, True], indirect=True, ids=["own", "shared"])
def test_what_is_passed_over_is_counted(metrics: Told, router: anabranch.Router) -> None:
    """Without a tracer provider there are no spans, and no contexts in messages."""
    queue, subscriber = router.queue("orders.new"), router.topic("orders.new").subscribe("audit")
    for _ in range(50):
        queue.send(b"1", {"a": 1}, priority=3)
        queue.send(b"2")
    router.topic("orders.new").send(b"3")
    for _ in range(2):
        with pytest.raises(anabranch.MessageTooLargeError):
            queue.send(b"x" * 101)
    for _ in range(100):
        with queue.receive(PATIENCE, lease=60) as message:  # type: ignore[union-attr]
            assert message.headers in ({"a": 1}, {})
    assert queue.receive() is queue.receive(0) is None
    subscriber.receive().ack()  # type: ignore[union-attr]
    sent = {("send", "orders.>"): 101, ("send", "orders.>", "MessageTooLargeError"): 2}
    assert metrics.points("messaging.client.sent.messages") == sent
    assert metrics.points("messaging.client.consumed.messages") == {("receive", "orders.>"): 101}
    assert metrics.points("messaging.client.operation.duration") == {
        (name, "orders.>"): 1 for name in ("send", "receive", "ack")
    }
    assert metrics.points("messaging.process.duration") == {("process", "orders.>"): 1}


def test_threads_count_every_message(metrics: Told, router: anabranch.Router) -> None:
    queue, before = router.queue("orders.new"), sys.getswitchinterval()

    def work() -> None:
        for _ in range(500):
            queue.send(b"1")
            queue.receive().ack()  # type: ignore[union-attr]

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work) for _ in range(4)]:
                done.result(PATIENCE)
    finally:
        sys.setswitchinterval(before)
    assert metrics.points("messaging.client.sent.messages") == {("send", "orders.>"): 2000}
    assert metrics.points("messaging.client.consumed.messages") == {("receive", "orders.>"): 2000}


def test_so_many_durations_a_second_are_recorded(router: anabranch.Router, monkeypatch: pytest.MonkeyPatch) -> None:
    now, told, queue = 1000.0, Told(), router.queue("orders.new")
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: now))

    def recorded() -> int:
        return told.points("messaging.client.operation.duration")["send", "orders.>"]

    instrument(meter_provider=told.meter_provider, traces=False, durations_a_second=10)
    try:
        for _ in range(5000):
            queue.send(b"1")
            now += 0.001
        assert 25 <= recorded() <= 50  # and from now on what comes is looked at
        for before in (recorded(), recorded() + 1):
            now += 60
            queue.send(b"1")
            assert recorded() == before + 1
        assert told.points("messaging.client.sent.messages") == {("send", "orders.>"): 5002}
    finally:
        uninstrument()


def test_metrics_alone_and_names_of_ones_own(router: anabranch.Router) -> None:
    def template(destination: anabranch.Destination) -> str:
        return destination.name.rstrip("0123456789")

    told, queue = Told(), router.queue("orders.7")
    instrument(
        meter_provider=told.meter_provider, traces=False, template=template, durations_a_second=1 / (PATIENCE * 100)
    )
    try:
        with pytest.raises(ValueError, match="durations_a_second is a number above 0, not 0"):
            instrument(durations_a_second=0)
        with pytest.raises(RuntimeError, match=r"instrumented already; call uninstrument\(\) first"):
            instrument()
        queue.send(b"1")
        router.queue("orders.8").send(b"2")
        with queue.receive() as message:  # type: ignore[union-attr]
            assert message.headers == {}
    finally:
        uninstrument()
    uninstrument()
    queue.send(b"3")
    assert told.points("messaging.client.sent.messages") == {("send", "orders."): 2}
    assert told.points("messaging.client.operation.duration")["send", "orders."] == 1
    assert told.points("messaging.process.duration") == {("process", "orders."): 1}
    assert anabranch.Queue.send is anabranch.Topic.send and "__exit__" in vars(anabranch.Message)
    assert not {"send", "receive"} & vars(anabranch.Queue).keys()
