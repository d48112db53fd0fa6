"""An exporter of spans that outlives its collector, and its process.

Spans go to a durable queue first, in the bytes in which OTLP sends them. A thread of its own posts them to the
collector. While that is down or unreachable they wait on disk, over restarts of the program too; none is lost once
`export` has returned. One may come twice, if the collector's answer is lost.

    pip install 'anabranch[opentelemetry]' opentelemetry-sdk opentelemetry-exporter-otlp-proto-http

    router = anabranch.open("telemetry")
    provider.add_span_processor(BatchSpanProcessor(DurableSpanExporter(router.queue("spans"))))
    forwarder = Forwarder(router.queue("spans"), "http://localhost:4318/v1/traces")
    ...
    provider.shutdown()
    forwarder.stop()
"""

from __future__ import annotations

import http.client
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence

from opentelemetry import context
from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

import anabranch

log = logging.getLogger(__name__)

POST_SECONDS = 10.0
COMES_BACK = {408, 429, 502, 503, 504}
"""Answers of a collector that will take it later. Others above 400 say that it never will."""


class DurableSpanExporter(SpanExporter):
    """Puts spans into a queue."""

    def __init__(self, queue: anabranch.Queue) -> None:
        self._queue = queue

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._queue.send(encode_spans(spans).SerializeToString())
        except anabranch.AnabranchError:
            log.exception("%d spans are lost", len(spans))
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS


class Forwarder:
    """Posts what is in the queue to a collector, in order, until it is stopped."""

    def __init__(self, queue: anabranch.Queue, endpoint: str, retry_seconds: float = 5.0) -> None:
        self._queue, self._endpoint, self._retry_seconds = queue, endpoint, retry_seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span-forwarder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop; what is left stays in the queue."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        context.attach(context.set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))  # or it would make spans of its own
        while not self._stopping.is_set():
            try:
                message = self._queue.receive(timeout=0.5)
                is_well = message is None or self._posted(message)
                if message is not None and not is_well:
                    message.release(delivered=False)
            except anabranch.AnabranchError:  # its owner is stopped, say
                log.exception("the queue of spans cannot be used")
                is_well = False
            if not is_well:
                self._stopping.wait(self._retry_seconds)

    def _posted(self, message: anabranch.Message) -> bool:
        """Post one; returns whether it is settled."""
        headers = {"Content-Type": "application/x-protobuf"}
        request = urllib.request.Request(self._endpoint, message.body, headers)
        try:
            with urllib.request.urlopen(request, timeout=POST_SECONDS):
                message.ack()
        except urllib.error.HTTPError as error:
            if error.code in COMES_BACK:
                return False
            log.error("the collector refuses spans: %s", error)
            message.reject(error)
        except (OSError, http.client.HTTPException) as error:
            log.warning("the collector cannot be reached: %s", error)
            return False
        return True
