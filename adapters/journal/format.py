"""What a journal's records hold, which the bytes of wal/format.py are made of. Drawn in docs/format.md, pinned by
tests/journal/test_golden.py. All integers are little-endian.
"""

from __future__ import annotations

import struct
from typing import Final

from ...policies.destination import NAME_BYTES_MAX
from ..base import TRANSACTION_BYTES
from ..wal import format as w
from ..wal.format import SNAPSHOT as SNAPSHOT

SEND: Final = 1
ACK: Final = 2
ACK_RANGE: Final = 3
DESTINATION: Final = 4
DESTINATION_GONE: Final = 5
PREPARE: Final = 7
COMMIT: Final = 8
ROLLBACK: Final = 9
SUBSCRIBE: Final = 10
UNSUBSCRIBE: Final = 11
DELIVERED: Final = 12
RECORD_TYPES: Final = frozenset(range(SEND, DELIVERED + 1))
"""What a store's journal holds."""

SEQ = struct.Struct("<Q")
SEQ_MAX: Final = (1 << 64) - 1
MESSAGE = struct.Struct("<IBBHIQQ")
"""What follows the seq in a SEND: destination id, priority, flags, bytes of the message id, bytes of the headers,
sent at (ms since the epoch), expires at (ms, 0 = never). Then message id, headers (msgpack), body."""
assert MESSAGE.size == 28
REQUEUED: Final = 1
"""In a SEND's flags: a dead letter that was put back, stored whatever the duplicate window said."""
FLAGS_AT: Final = 5
"""Where in MESSAGE the flags are."""
SEND_START = struct.Struct("<IQBBHQ")
"""A SEND's record header without its CRC, and the seq: what the leader puts before the rest."""
assert SEND_START.size == w.RECORD_REST.size + SEQ.size
MESSAGE_READ = struct.Struct("<8xQB3xQIBxHIQQ")
"""What a reader needs of a whole SEND: LSN, type, seq, destination id, priority, bytes of the message id and of the
headers, sent at, expires at."""
assert MESSAGE_READ.size == w.RECORD_HEADER.size + SEQ.size + MESSAGE.size

ACK_PAYLOAD = struct.Struct("<IIQ")
"""Destination id, subscription id (0: a queue), seq."""
assert ACK_PAYLOAD.size == 16

ACK_RECORD = struct.Struct("<IQBBHIIQ")
"""A whole ACK but for its CRC."""
assert ACK_RECORD.size == w.RECORD_REST.size + ACK_PAYLOAD.size

RANGE_PAYLOAD = struct.Struct("<IIQQ")
"""Destination id, subscription id, first and last seq: all the destination's messages between them are dead."""
assert RANGE_PAYLOAD.size == 24

DESTINATION_PAYLOAD = struct.Struct("<IB")
"""Destination id, kind (policies.destination.Kind). Then the name in UTF-8."""
assert DESTINATION_PAYLOAD.size == 5

DECLARATION_BYTES_MAX: Final = w.RECORD_HEADER.size + DESTINATION_PAYLOAD.size + NAME_BYTES_MAX
GONE_PAYLOAD = struct.Struct("<I")
"""Destination id: all its messages are dead, and the id needs a new DESTINATION before it is used again."""

SUBSCRIBE_PAYLOAD = struct.Struct("<IIQBHHI")
"""Destination id, subscription id, start (the seq after which messages are for it), flags, bytes of client, name and
selector. Then these three in UTF-8."""
assert SUBSCRIBE_PAYLOAD.size == 25
NO_LOCAL: Final = 1
HAS_SELECTOR: Final = 2
CLIENT_BYTES_MAX: Final = 1024
"""Of a client, and of a subscription's name."""
SELECTOR_BYTES_MAX: Final = 64 * 1024

UNSUBSCRIBE_PAYLOAD = struct.Struct("<II")
"""Destination id, subscription id."""
DELIVERED_PAYLOAD = struct.Struct("<IIQI")
"""Destination id, subscription id (0: a queue), seq, how often it has come back."""
assert DELIVERED_PAYLOAD.size == 20
DELIVERIES_MAX: Final = (1 << 32) - 1

SEND_OVERHEAD: Final = w.RECORD_HEADER.size + SEQ.size + MESSAGE.size
"""Bytes of a send in the journal beside message id, headers and body."""
ACK_BYTES: Final = w.RECORD_HEADER.size + ACK_PAYLOAD.size
RANGE_BYTES: Final = w.RECORD_HEADER.size + RANGE_PAYLOAD.size
GONE_BYTES: Final = w.RECORD_HEADER.size + GONE_PAYLOAD.size
DELIVERED_BYTES: Final = w.RECORD_HEADER.size + DELIVERED_PAYLOAD.size
UNSUBSCRIBE_BYTES: Final = w.RECORD_HEADER.size + UNSUBSCRIBE_PAYLOAD.size
BRANCH_ACK_BYTES: Final = max(ACK_BYTES, DELIVERED_BYTES)
"""An ack in a prepared branch: its commit writes the ack, its rollback that the message has come back."""
OUTCOME_BYTES: Final = w.RECORD_HEADER.size + TRANSACTION_BYTES
"""COMMIT and ROLLBACK: the transaction's id. A PREPARE's payload begins with it; the rest is transactions.py's."""
