"""The server of the page: HTTP on 127.0.0.1, for browsers of this machine whose user has the token.

Whatever the peer does, it takes a bounded part of this process. A request has 10 seconds to come, whole and of 64 KiB
at most, and its answer 10 seconds to be read. 64 connections have a thread each. One more waits for the next place. It
takes that of the one that has let us wait longest, where that is more than a second.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import io
import json
import logging
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from ....policies.errors import AnabranchError, ConfigError, DestinationError
from .advice import Advice
from .figures import Figures

log: logging.Logger = logging.getLogger(__name__)

HOST: Final = "127.0.0.1"
CONNECTIONS: Final = 64
"""Connections that have a thread. A browser has six to one server."""
PATIENCE: Final = 10.0
"""Seconds that a request may take to come, and an answer to be read."""
GRACE: Final = 1.0
"""Seconds that a connection may let us wait while others wait for its place."""
REQUEST_BYTES: Final = 64 << 10
TOKEN: Final = "X-Token"
"""The header of the token. Another origin cannot set it: no answer here allows that."""

_LENGTH: Final = re.compile(rb"^content-length:[ \t]*(\d{1,9})[ \t]*\r?$", re.IGNORECASE | re.MULTILINE)
_END: Final = re.compile(rb"\r?\n\r?\n")
_HEADERS: Final = {
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_NOTHING: Final = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_REPORT: Final = f"{_NOTHING}; style-src 'unsafe-inline'; img-src data:; sandbox"

Answer = tuple[HTTPStatus, str, bytes, str]
"""The status, the content type, the body, and the Content-Security-Policy."""


class Server(ThreadingHTTPServer):
    """Serves the page until `shutdown`. Opened by making it, closed by `server_close`, or with `with`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int, figures: Figures, advice: Advice, facts: Mapping[str, Any], *, write: bool) -> None:
        """`port`: 0 for a free one. `facts`: told to the page as they are. `write`: dead letters may be put back and
        discarded. Raises ConfigError for a port that cannot be had."""
        self.token: Final = secrets.token_urlsafe(32)
        self.figures = figures
        self.advice = advice
        self.write = write
        self.facts: Final[dict[str, Any]] = {**facts, "write": write}
        self.page: bytes = files(__package__).joinpath("page.html").read_bytes()
        self.policy: Final = _policy(self.page)
        self._room = threading.Condition()
        """Guards the two fields below; notified of a place."""
        self._count = 0
        """Connections that there are."""
        self._waiting: dict[socket.socket, float] = {}
        """Those whose peer has to do something, and since when (monotonic), in that order."""
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ConfigError(
                [f"port {port} of {HOST} cannot be used: {error.strerror}; give another --port, or none for a free one"]
            ) from error
        names = [f"{name}:{self.server_port}" for name in (HOST, "localhost")]
        self.hosts: Final = {*names, HOST, "localhost"} if self.server_port == 80 else set(names)
        self.origins: Final = {f"http://{host}" for host in self.hosts}

    @property
    def url(self) -> str:
        """The address for a browser. It has the token behind the `#`, which is sent nobody."""
        return f"http://{HOST}:{self.server_port}/#{self.token}"

    def server_bind(self) -> None:
        """Bind, without asking a name server what this machine is called."""
        socketserver.TCPServer.server_bind(self)
        self.server_name: str = HOST
        self.server_port: int = self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a connection its thread, once there is a place; others wait in the system's line meanwhile."""
        with self._room:
            while self._count >= CONNECTIONS:
                oldest, since = next(iter(self._waiting.items()), (None, time.monotonic()))
                left = since + GRACE - time.monotonic()
                if oldest is not None and left <= 0:
                    del self._waiting[oldest]
                    _cut(oldest)
                    break  # its thread ends at once
                self._room.wait(left)
            self._count += 1
            self._waiting[request] = time.monotonic()
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, on its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ended(request)

    def _ended(self, request: socket.socket) -> None:
        with self._room:
            self._count -= 1
            self._waiting.pop(request, None)
            self._room.notify()

    def waits(self, request: socket.socket, does: bool) -> None:
        """Note that it is the peer's turn, or that it is ours."""
        with self._room:
            self._waiting.pop(request, None)
            if does:
                self._waiting[request] = time.monotonic()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection: that its peer has gone, mostly."""
        log.debug("a connection of the page has ended", exc_info=True)


def _cut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # its peer was first
        pass


def _policy(page: bytes) -> str:
    """Return the Content-Security-Policy of a page: its own script and style, and requests to where it comes from."""
    hashes = []
    for tag in (b"script", b"style"):
        content = page.partition(b"<" + tag + b">")[2].partition(b"</" + tag + b">")[0]
        hashes.append(base64.b64encode(hashlib.sha256(content).digest()).decode())
    script, style = hashes
    return (
        f"{_NOTHING}; script-src 'sha256-{script}'; style-src 'sha256-{style}'; connect-src 'self'; img-src data:; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    )


class _Refused(Exception):  # noqa: N818  an answer, and no defect
    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    """One connection: one request, and its answer."""

    server: Server
    server_version, sys_version = "anabranch", ""

    def setup(self) -> None:
        self.connection = self.request
        self.rfile, self.wfile = io.BytesIO(), io.BytesIO()

    def handle(self) -> None:
        self.rfile = io.BytesIO(self._received())
        self.server.waits(self.connection, False)
        self.handle_one_request()

    def finish(self) -> None:
        self.server.waits(self.connection, True)
        self.connection.settimeout(PATIENCE)  # for all of it
        self.connection.sendall(self.wfile.getvalue())  # type: ignore[attr-defined]

    def _received(self) -> bytes:
        """Return the request, or as much as is taken of it. Raises OSError where it does not come in time."""
        got, needed, deadline = bytearray(), REQUEST_BYTES, time.monotonic() + PATIENCE
        while len(got) < needed:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            self.connection.settimeout(left)
            chunk = self.connection.recv(REQUEST_BYTES - len(got))
            got += chunk
            end = _END.search(got)
            if end is not None:
                length = _LENGTH.search(got, 0, end.end())
                needed = min(end.end() + (int(length[1]) if length is not None else 0), REQUEST_BYTES)
            if not chunk:
                break
        return bytes(got)

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, answer: Callable[[str, Mapping[str, str]], Answer]) -> None:
        try:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query, max_num_fields=10).items()}
            self._require_ours(url.path)
            found = answer(url.path, query)
        except _Refused as refused:
            found = _json({"error": str(refused)}, refused.status)
        except AnabranchError as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            found = _json({"error": text}, HTTPStatus.CONFLICT)
        except (ValueError, RecursionError) as error:
            found = _json({"error": f"the request is not one of the page's: {error}"}, HTTPStatus.BAD_REQUEST)
        except Exception as error:
            log.exception("a request of the page has failed")
            found = _json({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.INTERNAL_SERVER_ERROR)
        self._write(*found)

    def _require_ours(self, path: str) -> None:
        """Refuse what another page asks, whatever it knows; and what comes by another name, as it does where that name
        was pointed here to get around the rule of one origin."""
        if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
            raise _Refused(HTTPStatus.MISDIRECTED_REQUEST, f"this is http://{HOST}:{self.server.server_port}/, alone")
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site", "none")
        is_link = path == "/" and self.command == "GET"  # which any page may have: what it leads to has no figures
        if (origin is not None and origin not in self.server.origins) or not (
            is_link or site in ("same-origin", "none")
        ):
            raise _Refused(HTTPStatus.FORBIDDEN, "this is for its own page, and not for that of another origin")

    def _require_token(self) -> None:
        given = self.headers.get(TOKEN, "").encode("latin-1")
        if not hmac.compare_digest(given, self.server.token.encode()):
            text = "this needs the token: open the address that `anabranch ui` has printed"
            raise _Refused(HTTPStatus.UNAUTHORIZED, text)

    def _get(self, path: str, query: Mapping[str, str]) -> Answer:
        server = self.server
        if path == "/":
            return HTTPStatus.OK, "text/html; charset=utf-8", server.page, server.policy
        if path.startswith("/report/"):  # opened by a link, so without a header: its name is a token itself
            report = server.advice.report(path.removeprefix("/report/"))
            if report is not None:
                return HTTPStatus.OK, "text/html; charset=utf-8", report, _REPORT
            raise _Refused(HTTPStatus.NOT_FOUND, "this report is not there any more: ask for another one on the page")
        self._require_token()
        calls: dict[str, Callable[[], Mapping[str, Any]]] = {
            "/api/facts": lambda: server.facts,
            "/api/look": server.figures.look,
            "/api/health": server.figures.health,
            "/api/transactions": server.figures.transactions,
            "/api/letters": lambda: server.figures.letters(query.get("queue", "")),
            "/api/explain": server.figures.explain,
            "/api/advice": server.advice.state,
        }
        if path not in calls:
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")
        return _json(calls[path]())

    def _post(self, path: str, _query: Mapping[str, str]) -> Answer:
        self._require_token()
        if path == "/api/advice":
            return _json(self.server.advice.start())
        if path not in ("/api/put-back", "/api/discard"):
            raise _Refused(HTTPStatus.NOT_FOUND, "there is nothing of that name")
        if not self.server.write:
            raise _Refused(HTTPStatus.FORBIDDEN, "this page only reads: start `anabranch ui` with --write")
        match json.loads(self.rfile.read()):
            case {"queue": str(queue), "seqs": None | [*_] as seqs, **rest} if not rest:
                if seqs is not None and not all(isinstance(one, str) for one in seqs):
                    raise DestinationError("`seqs` are texts")
                return _json({"done": self.server.figures.settle(queue, seqs, path == "/api/put-back")})
        raise ValueError("it takes `queue` and `seqs`")

    def _write(self, status: HTTPStatus, kind: str, body: bytes, policy: str) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Security-Policy": policy}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no request, or has another method."""
        status = HTTPStatus(code)
        self._write(*_json({"error": message or status.description}, status))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a path may be a secret."""


def _json(value: Mapping[str, Any], status: HTTPStatus = HTTPStatus.OK) -> Answer:
    return status, "application/json", json.dumps(value).encode(), _NOTHING
