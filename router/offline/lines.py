"""A data directory as JSON Lines: what each line of an export says.

    {"is":"anabranch-export","version":1}
    {"is":"destination","name":"topic://prices","subscriptions":[{"client":"","name":"audit"}]}
    {"is":"message","sent_at_ms":1764400000000,"id":"17","body":"12.50","waiting":[{"name":"audit"}]}
    {"is":"message","sent_at_ms":1764400000001,"large":3000000}
    {"is":"chunk","data":"LS0t..."}                              the body of the message before, in parts
    {"is":"id","id":"16"}                                         seen lately, and gone
    {"is":"prepared","xid":[1,"order-17","db"],"sends":1,"acks":0}
    {"is":"message","to":"queue://orders","sent_at_ms":1764400000002,"data":"AP8="}

Messages stand behind their destination in their order, ids where they were seen among them. Bytes are in base64; a body
that is UTF-8 text is text. Times are milliseconds since 1970. A field that is not there has its default.
"""

from __future__ import annotations

import base64
import math
from typing import Any, Final

import msgspec

from ...adapters.core.store_types import Subscription, SubscriptionKey
from ...policies.names.destination import Destination

VERSION: Final = 1
TAG: Final = "is"
ESCAPED: Final = "$"
"""A dict with one key that begins so stands for what JSON does not have: bytes, a float that is no number, such a
dict."""


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, tag_field=TAG):
    """One line."""


class Start(_Line, frozen=True, tag="anabranch-export"):
    """The first line."""

    version: int


class Subscribed(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A durable subscription; in a prepared transaction one that is to begin, or to end."""

    name: str
    client: str = ""
    selector: str | None = None
    no_local: bool = False
    topic: str = ""
    """In a prepared transaction alone, as what follows."""
    ends: bool = False
    retroactive: bool = False

    def of(self, topic: Destination) -> Subscription:
        """Return the subscription."""
        return Subscription(topic, self.name, self.client, self.selector, self.no_local)


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A subscription that has yet to ack a message."""

    name: str
    client: str = ""
    deliveries: int = 0
    until_ms: int = 0

    @property
    def key(self) -> SubscriptionKey:
        return self.client, self.name


class Claim(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The ack of a message by a prepared transaction."""

    by: int
    """The place of the transaction among those of the file, from 0."""
    subscription: SubscriptionKey | None = None
    """Client and name; None: of a queue, or for all."""
    drops: bool = False


class Named(_Line, frozen=True, tag="destination"):
    """A destination; its messages follow."""

    name: str
    subscriptions: list[Subscribed] = []


class Held(_Line, frozen=True, tag="message"):
    """A message. One with `large` has its body in the chunks that follow it."""

    sent_at_ms: int
    id: str | None = None
    priority: int = 4
    expires_at_ms: int = 0
    deliveries: int = 0
    until_ms: int = 0
    """Until when it waits."""
    headers: dict[str, Any] = {}
    waiting: list[Waiting] = []
    claims: list[Claim] = []
    to: str | None = None
    """The destination, of one that a prepared transaction sends."""
    body: str | None = None
    data: bytes | None = None
    large: int | None = None


class Chunk(_Line, frozen=True, tag="chunk"):
    """A part of a large body."""

    data: bytes


class Seen(_Line, frozen=True, tag="id"):
    """A message id in the duplicate window whose message is gone."""

    id: str


class Prepared(_Line, frozen=True, tag="prepared"):
    """A prepared transaction; the messages that it sends follow, and those that it acks say so."""

    sends: int
    acks: int
    xid: tuple[int, str, str] | None = None
    """None: it waits for no manager, but for an operator."""
    subscriptions: list[Subscribed] = []


Line = Start | Named | Held | Chunk | Seen | Prepared

encode: Final = msgspec.json.Encoder().encode
decode: Final = msgspec.json.Decoder(Line).decode
"""Returns the line of these bytes. Raises msgspec.MsgspecError."""


def to_json(value: Any) -> Any:
    """Return a header's value as JSON has it."""
    if isinstance(value, bytes):
        return {f"{ESCAPED}bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {f"{ESCAPED}float": repr(value)}
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        plain = {name: to_json(one) for name, one in value.items()}
        return {f"{ESCAPED}dict": plain} if any(name.startswith(ESCAPED) for name in value) else plain
    return value


def from_json(value: Any) -> Any:
    """Return the value of a header. Raises ValueError."""
    if isinstance(value, list):
        return [from_json(one) for one in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((name, given),) = value.items()
        if name == f"{ESCAPED}bytes":
            return base64.b64decode(given, validate=True)
        if name == f"{ESCAPED}float":
            return float(given)
        if name == f"{ESCAPED}dict":
            return {key: from_json(one) for key, one in given.items()}
    return {name: from_json(one) for name, one in value.items()}
