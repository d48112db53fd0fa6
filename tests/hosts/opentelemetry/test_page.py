"""The program of docs/hosts.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ...pages import of_host

BEFORE = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

told = InMemorySpanExporter()
trace.set_tracer_provider(TracerProvider())
trace.get_tracer_provider().add_span_processor(SimpleSpanProcessor(told))
"""
AFTER = """
import anabranch

with anabranch.open("data") as router:
    router.queue("orders").send(b"a train")
print(*(span.name for span in told.get_finished_spans()))
"""


def test_a_send_is_told_to_the_global_provider(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BEFORE + of_host("opentelemetry") + AFTER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "send >\n"), done.stderr
