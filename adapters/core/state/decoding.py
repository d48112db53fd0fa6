"""From a record to the message that its receiver gets (record/encoding.py has the bytes)."""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from ....policies.errors import CorruptionError
from ....policies.names.destination import Destination
from ...system.acceleration import inner_loop
from ..messages import Message, MessageStore, shown_id
from ..record.encoding import HEAD, LARGE, NONPERSISTENT, reference_in
from ..record.headers import unpack_headers
from ..record.large import StoredBody
from ..record.place import DELIVERIES, EXPIRES, SEQ, Place
from .leases import Lease

_unpack = HEAD.unpack_from


@inner_loop
def decode(store: MessageStore, destination: Destination, place: Place, record: bytes, lease: Lease | None) -> Message:
    """Return the message; leased if there is a `lease`, else it only knows its place. Raises CorruptionError for bytes
    that are none, though their checksum was right."""
    try:
        return _decode(store, destination, place, record, lease)
    except (struct.error, ValueError, msgspec.MsgspecError, RecursionError) as error:
        reason = f"message {place[SEQ]} of {destination} does not parse: {error}"
        raise CorruptionError(str(store.directory), 0, reason, "reject it, or restore a backup") from error


def _decode(store: MessageStore, destination: Destination, place: Place, record: bytes, lease: Lease | None) -> Message:
    priority, flags, id_bytes, headers_bytes, sent_at_ms, _ = _unpack(record)
    at = HEAD.size + id_bytes
    message_id = shown_id(record[HEAD.size : at]) if id_bytes else None
    headers: dict[str, Any] = {}
    if headers_bytes:
        headers = unpack_headers(record[at : at + headers_bytes])
        at += headers_bytes
    leased = lease is not None
    body: bytes | StoredBody = record[at:]
    if flags & LARGE:
        body = store.large_body(reference_in(record))
    subscription = lease.channels[0].key if lease is not None and not lease.whole else None
    return Message(
        store, destination, place[SEQ], body, headers, message_id, sent_at_ms, leased,
        lease if leased else place, priority,
        place[EXPIRES], place[DELIVERIES] + leased, subscription, not flags or not flags & NONPERSISTENT,
    )  # fmt: skip
