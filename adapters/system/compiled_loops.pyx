# cython: language_level=3, boundscheck=True, wraparound=False, nonecheck=True, cdivision=True
"""The inner loops, compiled. acceleration.py says what belongs here; each function's twin in Python says what it does.

- What is not of the common kind, and whatever raises, the twin does from the beginning: no error is made here.
- Nothing is read beyond the end of a bytes object. PyBytes_Size says that it is one: None passes as any type. What is
  looked at without a reference of its own, the caller holds.
- A signal is seen once the call is over. None goes through more than a batch, or some hundred messages.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_Size
from cpython.exc cimport PyErr_CheckSignals
from cpython.mem cimport PyMem_Free, PyMem_Malloc, PyMem_Realloc
from cpython.ref cimport Py_INCREF
from cpython.version cimport PY_VERSION_HEX
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport getpid, pid_t

import time

from google_crc32c import extend



cdef extern from "Python.h":
    ctypedef struct PyTypeObject:
        pass
    void PyObject_GC_UnTrack(void *)
    object PyType_GenericAlloc(type, Py_ssize_t)
    void PyTuple_SET_ITEM(object, Py_ssize_t, object)

cdef extern from "pythread.h":
    ctypedef void *PyThread_type_lock
    ctypedef enum PyLockStatus:
        PY_LOCK_ACQUIRED
    unsigned long PyThread_get_thread_ident()
    PyThread_type_lock PyThread_allocate_lock()
    void PyThread_free_lock(PyThread_type_lock)
    PyLockStatus PyThread_acquire_lock_timed(PyThread_type_lock, long long, int) nogil
    void PyThread_release_lock(PyThread_type_lock)

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
    PREPARE = 7             # journal/encoding.py's kinds
    SEND_MANY = 256         # no record's kind
    BATCH_BYTES = 32
    RECORD_BYTES = 20       # wal/format.py's RECORD_HEADER
    SEND_BYTES = 32         # with destination and seq
    ACK_BYTES = 36
    HEAD_BYTES = 26         # core/record/encoding.py's HEAD
    REQUEUED = 1            # and one of its flags
    KEY_BYTES = 12          # journal/index/rows.py's KEY
    WHERE_BYTES = 16        # and WHERE
    ITEMS = 16
    SMALL_CHANGE = 64       # core/operations/changes.py's SMALL_BYTES
    FETCH = 64              # core/state/priorities.py's
    QUEUED_MAX = 67108864   # wal/log.py's
    OBJECT_BYTES = 1024     # and another one
    HEAVY_BYTES = 16384     # journal/writing.py's
    ROW_BYTES = 36          # core/engine/usage.py's ROW

cdef uint64_t priority_max = 0, expires_max_ms = 0
cdef object default_priority = None, order_of = None, GROUP = None

# What the loops make and know. It is imported once somebody calls one, since those who define it import this; the log's
# loops import nothing that the log does not know.
cdef object Send = None, SendMany = None, Ack = None, Mark = None, Tail = None, Record = None, Message = None, Receipt = None
cdef object Outgoing = None, Channel = None, Lease = None, Level = None, Receiver = None, DestinationState = None
cdef object DuplicateWindow = None, BatchHeader = None
cdef object number_of_lease = None, locking = None
cdef object PURE = None, CODECS = None, Plan = None, JournalBatch = None, NO_IDS = None, MadeId = None
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
    global Send, SendMany, Ack, Mark, Tail, Message, Receipt, Outgoing, pack_headers, pack_id, unpack_headers, order_of
    global default_priority, priority_max, expires_max_ms, Channel, Lease, Level, Receiver
    global DestinationState, DuplicateWindow, number_of_lease, locking, MadeId, GROUP
    from . import locking as system_locking
    from ..core.engine.engine import Engine as engine
    from ..core.messages import DEFAULT_PRIORITY, EXPIRES_MAX_MS, GROUP as group, PRIORITY_MAX, MadeId as made_id
    from ..core.messages import Message as message, Outgoing as outgoing, Receipt as receipt
    from ..core.operations.changes import Ack as ack, Mark as mark, Send as send, SendMany as send_many
    from ..core.service.sending import order_of as order
    from ..core.state.duplicates import DuplicateWindow as window
    from ..core.state.leases import Channel as channel, Lease as lease, Receiver as receiver, _numbers as numbers
    from ..core.state.priorities import Level as level
    from ..core.state.states import DestinationState as state
    from ..core.record.headers import pack_headers as pack, pack_id as pack_name, unpack_headers as unpack
    from ..wal.ticket import Tail as tail

    SendMany, Ack, Mark, Tail, Message, Receipt, Outgoing = send_many, ack, mark, tail, message, receipt, outgoing
    Channel, Lease, Level, Receiver, DestinationState, DuplicateWindow = channel, lease, level, receiver, state, window
    number_of_lease, locking, MadeId, GROUP = numbers, system_locking, made_id, group
    find_slots(send, engine)
    pack_headers, pack_id, unpack_headers = pack, pack_name, unpack
    order_of, default_priority, priority_max, expires_max_ms = order, DEFAULT_PRIORITY, PRIORITY_MAX, EXPIRES_MAX_MS
    Send = send  # last: it is what the others are asked by
    return 0


cdef int bind_codecs() except -1:
    """Import what the journal alone knows."""
    global CODECS
    from ..journal.encoding import CODECS as codecs

    CODECS = codecs
    return 0


cdef inline tuple plain(tuple values):
    """A tuple of numbers and bytes, as the garbage collector leaves one that it has met: it need not look at it."""
    PyObject_GC_UnTrack(<void *>values)
    return values


cdef extern from *:
    """
    #include <structmember.h>

    /* Where an object has what one of its class's __slots__ names; -1 for anything else. */
    static Py_ssize_t place_of_slot(PyObject *slot)
    {
        return Py_IS_TYPE(slot, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)slot)->d_member->offset : -1;
    }

    typedef struct {
        PyTypeObject *kind;
        Py_ssize_t at;
    } Slot;

    static PyObject **slot_in(PyObject *object, Slot slot)
    {
        if (PyObject_TypeCheck(object, slot.kind))
            return (PyObject **)((char *)object + slot.at);
        PyErr_SetString(PyExc_TypeError, "an object of another class");
        return NULL;
    }

    static PyObject *get(PyObject *object, Slot slot)
    {
        PyObject **value = slot_in(object, slot);
        if (value != NULL && *value == NULL)
            PyErr_SetString(PyExc_AttributeError, "a slot is empty");
        return value != NULL ? Py_XNewRef(*value) : NULL;
    }

    static int put(PyObject *object, Slot slot, PyObject *value)
    {
        PyObject **place = slot_in(object, slot), *before;
        if (place == NULL)
            return -1;
        before = *place;
        *place = Py_NewRef(value);
        Py_XDECREF(before);
        return 0;
    }
    """
    ctypedef struct Slot:
        PyTypeObject *kind
        Py_ssize_t at
    Py_ssize_t place_of_slot(object)
    object get(object, Slot)
    int put(object, Slot, object) except -1


cdef struct Slots:
    Slot message_store, message_destination, message_seq, message_body, message_headers, message_name
    Slot message_timestamp_ms, message_leased, message_note, message_priority, message_persistent
    Slot message_expires_at_ms, message_deliveries, message_subscription
    Slot ack_state, ack_seq, ack_number, ack_place, ack_drops
    Slot lease_number, lease_channels, lease_place, lease_hold, lease_whole
    Slot channel_state, channel_subscription, channel_held, channel_first, channel_returned, channel_receivers
    Slot channel_passed_at, channel_purging, channel_groups
    Slot level_ready, level_end, level_cursor
    Slot send_state, send_seq, send_record, send_order, send_expires_at_ms, send_own, send_name, send_size
    Slot send_recipients, send_extras
    Slot receiver_lease
    Slot engine_new, engine_pending, engine_batches, engine_hooks, engine_pending_changes, engine_taken
    Slot state_channel, state_at_limit, state_is_topic, state_is_map, state_declared, state_number
    Slot window_counts, window_limit, window_order, window_seqs


cdef struct LogSlots:
    Slot log_accepted, log_always, log_appender, log_backlog, log_closed, log_delivered, log_delivering, log_done
    Slot log_encoder, log_ended, log_failed, log_generation, log_idle_job, log_last_write, log_left, log_periodic
    Slot log_planning, log_queued, log_sync_number, log_syncer, log_writer
    Slot ticket_batch, ticket_content, ticket_done, ticket_future, ticket_held, ticket_outcomes, ticket_promise
    Slot ticket_size, ticket_sync, ticket_unsynced, ticket_waiter
    Slot batch_data, batch_delivered, batch_filled, batch_next, batch_number, batch_offset, batch_segment
    Slot batch_sync, batch_sync_number, batch_tail, batch_ticket, batch_unsynced
    Slot syncer_dirty_since, syncer_sealed
    Slot writer_limit, writer_must_roll, writer_prepared_ahead, writer_promised, writer_tail


cdef struct JournalSlots:
    Slot batch_plan
    Slot encoder_host, encoder_promised, encoder_sequencer
    Slot plan_sequencer, plan_changes, plan_ids, plan_is_more, plan_last_seq, plan_number, plan_own, plan_tickets
    Slot sequencer_planning, sequencer_gates, sequencer_last_seq, sequencer_mixed, sequencer_number, sequencer_window
    Slot hooks_freed, hooks_taken, hooks_taking


cdef Slots slots
cdef LogSlots logs
cdef JournalSlots journals


cdef int find_slots(object send, object engine) except -1:
    """Find where objects have their fields: by name each takes as long as a step of Python's."""
    find(<Slot *>&slots, (
        (Message, (
            "_store", "destination", "seq", "body", "headers", "message_id", "timestamp_ms", "leased", "_note",
            "priority", "persistent", "expires_at_ms", "deliveries", "subscription",
        )),
        (Ack, ("state", "seq", "number", "place", "drops")),
        (Lease, ("number", "channels", "place", "hold", "whole")),
        (Channel, ("state", "subscription", "held", "first", "returned", "receivers", "passed_at", "purging", "groups")),
        (Level, ("ready", "end", "cursor")),
        (send, (
            "state", "seq", "record", "order", "expires_at_ms", "own", "name", "size", "recipients", "extras",
        )),
        (Receiver, ("lease",)),
        (engine, ("_new", "_pending", "batches", "hooks", "pending_changes", "taken")),
        (DestinationState, ("channel", "at_limit", "is_topic", "is_map", "declared", "number")),
        (DuplicateWindow, ("counts", "limit", "order", "seqs")),
    ))  # in the order of Slots
    return 0


cdef int bind_log() except -1:
    """Find where a log's objects have their fields."""
    global locking
    from . import locking as system_locking
    from ..wal.log import Log
    from ..wal.segment_writer import SegmentWriter
    from ..wal.syncing import Syncer
    from ..wal.ticket import Ticket, WriteBatch

    find(<Slot *>&logs, (
        (Log, (
            "_accepted", "_always", "_appender", "_backlog", "_closed", "_delivered", "_delivering", "_done",
            "_encoder", "_ended", "failed", "_generation", "_idle_job", "_last_write", "_left", "_periodic",
            "_planning", "_queued", "_sync_number", "_syncer", "_writer",
        )),
        (Ticket, (
            "batch", "content", "done", "future", "held", "outcomes", "promise", "size", "sync", "unsynced", "waiter",
        )),
        (WriteBatch, (
            "data", "delivered", "filled", "next", "number", "offset", "segment", "sync", "sync_number", "tail",
            "ticket", "unsynced",
        )),
        (Syncer, ("dirty_since", "sealed")),
        (SegmentWriter, ("limit", "must_roll", "prepared_ahead", "promised", "tail")),
    ))  # in the order of LogSlots
    locking = system_locking
    return 0


cdef int bind_journal() except -1:
    """Find where a journal's objects have their fields."""
    global Plan, JournalBatch, NO_IDS
    from ..core.engine.hooks import Hooks
    from ..core.operations.plan import NO_IDS as no_ids, Plan as plan, Sequencer
    from ..journal.writing import JournalBatch as batch, JournalEncoder

    bind()
    bind_log()
    find(<Slot *>&journals, (
        (batch, ("plan",)),
        (JournalEncoder, ("_host", "promised", "sequencer")),
        (plan, ("_sequencer", "changes", "ids", "is_more", "last_seq", "number", "own", "tickets")),
        (Sequencer, ("_planning", "gates", "last_seq", "mixed", "number", "window")),
        (Hooks, ("freed", "taken", "taking")),
    ))  # in the order of JournalSlots
    JournalBatch, NO_IDS = batch, no_ids
    Plan = plan  # last
    return 0


cdef int find(Slot *slot, tuple fields) except -1:
    for kind, names in fields:
        for name in names:
            slot.kind, slot.at = <PyTypeObject *>kind, place_of_slot(kind.__dict__[name])
            if slot.at < 0:
                raise TypeError
            slot += 1
    return 0


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


# Locks


cdef double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec / 1e9


cdef enum:
    PASSED_MAX = 2          # by others that ran first: then it is handed over


cdef struct Waiting:
    PyThread_type_lock parked
    unsigned long thread
    pid_t process
    int passed
    bint woken
    Waiting *next


cdef class RLock:
    """Its fields are guarded by the interpreter's own lock. Who waits does so on a lock of its own, and takes this one
    once it runs again: it holds it at no time at which it cannot run, and whoever runs meanwhile need not wait for it.
    But who finds it taken again each time, since others wait for a disk with it, would wait for ever: it stays the first
    in line, and is handed the lock when it was passed often enough.
    """

    cdef unsigned long owner
    cdef Py_ssize_t again
    cdef Waiting *first

    cdef bint take(self, double seconds) except -1:
        cdef unsigned long me = PyThread_get_thread_ident()
        if self.owner == me:
            self.again += 1
            return True
        if self.owner and (seconds == 0 or not self.wait(seconds)):
            return False
        self.owner = me
        return True

    cdef bint wait(self, double seconds) except -1:
        """Return once nobody holds it any more: True; False after so many seconds, unless they are below 0."""
        cdef double until = monotonic() + seconds
        cdef long long left = -1
        cdef PyLockStatus status
        cdef Waiting **place
        cdef Waiting *waiting = <Waiting *>PyMem_Malloc(sizeof(Waiting))
        if waiting is NULL:
            raise MemoryError
        waiting.parked = PyThread_allocate_lock()
        if waiting.parked is NULL:
            PyMem_Free(waiting)
            raise MemoryError
        PyThread_acquire_lock_timed(waiting.parked, 0, 0)
        waiting.thread, waiting.process, waiting.passed = PyThread_get_thread_ident(), getpid(), 0
        try:
            while self.owner:
                if seconds > 0:
                    left = <long long>((until - monotonic()) * 1e6)
                    if left <= 0:
                        return False
                place = &self.first
                while place[0] is not NULL and not waiting.passed:
                    place = &place[0].next
                waiting.woken, waiting.next, place[0] = False, place[0], waiting
                with nogil:
                    status = PyThread_acquire_lock_timed(waiting.parked, left, 1)
                place = &self.first
                while place[0] is not waiting:
                    place = &place[0].next
                place[0] = waiting.next
                if self.owner == waiting.thread:
                    return True
                waiting.passed += status == PY_LOCK_ACQUIRED
                if status != PY_LOCK_ACQUIRED:
                    if waiting.woken:
                        PyThread_acquire_lock_timed(waiting.parked, 0, 0)
                    if not self.owner:
                        self.wake()  # instead: a signal's handler may take long, and wait for another thread
                    PyErr_CheckSignals()
            return True
        finally:
            PyThread_free_lock(waiting.parked)
            PyMem_Free(waiting)

    cdef void wake(self) noexcept:
        if self.first is not NULL and not self.first.woken:
            self.first.woken = True
            if self.first.passed >= PASSED_MAX and self.first.process == getpid():  # a fork leaves its thread behind
                self.owner = self.first.thread
            PyThread_release_lock(self.first.parked)

    def acquire(self, bint blocking=True, double timeout=-1):
        return self.take(timeout if blocking else 0)

    cdef bint is_mine(self) noexcept:
        return self.owner == PyThread_get_thread_ident()

    cdef void leave(self) noexcept:
        if self.again:
            self.again -= 1
            return
        self.owner = 0
        self.wake()

    def release(self):
        if not self.is_mine():
            raise RuntimeError("cannot release un-acquired lock")
        self.leave()

    def __enter__(self):
        return self.take(-1)

    def __exit__(self, kind, error, trace):
        self.release()

    def _is_owned(self):
        return self.owner == PyThread_get_thread_ident()


# A log's writing end


def submit_plain(log, ticket):
    cdef bint linked = False
    cdef RLock planning
    cdef int64_t queued
    if logs.log_closed.kind is NULL:
        bind_log()
    if get(log, logs.log_closed) or get(log, logs.log_failed) is not None or get(ticket, logs.ticket_future) is not None:
        return False
    planning = <RLock?>get(log, logs.log_planning)
    queued = get(log, logs.log_queued) - get(log, logs.log_done) + get(log, logs.log_left)
    if (
        get(log, logs.log_generation) != locking.generation or queued > QUEUED_MAX or planning.is_mine()
        or (<RLock?>get(log, logs.log_delivering)).is_mine() or get(get(log, logs.log_syncer), logs.syncer_sealed)
    ):
        return False
    planning.take(-1)
    try:
        return link_plain(log, ticket, &linked)
    except BaseException as error:
        if linked or not isinstance(error, Exception):
            raise
        return False
    finally:
        planning.leave()


cdef bint link_plain(object log, object ticket, bint *linked) except -1:
    """Plan a ticket, and link its batch, with `_planning` held; False if there is anything uncommon about it."""
    cdef object last = get(log, logs.log_accepted), writer = get(log, logs.log_writer), batch, data
    cdef object encoder = get(log, logs.log_encoder), syncer = get(log, logs.log_syncer), number, filled
    cdef object now, appender = get(log, logs.log_appender)
    cdef tuple tail = <tuple>get(writer, logs.writer_tail)  # Tails are such
    cdef tuple end
    cdef bint needs_sync
    if (
        get(last, logs.batch_next) is not None or get(log, logs.log_ended) or get(log, logs.log_failed) is not None
        or get(log, logs.log_backlog) or get(syncer, logs.syncer_sealed) or get(writer, logs.writer_must_roll)
        or tail[1] + BATCH_BYTES + get(ticket, logs.ticket_size) > get(writer, logs.writer_limit)
        or encoder.promised + get(ticket, logs.ticket_promise) > get(writer, logs.writer_promised)
    ):
        return False
    batch = encoder.encode(tail, ticket, appender.durable_lsn)
    end = <tuple>get(batch, logs.batch_tail)
    if end[1] > tail[0].allocated:
        return False
    data, number = get(batch, logs.batch_data), get(last, logs.batch_number) + 1
    filled = number if data else get(last, logs.batch_filled)
    needs_sync = get(batch, logs.batch_sync) or (
        get(log, logs.log_always) and not get(batch, logs.batch_unsynced)
    )
    put(batch, logs.batch_number, number)
    put(batch, logs.batch_filled, filled)
    if needs_sync:
        put(log, logs.log_sync_number, filled)
    put(batch, logs.batch_sync_number, get(log, logs.log_sync_number))
    put(ticket, logs.ticket_batch, batch)
    appender.put(data, end[2], needs_sync, last, batch)
    linked[0] = True
    put(writer, logs.writer_tail, end)
    encoder.accept(batch)
    put(log, logs.log_accepted, batch)
    put(log, logs.log_queued, get(log, logs.log_queued) + len(data) + OBJECT_BYTES)
    if data:
        now = monotonic()
        put(log, logs.log_last_write, now)
        if get(syncer, logs.syncer_dirty_since) is None:
            put(syncer, logs.syncer_dirty_since, now)
        if get(log, logs.log_idle_job).last.begun:
            log._schedule_idle()
    if not get(writer, logs.writer_prepared_ahead) and end[1] > tail[0].capacity // 2:
        writer.look_ahead()
    return True


def _settle(log, batch):
    if logs.log_closed.kind is NULL:
        bind_log()
    if (
        get(log, logs.log_periodic) or get(log, logs.log_failed) is not None
        or get(get(log, logs.log_syncer), logs.syncer_sealed)
    ):
        return twin("_settle")(log, batch)
    if not get(batch, logs.batch_delivered):
        try:
            get(log, logs.log_appender).settle(get(batch, logs.batch_number), get(batch, logs.batch_sync_number))
        except OSError as error:
            return log._lose(error)
        log._deliver()
        if not get(batch, logs.batch_delivered):
            twin("_settle")(log, batch)


def _deliver(log):
    cdef RLock delivering
    cdef object appender, encoder, syncer, last, batch, ticket
    cdef int64_t written, durable
    if logs.log_closed.kind is NULL:
        bind_log()
    appender, encoder, syncer = get(log, logs.log_appender), get(log, logs.log_encoder), get(log, logs.log_syncer)
    delivering = <RLock?>get(log, logs.log_delivering)
    delivering.take(-1)
    try:
        while True:
            last = get(log, logs.log_delivered)
            batch = get(last, logs.batch_next)
            if batch is None:
                return True
            written = appender.written
            durable = (syncer if get(syncer, logs.syncer_sealed) else appender).durable
            if <int64_t>get(batch, logs.batch_number) > written or <int64_t>get(batch, logs.batch_sync_number) > durable:
                return True
            if get(log, logs.log_accepted) is last:
                return False
            encoder.deliver(batch)
            ticket = get(batch, logs.batch_ticket)
            if ticket is not None:
                if get(ticket, logs.ticket_future) is not None:
                    ticket.finish(None)
                else:
                    put(ticket, logs.ticket_held, None)
                    put(ticket, logs.ticket_done, True)
                    put(ticket, logs.ticket_batch, None)
                    if get(ticket, logs.ticket_waiter) is not None:
                        ticket.wake()
            put(log, logs.log_delivered, batch)
            put(batch, logs.batch_delivered, True)
            put(log, logs.log_done, get(log, logs.log_done) + len(get(batch, logs.batch_data)) + OBJECT_BYTES)
            put(batch, logs.batch_ticket, None)
            put(batch, logs.batch_data, b"")
    finally:
        delivering.leave()


def deliver(encoder, batch):
    cdef bint done = False
    if Plan is None:
        bind_journal()
    try:
        done = deliver_plain(encoder, batch)
    except Exception:
        pass
    if not done:
        twin("deliver")(encoder, batch)


cdef bint deliver_plain(object encoder, object batch) except -1:
    """As Engine.take says; False if the plan does more than to send and to ack."""
    cdef object plan = get(batch, journals.batch_plan), host = get(encoder, journals.encoder_host)
    cdef object data = get(batch, logs.batch_data), change, state, channel, hook
    cdef object hooks = get(host, slots.engine_hooks), changes, number, new
    if plan is None or not data or get(plan, journals.plan_is_more) or len(data) > HEAVY_BYTES:
        return False
    changes, number = <list?>get(plan, journals.plan_changes), get(plan, journals.plan_number)
    for change in changes:
        if type(change) is not Send and type(change) is not Ack:
            return False
    put(plan, journals.plan_own, get(batch, logs.batch_tail))
    put(host, slots.engine_batches, get(host, slots.engine_batches) + 1)
    if number > get(host, slots.engine_taken):
        for hook in <tuple?>get(hooks, journals.hooks_taking):
            hook(plan)
        put(host, slots.engine_pending_changes, get(host, slots.engine_pending_changes) + len(changes))
        new = get(host, slots.engine_new)
        if not new and len(changes) == 1 and type(changes[0]) is Ack:
            new = get(host, slots.engine_pending)
        new.append(plan)
        put(host, slots.engine_taken, number)
        for hook in <tuple?>get(hooks, journals.hooks_taken):
            hook(plan)
    for change in changes:
        if type(change) is Ack:
            state = get(change, slots.ack_state)
            if get(state, slots.state_at_limit):
                host.wake_at_limit(state, get(change, slots.ack_number))
            continue
        state = get(change, slots.send_state)
        if get(state, slots.state_is_topic):
            for channel in state.channels():
                if get(channel, slots.channel_receivers):
                    channel.wake()
        elif not get(state, slots.state_is_map):
            channel = get(state, slots.state_channel)
            if get(channel, slots.channel_receivers):
                channel.wake()
    for hook in <tuple?>get(hooks, journals.hooks_freed):
        hook()
    put(plan, journals.plan_tickets, [])
    put(batch, journals.batch_plan, None)  # last
    return True


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
    """None if there is anything uncommon about it."""
    cdef Item few[ITEMS]
    cdef Item *items = few
    cdef Item *item
    cdef Py_ssize_t count = len(changes), position, size
    cdef uint64_t lsn, at
    cdef uint32_t offset, seed, records = 0
    cdef object segment = start[0], change, state, last_state = None, data
    cdef list contents = []
    cdef bytes body, head
    cdef tuple bodies
    cdef uint32_t number = 0
    cdef object codec
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
                contents.append(body)  # they are all held until all is copied
                item.kind, size = SEND, SEND_BYTES + PyBytes_Size(body)
                change.own = plain((lsn + 1 + records, at, size))
                records += 1
            elif type(change) is Ack:
                item.kind, item.subscription, size = ACK, change.number, ACK_BYTES
                records += 1
            elif type(change) is Mark:  # as a Send
                body = change.record
                contents.append(body)
                item.kind, size = SEND, SEND_BYTES + PyBytes_Size(body)
                change.own = plain((lsn + 1 + records, at, size))
                records += 1
            elif type(change) is SendMany:
                bodies, head = change.bodies, change.head
                contents.append((head, bodies))
                item.kind, size = SEND_MANY, (SEND_BYTES + PyBytes_Size(head)) * len(bodies)
                for body in bodies:
                    size += PyBytes_Size(body)
                change.own = plain((lsn + 1 + records, at))
                records += <uint32_t>len(bodies)
            else:
                if CODECS is None:
                    bind_codecs()
                codec = CODECS[type(change)]
                body = codec.encode(change)
                contents.append(body)
                item.kind, size = codec.kind, RECORD_BYTES + PyBytes_Size(body)
                if item.kind == PREPARE:
                    change.branch.own = (lsn + 1 + records, at, size)
                records += 1
                at += size
                continue
            state = change.state
            if state is not last_state:
                number, last_state = state.number, state
            item.destination, item.seq = number, change.seq
            if item.kind == SEND_MANY and item.seq + <uint64_t>len(bodies) < item.seq:
                return None  # one of theirs would not be a number of 64 bits
            at += size
        if at > 0xFFFFFFFF or lsn + 1 == 0 or lsn + records < lsn:
            return None
        data = PyBytes_FromStringAndSize(NULL, at - offset)
        out = <uchar *>PyBytes_AS_STRING(data)
        memcpy(out, b"\xabBat", 4)
        put32(out + 8, <uint32_t>(at - offset - BATCH_BYTES))
        put32(out + 12, records)
        put64(out + 16, lsn + 1)
        put64(out + 24, watermark)
        put32(out + 4, crc32c(seed ^ offset, out + 8, BATCH_BYTES - 8))
        at, record = <uint64_t>offset + BATCH_BYTES, out + BATCH_BYTES
        size = 0  # of the contents met
        for position in range(count):
            item = &items[position]
            if item.kind == ACK:
                lsn += 1
                put_head(record, ACK_BYTES, lsn, ACK, item.destination)
                put32(record + 24, item.subscription)
                put64(record + 28, item.seq)
                put32(record, crc32c(seed ^ <uint32_t>at, record + 4, ACK_BYTES - 4))
                at += ACK_BYTES
                record = out + (at - offset)
                continue
            if item.kind == SEND:
                lsn += 1
                at += put_send(record, seed ^ <uint32_t>at, lsn, item, b"", contents[size])
                record = out + (at - offset)
            elif item.kind != SEND_MANY:
                lsn += 1
                at += put_record(record, seed ^ <uint32_t>at, lsn, item.kind, contents[size])
                record = out + (at - offset)
            else:
                head, bodies = contents[size]
                for body in bodies:
                    lsn += 1
                    at += put_send(record, seed ^ <uint32_t>at, lsn, item, head, body)
                    item.seq += 1
                    record = out + (at - offset)
            size += 1
        return data, plain(<tuple>new(Tail, (segment, at, lsn, counter)))
    finally:
        if items is not few:
            PyMem_Free(items)


def encode_ticket(sequencer, tail, ticket, watermark):
    if Plan is None:
        bind_journal()
    batch = None if ticket is None else batch_of_plain(sequencer, tail, ticket, watermark)
    return twin("encode_ticket")(sequencer, tail, ticket, watermark) if batch is None else batch


cdef object batch_of_plain(object sequencer, object start, object ticket, object watermark):
    """The batch of messages that are no duplicates, and of acks; None for anything else. As Sequencer.plan, Send.plan,
    Naming and Plan say."""
    cdef object change, state, plan, batch, data_and_end, name, key, seq = get(sequencer, journals.sequencer_last_seq)
    cdef list changes = list(get(ticket, logs.ticket_content)), outcomes = [], tickets = [ticket]
    cdef dict ids = <dict?>NO_IDS, seqs
    if not changes or get(sequencer, journals.sequencer_gates) or get(sequencer, journals.sequencer_mixed):
        return None
    seqs = <dict?>get(get(sequencer, journals.sequencer_window), slots.window_seqs)
    for change in changes:
        if type(change) is Ack:
            outcomes.append(None)
            continue
        if type(change) is not Send:
            return None
        state = get(change, slots.send_state)
        if (
            get(change, slots.send_extras) is not None or get(change, slots.send_expires_at_ms)
            or not get(state, slots.state_declared) or get(state, slots.state_is_topic)
        ):
            return None
        name = get(change, slots.send_name)
        if name is not None:
            key = plain((get(state, slots.state_number), name))
            if get(state, slots.state_is_map) or key in seqs or key in ids:
                return None
        seq = seq + 1
        if name is not None:
            if ids is NO_IDS:
                ids = {}
            ids[key] = seq
        outcomes.append((seq, False))
        put(change, slots.send_seq, seq)
    try:
        data_and_end = batch_of(start, changes, seq, watermark)
    except Exception:
        return None
    if data_and_end is None:
        return None
    put(sequencer, journals.sequencer_planning, tickets)
    put(ticket, logs.ticket_outcomes, outcomes)
    plan = PyType_GenericAlloc(Plan, 0)
    put(plan, journals.plan_sequencer, sequencer)
    put(plan, journals.plan_number, get(sequencer, journals.sequencer_number) + 1)
    put(plan, journals.plan_last_seq, seq)
    put(plan, journals.plan_changes, changes)
    put(plan, journals.plan_ids, ids)
    put(plan, journals.plan_tickets, tickets)
    put(plan, journals.plan_is_more, False)
    put(plan, journals.plan_own, None)
    batch = PyType_GenericAlloc(JournalBatch, 0)
    put(batch, logs.batch_segment, start[0])
    put(batch, logs.batch_offset, start[1])
    put(batch, logs.batch_tail, (<tuple>data_and_end)[1])
    put(batch, logs.batch_ticket, ticket)
    put(batch, logs.batch_data, (<tuple>data_and_end)[0])
    put(batch, logs.batch_sync, get(ticket, logs.ticket_sync))
    put(batch, logs.batch_unsynced, get(ticket, logs.ticket_unsynced))
    put(batch, logs.batch_next, None)
    put(batch, logs.batch_delivered, False)
    put(batch, journals.batch_plan, plan)
    return batch


def accept_batch(encoder, batch):
    cdef object plan, sequencer, ids
    if Plan is None:
        bind_journal()
    plan = get(batch, journals.batch_plan)
    if plan is None or get(plan, journals.plan_is_more) or get(encoder, journals.encoder_promised):
        return twin("accept_batch")(encoder, batch)
    sequencer, ids = get(encoder, journals.encoder_sequencer), get(plan, journals.plan_ids)
    if ids:
        remember(get(sequencer, journals.sequencer_window), ids)
    put(sequencer, journals.sequencer_last_seq, get(plan, journals.plan_last_seq))
    put(sequencer, journals.sequencer_number, get(plan, journals.plan_number))
    put(sequencer, journals.sequencer_planning, ())  # last


cpdef remember(window, ids):
    cdef bint done = False
    if Send is None:
        bind()
    try:
        done = remember_in(window, ids)
    except Exception:
        pass
    if not done:
        twin("remember")(window, ids)


cdef bint remember_in(object window, dict ids) except -1:
    """As its twin says, which may do all again."""
    cdef dict seqs = <dict?>get(window, slots.window_seqs), counts = <dict?>get(window, slots.window_counts)
    cdef object order = get(window, slots.window_order), key, seq, before, number
    cdef Py_ssize_t limit = get(window, slots.window_limit)
    for key, seq in ids.items():
        before = seqs.get(key)
        if before == seq:
            continue
        if before is None:
            number = (<tuple?>key)[0]
            counts[number] = counts.get(number, 0) + 1
        order.append(plain((key, seq)))
        seqs[key] = seq
    while len(seqs) > limit:
        key, seq = order.popleft()
        if seqs.get(key) == seq:
            del seqs[key]
            number = (<tuple?>key)[0]
            counts[number] -= 1
    return len(order) <= 2 * limit


cdef inline void put_start(uchar *record, Py_ssize_t size, uint64_t lsn, uchar kind) noexcept:
    put32(record + 4, <uint32_t>(size - RECORD_BYTES))
    put64(record + 8, lsn)
    record[16], record[17] = kind, 0
    put16(record + 18, 0)


cdef inline void put_head(uchar *record, Py_ssize_t size, uint64_t lsn, uchar kind, uint32_t destination) noexcept:
    put_start(record, size, lsn, kind)
    put32(record + 20, destination)


cdef inline Py_ssize_t put_crc(uchar *record, uint32_t crc, Py_ssize_t size, Py_ssize_t last_at, bytes last) except -1:
    """Over all of a record behind it; `last` is what it ends with. Returns its bytes."""
    if size - last_at <= crc_bytes_max:
        crc = crc32c(crc, record + 4, size - 4)
    else:
        crc = extend(crc32c(crc, record + 4, last_at - 4), last)
    put32(record, crc)
    return size


cdef inline Py_ssize_t put_record(uchar *record, uint32_t crc, uint64_t lsn, uchar kind, bytes payload) except -1:
    """Any other. Returns its bytes."""
    cdef Py_ssize_t size = RECORD_BYTES + PyBytes_Size(payload)
    put_start(record, size, lsn, kind)
    memcpy(record + RECORD_BYTES, PyBytes_AS_STRING(payload), size - RECORD_BYTES)
    return put_crc(record, crc, size, RECORD_BYTES, payload)


cdef inline Py_ssize_t put_send(uchar *record, uint32_t crc, uint64_t lsn, Item *item, bytes head, bytes body) except -1:
    """A message whose record is head and body. Returns its bytes."""
    cdef Py_ssize_t body_at = SEND_BYTES + PyBytes_Size(head), size = body_at + PyBytes_Size(body)
    put_head(record, size, lsn, SEND, item.destination)
    put64(record + 24, item.seq)
    memcpy(record + SEND_BYTES, PyBytes_AS_STRING(head), body_at - SEND_BYTES)
    memcpy(record + body_at, PyBytes_AS_STRING(body), size - body_at)
    return put_crc(record, crc, size, body_at, body)


# Reading a page


cdef object body_at(bytes data, uint64_t start, uint32_t seed, uint32_t number, tuple place):
    """The message's record in the journal's, where `data` lies at `start`; None if it is not there."""
    cdef Py_ssize_t length, size = PyBytes_Size(data), first
    cdef uint64_t lsn, offset, seq
    cdef const uchar *record
    cdef uint32_t crc
    cdef tuple own = place[4]
    lsn, offset, length, seq = own[0], own[1], own[2], place[1]
    first = <Py_ssize_t>(offset - start)
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


def body_of(data, start, seed, number, place):
    try:
        return body_at(data, start, seed, number, place)
    except Exception:
        return twin("body_of")(data, start, seed, number, place)


def bodies_of(data, start, seed, number, places):
    try:
        return [body_at(data, start, seed, number, place) for place in <list?>places]
    except Exception:
        return twin("bodies_of")(data, start, seed, number, places)


def span_of(places):
    try:
        return span(places)
    except Exception:
        return twin("span_of")(places)


cdef tuple span(list places):
    cdef tuple place, own
    cdef uint64_t lsn, first, length, lowest = <uint64_t>-1, highest = 0, start = <uint64_t>-1, end = 0
    for place in places:
        own = place[4]
        lsn, first, length = own[0], own[1], own[2]
        if first + length < first:
            raise OverflowError
        lowest, highest = min(lowest, lsn), max(highest, lsn)
        start, end = min(start, first), max(end, first + length)
    if not end:
        raise ValueError
    return lowest, highest, start, end


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
    cdef object message, channel, subscription = None, headers, message_id = None, deliveries = place[3]
    cdef uint16_t flags
    if size < HEAD_BYTES:
        return None
    flags, id_bytes, headers_bytes = get16(head + 2), get16(head + 4), get32(head + 6)
    if flags & 4 or size - HEAD_BYTES < id_bytes + headers_bytes:  # LARGE
        return None
    if id_bytes:
        if head[at]:  # else the library has made it
            message_id = text[at : at + id_bytes].decode("utf-8")
        at += id_bytes
    if headers_bytes:
        headers = unpack_headers(PyBytes_FromStringAndSize(text + at, headers_bytes))
        at += headers_bytes
    else:
        headers = {}
    if lease is not None:
        if type(lease) is not Lease:
            return None
        deliveries += 1
        channel = (<tuple>get(lease, slots.lease_channels))[0]
        if not get(lease, slots.lease_whole) and get(channel, slots.channel_subscription) is not None:
            subscription = channel.key
    message = PyType_GenericAlloc(Message, 0)
    put(message, slots.message_store, store)
    put(message, slots.message_destination, destination)
    put(message, slots.message_seq, place[1])
    put(message, slots.message_body, PyBytes_FromStringAndSize(text + at, size - at))
    put(message, slots.message_headers, headers)
    put(message, slots.message_name, message_id)
    put(message, slots.message_timestamp_ms, get64(head + 10))
    put(message, slots.message_leased, lease is not None)
    put(message, slots.message_note, place if lease is None else lease)
    put(message, slots.message_priority, get16(head))
    put(message, slots.message_persistent, not flags & 2)  # NONPERSISTENT
    put(message, slots.message_expires_at_ms, place[2])
    put(message, slots.message_deliveries, deliveries)
    put(message, slots.message_subscription, subscription)
    return message


# Leases


def lease_ready(engine, channel, receiver):
    cdef int given = -1
    if Send is None:
        bind()
    try:
        given = give_ready(engine, channel, receiver)
    except Exception:
        pass
    return twin("lease_ready")(engine, channel, receiver) if given < 0 else given > 0


cdef int give_ready(object engine, object channel, object receiver) except -2:
    """Return 1, or 0 where nothing is given; -1 if there is anything uncommon about it."""
    cdef object delivery = engine.delivery, ready, seq, lease
    cdef RLock lock = engine.lock
    cdef tuple place
    if (
        get(channel, slots.channel_subscription) is not None or not isinstance(receiver, Receiver)
        or engine._generation != locking.generation or engine._guard is not None or lock._is_owned()
    ):
        return -1
    lock.take(-1)
    try:
        if engine.closed or engine.interrupted or engine.written is not None or engine.failed is not None:
            return -1
        if delivery.mixed:
            return 0
        if engine._new:
            look(engine)
        if get(channel, slots.channel_receivers):
            return 0
        if delivery.next_due:
            return -1
        return give(delivery, channel, receiver)
    finally:
        lock.release()


def lease(delivery, channel, rows, receiver):
    cdef int given = 0
    if Send is None:
        bind()
    try:
        if not delivery._priorities:
            given = give(delivery, channel, receiver)
    except Exception:
        pass
    return given > 0 or twin("lease")(delivery, channel, rows, receiver)


cdef int give(object delivery, object channel, object receiver) except -2:
    """Give the first ready message; 0 if that is not the first of all, or there is none, -1 if its twin is to tell."""
    cdef object seq, lease, ready = get(get(channel, slots.channel_first), slots.level_ready)
    cdef tuple place
    if (
        not ready or get(channel, slots.channel_returned) or get(channel, slots.channel_passed_at)
        or get(channel, slots.channel_purging)
    ):
        return 0
    if get(channel, slots.channel_groups) is not None:
        return -1
    held = <dict?>get(channel, slots.channel_held)
    place = ready[0]
    seq = place[1]
    if seq in held or place[2] or delivery._max_deliveries is not None or len(held) >= delivery._max_leases:
        return -1
    lease = PyType_GenericAlloc(Lease, 0)
    put(lease, slots.lease_number, next(number_of_lease))
    put(lease, slots.lease_channels, (channel,))
    put(lease, slots.lease_place, place)
    put(lease, slots.lease_hold, 1)  # LEASED
    put(lease, slots.lease_whole, False)
    put(receiver, slots.receiver_lease, lease)
    held[seq] = lease
    ready.popleft()
    return 1


def look(engine):
    cdef bint done = False
    if Send is None:
        bind()
    try:
        done = look_at(engine)
    except Exception:
        pass
    if not done:
        twin("look")(engine)


cdef bint look_at(object engine) except -1:
    """False if there is anything uncommon about it."""
    cdef object new = engine._new, pending = engine._pending, delivery = engine.delivery, epoch = delivery.epoch
    cdef object plan, change, level, seq, ready
    if not engine._passes_on:
        return False
    while new:
        plan = new[0]
        for change in <list?>plan.changes:
            if type(change) is Ack:
                continue
            if type(change) is not Send:
                return False
            level = get(get(get(change, slots.send_state), slots.state_channel), slots.channel_first)
            seq = get(change, slots.send_seq)
            if get(level, slots.level_end) != epoch or get(level, slots.level_cursor) >= seq:
                continue
            put(level, slots.level_end, 0)
            ready = get(level, slots.level_ready)
            if ready is not None and len(ready) < FETCH:
                delivery.records[seq] = get(change, slots.send_record)
                ready.append(plain((
                    get(change, slots.send_order), seq, get(change, slots.send_expires_at_ms), 0,
                    get(change, slots.send_own),
                )))
                put(level, slots.level_cursor, seq)
                put(level, slots.level_end, epoch)
        pending.append(plan)
        new.popleft()
    return True


def leave(delivery, store, messages, hold):
    if Send is None:
        bind()
    acks = None
    try:
        if not delivery.timed and len(messages) == 1:
            acks = acks_of(delivery.lock, store, messages[0], hold)
    except Exception:
        pass
    return twin("leave")(delivery, store, messages, hold) if acks is None else acks


cdef list acks_of(RLock lock, object store, object message, object hold):
    """None if it is not held so."""
    cdef object lease = get(message, slots.message_note), channel, subscription, ack
    cdef tuple place
    if type(lease) is not Lease or get(message, slots.message_store) is not store:
        return None
    channel, place = (<tuple>get(lease, slots.lease_channels))[0], get(lease, slots.lease_place)
    subscription, held = get(channel, slots.channel_subscription), <dict?>get(channel, slots.channel_held)
    ack = PyType_GenericAlloc(Ack, 0)
    put(ack, slots.ack_state, get(channel, slots.channel_state))
    put(ack, slots.ack_seq, place[1])
    put(ack, slots.ack_number, 0 if subscription is None or get(lease, slots.lease_whole) else subscription.number)
    put(ack, slots.ack_place, place)
    put(ack, slots.ack_drops, False)
    acks = [ack]
    lock.take(-1)
    try:
        if get(lease, slots.lease_hold) != hold or not get(message, slots.message_leased) or held.get(place[1]) is not lease:
            return None
        put(lease, slots.lease_hold, 3)  # LEAVING
        return acks
    finally:
        lock.release()


# Reading the log


def batches_in(window, seed, offset, lsn):
    global BatchHeader
    if BatchHeader is None:
        from ..wal.format import BatchHeader as header

        BatchHeader = header
    try:
        return whole_batches(window, seed, offset, lsn)
    except Exception:
        return twin("batches_in")(window, seed, offset, lsn)


cdef list whole_batches(object window, uint32_t seed, uint32_t offset, uint64_t lsn):
    cdef Py_ssize_t left = PyBytes_Size(window)
    cdef const uchar *batch = <const uchar *>PyBytes_AS_STRING(window)
    cdef Py_ssize_t length
    cdef uint32_t count
    cdef list headers = []
    if left + <uint64_t>offset > 0xFFFFFFFF:
        raise OverflowError
    while left >= BATCH_BYTES and memcmp(batch, b"\xabBat", 4) == 0:
        length, count = get32(batch + 8), get32(batch + 12)
        if crc32c(seed ^ offset, batch + 8, BATCH_BYTES - 8) != get32(batch + 4) or get64(batch + 16) != lsn + 1:
            break
        if lsn + 1 + count < lsn:
            raise OverflowError
        if length > left - BATCH_BYTES or not are_whole(
            batch + BATCH_BYTES, length, seed, offset + BATCH_BYTES, lsn + 1, count
        ):
            break
        headers.append(new(BatchHeader, (length, count, lsn + 1, get64(batch + 24))))
        batch += BATCH_BYTES + length
        left -= BATCH_BYTES + length
        offset += BATCH_BYTES + length
        lsn += count
    return headers


cdef bint are_whole(
    const uchar *record, Py_ssize_t left, uint32_t seed, uint32_t start, uint64_t lsn, uint32_t count
) except -1:
    cdef Py_ssize_t length
    cdef uint32_t crc
    while count > 0:
        if left < RECORD_BYTES:
            return False
        length = RECORD_BYTES + <Py_ssize_t>get32(record + 4)
        if get64(record + 8) != lsn or length > left:
            return False
        if length <= crc_bytes_max:
            crc = crc32c(seed ^ start, record + 4, length - 4)
        else:
            crc = extend(seed ^ start, PyBytes_FromStringAndSize(<const char *>record + 4, length - 4))
        if crc != get32(record):
            return False
        record += length
        start += length
        left -= length
        lsn += 1
        count -= 1
    return left == 0


def records_of(batch):
    global Record
    if Record is None:
        from ..wal.reader import Record as record

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


cdef object send_of(
    object state, bytes body, object headers, object message_id, tuple intake, object priority, object expires_at_ms,
    uint16_t flags
):
    """None for what is to be refused."""
    cdef Py_ssize_t limit = intake[0]
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
        if type(message_id) is MadeId:
            name = (<str>message_id).encode("utf-8")
        else:
            name = pack_id(message_id, get(state, slots.state_is_map))
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
    order = order_of(priority, True) if intake[1] else 0
    if not state.declared:
        return Send(state, record, name, order, expires_at_ms)
    send = PyType_GenericAlloc(Send, 0)
    put(send, slots.send_state, state)
    put(send, slots.send_seq, 0)
    put(send, slots.send_record, record)
    put(send, slots.send_order, order)
    put(send, slots.send_expires_at_ms, expires_at_ms)
    put(send, slots.send_own, None)
    put(send, slots.send_name, name)
    put(send, slots.send_size, HEAD_BYTES + size + SMALL_CHANGE)
    put(send, slots.send_recipients, ())
    put(send, slots.send_extras, None)
    return send


cpdef new_send(state, message, intake):
    cdef object send = None
    cdef uint16_t flags
    if Send is None:
        bind()
    try:
        if type(message) is bytes:
            send = send_of(state, message, None, None, <tuple>intake, default_priority, 0, 0)
        elif type(message) is Outgoing:
            body, headers, name, priority, expires_at_ms, persistent, requeued, deliver_at_ms, group = <tuple>message
            if (
                persistent is True and not deliver_at_ms and type(body) is bytes and group is None
                and (not headers or GROUP not in headers)
            ):
                flags = REQUEUED if requeued else 0
                send = send_of(state, body, headers, name, <tuple>intake, priority, expires_at_ms, flags)
    except Exception:
        send = None
    return twin("new_send")(state, message, intake) if send is None else send


def new_sends(state, messages, intake):
    return [new_send(state, message, intake) for message in messages]


def plain_bodies(messages, first, limit, size_max):
    try:
        return bodies_from(messages, first, limit, size_max)
    except Exception:
        return twin("plain_bodies")(messages, first, limit, size_max)


cdef tuple bodies_from(tuple messages, Py_ssize_t first, Py_ssize_t limit, Py_ssize_t size_max):
    cdef Py_ssize_t position, size = 0, more
    if first < 0:
        raise IndexError
    for position in range(first, len(messages)):
        body = messages[position]
        if type(body) is not bytes or PyBytes_Size(body) > limit:
            return position - first, size
        more = HEAD_BYTES + PyBytes_Size(body)
        if position > first and size + more + SMALL_CHANGE * (position - first + 1) > size_max:
            return position - first, size
        size += more
    return max(len(messages) - first, 0), size


# Rows of the index


def note_ids(ids, sends):
    if Send is None:
        bind()
    try:
        note_in(ids, sends)
    except Exception:
        twin("note_ids")(ids, sends)


cdef int note_in(dict ids, list sends) except -1:
    cdef object send, name, state
    for send in sends:
        name = get(send, slots.send_name)
        if name is not None:
            state = get(send, slots.send_state)
            if not get(state, slots.state_is_map):
                ids[get(send, slots.send_seq)] = plain((get(state, slots.state_number), name))
    return 0


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


def rows_of_many(number, sends):
    try:
        return rows_from(number, sends)
    except Exception:
        return twin("rows_of_many")(number, sends)


cdef object rows_from(uint32_t number, object sends):
    cdef RowsOfMany rows = RowsOfMany.__new__(RowsOfMany)
    cdef tuple own = sends.own
    put32_big(rows.key, number)
    rows.bodies, rows.position = sends.bodies, 0
    rows.seq, rows.lsn, rows.offset = sends.seq, own[0], own[1]
    rows.head_bytes = SEND_BYTES + PyBytes_Size(sends.head)
    if rows.offset + <uint64_t>sends.record_bytes + SEND_BYTES * len(rows.bodies) > 0xFFFFFFFF:
        raise OverflowError
    if rows.seq + <uint64_t>len(rows.bodies) < rows.seq or rows.lsn + <uint64_t>len(rows.bodies) < rows.lsn:
        raise OverflowError
    return rows


cdef class RowsOfMany:
    """The rows one by one: LMDB takes each before it asks for the next."""

    cdef tuple bodies
    cdef Py_ssize_t position, head_bytes
    cdef uint64_t seq, lsn
    cdef uint32_t offset
    cdef uchar key[KEY_BYTES]
    cdef uchar where[WHERE_BYTES]

    def __iter__(self):
        return self

    def __next__(self):
        cdef uint32_t length
        if self.position >= len(self.bodies):
            raise StopIteration
        length = <uint32_t>(self.head_bytes + PyBytes_Size(self.bodies[self.position]))
        put64_big(self.key + 4, self.seq + self.position)
        put64(self.where, self.lsn + self.position)
        put32(self.where + 8, self.offset)
        put32(self.where + 12, length)
        self.position += 1
        self.offset += length
        return (
            PyBytes_FromStringAndSize(<char *>self.key, KEY_BYTES),
            PyBytes_FromStringAndSize(<char *>self.where, WHERE_BYTES),
        )


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


def receipts_from(destination, first, count):
    cdef list made = []
    cdef uint64_t seq
    cdef Py_ssize_t position, end
    if Send is None:
        bind()
    try:
        seq, end = first, count
        if seq + <uint64_t>end < seq:
            raise OverflowError
        for position in range(end):
            made.append(receipt_of(destination, seq + position))
        return made
    except Exception:
        return twin("receipts_from")(destination, first, count)


cdef inline object receipt_of(object destination, object seq):
    """As `plain`: it takes part in no cycle."""
    if PY_VERSION_HEX >= 0x030E0000:  # a tuple keeps its hash there, which it must be told that it has none yet
        return plain(<tuple>new(Receipt, (destination, seq, False)))
    cdef tuple made = <tuple>PyType_GenericAlloc(Receipt, 3)
    Py_INCREF(destination)
    PyTuple_SET_ITEM(made, 0, destination)
    Py_INCREF(seq)
    PyTuple_SET_ITEM(made, 1, seq)
    Py_INCREF(False)
    PyTuple_SET_ITEM(made, 2, False)
    return plain(made)


# What clients of a shared directory are answered


cdef inline uchar *put_number(uchar *at, uint64_t value) noexcept:
    """As msgpack; returns where it ends."""
    cdef int size
    if value < 128:
        at[0] = <uchar>value
        return at + 1
    size = 1 if value <= 0xFF else 2 if value <= 0xFFFF else 4 if value <= 0xFFFFFFFF else 8
    at[0] = 0xCC if size == 1 else 0xCD if size == 2 else 0xCE if size == 4 else 0xCF
    at += 1
    while size:
        size -= 1
        at[0] = <uchar>(value >> (8 * size))
        at += 1
    return at


def pack_sent(number, outcome):
    cdef uchar frame[32]
    cdef uchar *at = frame + 4
    cdef object seq, duplicate
    try:
        seq, duplicate = <tuple?>outcome
        if type(number) is not int or type(seq) is not int or type(duplicate) is not bool:
            return twin("pack_sent")(number, outcome)
        at[0] = 0x93
        at = put_number(at + 1, number)
        at[0], at[1] = 0xC3, 0x92
        at = put_number(at + 2, seq)
        at[0] = 0xC3 if duplicate else 0xC2
        put32(frame, <uint32_t>(at + 1 - frame - 4))
        return PyBytes_FromStringAndSize(<char *>frame, at + 1 - frame)
    except Exception:
        return twin("pack_sent")(number, outcome)


# Telling the usage log


cdef inline uint64_t mixed(uint64_t seq) noexcept:
    """core/engine/usage.py's hash_of."""
    seq ^= seq >> 33
    seq *= <uint64_t>0xFF51AFD7ED558CCDULL
    seq ^= seq >> 33
    seq *= <uint64_t>0xC4CEB9FE1A85EC53ULL
    return (seq ^ (seq >> 33)) >> 32


cdef inline bint is_kept(Rows rows, uint64_t seq) noexcept:
    return rows.threshold > 0xFFFFFFFF or mixed(seq) < rows.threshold


cdef inline void put_row(
    uchar *row, uint64_t now, uint64_t seq, uint32_t number, uint64_t amount, uint32_t transaction, uint32_t who,
    uint16_t needed, uchar kind
) noexcept:
    put64(row, now)
    put64(row + 8, seq)
    put32(row + 16, number)
    put32(row + 20, <uint32_t>amount if amount <= 0xFFFFFFFF else 0xFFFFFFFF)
    put32(row + 24, transaction)
    put32(row + 28, who)
    put16(row + 32, needed)
    row[34], row[35] = kind, 0


cdef class Rows:
    cdef public dict numbers
    cdef public bint broken
    cdef public object lost
    cdef uint64_t threshold
    cdef uint32_t transactions
    cdef Py_ssize_t room, used, capacity
    cdef uchar *rows

    def __cinit__(self, room, threshold):
        self.room, self.threshold, self.numbers, self.lost = room, threshold, {}, 0

    def __dealloc__(self):
        PyMem_Free(self.rows)

    @property
    def size(self):
        return self.used

    cdef uchar *more(self, Py_ssize_t size) except? NULL:
        """Where so many bytes may be put; NULL if they are too many."""
        cdef Py_ssize_t capacity
        cdef uchar *rows
        if self.broken or size > self.room - self.used:
            return NULL
        if size > self.capacity - self.used:
            capacity = min(max(2 * self.capacity, self.used + size, 64 * ROW_BYTES), self.room)
            rows = <uchar *>PyMem_Realloc(self.rows, capacity)
            if rows is NULL:
                raise MemoryError
            self.rows, self.capacity = rows, capacity
        return self.rows + self.used

    cpdef uint32_t next_transaction(self):
        self.transactions = self.transactions + 1 if self.transactions + 1 else 1
        return self.transactions

    def append(self, rows):
        cdef Py_ssize_t size = PyBytes_Size(rows)
        cdef uchar *at = self.more(size)
        if at is NULL:
            self.lost += size // ROW_BYTES
        else:
            memcpy(at, PyBytes_AS_STRING(rows), size)
            self.used += size

    def take(self):
        cdef bytes taken = PyBytes_FromStringAndSize(<const char *>self.rows, self.used) if self.used else b""
        PyMem_Free(self.rows)
        self.rows, self.used, self.capacity = NULL, 0, 0
        return taken


cdef class Source:
    cdef readonly Rows rows

    def __init__(self, Rows rows):
        self.rows = rows


def record_usage(Source recorder, plan):
    cdef bint done = False
    if Send is None:
        bind()
    try:
        done = usage_of(recorder.rows, plan.changes, plan)
    except Exception:
        pass
    if not done:
        twin("record_usage")(recorder, plan)


cdef bint usage_of(Rows rows, list changes, object plan) except -1:
    """False if there is anything uncommon about it: nothing is added then. No Python code runs from `more` on, so that
    no other thread can add anything in between."""
    cdef object change
    cdef Py_ssize_t added
    if len(changes) == 1:
        change = changes[0]
        if type(change) is not SendMany:
            if rows.more(ROW_BYTES) is NULL:
                return False
            added = put_rows(rows, rows.rows + rows.used, change, 0, now_us())
            if added < 0:
                return False
            rows.used += added
            return True
    return usage_of_many(rows, plan.tickets)


cdef extern from *:
    """
    #include <time.h>

    /* Where the clock's last tick is told for less than the time itself: it is some milliseconds ago at most. */
    #ifdef CLOCK_MONOTONIC_COARSE
    #define TICK CLOCK_MONOTONIC_COARSE
    #else
    #define TICK CLOCK_MONOTONIC
    #endif
    """
    int TICK


cdef inline uint64_t now_us() noexcept:
    cdef timespec now
    clock_gettime(TICK, &now)
    return <uint64_t>now.tv_sec * 1000000 + now.tv_nsec // 1000


cdef bint usage_of_many(Rows rows, list tickets) except -1:
    cdef uint64_t time_us = now_us()
    cdef Py_ssize_t most = 0, done = 0, at, added
    cdef uint32_t transaction
    cdef object ticket, content, change
    for ticket in tickets:
        for change in ticket.content:
            most += len(<tuple>change.bodies) if type(change) is SendMany else 1
    if rows.more(most * ROW_BYTES) is NULL:
        return False
    for ticket in tickets:
        content, at, transaction = ticket.content, 0, 0
        if len(content) > 1 and ticket.transaction:
            transaction = rows.next_transaction()
        for change in content:
            if type(change) is Send and ticket.outcomes[at][0] != change.seq:
                return False
            added = put_rows(rows, rows.rows + rows.used + done, change, transaction, time_us)
            if added < 0:
                return False
            done += added
            at += 1
    rows.used += done
    return True


cdef Py_ssize_t put_rows(Rows rows, uchar *row, object change, uint32_t transaction, uint64_t now) except -2:
    """Put those of one change there; returns their bytes, -1 if it is uncommon."""
    cdef object kind = type(change), known
    cdef uint64_t number, seq
    cdef Py_ssize_t head_bytes, done = 0
    cdef bytes body
    if kind is not Ack and kind is not Send and kind is not SendMany:
        return -1
    known = rows.numbers.get(change.state)
    if known is None:
        return -1
    number, seq = known, change.seq
    if kind is Ack:
        if <uint32_t>number and is_kept(rows, seq):
            put_row(row, now, seq, <uint32_t>number, 0, transaction, change.number, 0, 2)
            return ROW_BYTES
        return 0
    if number >> 32:
        return -1  # a topic's
    if kind is Send:
        if number and is_kept(rows, seq):
            put_row(row, now, seq, <uint32_t>number, PyBytes_Size(change.record), transaction, 0, 1, 1)
            return ROW_BYTES
        return 0
    head_bytes = PyBytes_Size(change.head)
    for body in <tuple>change.bodies:
        if number and is_kept(rows, seq):
            put_row(row + done, now, seq, <uint32_t>number, head_bytes + PyBytes_Size(body), transaction, 0, 1, 1)
            done += ROW_BYTES
        seq += 1
    return done
