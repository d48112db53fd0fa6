"""What one store that compacts would cost, from the summary: the inner step of the search under compaction.

Of the kernel's journal this is the blurred picture. What a store was sent in one bucket, or in a part of one that is
long beside a segment, is a *cohort*: it has a size, which decays as the summary says that its messages are acked, and
lies in one file. Segments fill and are compacted by the kernel's own choice, with cohorts for messages.
"""

from __future__ import annotations

import numpy as np

from .jit import njit
from .kernel import (
    BEHIND,
    BORN,
    FILE,
    FILE_COLUMNS,
    FIRST,
    GENERATION,
    LAST,
    LEAST,
    LISTED_COUNT,
    LIVE,
    LIVE_BYTES,
    NONE,
    NUMBERS,
    SIZE,
    TAIL,
    TAKEN,
    THERE,
    choose_files,
    enlist,
    is_dying,
    more_rows,
    put,
    take_out,
    twice,
)
from .operations import Floats, Ints
from .summary import NO_ACK, Summary

_PARTS = 4
"""Cohorts of a segment's worth, where that many bytes stand in one bucket."""


def life_bytes(summary: Summary) -> Ints:
    """Bytes of the records of the messages in each of the summary's rows of lives: a bucket's sends have its bytes
    without its acks', shared alike by its messages."""
    ack, batch = summary.sizes.overhead(False, False), summary.sizes.sizes.batch_overhead
    buckets = len(summary.bucket_start)
    lives = np.repeat(np.arange(len(summary.totals)), np.diff(summary.life_rows))
    written = np.repeat(np.arange(len(summary.totals)), np.diff(summary.byte_rows))
    keys = written * buckets + summary.byte_bucket
    sent = lives * buckets + summary.life_send
    place = np.searchsorted(keys, sent)
    known = summary.life_ack != NO_ACK
    acked = np.searchsorted(keys, (lives * buckets + summary.life_ack)[known])
    acks = np.bincount(acked, weights=summary.life_count[known], minlength=len(keys))
    counts = np.bincount(place, weights=summary.life_count, minlength=len(keys))
    messages = np.array([total.sends for total in summary.totals], np.float64)
    rows = np.bincount(lives, weights=summary.life_count, minlength=len(messages))
    # A message that several acks end has as many rows.
    share = np.divide(messages, rows, out=np.ones(len(messages)), where=rows > 0)[lives]
    each = np.maximum(summary.byte_sum - acks * ack, 0.0)[place] / counts[place]
    records: Ints = np.maximum((each - batch * share) * summary.life_count, 0.0).round().astype(np.int64)
    return records


@njit
def written_by_bucket(
    members: Ints, byte_rows: Ints, byte_bucket: Ints, byte_sum: Floats, byte_squares: Floats, buckets: int
) -> tuple[Floats, float, float]:
    """Bytes that the members wrote in each bucket, in all, and the sum of the squares of their operations' sizes."""
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
    """Byte-seconds on disk, and bytes copied."""
    segment_bytes, capacity, room_more = limits[0], limits[1], limits[2]
    header = segment_bytes - capacity
    buckets = len(bucket_start) - 1
    finish = bucket_start[buckets]
    written, total, squares = written_by_bucket(members, byte_rows, byte_bucket, byte_sum, byte_squares, buckets)
    if total == 0.0:
        return 0.0, 0.0
    room = max(capacity - room_more - squares / (2.0 * total), capacity / 2.0)
    base = np.zeros(buckets + 1, np.int64)
    for b in range(buckets):
        base[b + 1] = base[b] + (0 if written[b] == 0.0 else int(np.ceil(_PARTS * written[b] / room)))
    cohorts = np.zeros((base[buckets], 5), np.int64)
    cohorts[:, FILE] = NONE
    # Deaths hang in linked lists at the bucket of their acks, in any order.
    first = np.full(buckets, NONE, np.int64)
    rows = 0
    for m in members:
        rows += life_rows[m + 1] - life_rows[m]
    following, death = np.empty(rows, np.int64), np.empty(rows, np.int64)
    at = 0
    for m in members:
        for k in range(life_rows[m], life_rows[m + 1]):
            if 0 <= life_ack[k] <= life_send[k]:
                continue  # they go before the bucket is over
            _share(cohorts, base, life_send[k], row_bytes[k])
            if life_ack[k] >= 0:
                death[at], following[at] = k, first[life_ack[k]]
                first[life_ack[k]] = at
                at += 1
    files = np.zeros((64, FILE_COLUMNS), np.int64)
    start = np.zeros(64)
    numbers = np.zeros(NUMBERS, np.int64)
    numbers[TAIL] = NONE
    listed = np.empty(64, np.int64)
    used, held, copied = 0.0, 0.0, 0.0
    # To look what pays takes a while: it is done once enough has changed. So many segments are dying, at most.
    waiting, look = 0, False
    for b in range(buckets):
        parts = base[b + 1] - base[b]
        for half in range(2 * parts):
            # A cohort belongs where its middle is written.
            span, share = bucket_start[b + 1] - bucket_start[b], written[b] / (2 * parts)
            if numbers[TAIL] == NONE or used + share > room:
                now = bucket_start[b] + span * (max(room - used, 0.0) / share + half) / (2 * parts)
                if numbers[TAIL] == NONE:
                    now = bucket_start[b]
                if numbers[BORN] + 1 > len(files):
                    files, start, listed = more_rows(files), _longer(start), twice(listed)
                tail, born = numbers[TAIL], numbers[BORN]
                files[born, :] = 0
                files[born, TAKEN] = capacity
                files[born, FIRST] = files[born, LAST] = NONE
                files[born, THERE] = 1
                start[born] = now
                numbers[TAIL], numbers[BORN] = born, born + 1
                used = used + share - room if tail != NONE else share
                if tail != NONE:
                    if not files[tail, LIVE]:
                        files[tail, THERE] = 0
                        held += (now - start[tail]) * segment_bytes
                    elif is_dying(tail, files, limits):
                        enlist(tail, limits, numbers, files, listed)
                        waiting += 1
                        look |= waiting >= limits[LEAST]
                    if look:
                        files, start, listed, waiting, bytes_held, bytes_copied = _compact(
                            now, limits, numbers, files, start, cohorts, listed
                        )
                        held += bytes_held
                        copied += bytes_copied
                        look = False
            else:
                used += share
            cohort = base[b] + half // 2
            if half % 2 == 0 and cohorts[cohort, SIZE]:
                put(cohort, numbers[TAIL], files, cohorts)
        k = first[b]
        while k != NONE:
            row = death[k]
            send, size = life_send[row], row_bytes[row]
            count = base[send + 1] - base[send]
            for part in range(count):
                cohort = base[send] + part
                part_size = size // count if part < count - 1 else size - (count - 1) * (size // count)
                if not part_size:
                    continue
                file = cohorts[cohort, FILE]
                was_dying = is_dying(file, files, limits)
                cohorts[cohort, SIZE] -= part_size
                files[file, LIVE_BYTES] -= part_size
                if file != numbers[TAIL] and not was_dying and is_dying(file, files, limits):
                    enlist(file, limits, numbers, files, listed)
                    waiting += files[file, GENERATION] == 0
                    look |= files[file, GENERATION] > 0 or waiting >= limits[LEAST]
                if cohorts[cohort, SIZE]:
                    continue
                take_out(cohort, files, cohorts)
                if not files[file, LIVE] and file != numbers[TAIL]:
                    files[file, THERE] = 0
                    end = max(min(life_time[row], finish), start[file])
                    held += (end - start[file]) * (header + files[file, TAKEN])
            k = following[k]
        if look:
            files, start, listed, waiting, bytes_held, bytes_copied = _compact(
                bucket_start[b + 1], limits, numbers, files, start, cohorts, listed
            )
            held += bytes_held
            copied += bytes_copied
            look = False
    for file in range(numbers[BORN]):
        if files[file, THERE]:
            held += (finish - start[file]) * (header + files[file, TAKEN])
    return held, copied


@njit
def _compact(
    now: float, limits: Ints, numbers: Ints, files: Ints, start: Floats, cohorts: Ints, listed: Ints
) -> tuple[Ints, Floats, Ints, int, float, float]:
    """Compact what pays. Returns, beside arrays, how many segments are dying yet, byte-seconds of what goes, and bytes
    copied."""
    capacity, batch = limits[1], limits[3]
    header = limits[0] - capacity
    held, copied = 0.0, 0.0
    while True:
        sources = choose_files(numbers, files, listed, limits)
        if not len(sources):
            waiting = 0
            for place in range(numbers[LISTED_COUNT]):
                waiting += files[listed[place], GENERATION] == 0
            return files, start, listed, waiting, held, copied
        generation, copies = files[sources[0], GENERATION] + 1, NONE
        for source in sources:
            cohort = files[source, FIRST]
            while cohort != NONE:
                behind = cohorts[cohort, BEHIND]
                if copies == NONE or files[copies, TAKEN] + cohorts[cohort, SIZE] > capacity:
                    if copies != NONE:
                        enlist(copies, limits, numbers, files, listed)
                    if numbers[BORN] + 1 > len(files):
                        files, start, listed = more_rows(files), _longer(start), twice(listed)
                    copies = numbers[BORN]
                    numbers[BORN] = copies + 1
                    files[copies, :] = 0
                    files[copies, GENERATION] = generation
                    files[copies, TAKEN] = batch
                    files[copies, FIRST] = files[copies, LAST] = NONE
                    files[copies, THERE] = 1
                    start[copies] = now
                put(cohort, copies, files, cohorts)
                files[copies, TAKEN] += cohorts[cohort, SIZE]
                copied += cohorts[cohort, SIZE]
                cohort = behind
            files[source, THERE] = 0
            files[source, LIVE] = 0
            held += (now - start[source]) * (header + files[source, TAKEN])
        enlist(copies, limits, numbers, files, listed)


@njit
def _share(cohorts: Ints, base: Ints, bucket: int, size: int) -> None:
    """Give each part of a bucket its share of bytes."""
    count = base[bucket + 1] - base[bucket]
    for part in range(count):
        cohorts[base[bucket] + part, SIZE] += (
            size // count if part < count - 1 else size - (count - 1) * (size // count)
        )


@njit
def _longer(array: Floats) -> Floats:
    longer = np.zeros(2 * len(array))
    longer[: len(array)] = array
    return longer
