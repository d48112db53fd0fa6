"""Metrics and spans of OpenTelemetry's messaging conventions, of all routers of a process.

    from anabranch.hosts.opentelemetry import instrument

    instrument()                                    # with the global providers
    queue.send(b"...")                              # span `send orders.>`, its context in the message's headers
    with queue.receive() as message:                # spans `receive orders.>`, `process orders.>`, `ack orders.>`
        ...

Until `instrument` is called nothing is paid, since it replaces methods of the public classes; `uninstrument` puts them
back. There are spans where a tracer provider is given, or set by then. A destination is called by the pattern that
routes it, so that there are as many series as patterns. Nothing here fails a call: what goes wrong is logged. Needs the
extra `opentelemetry`, which is the API alone.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from threading import RLock, get_ident
from types import TracebackType
from typing import Any, Final
from weakref import WeakKeyDictionary

from opentelemetry import context, propagate, trace
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, Context
from opentelemetry.metrics import CallbackOptions, Histogram, Meter, MeterProvider, Observation, get_meter_provider
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, Tracer, TracerProvider

import anabranch
from anabranch import Destination, Kind, Message, Outgoing, Pattern, Queue, Router, Subscriber, Topic, Transaction

__all__ = ["instrument", "uninstrument"]

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Operation:
    name: str
    type: str
    kind: SpanKind


_CREATE: Final = _Operation("create", "create", SpanKind.PRODUCER)
_SEND: Final = _Operation("send", "send", SpanKind.PRODUCER)
_COMMIT: Final = _Operation("commit", "send", SpanKind.CLIENT)
_RECEIVE: Final = _Operation("receive", "receive", SpanKind.CLIENT)
_PROCESS: Final = _Operation("process", "process", SpanKind.CONSUMER)
_ACK, _RELEASE, _REJECT = (_Operation(name, "settle", SpanKind.CLIENT) for name in ("ack", "release", "reject"))
_SETTLING: Final = (("ack", _ACK), ("release", _RELEASE))
_MEASURED: Final = (_SEND, _COMMIT, _RECEIVE, _PROCESS, _ACK, _RELEASE, _REJECT)

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds of buckets, which are those of the conventions."""
_REMEMBERED_MAX: Final = 100_000
"""The most destinations that are remembered."""
_PASSED_OVER_MAX: Final = 100_000
"""The most operations between two whose durations are looked at."""
_IS_TOLD: Final = "_is_told"
"""The mark of transactions that users have begun. Those of the library, which move dead letters, have none."""


def _attributes(operation: _Operation, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of an operation, and those of the named that are known."""
    return {
        "messaging.system": "anabranch",
        "messaging.operation.name": operation.name,
        "messaging.operation.type": operation.type,
        **{name: value for name, value in named.items() if value is not None},
    }


class _Templates:
    """What destinations are called in names and metrics. Threads: all."""

    def __init__(self, template: Callable[[Destination], str] | None) -> None:
        self._template = template
        self._known: dict[Destination, str] = {}

    def of(self, destination: Destination, of: Any) -> str:
        """Return what a destination is called; `of` is what knows its router."""
        found = self._known.get(destination)
        if found is None:
            if self._template is not None:
                found = self._template(destination)
            else:
                router: Any = of._store.owner if isinstance(of, Message) else of
                found = str(router._registry.route(destination).pattern)
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[destination] = found
        return found


class _Series:
    """The messages of one set of attributes. To add to `count` is one step of the interpreter's: none is missed."""

    __slots__ = ("attributes", "count")

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self.attributes, self.count = attributes, 0


class _Instruments:
    """The instruments of one meter. Counts are kept here, and asked for when they are collected: to add to a counter of
    the SDK takes ten times as long."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return meter.create_histogram(name, "s", text, explicit_bucket_boundaries_advisory=_SECONDS)

        self.operations = seconds("messaging.client.operation.duration", "Duration of an operation of a client.")
        self.processing = seconds("messaging.process.duration", "Duration of processing a message.")
        self.meters: list[_Meter] = []
        """Those that are in use."""
        self.series: dict[tuple[_Operation, str | None, str | None], _Series] = {}
        """By operation, template and type of error."""
        for name, types, text in (
            ("messaging.client.sent.messages", ("send",), "Messages that were to be stored."),
            ("messaging.client.consumed.messages", ("receive", "process"), "Messages that were handed out."),
        ):
            meter.create_observable_counter(name, [partial(self._counts, types)], "{message}", text)

    def _counts(self, types: Sequence[str], options: CallbackOptions) -> Iterable[Observation]:
        for meter in self.meters:
            meter.left = 0  # each collection has a duration of what goes on, however slow that has become
        found = [one for (operation, *_), one in list(self.series.items()) if operation.type in types]
        return [Observation(one.count, one.attributes) for one in found if one.count]


class _Meter:
    """What is measured of one operation. Threads: all.

    A message must not pay for the clock, nor for a histogram, which takes as long as many a send. So durations are
    recorded of some operations alone. How many are passed over in between follows from how many came lately.
    """

    def __init__(self, operation: _Operation, instruments: _Instruments, templates: _Templates, pause: float) -> None:
        self._operation, self._to, self._templates = operation, instruments, templates
        self._histogram = instruments.processing if operation is _PROCESS else instruments.operations
        self._pause = pause
        """Seconds between two durations that are recorded, at least."""
        self.left = 0
        """So many operations are passed over before one is looked at."""
        self._passed_over, self._looked_at, self._due = 0, 0.0, 0.0
        self._known: dict[Destination | None, _Series] = {}

    def begin(self) -> float:
        """Begin an operation. Returns the time now if its duration is to be recorded, else 0."""
        if self.left > 0:
            self.left -= 1
            return 0.0
        now = time.perf_counter()
        calls = self._passed_over + 1
        rate = calls / max(now - self._looked_at, 1e-9)
        self.left = self._passed_over = min(int(rate * self._pause), 2 * calls, _PASSED_OVER_MAX)
        self._looked_at = now
        if now < self._due:
            return 0.0
        self._due = now + self._pause
        return now

    def run(self, of: Any, count: int, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Return what a method returns, measured. Where that is a future, it is done when that is resolved. `of` is a
        queue or a message, say, and `count` how many messages it is about if it fails."""
        begun = self.begin()
        try:
            result = method(*given, **options)
        except BaseException as error:
            self.note(of, begun, count, error)
            raise
        if isinstance(result, Future):
            result.add_done_callback(partial(self._resolved, of, begun, count))
        else:
            self._returned(of, begun, count, result)
        return result

    def _resolved(self, of: Any, begun: float, count: int, future: Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None and not future.cancelled():
            self._returned(of, begun, count, future.result())
        else:
            self.note(of, begun, count, error)

    def _returned(self, of: Any, begun: float, count: int, result: Any) -> None:
        if self._operation is _RECEIVE:
            if result:  # else nothing has come, of which nothing is told
                one = result[0] if type(result) is list else result
                self.note(one, begun, 1 if one is result else len(result))
            elif begun:
                self._due = 0.0  # the next one is recorded
        elif self._operation is _COMMIT:
            if result:
                self.note(of, begun, 0)
            sent = Counter(receipt.destination for receipt in result if receipt.destination.kind is not Kind.MAP)
            for destination, number in sent.items():
                self.note(of, 0.0, number, destination=destination)
        else:
            self.note(of, begun, len(result) if type(result) is list else count)

    def note(
        self, of: Any, begun: float, count: int, error: BaseException | None = None,
        destination: Destination | None = None,
    ) -> None:  # fmt: skip
        """Note an operation that has ended, of `count` messages. `begun`: as `begin` said; 0: its duration is not
        recorded."""
        seconds = time.perf_counter() - begun
        try:
            series = self.series(destination or getattr(of, "destination", None), of, error)
            series.count += count
            if begun:
                self._histogram.record(seconds, series.attributes)
        except Exception:
            log.exception("a measurement of %s is missing", self._operation.name)

    def remember(self, of: Any, known: dict[str, _Series]) -> None:
        """Add the series of a queue, a topic or a subscription to those that are known by its name."""
        with suppress(Exception):  # which was logged
            if len(known) >= _REMEMBERED_MAX:
                known.clear()
            known[of.destination.name] = self.series(of.destination, of)

    def series(self, destination: Destination | None, of: Any, error: BaseException | None = None) -> _Series:
        """Return the series of a destination; `of` is what knows its router."""
        found = self._known.get(destination) if error is None else None
        if found is not None:
            return found
        template = None if destination is None else self._templates.of(destination, of)
        failed = None if error is None else type(error).__qualname__
        named = {"messaging.destination.template": template, "error.type": failed}
        made = _Series(_attributes(self._operation, named))
        found = self._to.series.setdefault((self._operation, template, failed), made)
        if error is None:
            if len(self._known) >= _REMEMBERED_MAX:
                self._known.clear()
            self._known[destination] = found
        return found


class _Call:
    """The span of one operation."""

    __slots__ = (
        "_at", "_links", "_many", "_message_id", "_of", "_operation", "_sent", "_span", "_templates", "_token",
        "_tracer", "destination", "messages",
    )  # fmt: skip

    def __init__(
        self, tracer: Tracer, templates: _Templates, operation: _Operation, of: Any, many: bool = False
    ) -> None:
        """Begin an operation of a queue or a message, say, or of `many` messages at once."""
        self._tracer, self._templates, self._operation, self._of, self._many = tracer, templates, operation, of, many
        self.destination: Destination | None = getattr(of, "destination", None)
        self.messages: Sequence[Message[Any]] = [of] if isinstance(of, Message) else ()
        """Those that it has received, settles or processes."""
        self._sent = 0
        self._links: list[SpanContext] = []
        self._span: Span | None = None
        self._message_id: str | None = None
        self._token: Any = None
        self._at = time.time_ns()

    def run(self, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
        """Return what a method returns. Where that is a future, the span ends when it is resolved."""
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
            if not result:
                return
            self.messages = result if isinstance(result, list) else [result]
            if self.destination is None:
                self._of, self.destination = result, result.destination
        elif isinstance(result, list):
            if not result:
                return
            self._sent = len(result)
        self.end()

    def created(self, headers: Any, message_id: Any = None) -> Any:
        """Return the headers of a message that is sent, with the context of this operation, unless they have one."""
        try:
            own = _creation(headers)
            if own is not None:
                self._links.append(own)
                return headers
            self._message_id = message_id
            carrier: dict[str, Any] = dict(headers or {})
            propagate.inject(carrier, trace.set_span_in_context(self._begun()))
        except Exception:  # of headers that are none, too, which the send says
            log.debug("a message is sent without a context", exc_info=True)
            return headers
        return carrier or headers

    def created_many(self, messages: Any) -> Any:
        """Return messages that are sent together, as `created` does."""
        if not isinstance(messages, Iterable) or isinstance(messages, bytes | bytearray | memoryview | str | Outgoing):
            return messages
        outgoing = (one if isinstance(one, Outgoing) else Outgoing(one) for one in messages)
        return [one._replace(headers=self.created(one.headers)) for one in outgoing]

    def enter(self) -> None:
        """Let what this thread does be part of the operation, until its end."""
        try:
            inside = context.get_current()
            if not trace.get_current_span(inside).get_span_context().is_valid:
                inside = propagate.extract(_carrier(self.messages[0].headers), inside)
            self._token = context.attach(trace.set_span_in_context(self._begun(inside), inside))
        except Exception:
            log.exception("a message is processed without a span")

    def _begun(self, parent: Context | None = None) -> Span:
        """Return the span, which is begun when it is asked for first."""
        if self._span is None:
            operation, destination, of = self._operation, self.destination, self._of
            self._links += (one for one in map(_creation, (message.headers for message in self.messages)) if one)
            template = None if destination is None else self._templates.of(destination, of)
            one = self.messages[0] if len(self.messages) == 1 and not self._many else None
            key = getattr(of, "subscription", None)  # a subscriber's subscription, or a message's client and name
            named = {
                "messaging.destination.template": template,
                "messaging.destination.name": None if destination is None else str(destination),
                "messaging.destination.subscription.name": key[1]
                if isinstance(key, tuple)
                else getattr(key, "name", None),
                "messaging.message.id": self._message_id if one is None else one.message_id,
                "messaging.anabranch.message.deliveries": one.deliveries if one and one.redelivered else None,
            }
            kind = SpanKind.CLIENT if operation is _SEND and self._links else operation.kind
            name = operation.name if template is None else f"{operation.name} {template}"
            links, self._links = [Link(one) for one in self._links], []
            self._span = self._tracer.start_span(name, parent, kind, _attributes(operation, named), links, self._at)
        return self._span

    def end(self, error: BaseException | None = None) -> None:
        """End the span."""
        if self._operation is _CREATE and self._span is None:
            return  # the message has the context of another creation
        try:
            span = self._begun()
            for link in self._links:
                span.add_link(link)
            if self._many:
                span.set_attribute("messaging.batch.message_count", len(self.messages) or self._sent)
            if error is not None:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR, str(error)))
            if self._token is not None and trace.get_current_span() is span:
                context.detach(self._token)
            span.end()
        except Exception:
            log.exception("a span of %s is missing", self._operation.name)


def _is_suppressed() -> bool:
    """Return whether no spans are wanted: an exporter is at work, whose own sends would make more of them."""
    return bool(context.get_value(_SUPPRESS_INSTRUMENTATION_KEY))


def _carrier(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if isinstance(value, str)}


def _creation(headers: Mapping[str, Any] | None) -> SpanContext | None:
    """Return the context in which a message was created, if its headers have one."""
    if not headers:
        return None
    found = trace.get_current_span(propagate.extract(_carrier(headers), Context())).get_span_context()
    return found if found.is_valid else None


class _Processing:
    """The messages that are processed, each by a thread. Threads: all."""

    def __init__(self, meter: _Meter | None, begin: Callable[[_Operation, Any], _Call] | None) -> None:
        self._meter, self._call = meter, begin
        self.held: dict[tuple[int, int], list[Any]] = {}
        """By message and thread: how often it was begun, when, its span, and the message. Without those that have
        neither a span nor a duration that is recorded."""

    def begin(self, message: Message[Any]) -> None:
        """Begin to process a message; what begins inside that, on the same thread, is part of it."""
        key = id(message), get_ident()
        held = self.held.get(key)
        if held is not None:
            held[0] += 1
            return
        call = None if self._call is None or _is_suppressed() else self._call(_PROCESS, message)
        begun = 0.0 if self._meter is None else self._meter.begin()
        if begun or call is not None:
            self.held[key] = [1, begun, call, message]
        if call is not None:
            call.enter()

    def finish(self, message: Message[Any], error: BaseException | None = None) -> None:
        """End what `begin` began."""
        key = id(message), get_ident()
        held = self.held.get(key) if self.held else None
        if held is None:  # it was passed over, begun on another thread, or before all this
            return
        held[0] -= 1
        if not held[0]:
            del self.held[key]
            _, begun, call, _ = held
            if self._meter is not None and begun:
                self._meter.note(message, begun, 0, error)
            if call is not None:
                call.end(error)

    def heard(self, on_message: Callable[[Any], object]) -> Callable[[Any], object]:
        """Return a listener's callback, whose messages are counted, and processed. One of ours hands them on."""
        hands_on = str(getattr(on_message, "__module__", "")).startswith("anabranch.")

        def hear(message: Message[Any]) -> object:
            if self._meter is not None:
                self._meter.note(message, 0.0, 1)
            if hands_on:
                return on_message(message)
            self.begin(message)
            return self.run(message, None, on_message, message)

        return hear

    def run(self, message: Message[Any], error: BaseException | None, method: Callable[..., Any], *given: Any) -> Any:
        """Return what a method returns, with which it ends to be processed: with this error, or what that raises."""
        try:
            result = method(*given)
        except BaseException as raised:
            self.finish(message, raised)
            raise
        self.finish(message, error)
        return result


_lock: Final = RLock()
_replaced: Final[list[tuple[type, str, Any]]] = []
"""What was replaced: a class, a name, and what the class itself had there, or None."""
_instruments: Final[WeakKeyDictionary[MeterProvider, _Instruments]] = WeakKeyDictionary()
"""Those that were made. None can be removed, so that they serve again."""


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    meter_provider: MeterProvider | None = None,
    traces: bool = True,
    metrics: bool = True,
    template: Callable[[Destination], str] | None = None,
    durations_a_second: float = 10.0,
) -> None:
    """Tell of all routers of this process, those that are open too, to these providers, or else to the global ones.

    `traces=False` and `metrics=False` leave one out. `template` returns what a destination is called in the names of
    spans and in metrics. It has to return few different texts; without it that is the pattern that routes it. The
    counters are exact. Of durations at most so many a second are recorded for each operation, of whatever destination
    it is about: `math.inf` is all, which may take longer than what is measured. Without a tracer provider there are no
    spans: set it before. Raises RuntimeError where it is instrumented already, and ValueError for a number of durations
    that is not above 0.
    """
    if traces and tracer_provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        log.warning("no tracer provider is set, so there are no spans: set it before, or say traces=False")
        traces = False
    if not durations_a_second > 0:
        raise ValueError(f"durations_a_second is a number above 0, not {durations_a_second!r}; math.inf is all")
    with _lock:
        if _replaced:
            raise RuntimeError("anabranch is instrumented already; call uninstrument() first")
        version, templates = anabranch.__version__, _Templates(template)
        begin: Callable[..., _Call] | None = None
        if traces:
            begin = partial(_Call, trace.get_tracer("anabranch", version, tracer_provider), templates)
        meters: dict[_Operation, _Meter] = {}
        if metrics:
            provider = get_meter_provider() if meter_provider is None else meter_provider
            instruments = _instruments.get(provider)
            if instruments is None:
                instruments = _instruments[provider] = _Instruments(provider.get_meter("anabranch", version))
            meters = {one: _Meter(one, instruments, templates, 1 / durations_a_second) for one in _MEASURED}
            instruments.meters = list(meters.values())
        _Replacing(meters, begin).replace_all()


def uninstrument() -> None:
    """Tell of nothing any more. Does nothing where nothing is told."""
    with _lock:
        while _replaced:
            kind, name, before = _replaced.pop()
            if before is None:
                delattr(kind, name)
            else:
                setattr(kind, name, before)


def _replace(kind: type, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(kind, name)
    _replaced.append((kind, name, vars(kind).get(name)))
    setattr(kind, name, wraps(original)(make(original)))


def _unmeasured(of: Any, count: int, method: Callable[..., Any], *given: Any, **options: Any) -> Any:
    return method(*given, **options)


def _quick_send(meter: _Meter, original: Any, slow: Any) -> Any:
    """Return what stands for `send` where there are no spans: of a send that is passed over only the message counts."""
    known: dict[str, _Series] = {}

    def send(self: Any, body: Any, headers: Any = None, message_id: Any = None, *given: Any, **options: Any) -> Any:
        series = known.get(self.destination.name)
        if series is None or meter.left <= 0 or given or options:
            receipt = slow(self, body, headers, message_id, *given, **options)
            if series is None:
                meter.remember(self, known)
            return receipt
        meter.left -= 1
        try:
            receipt = original(self, body, headers, message_id)
        except BaseException as error:
            meter.note(self, 0.0, 1, error)
            raise
        series.count += 1
        return receipt

    return send


def _quick_receive(meter: _Meter, original: Any, slow: Any) -> Any:
    """Return what stands for `receive` likewise."""
    known: dict[str, _Series] = {}

    def receive(self: Any, timeout: Any = 0, **options: Any) -> Any:
        series = known.get(self.destination.name)
        if series is None or meter.left <= 0 or options:
            message = slow(self, timeout, **options)
            if series is None:
                meter.remember(self, known)
            return message
        meter.left -= 1
        try:
            message = original(self, timeout)
        except BaseException as error:
            meter.note(self, 0.0, 0, error)
            raise
        if message is not None:
            series.count += 1
        return message

    return receive


def _quick_ack(meter: _Meter, original: Any, slow: Any) -> Any:
    """Return what stands for `ack` likewise: it counts nothing."""

    def ack(self: Any, *, connection: Any = None) -> Any:  # the arguments of `ack`: to gather them takes longer
        if meter.left <= 0 or connection is not None:
            return slow(self, connection=connection)
        meter.left -= 1
        return original(self)

    return ack


def _quick_enter(held: Mapping[Any, Any], meter: _Meter, original: Any, slow: Any) -> Any:
    """Return what stands for `__enter__` likewise. `held`: the messages whose processing is measured."""

    def enter(self: Any) -> Any:
        if meter.left <= 0 or held:
            return slow(self)
        meter.left -= 1
        return original(self)

    return enter


def _quick_exit(held: Mapping[Any, Any], meter: _Meter, original: Any, slow: Any) -> Any:
    """Return what stands for `__exit__` likewise."""

    def leave(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        return slow(self, kind, error, trace) if held else original(self, kind, error, trace)

    return leave


class _Replacing:
    """Makes the methods that replace others, each of the one that it stands for."""

    def __init__(self, meters: Mapping[_Operation, _Meter], begin: Callable[..., _Call] | None) -> None:
        self._meters, self._call = meters, begin
        self._processing = _Processing(meters.get(_PROCESS), begin)

    def _measured(self, operation: _Operation) -> Callable[..., Any]:
        return self._meters[operation].run if self._meters else _unmeasured

    def replace_all(self) -> None:
        """Replace all that is told of."""
        for kind in (Queue, Topic):
            _replace(kind, "send", self._quickly(_quick_send, _SEND, self._sends))
            _replace(kind, "send_nowait", self._sends)
            _replace(kind, "send_many", self._sends_many)
        _replace(Queue, "send_leased", self._sends)
        for receiver in (Queue, Subscriber):
            _replace(receiver, "receive", self._quickly(_quick_receive, _RECEIVE, partial(self._does, _RECEIVE)))
            _replace(receiver, "receive_many", partial(self._does, _RECEIVE, many=True))
            _replace(receiver, "listen", self._listens)
        _replace(Message, "ack", self._quickly(_quick_ack, _ACK, partial(self._does, _ACK)))
        for name, operation in (("ack_nowait", _ACK), ("release", _RELEASE), ("release_nowait", _RELEASE)):
            _replace(Message, name, partial(self._does, operation))
        for name, operation in (*_SETTLING, *((f"{name}_nowait", operation) for name, operation in _SETTLING)):
            _replace(Router, name, partial(self._settles, operation))
        _replace(Router, "reject", partial(self._settles, _REJECT))  # which Message.reject calls
        held = self._processing.held
        _replace(Message, "__enter__", self._quickly(partial(_quick_enter, held), _PROCESS, self._enters))
        _replace(Message, "__exit__", self._quickly(partial(_quick_exit, held), _PROCESS, self._exits))
        _replace(Router, "listen", self._listens_to_many)
        _replace(Router, "receive", self._receives_pattern)
        _replace(Router, "consume", self._consumes_pattern)
        _replace(Router, "transaction", self._begins)
        _replace(Transaction, "send", self._creates)
        for name in ("commit", "commit_nowait"):
            _replace(Transaction, name, self._commits)
        try:
            from ..aio import AsyncMessage, AsyncQueue, AsyncSubscriber
        except anabranch.MissingExtraError:
            return
        _replace(AsyncMessage, "__aexit__", self._exits_async)
        if self._call is not None:  # a span is of one task, in whose context its call is made
            for one in (AsyncMessage, AsyncQueue, AsyncSubscriber):
                _replace(one, "_is_together", lambda original: lambda self: False)

    def _quickly(self, quick: Callable[..., Any], operation: _Operation, make: Callable[[Any], Any]) -> Any:
        """Return what makes a method: with metrics alone the `quick` one, which falls back on what `make` makes."""
        if self._call is not None or not self._meters:
            return make
        return lambda original: quick(self._meters[operation], original, make(original))

    def _does(self, operation: _Operation, original: Any, many: bool = False) -> Any:
        measured, begin = self._measured(operation), self._call

        def call(self: Any, *given: Any, **options: Any) -> Any:
            if begin is None or _is_suppressed():
                return measured(self, 0, original, self, *given, **options)
            return measured(self, 0, begin(operation, self, many).run, original, self, *given, **options)

        return call

    def _sends(self, original: Any) -> Any:
        measured, begin = self._measured(_SEND), self._call

        def send(self: Any, body: Any, headers: Any = None, message_id: Any = None, *given: Any, **options: Any) -> Any:
            if begin is None or _is_suppressed():
                return measured(self, 1, original, self, body, headers, message_id, *given, **options)
            call = begin(_SEND, self)
            headers = call.created(headers, message_id)
            return measured(self, 1, call.run, original, self, body, headers, message_id, *given, **options)

        return send

    def _sends_many(self, original: Any) -> Any:
        measured, begin = self._measured(_SEND), self._call

        def send_many(self: Any, messages: Any, *given: Any, **options: Any) -> Any:
            if begin is None or _is_suppressed():
                return measured(self, 0, original, self, messages, *given, **options)
            call = begin(_SEND, self, many=True)
            return measured(self, 0, call.run, original, self, call.created_many(messages), *given, **options)

        return send_many

    def _settles(self, operation: _Operation, original: Any) -> Any:
        measured, begin = self._measured(operation), self._call

        def settle(self: Any, messages: Any, *given: Any, **options: Any) -> Any:
            of, many = messages, not isinstance(messages, Message)
            if many and isinstance(messages, Iterable):
                messages = list(messages)
                destinations = {getattr(message, "destination", None) for message in messages}
                of = messages[0] if len(destinations) == 1 else None
            if begin is None or _is_suppressed():
                return measured(of, 0, original, self, messages, *given, **options)
            call = begin(operation, of, many)
            call.messages = [one for one in (messages if many else [of]) if isinstance(one, Message)]
            return measured(of, 0, call.run, original, self, messages, *given, **options)

        return settle

    def _listens(self, original: Any) -> Any:
        heard = self._processing.heard

        def listen(self: Any, on_message: Any, *given: Any, **options: Any) -> Any:
            return original(self, heard(on_message) if callable(on_message) else on_message, *given, **options)

        return listen

    def _listens_to_many(self, original: Any) -> Any:
        listen = self._listens(
            lambda self, on_message, queues, *given, **options: original(self, queues, on_message, *given, **options)
        )
        return lambda self, queues, on_message, *given, **options: listen(self, on_message, queues, *given, **options)

    def _enters(self, original: Any) -> Any:
        begin = self._processing.begin

        def enter(self: Message[Any]) -> Any:
            entered = original(self)
            begin(self)
            return entered

        return enter

    def _exits(self, original: Any) -> Any:
        run = self._processing.run

        def leave(self: Message[Any], kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
            run(self, error, original, self, kind, error, trace)

        return leave

    def _exits_async(self, original: Any) -> Any:
        processing = self._processing

        async def leave(self: Any, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
            processing.begin(self._of)  # what ends inside is in a context of its own, in which ours cannot be left
            try:
                await original(self, kind, error, trace)
            except BaseException as raised:
                processing.finish(self._of, raised)
                raise
            processing.finish(self._of, error)

        return leave

    def _receives_pattern(self, original: Any) -> Any:
        receive = self._does(_RECEIVE, original)
        return lambda self, pattern, *given, **options: (
            receive if _is_pattern(pattern) else original  # of a queue, which tells of it
        )(self, pattern, *given, **options)

    def _consumes_pattern(self, original: Any) -> Any:
        following = self._does(_RECEIVE, lambda self, found: next(found, None))

        def consume(self: Router, pattern: Any, *given: Any, **options: Any) -> Iterator[Any]:
            found: Iterator[Any] = original(self, pattern, *given, **options)
            return iter(lambda: following(self, found), None) if _is_pattern(pattern) else found

        return consume

    def _begins(self, original: Any) -> Any:
        def transaction(self: Router, *given: Any, **options: Any) -> Transaction:
            begun: Transaction = original(self, *given, **options)
            vars(begun)[_IS_TOLD] = True
            return begun

        return transaction

    def _creates(self, original: Any) -> Any:
        begin = self._call

        def send(self: Any, destination: Any, body: Any, headers: Any = None, *given: Any, **options: Any) -> Any:
            if begin is None or _IS_TOLD not in vars(self) or _is_suppressed():
                return original(self, destination, body, headers, *given, **options)
            call = begin(_CREATE, self)
            call.destination = _destination_of(destination)
            return call.run(original, self, destination, body, call.created(headers), *given, **options)

        return send

    def _commits(self, original: Any) -> Any:
        commit = self._does(_COMMIT, original, many=True)
        return lambda self: (commit if _IS_TOLD in vars(self) else original)(self)


def _is_pattern(pattern: object) -> bool:
    """Return whether messages of many queues are asked for."""
    try:
        return isinstance(pattern, str) and not Pattern.parse(pattern).exact
    except anabranch.DestinationError:
        return False


def _destination_of(address: Any) -> Destination | None:
    """Return the destination of a send of a transaction, if it is one."""
    try:
        found = Destination.parse(address) if isinstance(address, str) else getattr(address, "destination", address)
    except anabranch.DestinationError:  # a composite; or the send says so
        return None
    return found if isinstance(found, Destination) else None
