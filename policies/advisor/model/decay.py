"""The cost of one store that compacts, from the summary: the inner step of the search under compaction.

This is the blurred picture of the kernel's journal. All that a store was sent in one bucket, or in a part of one that
is long beside a segment, is a *cohort*: it has a size, which decays as the summary says that its messages are acked,
and lies in one file. Segments fill and are compacted by the kernel's own choice, with cohorts for messages.
"""

from __future__ import annotations

import numpy as np

from ..statistics.summary import NO_ACK, Summary
from ..trace.arrays import Floats, Ints
from ..trace.nodes import count_nodes
from .jit import njit
from .kernel import (
    BATCH,
    BEHIND,
    BORN,
    CAPACITY,
    EMPTY,
    EMPTY_BYTES,
    FILE,
    FILE_COLUMNS,
    FIRST,
    GENERATION,
    HEADER,
    LEAST,
    LISTED_COUNT,
    LIVE,
    LIVE_BYTES,
    NONE,
    NUMBERS,
    RECORDS,
    ROOM_MORE,
    SIZE,
    TAIL,
    TAKEN,
    THERE,
    UNTIL_LOOK,
    begin_file,
    choose_files,
    die,
    empty_file,
    enlist,
    is_dying,
    put,
    seal_file,
    snapshot_size,
    take_out,
    twice,
)

_PARTS = 4
"""Cohorts of a segment's worth, where that many bytes stand in one bucket."""
_HELD, _COPIED, _BEGUN, _USED, _RECORD = range(5)
_SUMS = 5
"""Places of sums: byte-seconds of what has gone, bytes copied, bytes times when they came of what is about to go, bytes
used in the segment that is written, and bytes of a record."""


def life_bytes(summary: Summary) -> Ints:
    """Return the bytes of the messages' records in each of the summary's rows of lives. A bucket's sends have its bytes
    without its acks', shared alike by its messages."""
    ack, batch = summary.sizes.overhead(False, False), summary.sizes.sizes.batch_overhead
    buckets = len(summary.bucket_start)
    lives = np.repeat(np.arange(len(summary.life_rows) - 1), np.diff(summary.life_rows))
    written = np.repeat(np.arange(len(summary.byte_rows) - 1), np.diff(summary.byte_rows))
    keys = written * buckets + summary.byte_bucket
    sent = lives * buckets + summary.life_send
    place = np.searchsorted(keys, sent)
    known = summary.life_ack != NO_ACK
    acked = np.searchsorted(keys, (lives * buckets + summary.life_ack)[known])
    acks = np.bincount(acked, weights=summary.life_count[known], minlength=len(keys))
    counts = np.bincount(place, weights=summary.life_count, minlength=len(keys))
    messages = np.array([total.sends for total in summary.totals], np.float64)
    destination = lives // count_nodes(summary.use)
    rows = np.bincount(destination, weights=summary.life_count, minlength=len(messages))
    # A message that several acks end has as many rows.
    share = np.divide(messages, rows, out=np.ones(len(messages)), where=rows > 0)[destination]
    each = np.maximum(summary.byte_sum - acks * ack, 0.0)[place] / counts[place]
    records: Ints = np.maximum((each - batch * share) * summary.life_count, 0.0).round().astype(np.int64)
    return records


@njit
def written_by_bucket(
    members: Ints, byte_rows: Ints, byte_bucket: Ints, byte_sum: Floats, byte_squares: Floats, buckets: int
) -> tuple[Floats, float, float]:
    """Add up the bytes that the members wrote, by bucket and in all, and the squares of their operations' sizes."""
    written = np.zeros(buckets)
    total, squares = 0.0, 0.0
    for m in members:
        for k in range(byte_rows[m], byte_rows[m + 1]):
            written[byte_bucket[k]] += byte_sum[k]
            total += byte_sum[k]
            squares += byte_squares[k]
    return written, total, squares


@njit
def decayed(
    members: Ints,
    byte_rows: Ints,
    byte_bucket: Ints,
    byte_sum: Floats,
    byte_squares: Floats,
    life_rows: Ints,
    life_send: Ints,
    life_ack: Ints,
    life_time: Floats,
    row_bytes: Ints,
    bucket_start: Floats,
    limits: Ints,
) -> tuple[float, float]:
    """Work out the byte-seconds on disk, and the bytes copied."""
    buckets = len(bucket_start) - 1
    written, total, squares = written_by_bucket(members, byte_rows, byte_bucket, byte_sum, byte_squares, buckets)
    if total == 0.0:
        return 0.0, 0.0
    capacity = limits[CAPACITY]
    room = max(capacity - limits[ROOM_MORE] - squares / (2.0 * total), capacity / 2.0)
    base = np.zeros(buckets + 1, np.int64)
    for b in range(buckets):
        base[b + 1] = base[b] + (0 if written[b] == 0.0 else int(np.ceil(_PARTS * written[b] / room)))
    cohorts = np.zeros((base[buckets], 5), np.int64)
    cohorts[:, FILE] = NONE
    first, following, death = _hang_deaths(members, life_rows, life_send, life_ack, row_bytes, cohorts, base)
    files = np.zeros((64, FILE_COLUMNS), np.int64)
    start, listed = np.zeros(64), np.empty(64, np.int64)
    numbers, sums = np.zeros(NUMBERS, np.int64), np.zeros(_SUMS)
    numbers[TAIL] = NONE
    sums[_RECORD] = squares / total
    # To look what pays takes a while: it is done once enough has changed. So many segments are dying, at most.
    waiting, look = 0, False
    for b in range(buckets):
        parts = base[b + 1] - base[b]
        for half in range(2 * parts):
            # A cohort belongs where its middle is written.
            span, share = bucket_start[b + 1] - bucket_start[b], written[b] / (2 * parts)
            if numbers[TAIL] == NONE or sums[_USED] + share > room:
                now = bucket_start[b]
                if numbers[TAIL] != NONE:
                    now += span * (max(room - sums[_USED], 0.0) / share + half) / (2 * parts)
                if numbers[BORN] + 2 > len(files):
                    files, start, listed = twice(files), twice(start), twice(listed)
                if _begin_segment(now, limits, numbers, files, start, listed, sums):
                    waiting += 1
                    look |= waiting >= limits[LEAST]
                sums[_USED] = max(sums[_USED] + share - room, 0.0) if numbers[BORN] > 1 else share
                if look:
                    files, start, listed, waiting = _compact(now, limits, numbers, files, start, cohorts, listed, sums)
                    look = False
            else:
                sums[_USED] += share
            cohort = base[b] + half // 2
            if half % 2 == 0 and cohorts[cohort, SIZE]:
                put(cohort, numbers[TAIL], files, cohorts)
        k = first[b]
        while k != NONE:
            row = death[k]
            send, size = life_send[row], row_bytes[row]
            count = base[send + 1] - base[send]
            for part in range(count):
                generation = _decay(
                    base[send] + part,
                    _part(size, part, count),
                    min(life_time[row], bucket_start[buckets]),
                    limits,
                    numbers,
                    files,
                    start,
                    cohorts,
                    listed,
                    sums,
                )
                if generation >= 0:
                    waiting += generation == 0
                    look |= generation > 0 or waiting >= limits[LEAST]
            k = following[k]
        if look and numbers[UNTIL_LOOK] <= 0:
            now = bucket_start[b + 1]
            files, start, listed, waiting = _compact(now, limits, numbers, files, start, cohorts, listed, sums)
            look = False
    finish, header = bucket_start[buckets], limits[HEADER]
    sums[_HELD] += numbers[EMPTY_BYTES] * finish - sums[_BEGUN]
    for file in range(numbers[BORN]):
        if files[file, THERE]:
            sums[_HELD] += (finish - start[file]) * (header + files[file, TAKEN])
    return sums[_HELD], sums[_COPIED]


@njit
def _hang_deaths(
    members: Ints, life_rows: Ints, life_send: Ints, life_ack: Ints, row_bytes: Ints, cohorts: Ints, base: Ints
) -> tuple[Ints, Ints, Ints]:
    """Give cohorts their sizes, and hang rows of lives into lists at the buckets of their acks, in any order."""
    first = np.full(len(base) - 1, NONE, np.int64)
    rows = 0
    for m in members:
        rows += life_rows[m + 1] - life_rows[m]
    following, death = np.empty(rows, np.int64), np.empty(rows, np.int64)
    at = 0
    for m in members:
        for k in range(life_rows[m + 1] - 1, life_rows[m] - 1, -1):
            if 0 <= life_ack[k] <= life_send[k]:
                continue  # they go before the bucket is over
            send = life_send[k]
            count = base[send + 1] - base[send]
            for part in range(count):
                cohorts[base[send] + part, SIZE] += _part(row_bytes[k], part, count)
            if life_ack[k] >= 0:
                death[at], following[at] = k, first[life_ack[k]]
                first[life_ack[k]] = at
                at += 1
    return first, following, death


@njit
def _part(size: int, part: int, count: int) -> int:
    """Return a part's share of bytes."""
    return size // count if part < count - 1 else size - (count - 1) * (size // count)


@njit
def _begin_segment(
    now: float, limits: Ints, numbers: Ints, files: Ints, start: Floats, listed: Ints, sums: Floats
) -> bool:
    """Begin the next segment. Returns whether the one before is mostly dead."""
    tail, born = numbers[TAIL], begin_file(0, limits[CAPACITY], numbers, files)
    start[born], numbers[TAIL] = now, born
    if tail == NONE:
        return False
    files[tail, RECORDS] = int(limits[CAPACITY] / sums[_RECORD])
    seal_file(tail, numbers, files)
    if not files[tail, LIVE]:
        _go(tail, now, limits, numbers, files, start, sums)
        return False
    enlist(tail, limits, numbers, files, listed)
    return is_dying(tail, files, limits)


@njit
def _decay(
    cohort: int,
    size: int,
    now: float,
    limits: Ints,
    numbers: Ints,
    files: Ints,
    start: Floats,
    cohorts: Ints,
    listed: Ints,
    sums: Floats,
) -> int:
    """Take bytes out of a cohort. Returns the generation of its file where that is mostly dead by it, else -1."""
    if not size:
        return NONE
    file = cohorts[cohort, FILE]
    was_dying = is_dying(file, files, limits)
    cohorts[cohort, SIZE] -= size
    files[file, LIVE_BYTES] -= size
    generation = NONE
    if file != numbers[TAIL]:
        die(size, numbers)
        if not was_dying and is_dying(file, files, limits):
            enlist(file, limits, numbers, files, listed)
            generation = files[file, GENERATION]
    if not cohorts[cohort, SIZE]:
        take_out(cohort, files, cohorts)
        if not files[file, LIVE] and file != numbers[TAIL]:
            _go(file, max(now, start[file]), limits, numbers, files, start, sums)
    return generation


@njit
def _go(file: int, now: float, limits: Ints, numbers: Ints, files: Ints, start: Floats, sums: Floats) -> None:
    """Empty a file in which nothing lives any more. It goes with others, once they are worth a snapshot."""
    sums[_BEGUN] += start[file] * (limits[HEADER] + files[file, TAKEN])
    empty_file(file, limits, numbers, files)
    size = snapshot_size(numbers)
    if size > 0:
        sums[_USED] += size + limits[BATCH]
        sums[_HELD] += numbers[EMPTY_BYTES] * now - sums[_BEGUN]
        sums[_BEGUN] = 0.0
        numbers[EMPTY] = numbers[EMPTY_BYTES] = 0


@njit
def _compact(
    now: float, limits: Ints, numbers: Ints, files: Ints, start: Floats, cohorts: Ints, listed: Ints, sums: Floats
) -> tuple[Ints, Floats, Ints, int]:
    """Compact what pays. Returns, beside arrays, how many segments are dying yet."""
    while True:
        sources = choose_files(numbers, files, listed, limits)
        if not len(sources):
            waiting = 0
            for place in range(numbers[LISTED_COUNT]):
                waiting += files[listed[place], GENERATION] == 0
            return files, start, listed, waiting
        generation, copies = files[sources[0], GENERATION] + 1, NONE
        for source in sources:
            cohort = files[source, FIRST]
            while cohort != NONE:
                behind = cohorts[cohort, BEHIND]
                if copies == NONE or files[copies, TAKEN] + cohorts[cohort, SIZE] > limits[CAPACITY]:
                    if copies != NONE:
                        _publish(copies, limits, numbers, files, listed, sums)
                    if numbers[BORN] + 1 > len(files):
                        files, start, listed = twice(files), twice(start), twice(listed)
                    copies = begin_file(generation, limits[BATCH], numbers, files)
                    start[copies] = now
                put(cohort, copies, files, cohorts)
                files[copies, TAKEN] += cohorts[cohort, SIZE]
                sums[_COPIED] += cohorts[cohort, SIZE]
                cohort = behind
        _publish(copies, limits, numbers, files, listed, sums)
        for source in sources:
            _go(source, now, limits, numbers, files, start, sums)


@njit
def _publish(copies: int, limits: Ints, numbers: Ints, files: Ints, listed: Ints, sums: Floats) -> None:
    files[copies, RECORDS] = int(files[copies, TAKEN] / sums[_RECORD])
    seal_file(copies, numbers, files)
    enlist(copies, limits, numbers, files, listed)
