# cython: language_level=3, boundscheck=True, wraparound=False, cdivision=True
"""The appender, compiled: python_appender.py says what each method does. A thread waits without the interpreter, and
looks every SLICE seconds whether a signal has come. No bytecode runs between a batch's being queued and its being
linked, so that no signal comes between."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.exc cimport PyErr_CheckSignals
from cpython.object cimport PyObject
from libc.errno cimport EINTR, EIO
from libc.stdint cimport uint64_t
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.types cimport off_t

import os
from threading import get_ident

from ....policies.platform_files import BY_FDATASYNC, sync_data
from ....policies.errors import ClosedError
from ...system.durations import BOUNDS, Durations
from .python_appender import REENTRY

cdef extern from "appender.h" nogil:
    enum: APPENDER_PASS, APPENDER_OK, APPENDER_AGAIN, APPENDER_FAILED, APPENDER_NO_MEMORY, APPENDER_FORKED, APPENDER_ERRNO
    ctypedef struct appender:
        pass
    ctypedef struct appender_state:
        uint64_t attempted, syncs
        double sync_seconds
        size_t queued
        int fd, failed
    enum: APPENDER_BUCKETS
    ctypedef struct appender_durations:
        uint64_t counts[20]
        double seconds
    double appender_bounds[19]
    ctypedef struct appender_calls:
        ssize_t (*write)(int, const void *, size_t, off_t) noexcept
        int (*sync)(int) noexcept
    const appender_calls appender_system_calls
    void appender_use(const appender_calls *)
    appender *appender_new()
    void appender_release(appender *)
    int appender_segment(appender *, int, uint64_t, double)
    void appender_restart(appender *, uint64_t)
    int appender_put(appender *, const void *, size_t, uint64_t, int)
    int appender_write(appender *, uint64_t, double)
    int appender_wait(appender *, uint64_t, double)
    void appender_pass(appender *)
    void appender_stop(appender *)
    void appender_kick(appender *)
    appender_state appender_look(appender *)
    appender_durations appender_took(appender *)
    uint64_t appender_written(appender *)
    uint64_t appender_durable(appender *)
    uint64_t appender_durable_lsn(appender *)

cdef extern from *:
    """
    #include <sys/resource.h>

    /* How often this thread has waited for something, such as a disk; -1 where that is not told. */
    static long waits(void)
    {
    #ifdef RUSAGE_THREAD
        struct rusage usage;
        if (getrusage(RUSAGE_THREAD, &usage) == 0)
            return usage.ru_nvcsw;
    #endif
        return -1;
    }
    """
    long waits() noexcept nogil

for number, bound in enumerate(BOUNDS):
    appender_bounds[number] = bound

cdef double SLICE = 0.05
cdef size_t SMALL_BYTES = 16384
cdef double SLOW_SECONDS = 0.001, SLOW_SHARE = 20, LOOK_SECONDS = 1
cdef double hands_over_until = 0.0, looks_until = 0.0


cdef double monotonic() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec / 1e9


# System calls that somebody has put in the place of the os module's, to watch or to spoil what is written

cdef dict of_os = os.__dict__
cdef object system_pwrite = os.pwrite, system_fdatasync = getattr(os, "fdatasync", None)
cdef bint by_fdatasync = BY_FDATASYNC
cdef bint calls_python = False
cdef list raised = []  # by one of them, and not yet by who waits
cdef list callers = []  # who is in one, and for which file: a signal handler may come there, and wait for itself


cdef int outcome(object error) noexcept:
    """A negative errno. What is no error of the system's is raised once the call was made again."""
    if isinstance(error, OSError) and error.errno:
        return -error.errno
    raised.append(error)
    return -EINTR if len(raised) == 1 else -EIO


cdef ssize_t python_write(int fd, const void *data, size_t size, off_t offset) noexcept with gil:
    try:
        callers.append((get_ident(), fd))
        return os.pwrite(fd, (<const char *>data)[:size], offset)
    except BaseException as error:
        return outcome(error)
    finally:
        callers.remove((get_ident(), fd))


cdef int python_sync(int fd) noexcept with gil:
    try:
        callers.append((get_ident(), fd))
        sync_data(fd)
        return 0
    except BaseException as error:
        return outcome(error)
    finally:
        callers.remove((get_ident(), fd))


cdef appender_calls python_calls
python_calls.write, python_calls.sync = python_write, python_sync


cdef inline int look_at_calls(int fd) except -1:
    global calls_python
    cdef bint changed = (
        PyDict_GetItem(of_os, "pwrite") is not <PyObject *>system_pwrite
        or PyDict_GetItem(of_os, "fdatasync") is not <PyObject *>system_fdatasync
        or not by_fdatasync
    )
    if changed is not calls_python:
        calls_python = changed
        appender_use(&python_calls if changed else &appender_system_calls)
    if callers and (get_ident(), fd) in callers:
        raise RuntimeError(REENTRY)
    return 0


cdef class Appender:
    cdef appender *log
    cdef int fd

    def __cinit__(self):
        self.fd = -1
        self.log = appender_new()
        if self.log is NULL:
            raise MemoryError

    def __dealloc__(self):
        if self.log is not NULL:
            appender_stop(self.log)
            appender_release(self.log)

    @property
    def attempted(self):
        return appender_look(self.log).attempted

    @property
    def written(self):
        return appender_written(self.log)

    @property
    def durable(self):
        return appender_durable(self.log)

    @property
    def durable_lsn(self):
        return appender_durable_lsn(self.log)

    @property
    def syncs(self):
        return appender_look(self.log).syncs

    @property
    def sync_seconds(self):
        return appender_look(self.log).sync_seconds

    @property
    def sync_durations(self):
        cdef appender_durations took = appender_took(self.log)
        return Durations(tuple([took.counts[bucket] for bucket in range(APPENDER_BUCKETS)]), took.seconds)

    def restart(self, first):
        appender_restart(self.log, first.tail.lsn)

    def segment(self, int fd, uint64_t offset):
        cdef int result = APPENDER_AGAIN
        while result == APPENDER_AGAIN:
            with nogil:
                result = appender_segment(self.log, fd, offset, SLICE)
            if result == APPENDER_AGAIN:
                PyErr_CheckSignals()
        self.require(result)
        self.fd = appender_look(self.log).fd

    def put(self, bytes data, uint64_t lsn, bint sync, last, batch):
        cdef int result
        look_at_calls(self.fd)
        result = appender_put(self.log, PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), lsn, sync)
        if result != APPENDER_OK:
            self.require(result)
        last.next = batch

    def settle(self, uint64_t number, uint64_t sync_number):
        cdef int result
        look_at_calls(self.fd)
        if sync_number > appender_durable(self.log):
            result = APPENDER_AGAIN
            while result == APPENDER_AGAIN:
                with nogil:
                    result = appender_wait(self.log, sync_number, SLICE)
                if result == APPENDER_AGAIN:
                    PyErr_CheckSignals()
            if result == APPENDER_PASS:
                appender_pass(self.log)
            elif result != APPENDER_OK:
                self.require(result)
        if number > appender_written(self.log):
            self.write(number)
        if raised:
            self.reraise()

    cdef int write(self, uint64_t number) except -1:
        """A small write does not hand the interpreter to other threads, which would take longer. Once two within a
        second took more than a millisecond, the second of them waiting for the disk, all do for twenty times as long as
        it took: a slow disk stops the other threads for a twentieth of the time."""
        global hands_over_until, looks_until
        cdef double began = monotonic(), took
        cdef bint looks = began < looks_until
        cdef long before = 0
        cdef int result = APPENDER_AGAIN
        if began >= hands_over_until and not calls_python and appender_look(self.log).queued <= SMALL_BYTES:
            if looks:
                before = waits()
            result = appender_write(self.log, number, 0)
            took = monotonic() - began
            if took > SLOW_SECONDS:
                looks_until = began + took + LOOK_SECONDS
                if looks and (before < 0 or waits() != before):
                    hands_over_until = began + took + took * SLOW_SHARE
        while result == APPENDER_AGAIN:
            with nogil:
                result = appender_write(self.log, number, SLICE)
            if result == APPENDER_AGAIN:
                PyErr_CheckSignals()
        if result != APPENDER_OK:
            self.require(result)
        return 0

    def stop(self):
        appender_stop(self.log)

    def kick(self):
        look_at_calls(self.fd)
        appender_kick(self.log)

    cdef int reraise(self) except -1:
        error = raised[0]
        raised.clear()
        raise error

    cdef int require(self, int result) except -1:
        cdef int failed
        if result < APPENDER_ERRNO:
            raise OSError(APPENDER_ERRNO - result, os.strerror(APPENDER_ERRNO - result))
        if result == APPENDER_NO_MEMORY:
            raise MemoryError
        if result == APPENDER_FORKED:
            raise ClosedError("opened by the parent process; open it anew in a forked child")
        if raised:
            self.reraise()
        if result == APPENDER_FAILED:
            failed = appender_look(self.log).failed
            raise OSError(failed, os.strerror(failed))
        return 0
