"""The exporter in examples/opentelemetry, before a collector that is killed and comes back."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from examples.opentelemetry.durable_exporter import DurableSpanExporter, Forwarder
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

import anabranch
from anabranch.hosts.opentelemetry import instrument, uninstrument

PATIENCE = 120.0
COLLECTOR = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

class Collector(BaseHTTPRequestHandler):
    def do_POST(self):
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(sys.argv[1]).open("a") as file:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        print(span.name, file=file)
        self.send_response(200)
        self.end_headers()

server = HTTPServer(("127.0.0.1", int(sys.argv[2])), Collector)
print(server.server_port, flush=True)
server.serve_forever()
"""


def collector(collected: Path, port: int) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-c", COLLECTOR, str(collected), str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process.stdout:  # type: ignore[union-attr]
        return process, int(process.stdout.readline())  # type: ignore[union-attr]


def wait_for(collected: Path, names: set[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not (collected.exists() and names <= set(collected.read_text().split())):
        assert time.monotonic() < deadline


def test_spans_wait_for_a_collector(tmp_path: Path) -> None:
    collected = tmp_path / "collected"
    process, port = collector(collected, 0)

    def program(*names: str, until: Any) -> None:
        """A program that makes spans, is instrumented itself, and ends."""
        provider = TracerProvider()
        with anabranch.open(tmp_path / "data") as router:
            queue = router.queue("spans")
            provider.add_span_processor(SimpleSpanProcessor(DurableSpanExporter(queue)))
            forwarder = Forwarder(queue, f"http://127.0.0.1:{port}/v1/traces", retry_seconds=0.01)
            instrument(tracer_provider=provider, metrics=False)
            try:
                for name in names:
                    provider.get_tracer("program").start_span(name).end()
                until()
            finally:
                uninstrument()
                provider.shutdown()
                forwarder.stop()

    try:
        program("first", until=lambda: wait_for(collected, {"first"}))
        process.kill()
        process.wait()
        program("second", "third", until=lambda: None)
        with anabranch.open(tmp_path / "data") as router:
            assert router.queue("spans").depth() == 2
        process, _ = collector(collected, port)
        program("fourth", until=lambda: wait_for(collected, {"second", "third", "fourth"}))
    finally:
        process.kill()
        process.wait()
    assert collected.read_text().split() == ["first", "second", "third", "fourth"], "its own sends make no spans"


def test_spans_wait_for_what_answers_nonsense_and_for_a_queue_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"]
    errors = [anabranch.StoreFailedError("the owner is stopped")]
    receive = anabranch.Queue.receive

    def received(queue: anabranch.Queue, *given: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return receive(queue, *given, **options)

    monkeypatch.setattr(anabranch.Queue, "receive", received)
    with anabranch.open(tmp_path / "data") as router, socket.create_server(("127.0.0.1", 0)) as server:
        queue = router.queue("spans")
        queue.send(b"x")
        forwarder = Forwarder(queue, f"http://127.0.0.1:{server.getsockname()[1]}/", retry_seconds=0.01)
        for answer in answers:
            taken, _ = server.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(answer)
        deadline = time.monotonic() + PATIENCE
        while queue.depth():
            assert time.monotonic() < deadline
        forwarder.stop()
