"""Metrics and spans of OpenTelemetry's messaging conventions, of all routers of a process.

    from anabranch.hosts.opentelemetry import instrument

    instrument()                                    # with the global providers
    queue.send(b"...")                              # span `send orders.>`, its context in the message's headers
    with queue.receive() as message:                # spans `receive orders.>`, `process orders.>`, `ack orders.>`
        ...

Until `instrument` is called nothing is paid, since it replaces methods of the public classes; `uninstrument` puts them
back. Metrics name a destination by the pattern that routes it, so that there are as many series as patterns. Nothing
here fails a call: what goes wrong is logged. Needs the extra `opentelemetry`, which is the API alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial, wraps
from threading import Lock, get_ident
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context, metrics, propagate, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Meter, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider

import anabranch
from anabranch import (
    Destination,
    Kind,
    Message,
    Outgoing,
    Pattern,
    Queue,
    Receipt,
    Router,
    Subscriber,
    Topic,
    Transaction,
)

__all__ = ["instrument", "uninstrument"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    name: str
    type: str
    kind: SpanKind


_CREATE: Final = _Operation("create", "create", SpanKind.PRODUCER)
_SEND: Final = _Operation("send", "send", SpanKind.PRODUCER)
_COMMIT: Final = _Operation("commit", "send", SpanKind.CLIENT)
_RECEIVE: Final = _Operation("receive", "receive", SpanKind.CLIENT)
_DELIVER: Final = _Operation("process", "process", SpanKind.CONSUMER)
"""A listener is handed a message: that is counted, and nothing else."""
_PROCESS: Final = _Operation("process", "process", SpanKind.CONSUMER)
_ACK, _RELEASE, _REJECT = (_Operation(name, "settle", SpanKind.CLIENT) for name in ("ack", "release", "reject"))
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of buckets, which are those of the conventions."""
_IS_TOLD: Final = "_is_told"
"""The mark of transactions that users have begun. Those of the library, which move dead letters, have none."""
_DESTINATIONS_MAX: Final = 100_000
"""The most destinations whose templates are remembered."""


class _Series:
    """A count of messages, and its attributes."""

    __slots__ = ("attributes", "count")

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.attributes, self.count = attributes, 0


class _Meters:
    """The instruments of one meter. Counts are kept here, and asked for when they are collected: to add to a counter of
    the SDK takes ten times as long."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, text: str) -> metrics.Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_SECONDS)

        self._operations = seconds("messaging.client.operation.duration", "Duration of an operation of a client.")
        self._processing = seconds("messaging.process.duration", "Duration of processing a message.")
        self._lock = Lock()
        self._series: dict[tuple[_Operation, str | None, str | None], _Series] = {}
        for name, operations, text in (
            ("messaging.client.sent.messages", (_SEND, _COMMIT), "Messages that were to be stored."),
            ("messaging.client.consumed.messages", (_RECEIVE, _DELIVER), "Messages that were handed out."),
        ):
            meter.create_observable_counter(name, [partial(self._counts, operations)], "{message}", text)

    def _counts(self, operations: Iterable[_Operation], options: CallbackOptions) -> Iterable[Observation]:
        with self._lock:
            return [
                Observation(one.count, one.attributes)
                for (operation, *_), one in self._series.items() if one.count and operation in operations
            ]  # fmt: skip

    def _of(self, operation: _Operation, template: str | None, failed: str | None) -> _Series:
        key = operation, template, failed
        series = self._series.get(key)
        if series is None:
            named = {"messaging.destination.template": template, "error.type": failed}
            with self._lock:
                series = self._series.setdefault(key, _Series(_attributes(operation, named)))
        return series

    def count(self, operation: _Operation, template: str | None, failed: str | None, count: int) -> None:
        """Count messages."""
        series = self._of(operation, template, failed)
        with self._lock:
            series.count += count

    def record(self, operation: _Operation, template: str | None, failed: str | None, seconds: float) -> None:
        """Record how long an operation took."""
        histogram = self._processing if operation is _PROCESS else self._operations
        histogram.record(seconds, self._of(operation, template, failed).attributes)


def _attributes(operation: _Operation, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an operation, and those of the named that are known."""
    return {
        "messaging.system": "anabranch",
        "messaging.operation.name": operation.name,
        "messaging.operation.type": operation.type,
        **{name: value for name, value in named.items() if value is not None},
    }


class _Telemetry:
    """What is told while it is instrumented. Threads: all."""

    def __init__(
        self, tracer: Tracer | None, meters: _Meters | None, template: Callable[[Destination], str] | None
    ) -> None:
        self.tracer, self.meters, self._template = tracer, meters, template
        self._templates: dict[Destination, str] = {}
        self._processed: dict[tuple[int, int], _Call] = {}
        """What is processed, by message and thread."""

    def template(self, destination: Destination, of: Any) -> str:
        """Return what a destination is called in names and metrics. `of` is what knows its router."""
        found = self._templates.get(destination)
        if found is None:
            if self._template is not None:
                found = self._template(destination)
            else:
                router: Any = of._store.owner if isinstance(of, Message) else of
                found = str(router._registry.route(destination).pattern)
            if len(self._templates) >= _DESTINATIONS_MAX:
                self._templates.clear()
            self._templates[destination] = found
        return found

    def begin(self, message: Message[Any]) -> None:
        """Begin to process a message; what begins inside that, on the same thread, is part of it."""
        key = id(message), get_ident()
        call = self._processed.get(key)
        if call is None:
            call = self._processed[key] = _Call(self, _PROCESS, message)
            call.messages = [message]
            call.enter()
        call.depth += 1

    def finish(self, message: Message[Any], error: BaseException | None = None) -> None:
        """End what `begin` began."""
        key = id(message), get_ident()
        call = self._processed.get(key)
        if call is not None:  # else it was begun on another thread, or before all this
            call.depth -= 1
            if not call.depth:
                del self._processed[key]
                call.end(error)

    def heard(self, on_message: Callable[[Any], object]) -> Callable[[Any], object]:
        """Return a listener's callback, whose messages are counted, and processed. One of ours hands them on."""
        hands_on = str(getattr(on_message, "__module__", "")).startswith("anabranch.")

        def hear(message: Message[Any]) -> object:
            call = _Call(self, _DELIVER, message)
            call.messages = [message]
            call.end()
            if hands_on:
                return on_message(message)
            self.begin(message)
            try:
                result = on_message(message)
            except BaseException as error:
                self.finish(message, error)
                raise
            self.finish(message)
            return result

        return hear


class _Call:
    """An operation, from its beginning to its end."""

    __slots__ = (
        "_at", "_begun", "_links", "_many", "_message_id", "_of", "_operation", "_receipts", "_span", "_tell", "_token",
        "depth", "destination", "messages",
    )  # fmt: skip

    def __init__(self, tell: _Telemetry, operation: _Operation, of: Any, many: bool = False) -> None:
        """Begin an operation of a queue, say, or of `many` messages at once."""
        self._tell, self._operation, self._of, self._many = tell, operation, of, many
        self.destination: Destination | None = getattr(of, "destination", None)
        self.messages: Sequence[Message[Any]] = ()
        """Those that it has received, settles or processes."""
        self.depth = 0
        self._receipts: Sequence[Receipt] = ()
        self._links: list[SpanContext] = []
        self._span: Span | None = None
        self._message_id: str | None = None
        self._token: Any = None
        self._at = 0 if tell.tracer is None else time.time_ns()
        self._begun = time.perf_counter()

    def run(self, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Return what a method returns. Where that is a future, the operation ends when it is resolved."""
        try:
            result = method(*given, **options)
        except BaseException as error:
            self.end(error)
            raise
        if isinstance(result, Future):
            result.add_done_callback(self._resolved)
        else:
            self._returned(result)
        return result

    def _resolved(self, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            self._returned(future.result())
        else:
            self.end(error)

    def _returned(self, result: Any) -> None:
        if self._operation is _RECEIVE:
            if not result:  # nothing has come, of which nothing is told
                return
            self.messages = result if isinstance(result, list) else [result]
        elif self._operation.type == "send":
            if not result:  # nothing was sent
                return
            self._receipts = result if isinstance(result, list) else [result]
        self.end()

    def created(self, headers: Any, message_id: str | None = None) -> Any:
        """Return the headers of a message that is sent, with the context of this operation, unless they have one."""
        if self._tell.tracer is None or not (headers is None or isinstance(headers, Mapping)):
            return headers
        try:
            own = _creation(headers)
            if own is not None:
                self._links.append(own)
                return headers
            self._message_id = message_id
            carrier: dict[str, Any] = dict(headers or {})
            propagate.inject(carrier, trace.set_span_in_context(self._spanned()))
        except Exception:
            log.exception("the context of a message is not sent with it")
            return headers
        return carrier or headers

    def created_many(self, messages: Any) -> Any:
        """Return messages that are sent together, as `created` does."""
        if (
            self._tell.tracer is None or not isinstance(messages, Iterable)
            or isinstance(messages, bytes | bytearray | memoryview | str | Outgoing)
        ):  # fmt: skip
            return messages
        outgoing = (one if isinstance(one, Outgoing) else Outgoing(one) for one in messages)
        return [one._replace(headers=self.created(one.headers)) for one in outgoing]

    def enter(self) -> None:
        """Let what this thread does be part of the operation, until its end."""
        if self._tell.tracer is None:
            return
        try:
            inside = context.get_current()
            if not trace.get_current_span(inside).get_span_context().is_valid:
                inside = propagate.extract(_carrier(self.messages[0].headers), inside)
            self._links += _creations(self.messages)
            self._token = context.attach(trace.set_span_in_context(self._spanned(inside), inside))
        except Exception:
            log.exception("a message is processed without a span")

    def _spanned(self, parent: Context | None = None) -> Span:
        """Return the span, which is begun when it is asked for first."""
        if self._span is None:
            assert self._tell.tracer is not None
            operation, named = self._operation, self._named()
            template = named["messaging.destination.template"]
            is_created = operation.type != "send" or not self._links
            self._span = self._tell.tracer.start_span(
                operation.name if template is None else f"{operation.name} {template}",
                parent, operation.kind if is_created else SpanKind.CLIENT, _attributes(operation, named),
                [Link(one) for one in self._links], self._at,
            )  # fmt: skip
            self._links = []
        return self._span

    def _named(self) -> dict[str, Any]:
        destination, messages = self.destination, self.messages
        one = messages[0] if len(messages) == 1 and not self._many else None
        subscription = getattr(self._of, "subscription", None)
        if isinstance(subscription, tuple):  # the key of a message's
            subscription = subscription[1]
        return {
            "messaging.destination.template": self._template(),
            "messaging.destination.name": None if destination is None else str(destination),
            "messaging.destination.subscription.name": getattr(subscription, "name", subscription),
            "messaging.message.id": self._message_id if one is None else one.message_id,
            "messaging.anabranch.message.deliveries": one.deliveries if one is not None and one.redelivered else None,
        }

    def _template(self) -> str | None:
        return None if self.destination is None else self._tell.template(self.destination, self._of)

    def end(self, error: BaseException | None = None) -> None:
        """End the operation, and tell of it."""
        seconds = time.perf_counter() - self._begun
        try:
            if self.messages and not isinstance(self._of, Message) and self.destination is None:
                destinations = {message.destination for message in self.messages}
                self._of, self.destination = self.messages[0], destinations.pop() if len(destinations) == 1 else None
            failed = None if error is None else type(error).__qualname__
            if self._tell.meters is not None:
                self._measure(self._tell.meters, seconds, failed)
            if self._tell.tracer is not None and self._operation is not _DELIVER:
                self._end_span(error, failed)
        except Exception:
            log.exception("nothing is told of %s", self._operation.name)

    def _measure(self, meters: _Meters, seconds: float, failed: str | None) -> None:
        operation, template = self._operation, self._template()
        if operation is not _CREATE and operation is not _DELIVER:
            meters.record(operation, template, failed, seconds)
        if operation is _COMMIT:
            sent = Counter(one.destination for one in self._receipts if one.destination.kind is not Kind.MAP)
            for destination, count in sent.items():
                meters.count(operation, self._tell.template(destination, self._of), failed, count)
        elif operation is _SEND:
            meters.count(operation, template, failed, len(self._receipts) or (failed is not None and not self._many))
        elif operation is _RECEIVE or operation is _DELIVER:
            meters.count(operation, template, failed, len(self.messages))

    def _end_span(self, error: BaseException | None, failed: str | None) -> None:
        if self._operation is not _PROCESS:
            self._links += _creations(self.messages)
        if self._operation is _CREATE and self._span is None:
            return  # the message has the context of another creation
        span = self._spanned()
        for link in self._links:
            span.add_link(link)
        if self._many:
            span.set_attribute("messaging.batch.message_count", len(self.messages) or len(self._receipts))
        if failed is not None:
            span.set_attribute("error.type", failed)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        if self._token is not None and trace.get_current_span() is span:
            context.detach(self._token)
        span.end()


def _carrier(headers: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: value for name, value in (headers or {}).items() if isinstance(value, str)}


def _creation(headers: Mapping[str, Any] | None) -> SpanContext | None:
    """Return the context in which a message was created, if its headers have one."""
    if not headers:
        return None
    found = trace.get_current_span(propagate.extract(_carrier(headers), Context())).get_span_context()
    return found if found.is_valid else None


def _creations(messages: Iterable[Message[Any]]) -> list[SpanContext]:
    found = (_creation(message.headers) for message in messages)
    return [one for one in found if one is not None]


_lock: Final = Lock()
_replaced: Final[list[tuple[type, str, Any]]] = []
"""What was replaced: a class, a name, and what the class itself had there, or None."""
_meters: Final[WeakKeyDictionary[MeterProvider, _Meters]] = WeakKeyDictionary()
"""The instruments that were made. There is no way to remove one, so that they serve again."""


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    traces: bool = True,
    metrics: bool = True,
    template: Callable[[Destination], str] | None = None,
) -> None:
    """Tell of all routers of this process, those that are open too, to these providers, or else to the global ones.

    `traces=False` and `metrics=False` leave one out. `template` returns what a destination is called in the names of
    spans and in metrics. It has to return few different texts; without it that is the pattern that routes it. Raises
    RuntimeError where it is instrumented already.
    """
    with _lock:
        if _replaced:
            raise RuntimeError("anabranch is instrumented already; call uninstrument() first")
        tracer = trace.get_tracer("anabranch", anabranch.__version__, tracer_provider) if traces else None
        _replace_all(_Telemetry(tracer, _meters_of(meter_provider) if metrics else None, template))


def uninstrument() -> None:
    """Tell of nothing any more. Does nothing where nothing is told."""
    with _lock:
        while _replaced:
            kind, name, before = _replaced.pop()
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def _meters_of(provider: MeterProvider | None) -> _Meters:
    provider = metrics.get_meter_provider() if provider is None else provider
    found = _meters.get(provider)
    if found is None:
        found = _meters[provider] = _Meters(provider.get_meter("anabranch", anabranch.__version__))
    return found


def _replace(kind: type, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(kind, name)
    _replaced.append((kind, name, vars(kind).get(name)))
    setattr(kind, name, wraps(original)(make(original)))


def _replace_all(tell: _Telemetry) -> None:
    def sends(original: Any) -> Any:
        def send(self: Any, body: Any, headers: Any = None, message_id: Any = None, *given: Any, **options: Any) -> Any:
            call = _Call(tell, _SEND, self)
            return call.run(original, self, body, call.created(headers, message_id), message_id, *given, **options)

        return send

    def sends_many(original: Any) -> Any:
        def send_many(self: Any, messages: Any, *given: Any, **options: Any) -> Any:
            call = _Call(tell, _SEND, self, many=True)
            return call.run(original, self, call.created_many(messages), *given, **options)

        return send_many

    def receives(original: Any, many: bool = False) -> Any:
        return lambda self, *given, **options: _Call(tell, _RECEIVE, self, many).run(original, self, *given, **options)

    def listens(original: Any) -> Any:
        def listen(self: Any, on_message: Any, *given: Any, **options: Any) -> Any:
            return original(self, tell.heard(on_message) if callable(on_message) else on_message, *given, **options)

        return listen

    def settles(operation: _Operation, original: Any) -> Any:
        def settle(self: Any, *given: Any, **options: Any) -> Any:
            call = _Call(tell, operation, self)
            call.messages = [self]
            return call.run(original, self, *given, **options)

        return settle

    def settles_many(operation: _Operation, original: Any) -> Any:
        def settle(self: Any, messages: Any, *given: Any, **options: Any) -> Any:
            is_one = isinstance(messages, Message)
            call = _Call(tell, operation, self, many=not is_one)
            if not is_one and isinstance(messages, Iterable):
                messages = list(messages)
            call.messages = [messages] if is_one else messages
            return call.run(original, self, messages, *given, **options)

        return settle

    def enters(original: Any) -> Any:
        def enter(self: Message[Any]) -> Any:
            entered = original(self)
            tell.begin(self)
            return entered

        return enter

    def exits(original: Any) -> Any:
        def leave(self: Message[Any], kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
            failed = error
            try:
                original(self, kind, error, trace)
            except BaseException as raised:
                failed = raised
                raise
            finally:
                tell.finish(self, failed)

        return leave

    def exits_async(original: Any) -> Any:
        async def leave(self: Any, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
            message, failed = self._of, error
            tell.begin(message)  # its own end is in a context of its own, in which ours cannot be left
            try:
                await original(self, kind, error, trace)
            except BaseException as raised:
                failed = raised
                raise
            finally:
                tell.finish(message, failed)

        return leave

    def receives_pattern(original: Any) -> Any:
        def receive(self: Router, pattern: Any, *given: Any, **options: Any) -> Any:
            if not _is_pattern(pattern):  # but a queue, which tells of it
                return original(self, pattern, *given, **options)
            return _Call(tell, _RECEIVE, self).run(original, self, pattern, *given, **options)

        return receive

    def consumes_pattern(original: Any) -> Any:
        def consume(self: Router, pattern: Any, *given: Any, **options: Any) -> Iterator[Any]:
            found: Iterator[Any] = original(self, pattern, *given, **options)
            if not _is_pattern(pattern):
                return found
            return iter(lambda: _Call(tell, _RECEIVE, self).run(next, found, None), None)

        return consume

    def begins(original: Any) -> Any:
        def transaction(self: Router, *given: Any, **options: Any) -> Transaction:
            begun: Transaction = original(self, *given, **options)
            vars(begun)[_IS_TOLD] = True
            return begun

        return transaction

    def creates(original: Any) -> Any:
        def send(self: Any, destination: Any, body: Any, headers: Any = None, *given: Any, **options: Any) -> Any:
            if _IS_TOLD not in vars(self):
                return original(self, destination, body, headers, *given, **options)
            call = _Call(tell, _CREATE, self)
            call.destination = _destination_of(destination)
            return call.run(original, self, destination, body, call.created(headers), *given, **options)

        return send

    def commits(original: Any) -> Any:
        def commit(self: Any) -> Any:
            if _IS_TOLD not in vars(self):
                return original(self)
            return _Call(tell, _COMMIT, self, many=True).run(original, self)

        return commit

    for kind in (Queue, Topic):
        for name, make in (("send", sends), ("send_nowait", sends), ("send_many", sends_many)):
            _replace(kind, name, make)
    for kind in (Queue, Subscriber):
        _replace(kind, "receive", receives)
        _replace(kind, "receive_many", partial(receives, many=True))
        _replace(kind, "listen", listens)
    for operation in (_ACK, _RELEASE):
        for name in (operation.name, f"{operation.name}_nowait"):
            _replace(Message, name, partial(settles, operation))
            _replace(Router, name, partial(settles_many, operation))
    _replace(Router, "reject", partial(settles_many, _REJECT))  # which Message.reject calls
    _replace(Message, "__enter__", enters)
    _replace(Message, "__exit__", exits)
    _replace(Router, "receive", receives_pattern)
    _replace(Router, "consume", consumes_pattern)
    _replace(Router, "transaction", begins)
    _replace(Transaction, "send", creates)
    _replace(Transaction, "commit", commits)
    _replace(Transaction, "commit_nowait", commits)
    try:
        from ..aio import AsyncMessage
    except anabranch.MissingExtraError:
        return
    _replace(AsyncMessage, "__aexit__", exits_async)


def _is_pattern(pattern: object) -> bool:
    """Return whether messages of many queues are asked for."""
    try:
        return isinstance(pattern, str) and not Pattern.parse(pattern).exact
    except anabranch.DestinationError:
        return False


def _destination_of(address: Any) -> Destination | None:
    """Return the destination of a send of a transaction, if it is one."""
    if isinstance(address, str):
        try:
            return Destination.parse(address)
        except anabranch.DestinationError:  # a composite; or the send says so
            return None
    found = getattr(address, "destination", address)
    return found if isinstance(found, Destination) else None
