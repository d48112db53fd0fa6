"""The program of docs/hosts.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import prometheus_client
import pytest

from ...pages import of_host


def test_it_can_be_scraped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    started: list[Any] = []
    start = prometheus_client.start_http_server
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda _, host: started.extend(start(0, host)))
    names: dict[str, Any] = {}
    exec(of_host("prometheus", {"shared=True": "shared=False"}), names)
    names["router"].queue("orders").send(b"a train")
    server, thread = started
    with names["router"], urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
        assert re.search(rb"^anabranch_store_up{.*} 1.0$", answer.read(), re.M)
    server.shutdown()
    thread.join()
    server.server_close()
