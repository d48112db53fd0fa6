"""The page: what it shows of a router under load, in a browser; and whom its server refuses."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

import anabranch
from anabranch import Config, StoreConfig, Xid
from anabranch.router.cli.ui import server as serving
from anabranch.router.cli.ui.advice import Advice
from anabranch.router.cli.ui.figures import Figures
from anabranch.router.cli.ui.server import CONNECTIONS, HOST, TOKEN, Server
from anabranch.router.upkeep import overview

from ..children import started
from ..contract.disk import PATIENCE, eventually
from ..partitioning.test_report_page import _CONTRAST as CONTRAST
from ..places import in_memory

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

HOSTILE: Final = "<img src=x onerror=document.title='taken'>"
QUEUES: Final = 1000
LETTERS: Final = 12
XID: Final = Xid(1, "order-17", "messages")


def router_in(directory: Path) -> anabranch.Router:
    options = {"sync": "never", "dead_letter": "dlq.{name}", "max_deliveries": 1}
    stores = [
        StoreConfig("orders", ["queue://orders.>", "queue://dlq.orders.>"], journal=options),
        StoreConfig("rest", [">"], journal=options),
    ]
    return anabranch.open(Config(directory, stores))


def reject(router: anabranch.Router, queue: str, count: int) -> None:
    """Send messages that become dead letters."""
    for number in range(count):
        router.queue(queue).send(b"body of %d" % number, {"kind": "toy"}, f"order-{number}")
        message = router.queue(queue).receive()
        assert message is not None
        message.reject(f"no such customer: {HOSTILE}")


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="anabranch-ui-", dir=in_memory()) as place:
        yield Path(place)


@pytest.fixture(scope="module")
def router(place: Path) -> Iterator[anabranch.Router]:
    """A router of this process, under load: with a thousand queues, and a transaction in doubt."""
    stop = threading.Event()

    def load() -> None:
        busy = ours.queue("telemetry")
        while not stop.wait(0.01):
            busy.send_many([b"1"] * 10)
            ours.ack(busy.receive_many(9))

    with router_in(place / "data") as ours:
        ours.topic("prices").subscribe("audit", client_id="billing")
        ours.topic("prices").send_many([b"1"] * 400)
        ours.queue("orders.stuck").send_many([b"1", b"2"])
        for number in range(QUEUES):
            ours.queue(f"orders.region-{number}").send(b"1")
        ours.queue("orders.fullest").send_many([b"1"] * 500)
        reject(ours, "orders.rejected", LETTERS)
        doubtful = ours.transaction(XID)
        doubtful.send("orders.paid", b"1")
        doubtful.prepare()
        thread = threading.Thread(target=load)
        thread.start()
        yield ours
        stop.set()
        thread.join()
        ours.rollback(XID)


@pytest.fixture(scope="module")
def url(place: Path, router: anabranch.Router) -> Iterator[str]:
    """The address that `anabranch ui` prints, a process of its own beside the router's."""
    told = place / "told"
    process = started(
        "anabranch", "ui", str(place / "data"), "--write", "--bodies", "--json", out=str(told), err=str(place / "err")
    )
    eventually(lambda: told.exists() and told.read_text().endswith("\n"), lambda: (place / "err").read_text())
    said = json.loads(told.read_text())
    assert said["owner_pid"] == os.getpid()
    yield said["url"]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(PATIENCE)
    assert process.exitcode == 143


FOCUSED: Final = "(e => [e.tagName, getComputedStyle(e).outlineStyle, e.id])(document.activeElement)"
VIEWS: Final = {"wide-light": (1280, "light"), "narrow-dark": (360, "dark")}


@pytest.fixture(scope="module", params=sorted(VIEWS))
def page(request: pytest.FixtureRequest, chromium: Browser, url: str) -> Iterator[Page]:
    width, scheme = VIEWS[request.param]
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE * 1000)
    page = context.new_page()
    told: list[str] = []
    page.on("console", lambda message: told.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: told.append(f"error: {error}"))
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(url)
    for table in ("store", "health", "destination", "queue", "transaction"):
        page.wait_for_selector(f"#{table}-table table")
    yield page
    assert told == []
    assert page.title() != "taken"
    context.close()


def cells(page: Page, table: str) -> dict[str, dict[str, str]]:
    """The rows of a table by their first cell, each as what stands below the heads."""
    found = page.evaluate("""id => [...document.querySelector(id).querySelectorAll('tbody tr')].map(row =>
        [...row.cells].map(cell => [cell.dataset.head ?? '', cell.textContent]))""", f"#{table}-table")  # fmt: skip
    return {row[0][1]: dict(row[1:]) for row in found}


def test_it_shows_what_happens(page: Page, url: str) -> None:
    assert page.url == url.partition("#")[0], "the token stays in no address bar"
    eventually(lambda: cells(page, "store")["rest"]["sends/s"] not in ("-", "0"))
    stores = cells(page, "store")
    assert (stores["orders"]["dead"], stores["orders"]["kind"]) == (str(LETTERS), "journal")
    assert {"disk live", "disk held", "oldest", "sync ms", "p99 ms", "leased", "delayed"} <= set(stores["orders"])
    assert page.locator("#health").text_content() == "Health: all stores can be used."
    assert page.locator("#wrong").text_content() == "1 transaction in doubt: see anabranch transactions"
    assert page.locator("#wrong code").text_content() == "anabranch transactions"
    assert {row["state"] for row in cells(page, "health").values()} == {"ok"}
    oldest = {"topic://prices billing/audit", "orders.stuck"}
    eventually(lambda: set(list(cells(page, "destination"))[:2]) == oldest, lambda: cells(page, "destination"))
    destinations = cells(page, "destination")
    assert len(destinations) == 50 and not any(name.startswith("dlq.") for name in destinations)
    assert destinations["orders.stuck"]["ready"] == "2"
    assert page.locator("#shown").text_content() in {f"50 of {n:,} that hold messages." for n in range(QUEUES, 1100)}
    assert "1:order-17:messages" in cells(page, "transaction")
    page.click("#explain")
    page.wait_for_selector("#explained table")
    assert "queue://orders.fullest" in page.locator("#explained").text_content()  # type: ignore[operator]


def test_anybody_can_read_and_work_it(page: Page) -> None:
    page.click("#queue-table button >> nth=0")
    page.wait_for_selector("#letter-table table")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page itself scrolls sideways"
    assert page.evaluate(CONTRAST) == []
    assert page.locator("html").get_attribute("lang") == "en"
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map(e => +e.tagName[1])")
    assert levels.count(1) == 1 and all(after - before <= 1 for before, after in pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('th')].every(e => e.scope && e.textContent.trim())")
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert page.evaluate("document.activeElement.id") == "opened", "the focus is where the letters are"
    names = page.evaluate("[...document.querySelectorAll('button')].map(e => e.ariaLabel || e.textContent)")
    assert len(names) == len(set(names)) and all(names), "two buttons of one name"
    page.locator("#pause").focus()
    page.keyboard.press("Space")
    assert page.locator("#pause").get_attribute("aria-pressed") == "true"
    page.locator(".skip").focus()
    wanted = page.evaluate("document.querySelectorAll('a, button, [tabindex=\"0\"]').length")
    reached = [page.evaluate(FOCUSED)]
    while len(reached) < wanted:
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))
    assert [one for one in reached if one[1] != "solid"] == [], "what has the focus shows it"
    assert sum(tag == "BUTTON" for tag, *_ in reached) == len(names)


def test_dead_letters_go_back_or_go(chromium: Browser, url: str, router: anabranch.Router) -> None:
    reject(router, "orders.settled", LETTERS)
    letters = router.queue("dlq.orders.settled")
    page = chromium.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    asked: list[str] = []

    def agree(dialog: Dialog) -> None:
        asked.append(dialog.message)
        dialog.accept()

    page.on("dialog", agree)
    page.goto(url)
    of_queue = page.locator("tr[data-key='queue://dlq.orders.settled']")
    of_queue.get_by_text("Show").click()
    page.wait_for_selector("#letter-table table")
    shown = cells(page, "letter")
    first = shown["order-0"]
    assert list(shown) == [f"order-{number}" for number in range(LETTERS)]
    assert (first["from"], first["reason"]) == ("queue://orders.settled", f"no such customer: {HOSTILE}")
    assert (first["headers"], first["body"]) == ("kind: toy", "body of 0")

    def done(text: str) -> None:
        page.wait_for_selector(f"#status >> text=/^{text}/")

    page.get_by_label("Put back: order-3").click()
    done("1 dead letter of queue://dlq.orders.settled put back")
    page.wait_for_selector("#letter-table tbody tr:nth-child(11)")
    page.get_by_label("Discard: order-4").click()
    done("1 dead letter of queue://dlq.orders.settled discarded")
    assert asked == ["Discard this dead letter? It is gone for good."]
    assert (letters.depth(), router.queue("orders.settled").depth()) == (LETTERS - 2, 1)
    back = router.queue("orders.settled").receive()
    assert back is not None and (back.body, back.message_id) == (b"body of 3", "order-3")
    back.ack()
    of_queue.get_by_text("Put all back").click()
    done(f"{LETTERS - 2} dead letters")
    assert (letters.depth(), router.queue("orders.settled").depth()) == (0, LETTERS - 2)
    page.close()


class _Elsewhere(BaseHTTPRequestHandler):
    """A page of another port, whose forms and frames are those of one that is up to something."""

    html = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.html)

    def log_message(self, *_: object) -> None:
        pass


def test_other_pages_cannot_use_it(chromium: Browser, url: str, router: anabranch.Router) -> None:
    """Neither in a frame, nor by a form or a request of a script, also where it knows the token."""
    home, token = url.split("#")
    _Elsewhere.html = f"""<!DOCTYPE html><title>elsewhere</title><iframe src="{home}"></iframe>
        <iframe name="out"></iframe>
        <form method="post" enctype="text/plain" action="{home}api/discard" target="out">
        <input name='{{"queue": "queue://dlq.orders.rejected", "seqs": null, "x": "' value='"}}'></form>""".encode()
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE * 1000)
    mine, other = context.new_page(), context.new_page()
    mine.goto(url)
    mine.wait_for_selector("#store-table table")
    with ThreadingHTTPServer((HOST, 0), _Elsewhere) as elsewhere:
        thread = threading.Thread(target=elsewhere.serve_forever, args=(0.01,))
        thread.start()
        other.goto(f"http://{HOST}:{elsewhere.server_port}/")
        assert "Anabranch" not in "".join(frame.content() for frame in other.frames[1:])
        with other.expect_response("**/api/discard") as answer:
            other.evaluate("document.forms[0].submit()")
        assert answer.value.status == 403
        ask = "async ([url, how]) => { try { await fetch(url, how); return 'read'; } catch { return 'refused'; } }"
        for how in ({}, {"headers": {TOKEN: token}}, {"credentials": "include"}, {"method": "POST", "body": "{}"}):
            assert other.evaluate(ask, [f"{home}api/look", how]) == "refused", how
        elsewhere.shutdown()
        thread.join()
    assert router.queue("dlq.orders.rejected").depth() == LETTERS
    context.close()


# The server -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that only reads, over a directory that nobody else has open."""
    with router_in(tmp_path / "data") as router, Advice(router.config) as advice:
        reject(router, "orders.rejected", 1)
        router.queue("private").send(b"1")
        with Server(0, Figures(router, bodies=False), advice, {}, write=False) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            yield server
            server.shutdown()
            thread.join()


def ask(server: Server, path: str, headers: dict[str, str] | None = None, body: Any = None) -> tuple[int, Any]:
    """Return the status and what was said."""
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=PATIENCE)
    method = "GET" if body is None else "POST"
    given = {TOKEN: server.token} | (headers or {})
    connection.putrequest(method, path, skip_host="Host" in given)
    for name, value in given.items():
        connection.putheader(name, value)
    text = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.putheader("Content-Length", str(len(text)))
    connection.endheaders(text)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.headers["X-Frame-Options"] == "DENY"
    assert answer.headers["Access-Control-Allow-Origin"] is None
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    return answer.status, json.loads(content) if answer.headers["Content-Type"] == "application/json" else content


def raw(server: Server, request: bytes) -> bytes:
    """Send this, and nothing more; return what comes back until it is closed."""
    answer = b""
    with socket.create_connection((HOST, server.server_port), PATIENCE) as peer, suppress(OSError):  # it may be cut
        peer.sendall(request)
        peer.shutdown(socket.SHUT_WR)
        while chunk := peer.recv(65536):
            answer += chunk
    return answer


def test_who_is_refused(server: Server) -> None:
    home = f"{HOST}:{server.server_port}"
    assert ask(server, "/api/look")[0] == 200
    assert ask(server, "/api/look", {"Origin": f"http://{home}", "Sec-Fetch-Site": "same-origin"})[0] == 200
    refused: list[tuple[int, dict[str, str]]] = [
        (401, {TOKEN: ""}), (401, {TOKEN: server.token[:-1]}), (401, {TOKEN: "\xff" * 43}),
        (421, {"Host": "elsewhere.test"}), (421, {"Host": f"elsewhere.test:{server.server_port}"}),
        (421, {"Host": HOST}), (421, {"Host": ""}),
        (403, {"Origin": "http://elsewhere.test"}), (403, {"Origin": "null"}), (403, {"Origin": f"https://{home}"}),
        (403, {"Sec-Fetch-Site": "cross-site"}), (403, {"Sec-Fetch-Site": "same-site"}),
    ]  # fmt: skip
    for status, headers in refused:
        assert ask(server, "/api/look", headers)[0] == status, headers
        assert ask(server, "/api/advice", headers, {})[0] == status, headers
    assert ask(server, "/", {"Host": "elsewhere.test", TOKEN: ""})[0] == 421
    status, page = ask(server, "/", {TOKEN: "", "Sec-Fetch-Site": "cross-site"})  # a link to it
    assert (status, server.token.encode() in page) == (200, False)
    for path in ("/report/", "/report/x", "/etc/passwd", "/api", "/api/nothing"):
        assert ask(server, path)[0] == 404


def test_dead_letters_are_counted_below_alone(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = ask(server, "/api/look")[1]
    assert ([row[0] for row in seen["destinations"]["rows"]], seen["destinations"]["total"]) == (["private"], 1)
    assert seen["letters"]["rows"] == [["queue://dlq.orders.rejected", "1"]]
    monkeypatch.setattr(overview, "LETTERS_MAX", 0)  # beyond those that are named
    server.figures.look._seconds = 0
    seen = ask(server, "/api/look")[1]
    assert (seen["destinations"]["total"], seen["letters"]["rows"]) == (1, [])


def test_without_write_it_only_reads_and_without_bodies_shows_none(server: Server) -> None:
    (row,) = ask(server, "/api/letters?queue=queue://dlq.orders.rejected")[1]["letters"]["rows"]
    assert "toy" not in str(row) and "body of" not in str(row) and "order-0" in row
    for path in ("/api/discard", "/api/put-back"):
        assert ask(server, path, body={"queue": "queue://dlq.orders.rejected", "seqs": None})[0] == 403
    server.write = True
    for queue in ("queue://private", "queue://orders.rejected", "topic://x", "", "\ud800"):
        status, said = ask(server, "/api/discard", body={"queue": queue, "seqs": None})
        assert (status, "is none of the dead-letter queues" in said["error"]) == (409, True)
    garbage = (b"", b"{", b"[]", b"\xff", b"[" * 65536)
    for wrong in (*garbage, b'{"queue": 1}', {"queue": "q"}, {"queue": "q", "seqs": [1]}):
        assert ask(server, "/api/discard", body=wrong)[0] in (400, 409)
    status, said = ask(server, "/api/discard", body={"queue": "queue://dlq.orders.rejected", "seqs": ["0", "99"]})
    assert (status, said["done"][:15]) == (200, "0 dead letters ")
    assert len(ask(server, "/api/letters?queue=queue://dlq.orders.rejected")[1]["letters"]["rows"]) == 1


def test_garbage_is_refused(server: Server) -> None:
    for garbage in (
        b"", b"\n", b"\r\n\r\n", os.urandom(4096), b"GET", b"GET /\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        b"OPTIONS /api/look HTTP/1.1\r\nHost: x\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"a" * 200_000, b"POST /api/discard HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n{}",
        b"GET //[ HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    ):  # fmt: skip
        assert not re.match(rb"HTTP/1.. 200", raw(server, garbage)), garbage[:80]
    assert ask(server, "/api/look")[0] == 200


def test_who_says_nothing_or_reads_nothing_keeps_nobody_out(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred clients that do nothing: those that have let it wait longest go when others come."""
    monkeypatch.setattr(serving, "GRACE", 0.1)
    idle = [socket.create_connection((HOST, server.server_port), PATIENCE) for _ in range(100)]
    for one in idle[::2]:
        one.sendall(b"GET / HTTP/1.1\r\nHost: ")
    for _ in range(3):
        assert ask(server, "/api/look")[0] == 200
    assert sum(thread.name.count("process_request") for thread in threading.enumerate()) <= CONNECTIONS + 40
    assert idle[0].recv(1) == b""
    for one in idle:
        one.close()
    monkeypatch.setattr(serving, "PATIENCE", 0.2)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect((HOST, server.server_port))
        slow.settimeout(PATIENCE)
        slow.sendall(b"GET / HTTP/1.1\r\n")
        assert slow.recv(1) == b""
    big = server.page = b"x" * (64 << 20)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.connect((HOST, server.server_port))
        slow.sendall(b"GET / HTTP/1.1\r\nHost: %s:%d\r\n\r\n" % (HOST.encode(), server.server_port))
        eventually(lambda: not server._waiting and server._count == 0)
        slow.settimeout(PATIENCE)
        read = 0
        while chunk := slow.recv(1 << 20):
            read += len(chunk)
        assert read < len(big)


def report(server: Server) -> dict[str, str]:
    """Let it make a report, and return what became of it."""
    assert ask(server, "/api/advice")[1] == {"state": "none"}
    assert ask(server, "/api/advice", body={})[1]["state"] == "running"
    found: dict[str, str] = {}
    eventually(lambda: found.update(ask(server, "/api/advice")[1]) or found["state"] != "running")
    return found


def test_a_report_that_cannot_be_made_says_why(server: Server) -> None:
    found = report(server)
    assert (found["state"], "there is no usage log at" in found["error"]) == ("failed", True)


@pytest.mark.campaign
def test_the_report_is_made_when_asked(server: Server, chromium: Browser) -> None:
    router = server.figures._router
    router.start_usage_log()
    for delay in (0.0, 0.1):  # a trace spans some time
        router.queue("private").send(b"1", deliver_in=delay)
        router.ack(router.queue("private").receive_many(9, timeout=PATIENCE))
    router.stop_usage_log()
    found = report(server)
    assert found["state"] == "ready", found
    assert ask(server, found["path"], {TOKEN: ""})[0] == 200
    assert ask(server, found["path"][:-1])[0] == 404
    page = chromium.new_page()
    page.goto(f"http://{HOST}:{server.server_port}{found['path']}")
    assert page.title() == "Which destinations should share a store"
    page.close()


def test_a_port_that_is_taken_is_named(server: Server) -> None:
    with pytest.raises(
        anabranch.ConfigError, match=rf"port {server.server_port} of 127\.0\.0\.1 .*give another --port"
    ):
        Server(server.server_port, server.figures, server.advice, {}, write=False)
