# cython: language_level=3, boundscheck=True, wraparound=False, nonecheck=True, cdivision=True
"""The inner loops, compiled. acceleration.py says what belongs here; each function's twin in Python says what it does.

- What is not of the common kind, and whatever raises, the twin does from the beginning: no error is made here.
- Nothing is read beyond the end of a bytes object. PyBytes_Size says that it is one: None passes as any type. What is
  looked at without a reference of its own, the caller holds.
- A signal is seen once the call is over. None goes through more than a batch, or some hundred messages.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_SetFromErrno
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.types cimport off_t
from posix.unistd cimport fdatasync, pwrite

import os
import time

from google_crc32c import extend


cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)

cdef extern from "crc32c.h" nogil:
    void crc32c_prepare()
    uint32_t crc32c(uint32_t crc, const unsigned char *data, size_t size)
    uint32_t crc32c_by_table(uint32_t crc, const unsigned char *data, size_t size)
    size_t crc32c_bytes_max()
    void put16(unsigned char *at, uint16_t value)
    void put32(unsigned char *at, uint32_t value)
    void put64(unsigned char *at, uint64_t value)
    void put32_big(unsigned char *at, uint32_t value)
    void put64_big(unsigned char *at, uint64_t value)
    uint16_t get16(const unsigned char *at)
    uint32_t get32(const unsigned char *at)
    uint64_t get64(const unsigned char *at)
    uint64_t get64_big(const unsigned char *at)

crc32c_prepare()

ctypedef unsigned char uchar

cdef Py_ssize_t crc_bytes_max = crc32c_bytes_max()


cdef enum:
    SEND = 1
    ACK = 2
    BATCH_BYTES = 32
    RECORD_BYTES = 20       # wal/format.py's RECORD_HEADER
    SEND_BYTES = 32         # with destination and seq
    ACK_BYTES = 36
    HEAD_BYTES = 26         # core/records.py's HEAD
    KEY_BYTES = 12          # journal/rows.py's KEY
    WHERE_BYTES = 16        # and WHERE
    ITEMS = 16
    SMALL_BYTES = 16384

cdef uint64_t priority_max = 0, expires_max_ms = 0
cdef object default_priority = None, order_of = None
cdef double SLOW_SECONDS = 0.001, SLOW_SHARE = 20

# What the loops make and know. It is imported once somebody calls one, since those who define it import this; the log's
# loops import nothing that the log does not know.
cdef object Send = None, Ack = None, Tail = None, Record = None, Message = None, Receipt = None, PURE = None
cdef object pack_headers = None, pack_id = None, unpack_headers = None, new = tuple.__new__


cdef object twin(name):
    """The loop in Python of this name."""
    global PURE
    if PURE is None:
        from .acceleration import PURE as pure

        PURE = pure
    return PURE[name]


cdef int bind() except -1:
    """Import what has to do with messages."""
    global Send, Ack, Tail, Message, Receipt, pack_headers, pack_id, unpack_headers, order_of
    global default_priority, priority_max, expires_max_ms
    from .messages import DEFAULT_PRIORITY, EXPIRES_MAX_MS, PRIORITY_MAX, Message as message, Receipt as receipt
    from .core.changes import Ack as ack, Send as send
    from .core.sending import order_of as order
    from .core.headers import pack_headers as pack, pack_id as pack_name, unpack_headers as unpack
    from .wal.ticket import Tail as tail

    Ack, Tail, Message, Receipt = ack, tail, message, receipt
    pack_headers, pack_id, unpack_headers = pack, pack_name, unpack
    order_of, default_priority, priority_max, expires_max_ms = order, DEFAULT_PRIORITY, PRIORITY_MAX, EXPIRES_MAX_MS
    Send = send  # last: it is what the others are asked by
    return 0


cdef inline tuple plain(tuple values):
    """A tuple of numbers and bytes, as the garbage collector leaves one that it has met: it need not look at it."""
    PyObject_GC_UnTrack(<void *>values)
    return values


def checksums(crc, data):
    """CRC-32C of some bytes, twice: as this machine sums them, and as one would that has no instruction for it."""
    cdef uint32_t start = crc
    cdef Py_ssize_t size = PyBytes_Size(data)
    cdef const uchar *first = <const uchar *>PyBytes_AS_STRING(data)
    return crc32c(start, first, size), crc32c_by_table(start, first, size)


cdef struct Item:
    uint32_t kind
    uint32_t destination
    uint32_t subscription
    uint64_t seq
    const uchar *body
    Py_ssize_t body_bytes


# Writing a batch


def encode_batch(start, changes, counter, watermark):
    if Send is None:
        bind()
    try:
        data_and_end = batch_of(start, changes, counter, watermark)
    except Exception:
        data_and_end = None
    if data_and_end is None:
        return twin("encode_batch")(start, changes, counter, watermark)
    return data_and_end


cdef object batch_of(object start, list changes, object counter, uint64_t watermark):
    """None if there is a change in it that is no Send and no Ack."""
    cdef Item few[ITEMS]
    cdef Item *items = few
    cdef Item *item
    cdef Py_ssize_t count = len(changes), position, size
    cdef uint64_t lsn, at
    cdef uint32_t offset, seed, crc
    cdef object segment = start[0], change, state, last_state = None, body, data
    cdef list bodies = []
    cdef uint32_t number = 0
    cdef uchar *out
    cdef uchar *record
    if count == 0:
        return None
    offset, lsn, seed = start[1], start[2], segment.seed
    if count > ITEMS:
        items = <Item *>PyMem_Malloc(count * sizeof(Item))
        if items is NULL:
            return None
    try:
        at = <uint64_t>offset + BATCH_BYTES
        for position in range(count):
            change = changes[position]
            item = &items[position]
            if type(change) is Send:
                body = change.record
                if type(body) is not bytes:
                    return None
                bodies.append(body)  # they are all held until all is copied
                item.kind = SEND
                item.body, item.body_bytes = <const uchar *>PyBytes_AS_STRING(body), PyBytes_Size(body)
                size = SEND_BYTES + item.body_bytes
                change.own = plain((lsn + 1 + position, at, size))
            elif type(change) is Ack:
                item.kind, item.subscription, size = ACK, change.number, ACK_BYTES
            else:
                return None
            state = change.state
            if state is not last_state:
                number, last_state = state.number, state
            item.destination, item.seq = number, change.seq
            at += size
        if at > 0xFFFFFFFF or lsn + count < lsn:
            return None
        data = PyBytes_FromStringAndSize(NULL, at - offset)
        out = <uchar *>PyBytes_AS_STRING(data)
        at, record = <uint64_t>offset + BATCH_BYTES, out + BATCH_BYTES
        size = 0  # of the bodies met
        for position in range(count):
            item = &items[position]
            put64(record + 8, lsn + 1 + position)
            record[16], record[17] = item.kind, 0
            put16(record + 18, 0)
            put32(record + 20, item.destination)
            if item.kind == SEND:
                put32(record + 4, <uint32_t>(SEND_BYTES - RECORD_BYTES + item.body_bytes))
                put64(record + 24, item.seq)
                memcpy(record + SEND_BYTES, item.body, item.body_bytes)
                crc = seed ^ <uint32_t>at
                if item.body_bytes <= crc_bytes_max:
                    crc = crc32c(crc, record + 4, SEND_BYTES - 4 + item.body_bytes)
                else:
                    crc = extend(crc32c(crc, record + 4, SEND_BYTES - 4), bodies[size])
                size += 1
                put32(record, crc)
                at += SEND_BYTES + item.body_bytes
                record += SEND_BYTES + item.body_bytes
            else:
                put32(record + 4, ACK_BYTES - RECORD_BYTES)
                put32(record + 24, item.subscription)
                put64(record + 28, item.seq)
                put32(record, crc32c(seed ^ <uint32_t>at, record + 4, ACK_BYTES - 4))
                at += ACK_BYTES
                record += ACK_BYTES
        memcpy(out, b"\xabBat", 4)
        put32(out + 8, <uint32_t>(at - offset - BATCH_BYTES))
        put32(out + 12, <uint32_t>count)
        put64(out + 16, lsn + 1)
        put64(out + 24, watermark)
        put32(out + 4, crc32c(seed ^ offset, out + 8, BATCH_BYTES - 8))
        return data, new(Tail, (segment, at, lsn + count, counter))
    finally:
        if items is not few:
            PyMem_Free(items)


# Reading a page


cdef object body_at(object data, Py_ssize_t first, uint32_t seed, uint32_t number, object place):
    """The message's record in the journal's that lies in `data` from `first` on; None if it is not there."""
    cdef Py_ssize_t length, size = PyBytes_Size(data)
    cdef uint64_t lsn, offset, seq
    cdef const uchar *record
    cdef uint32_t crc
    cdef object own = place[4]
    lsn, offset, length, seq = own[0], own[1], own[2], place[1]
    if length < SEND_BYTES or first < 0 or first > size or size - first < length:
        return None
    record = <const uchar *>PyBytes_AS_STRING(data) + first
    if get64(record + 8) != lsn or record[16] != SEND or get32(record + 20) != number or get64(record + 24) != seq:
        return None
    crc = seed ^ <uint32_t>offset
    if length <= crc_bytes_max:
        crc = crc32c(crc, record + 4, length - 4)
    else:
        crc = extend(crc, data[first + 4 : first + length])
    if crc != get32(record):
        return None
    return PyBytes_FromStringAndSize(<const char *>record + SEND_BYTES, length - SEND_BYTES)


def body_of(record, seed, number, place):
    try:
        if type(record) is bytes:
            if PyBytes_Size(record) != <Py_ssize_t>place[4][2]:
                return None
            return body_at(record, 0, seed, number, place)
    except Exception:
        pass
    return twin("body_of")(record, seed, number, place)


def bodies_of(data, start, seed, number, places):
    cdef Py_ssize_t position, first
    cdef list found
    try:
        if type(data) is bytes and type(places) is list:
            found = []
            for position in range(len(<list>places)):
                place = (<list>places)[position]
                first = place[4][1] - start
                found.append(body_at(data, first, seed, number, place))
            return found
    except Exception:
        pass
    return twin("bodies_of")(data, start, seed, number, places)


def decode(store, destination, place, record, lease):
    if Send is None:
        bind()
    try:
        message = message_of(store, destination, place, record, lease)
    except Exception:
        message = None
    if message is None:
        return twin("decode")(store, destination, place, record, lease)
    return message


cdef object message_of(object store, object destination, tuple place, bytes record, object lease):
    cdef Py_ssize_t size = PyBytes_Size(record), at = HEAD_BYTES, id_bytes, headers_bytes
    cdef const uchar *head = <const uchar *>PyBytes_AS_STRING(record)
    cdef const char *text = <const char *>head
    cdef object message, subscription = None, headers, message_id = None
    cdef bint leased = lease is not None
    if size < HEAD_BYTES:
        return None
    id_bytes, headers_bytes = get16(head + 4), get32(head + 6)
    if size - HEAD_BYTES < id_bytes + headers_bytes:
        return None
    if id_bytes:
        message_id = text[at : at + id_bytes].decode("utf-8")
        at += id_bytes
    if headers_bytes:
        headers = unpack_headers(PyBytes_FromStringAndSize(text + at, headers_bytes))
        at += headers_bytes
    else:
        headers = {}
    if leased and not lease.whole:
        subscription = lease.feeds[0].key
    message = Message.__new__(Message)
    message._store = store
    message.destination = destination
    message.seq = place[1]
    message.body = PyBytes_FromStringAndSize(text + at, size - at)
    message.headers = headers
    message.message_id = message_id
    message.timestamp_ms = get64(head + 10)
    message.leased = leased
    message._note = lease if leased else place
    message.priority = get16(head)
    message.persistent = not get16(head + 2) & 2  # NONPERSISTENT
    message.expires_at_ms = place[2]
    message.deliveries = place[3] + leased
    message.subscription = subscription
    return message


# Reading the log


def is_whole(records, seed, start, base_lsn, count):
    try:
        return are_whole(records, seed, start, base_lsn, count)
    except Exception:
        return twin("is_whole")(records, seed, start, base_lsn, count)


cdef bint are_whole(
    object records, uint32_t seed, uint32_t start, uint64_t lsn, Py_ssize_t count
) except -1:
    cdef Py_ssize_t left = PyBytes_Size(records), length, position = 0
    cdef const uchar *record
    cdef uint32_t crc
    if left + <uint64_t>start > 0xFFFFFFFF or count < 0 or lsn + <uint64_t>count < lsn:
        raise OverflowError
    record = <const uchar *>PyBytes_AS_STRING(records)
    while count > 0:
        if left < RECORD_BYTES:
            return False
        length = RECORD_BYTES + <Py_ssize_t>get32(record + 4)
        if get64(record + 8) != lsn or length > left:
            return False
        crc = seed ^ (start + <uint32_t>position)
        if length <= crc_bytes_max:
            crc = crc32c(crc, record + 4, length - 4)
        else:
            crc = extend(crc, records[position + 4 : position + length])
        if crc != get32(record):
            return False
        record += length
        position += length
        left -= length
        lsn += 1
        count -= 1
    return left == 0


def records_of(batch):
    global Record
    if Record is None:
        from .wal.reader import Record as record

        Record = record
    try:
        return records_in(batch[3], batch[0], batch[1])
    except Exception:
        return twin("records_of")(batch)


cdef list records_in(object records, object segment, uint64_t offset):
    cdef Py_ssize_t left = PyBytes_Size(records), length
    cdef const uchar *record = <const uchar *>PyBytes_AS_STRING(records)
    cdef list found = []
    offset += BATCH_BYTES
    while left > 0:
        if left < RECORD_BYTES:
            raise ValueError
        length = RECORD_BYTES + <Py_ssize_t>get32(record + 4)
        if length > left:
            raise ValueError
        payload = PyBytes_FromStringAndSize(<const char *>record + RECORD_BYTES, length - RECORD_BYTES)
        found.append(new(Record, (get64(record + 8), record[16], payload, segment, offset, length)))
        record += length
        offset += length
        left -= length
    return found


# A message's record


def encode(destination, body, headers, message_id, limit, priority=4, expires_at_ms=0, flags=0):
    if Send is None:
        bind()
    try:
        coded = record_of(body, headers, message_id, limit, priority, expires_at_ms, flags)
    except Exception:
        coded = None
    if coded is None:
        return twin("encode")(destination, body, headers, message_id, limit, priority, expires_at_ms, flags)
    return coded


cdef object record_of(
    bytes body, object headers, object message_id, Py_ssize_t limit, object priority, object expires_at_ms,
    uint16_t flags
):
    """None for what is to be refused."""
    cdef Py_ssize_t size = PyBytes_Size(body), id_bytes = 0, headers_bytes = 0
    cdef int64_t now
    cdef uint64_t expires
    cdef uint16_t urgency
    cdef bytes packed = None, name = None, record
    cdef uchar *out
    if type(priority) is not int or type(expires_at_ms) is not int:
        return None
    urgency, expires = priority, expires_at_ms
    now = time.time_ns()
    if now < 0 or urgency > priority_max or expires > expires_max_ms:
        return None
    if headers:
        packed = pack_headers(headers)
        headers_bytes = PyBytes_Size(packed)
    if message_id is not None:
        name = pack_id(message_id)
        id_bytes = PyBytes_Size(name)
    size += id_bytes + headers_bytes
    if size > limit or id_bytes > 0xFFFF or headers_bytes > 0xFFFFFFFF:
        return None
    record = PyBytes_FromStringAndSize(NULL, HEAD_BYTES + size)
    out = <uchar *>PyBytes_AS_STRING(record)
    put16(out, urgency)
    put16(out + 2, flags)
    put16(out + 4, <uint16_t>id_bytes)
    put32(out + 6, <uint32_t>headers_bytes)
    put64(out + 10, <uint64_t>(now // 1000000))
    put64(out + 18, expires)
    out += HEAD_BYTES
    if id_bytes:
        memcpy(out, PyBytes_AS_STRING(name), id_bytes)
    if headers_bytes:
        memcpy(out + id_bytes, PyBytes_AS_STRING(packed), headers_bytes)
    memcpy(out + id_bytes + headers_bytes, PyBytes_AS_STRING(body), size - id_bytes - headers_bytes)
    return record, name


def new_sends(state, messages, limit, priorities, apart):
    cdef list sends = []
    if Send is None:
        bind()
    order = None
    for message in messages:
        if type(message) is bytes and state.declared:
            try:
                coded = record_of(message, None, None, limit, default_priority, 0, 0)
            except Exception:
                coded = None
            if coded is not None:
                if order is None:
                    order = order_of(default_priority, priorities)
                sends.append(Send(state, (<tuple>coded)[0], None, order, 0))
                continue
        sends += twin("new_sends")(state, (message,), limit, priorities, apart)
    return sends


# Rows of the index


def pack_rows(number, sends):
    try:
        rows = rows_of(number, sends)
    except Exception:
        rows = False
    return twin("pack_rows")(number, sends) if rows is False else rows


cdef object rows_of(uint32_t number, object sends):
    cdef list rows = []
    cdef tuple own
    cdef uint64_t seq, lsn
    cdef uint32_t offset, length
    cdef uchar key[KEY_BYTES]
    cdef uchar where[WHERE_BYTES]
    cdef uint64_t size = 0
    put32_big(key, number)
    for send in sends:
        if send.expires_at_ms:
            return None
        own = send.own
        seq, lsn, offset, length = send.seq, own[0], own[1], own[2]
        put64_big(key + 4, seq)
        put64(where, lsn)
        put32(where + 8, offset)
        put32(where + 12, length)
        rows.append(plain((
            PyBytes_FromStringAndSize(<char *>key, KEY_BYTES), PyBytes_FromStringAndSize(<char *>where, WHERE_BYTES)
        )))
        size += length
    return rows, size


def places_of(rows):
    try:
        return places(rows)
    except Exception:
        return twin("places_of")(rows)


cdef list places(list rows):
    cdef list found = []
    cdef Py_ssize_t position
    cdef const uchar *where
    cdef bytes key, value
    cdef uint64_t seq
    for position in range(len(rows)):
        key, value = rows[position]
        if PyBytes_Size(key) != KEY_BYTES:
            raise ValueError
        seq = get64_big(<const uchar *>PyBytes_AS_STRING(key) + 4)
        if PyBytes_Size(value) == WHERE_BYTES:
            where = <const uchar *>PyBytes_AS_STRING(value)
            found.append(plain((0, seq, 0, 0, plain((get64(where), get32(where + 8), get32(where + 12))))))
        else:
            found += twin("places_of")([(key, value)])
    return found


# What a send returns


def receipts(destination, outcomes):
    cdef list made = []
    if Send is None:
        bind()
    try:
        for seq, duplicate in outcomes:
            made.append(new(Receipt, (destination, seq, duplicate)))
        return made
    except Exception:
        return twin("receipts")(destination, outcomes)


# Writing to a file


cdef object system_pwrite = os.pwrite, system_fdatasync = os.fdatasync
cdef double hands_over_until = 0.0


cdef double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec / 1e9


def took(double seconds):
    """A write has just taken so long, with all other threads waiting."""
    global hands_over_until
    hands_over_until = monotonic() + seconds * SLOW_SHARE


def write_small(fd, data, offset):
    cdef Py_ssize_t size, written
    cdef double began, seconds
    cdef int descriptor
    cdef off_t at
    # Who puts another function there, to watch or to spoil what is written, is asked.
    if type(data) is bytes and os.pwrite is system_pwrite:
        size, began = PyBytes_Size(data), monotonic()
        if size <= SMALL_BYTES and began >= hands_over_until:
            descriptor, at = fd, offset
            written = pwrite(descriptor, PyBytes_AS_STRING(data), size, at)
            seconds = monotonic() - began
            if seconds > SLOW_SECONDS:
                took(seconds)
            if written == size:
                return
    twin("write_small")(fd, data, offset)  # again, if less was written or nothing: it tells why


def write_synced(fd, data, offset):
    cdef Py_ssize_t size, written
    cdef int descriptor, failed = 0
    cdef off_t at
    cdef const char *start
    if type(data) is not bytes or os.pwrite is not system_pwrite or os.fdatasync is not system_fdatasync:
        return twin("write_synced")(fd, data, offset)
    size, descriptor, at, start = PyBytes_Size(data), fd, offset, PyBytes_AS_STRING(data)
    with nogil:
        written = pwrite(descriptor, start, size, at)
        if written == size:
            failed = fdatasync(descriptor)
            while failed and errno == EINTR:
                failed = fdatasync(descriptor)
    if written != size:
        return twin("write_synced")(fd, data, offset)  # again: it tells why
    if failed:
        PyErr_SetFromErrno(OSError)  # never tried again
