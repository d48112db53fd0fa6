"""Shared by the commands over messages: queues that are there, how a message is shown, asking before anything goes.

A body is shown as text where it is UTF-8 text, or where its `content_type` says MessagePack; else its length and its
first bytes are. A pickle, which a codec would have to run, is never decoded here. With `--json` each message is one
object on a line of its own; with `--raw` bodies alone come, as they are.
"""

from __future__ import annotations

import base64
import json
import math
import shutil
import sys
from datetime import UTC, datetime
from typing import Any, Final

import click
import msgspec

from ...adapters.core.messages import DEFAULT_PRIORITY, Message
from ...policies.errors import DestinationError
from ...policies.names.destination import Destination, Kind, wildcard_in
from ...policies.text import human_bytes, printable
from ..api.queue import Queue
from ..api.topic import Topic
from ..placement.near_names import alike_name, near_name
from ..router import Router, inspection_of

HEX_BYTES: Final = 16
"""The number of bytes that are shown of a body that is no text."""
LINES: Final = 20
"""The number of lines of a text that a terminal shows."""
NAMES: Final = 5
"""The number of destinations that are named of those that are there."""
CHUNK: Final = 1 << 16
_MSGPACK: Final = "application/msgpack"
_JSON: Final = "application/json"

_LINES_HELP: Final = "Print one JSON object for each message, on a line of its own. Errors stay text, on stderr."
json_lines: Final = click.option("--json", "as_json", is_flag=True, help=_LINES_HELP)
raw_option: Final = click.option("--raw", is_flag=True, help="Write bodies alone, as they are, one behind the other.")
yes_option: Final = click.option("--yes", "-y", is_flag=True, help="Do not ask.")


# Queues --------------------------------------------------------------------------------------------------------------


def destination_in(text: str) -> Destination:
    """Return the one destination that a command is given; a bare name is a queue. Raises DestinationError."""
    if "," in text:
        raise DestinationError(f"{text!r} has a comma, which stands between several names: give one")
    destination = Destination.parse(text)
    wildcard = wildcard_in(destination.name)
    if wildcard is not None:
        raise DestinationError(
            f"{destination} holds the wildcard {wildcard}: give one name; `anabranch queues` lists those there are"
        )
    return destination


def queue_named(router: Router, name: str) -> Queue:
    """Return a queue, new or not. Raises DestinationError for a topic or a map."""
    destination = destination_in(name)
    if destination.kind is not Kind.QUEUE:
        others = "; `browse` and `tail` show its messages" if destination.kind is Kind.TOPIC else ""
        raise DestinationError(f"{destination} is a {destination.kind.name.lower()}: give a queue{others}")
    return router.queue(destination)


def queue_in(router: Router, name: str, *, loses: bool = False) -> Queue:
    """Return a queue that has been used; `loses` as in `require_known`. Raises DestinationError for another."""
    queue = queue_named(router, name)
    require_known(router, queue.destination, loses=loses)
    return queue


def backlog_in(router: Router, name: str) -> Queue | Topic:
    """Return a queue, or a topic, that has been used. Raises DestinationError for another."""
    destination = destination_in(name)
    if destination.kind is Kind.MAP:
        raise DestinationError(f"{destination} is a map, which has no messages: give a queue or a topic")
    require_known(router, destination)
    return router.topic(destination) if destination.kind is Kind.TOPIC else router.queue(destination)


def require_known(router: Router, destination: Destination, *, loses: bool = False) -> None:
    """Raise DestinationError for a destination that nobody has used. If the command `loses` what it is given, no name
    is suggested but one that is a slip away."""
    if router.exists(destination):
        return
    known = router.destinations(destination.kind.scheme)
    near = near_name(destination, known) or (None if loses else alike_name(destination, known))
    shown = [as_given(one) for one in known[:NAMES]]
    more = f" and {len(known) - NAMES:,} more" if len(known) > NAMES else ""
    there = f"it has {', '.join(shown)}{more}" if shown else "there is none yet"
    if near is not None:
        there = f"did you mean {as_given(near)}?"
    raise DestinationError(f"{router.config.directory} has no {destination}; {there}")


def require_lasting(router: Router, destination: Destination) -> None:
    """Raise DestinationError for a destination that is, or would be, in memory alone: all of it goes when the command
    ends."""
    if inspection_of(router).is_volatile(destination):
        raise DestinationError(
            f"{destination} is in a memory store, whose messages go when this command ends: nothing is put there"
        )


def as_given(destination: Destination) -> str:
    """Return the name as a command is given it: a queue needs no scheme."""
    return printable(destination.name if destination.kind is Kind.QUEUE else str(destination))


def confirm(question: str, yes: bool) -> None:
    """Ask on the terminal, unless `yes`. Raises ClickException for anything but y or yes, and UsageError where there is
    no terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"there is no terminal to ask on: {question} Give --yes to do it")
    click.echo(f"{question} [y/N] ", nl=False, err=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise click.ClickException("nothing was changed")


# Messages ------------------------------------------------------------------------------------------------------------


class Shown:
    """Shows messages. Each is written out on return: a reader that has gone is noticed before anything else is done
    with the message (BrokenPipeError)."""

    def __init__(self, as_json: bool, raw: bool = False) -> None:
        if as_json and raw:
            raise click.UsageError("--json and --raw exclude each other; give one of them")
        self._as_json, self._raw = as_json, raw
        is_terminal = sys.stdout.isatty()
        self._columns = shutil.get_terminal_size().columns if is_terminal else 0
        self.count: int = 0
        """The number of messages that were shown."""

    def __call__(self, message: Message) -> None:
        """Show one message."""
        self.count += 1
        if self._raw:
            with message.open() as stream:
                while chunk := stream.read(CHUNK):
                    sys.stdout.buffer.write(chunk)
            sys.stdout.buffer.flush()
        elif self._as_json:
            click.echo(json.dumps(as_json(message), ensure_ascii=False))
        else:
            click.echo("\n".join([*self._head(message), *self._body(message)]))

    def _head(self, message: Message) -> list[str]:
        parts = [f"{message.seq}", _time(message.timestamp_ms), human_bytes(message.size)]
        if message.message_id is not None:
            parts.append(f"id {printable(message.message_id)}")
        if message.priority != DEFAULT_PRIORITY:
            parts.append(f"priority {message.priority}")
        if message.expires_at_ms:
            parts.append(f"expires {_time(message.expires_at_ms)}")
        back = message.deliveries - message.leased
        if back:
            parts.append(f"given back {'once' if back == 1 else f'{back} times'}")
        lines: list[str] = []
        for part in parts:  # none is broken
            if lines and (not self._columns or len(lines[-1]) + 2 + len(part) <= self._columns):
                lines[-1] += f"  {part}"
            else:
                lines.append(f"  {part}" if lines else part)
        values = {name: value.hex() if isinstance(value, bytes) else value for name, value in message.headers.items()}
        return lines + [
            self._cut(f"  {printable(name)}: {printable(value if isinstance(value, str) else json.dumps(value))}")
            for name, value in values.items()
        ]

    def _body(self, message: Message) -> list[str]:
        text = None if message.is_large else text_of(message)
        if text is None:
            return [self._cut(f"  {hint(message)}")]
        lines = text.splitlines() or [""]
        more = len(lines) - LINES if self._columns else 0
        shown = [self._cut(f"  {line}") for line in (lines[:LINES] if more > 0 else lines)]
        return [*shown, f"  ... and {more:,} more lines; --raw writes all"] if more > 0 else shown

    def _cut(self, line: str) -> str:
        """Cut a line to the terminal's width. Output to anything else is whole."""
        return line if not self._columns or len(line) <= self._columns else line[: self._columns - 3] + "..."


def as_json(message: Message) -> dict[str, Any]:
    """Return a message as plain values: its body as `body` where it is text, else as `body_base64`. A body that is kept
    apart is left out. The `value` is the content of JSON or MessagePack, by the content type."""
    shown: dict[str, Any] = {
        "destination": str(message.destination), "seq": message.seq, "message_id": message.message_id,
        "sent_at": _time(message.timestamp_ms, exact=True),
        "expires_at": _time(message.expires_at_ms, exact=True) if message.expires_at_ms else None,
        "priority": message.priority, "given_back": message.deliveries - message.leased,
        "headers": plain_value(message.headers), "bytes": message.size, "large": message.is_large,
    }  # fmt: skip
    if message.is_large:
        return shown
    body = message.raw_body
    try:
        shown["body"] = body.decode()
    except UnicodeDecodeError:
        shown["body_base64"] = base64.b64encode(body).decode()
    try:
        if _is_of(message, _MSGPACK):
            shown["value"] = plain_value(msgspec.msgpack.decode(body))
        elif _is_of(message, _JSON):
            shown["value"] = plain_value(json.loads(body))
        json.dumps(shown.get("value"), ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # it is not what it says, or has half a character, which nobody can write
        shown.pop("value", None)
    return shown


def text_of(message: Message) -> str | None:
    """Return the body as text for people; None where it is none."""
    body = message.raw_body
    try:
        if _is_of(message, _MSGPACK):
            return json.dumps(plain_value(msgspec.msgpack.decode(body)), ensure_ascii=False)
        text = body.decode()
    except (ValueError, RecursionError):
        return None
    return text if all(char.isprintable() or char in "\n\t\r" for char in text) else None


def hint(message: Message) -> str:
    """Return a text to show for a body that is no text."""
    with message.open() as stream:
        start = stream.read(HEX_BYTES)
    what = message.headers.get("content_type")
    kind = f"{printable(what)}, " if isinstance(what, str) else ""
    more = " ..." if message.size > len(start) else ""
    return f"<{kind}{human_bytes(message.size)}: {start.hex(' ')}{more}>"


def _is_of(message: Message, content_type: str) -> bool:
    given = message.headers.get("content_type")
    return isinstance(given, str) and given.partition(";")[0].strip().lower() == content_type


def plain_value(value: Any) -> Any:
    """Return a value in terms of JSON: bytes as base64, and all else that JSON lacks as text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): plain_value(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(one) for one in value]
    is_plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return value if is_plain else str(value)


def _time(ms: int, exact: bool = False) -> str:
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
    return at.isoformat(timespec="milliseconds") if exact else f"{at:%Y-%m-%d %H:%M:%S}Z"
