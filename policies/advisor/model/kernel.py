"""The journal of one store, exact: what is on disk after each of its operations, and how much compaction copies.

    journal = store_journal(rules)
    journal.feed(position, size, partner, ends)     # arrays, as often as there are more
    course = journal.finish(last_position)

A store writes its operations into segments that an operation never straddles. When a segment goes depends on the rules:

    kahadb               when it is full, no message in it is pending, and no earlier segment whose messages are acked
                         here is there any more: ActiveMQ's ack rule. Every ack in an earlier segment stands before
                         every operation of this one, so one ascending sweep reaches the rule's fixed point
    anabranch            when it is full and no message in it is pending
    anabranch, compact   the same, and whenever a segment is full, or much has died in full ones, what pays is
                         compacted, as policies/compaction.py says: live messages go into files of copies. Files in
                         which nothing lives go once they are worth the snapshot that is written for them

All is counted in positions of the global order; whoever knows the clock turns them into times, which never fall along
it. The memory that it keeps grows with live messages and with segments, never with operations. A test holds the third
kind to a slow model that is itself held to a real store, the others to definitions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import numpy as np

from ...compaction import BATCH_BYTES, MESSAGES_MAX, PARTS, TOGETHER
from ..statistics.sizes import OperationSizes
from ..trace.arrays import NEVER_POSITION, Floats, Ints
from .jit import njit

Rows = TypeVar("Rows", Ints, Floats)

ROOM: Final = 32
"""`JournalRules.room` of our own journal."""
COMPACTED_BYTES: Final = 48
"""The record that says that a file of copies counts, without its batch."""
SNAPSHOT_BYTES: Final = 60
KEPT_BYTES: Final = 42
"""A snapshot without its batch has so many bytes, so many more for each file in which something lives, and a bit for
each record there. Its parts about destinations, subscriptions and ids are left out."""
KEPT_EXPECTED: Final = 44
SNAPSHOT_WORTH: Final = 4
"""The bytes that a store expects a snapshot to take: so many bytes for each such file, and one for 64 records. It is
written once the files that can go then have at least so many times as many bytes."""


@dataclass(frozen=True, slots=True)
class JournalRules:
    """The rules by which a journal keeps its files, as plain numbers."""

    segment_bytes: int
    capacity: int
    """Bytes of a segment that operations can fill."""
    room: int = ROOM
    """Bytes more than an operation takes that have to be free in a segment before it is written there."""
    batch_overhead: int = 32
    """Bytes of an operation's size that are not its record's: a file of copies has larger batches."""
    ack_rule: bool = False
    """Whether an ack keeps its file for as long as the file of its message is there."""
    live_percent: int = 0
    """Files are compacted of which at most so much is live; 0: none is."""
    min_segments: int = 4
    """So many segments are compacted together at least."""
    messages_max: int = MESSAGES_MAX

    @classmethod
    def of(
        cls, sizes: OperationSizes, segment_bytes: int, live_percent: int, min_segments: int, *, ack_rule: bool = True
    ) -> JournalRules:
        """Return the rules of a model. KahaDB copies no messages, and it alone has the ack rule, unless that is left
        out."""
        ours = sizes.model == "anabranch"
        return cls(
            segment_bytes,
            sizes.capacity(segment_bytes),
            ROOM if ours else 0,
            sizes.sizes.batch_overhead,
            ack_rule and not ours,
            live_percent if ours else 0,
            min_segments,
        )

    def limits(self) -> Ints:
        """Return the rules as compiled code takes them; their places have names below."""
        rules = self.segment_bytes, self.capacity, self.room, self.batch_overhead, self.live_percent, self.min_segments
        return np.array([*rules, self.messages_max, self.segment_bytes - self.capacity], np.int64)


@dataclass(frozen=True, slots=True)
class StoreCourse:
    """The bytes and files that one store has on disk over the trace, and what it wrote."""

    changes: Ints
    """Positions, ascending. If several are alike, the earlier ones are what there is for a moment: copies beside what
    they are copied from, a segment that goes beside one that begins."""
    level: Ints
    """Bytes on disk from each change to the next."""
    files: Ints
    """Files on disk."""
    written: int
    """Bytes of operations, and of compaction's own records."""
    copied: int
    """Bytes of messages that compaction read and wrote once more."""
    most_copied: int
    """The copies of the message that was copied most often."""
    starts: Ints
    ends: Ints
    """Positions at which each segment began and went, in order of birth. Both are empty where the store compacts."""


class StoreJournal(Protocol):
    """A journal of one store, fed with its own operations in their order."""

    def feed(self, position: Ints, size: Ints, partner: Ints, ends: Ints) -> None:
        """Go on with these operations, by ascending position.

        `partner`: for an ack the position of its send, -1 for a send and where no send is known. `ends`: for a send the
        position of the last ack, NEVER_POSITION if that never comes.
        """

    def finish(self, last_position: int) -> StoreCourse:
        """Give the course to the end of the trace."""


def store_journal(rules: JournalRules) -> StoreJournal:
    """Begin a journal that keeps its files by these rules."""
    return _Compacting(rules) if rules.live_percent else _Plain(rules)


# Segments that go whole -----------------------------------------------------------------------------------------------


class _Plain:
    """A journal of which no message is copied."""

    def __init__(self, rules: JournalRules) -> None:
        self._rules = rules
        self._starts = np.empty(16, np.int64)
        self._ends = np.empty(16, np.int64)
        self._state = np.zeros(2, np.int64)
        """The number of segments, and the bytes used in the last."""
        self._written = 0

    def feed(self, position: Ints, size: Ints, partner: Ints, ends: Ints) -> None:
        rules = self._rules
        self._written += int(size.sum())
        self._starts, self._ends = _feed_plain(
            position,
            size,
            partner,
            ends,
            self._starts,
            self._ends,
            self._state,
            rules.capacity - rules.room,
            rules.ack_rule,
        )

    def finish(self, last_position: int) -> StoreCourse:
        count = int(self._state[0])
        starts, ends = self._starts[:count].copy(), np.minimum(self._ends[:count], last_position)
        if count:
            ends[-1] = last_position
        at = np.concatenate([starts, ends])
        change = np.repeat(np.array([1, -1], np.int64), count)
        order = np.lexsort((-change, at))  # one that goes where another begins is there beside it for a moment
        files = np.cumsum(change[order])
        return StoreCourse(at[order], files * self._rules.segment_bytes, files, self._written, 0, 0, starts, ends)


@njit
def _feed_plain(
    position: Ints,
    size: Ints,
    partner: Ints,
    ends: Ints,
    seg_start: Ints,
    seg_end: Ints,
    state: Ints,
    room: int,
    chains: bool,
) -> tuple[Ints, Ints]:
    """Go on with a journal that does not compact. A full segment is there until the next has begun, at least."""
    count, used = state[0], state[1]
    for i in range(len(position)):
        at = position[i]
        if count == 0 or (used and used + size[i] > room):
            if count == len(seg_start):
                seg_start, seg_end = twice(seg_start), twice(seg_end)
            if count:
                seg_end[count - 1] = max(seg_end[count - 1], at)
            seg_start[count] = seg_end[count] = at
            count += 1
            used = 0
        used += size[i]
        last = count - 1
        if partner[i] < 0:
            seg_end[last] = max(seg_end[last], ends[i])
        elif chains and seg_start[0] <= partner[i] < seg_start[last]:
            earlier = np.searchsorted(seg_start[:count], partner[i], side="right") - 1
            seg_end[last] = max(seg_end[last], seg_end[earlier])
    state[0], state[1] = count, used
    return seg_start, seg_end


@njit
def twice(rows: Rows) -> Rows:
    """Make room for twice as many rows, or numbers. What the new ones hold is not said."""
    longer: Rows = np.empty((2 * len(rows), *rows.shape[1:]), rows.dtype)
    longer[: len(rows)] = rows
    return longer


# Segments that are compacted ------------------------------------------------------------------------------------------

# The state is a few arrays of rows. A file is a row of _FILES, a live message whose end is known or not a row of
# _MESSAGES; the table finds, by an ack's position, the messages that end there.

GENERATION, LIVE, LIVE_BYTES, TAKEN, FIRST, LAST, THERE, LISTED, RECORDS = range(9)
FILE_COLUMNS: Final = 9
"""Columns of a file: how often what is in it was copied, live messages, their bytes, the bytes that it takes beside its
header, its first and last live message, whether anything lives in it, whether it is listed as one that may be
compacted, and its records."""
SIZE, FILE, BEFORE, BEHIND, ALIKE = range(5)
"""Columns of a message: bytes of its record, its file, its neighbours there, the next one that ends where it does (or
the next free row)."""
_USED, TAIL, _LEVEL, _ON_DISK, _WRITTEN, _COPIED, _MOST, BORN = range(8)
_FREE, _IN_TABLE, _CHANGES, _LOOK, LISTED_COUNT, _KEPT, _KEPT_RECORDS, EMPTY, EMPTY_BYTES, _LIVE, UNTIL_LOOK = range(
    8, 19
)
NUMBERS: Final = 19
"""Places of single numbers: bytes used in the segment that is written (`TAIL`), bytes and files on disk, sums, files
ever, the first free message, keys in the table, rows of the course, whether it is time to look what pays to be
compacted, how many files are listed for that, full files in which something lives and their records, those in which
nothing does and their bytes, bytes that live in full files, and how many of these may die until it is time to look."""
NONE: Final = -1
_DYING, _SMALL = 1, 2
_GENERATIONS: Final = 64
"""No message is copied more often (policies/compaction.py)."""


class _Compacting:
    """A journal that compacts."""

    def __init__(self, rules: JournalRules) -> None:
        self._limits = rules.limits()
        self._numbers = np.zeros(NUMBERS, np.int64)
        self._numbers[TAIL] = self._numbers[_FREE] = NONE
        self._files = np.empty((32, FILE_COLUMNS), np.int64)
        self._messages = np.empty((0, 5), np.int64)
        self._table = np.full((16, 2), NONE, np.int64)
        self._course = np.empty((64, 3), np.int64)
        self._listed = np.empty(32, np.int64)

    def feed(self, position: Ints, size: Ints, partner: Ints, ends: Ints) -> None:
        self._files, self._messages, self._table, self._course, self._listed = _feed_compacting(
            position,
            size,
            partner,
            ends,
            self._limits,
            self._numbers,
            self._files,
            self._messages,
            self._table,
            self._course,
            self._listed,
        )

    def finish(self, last_position: int) -> StoreCourse:
        numbers, course = self._numbers, self._course[: self._numbers[_CHANGES]]
        nothing = np.empty(0, np.int64)
        return StoreCourse(
            course[:, 0].copy(),
            course[:, 1].copy(),
            course[:, 2].copy(),
            int(numbers[_WRITTEN]),
            int(numbers[_COPIED]),
            int(numbers[_MOST]),
            nothing,
            nothing,
        )


SEGMENT, CAPACITY, ROOM_MORE, BATCH, PERCENT, LEAST, MESSAGES, HEADER = range(8)
"""Places of the rules in `JournalRules.limits`."""


@njit
def _feed_compacting(
    position: Ints,
    size: Ints,
    partner: Ints,
    ends: Ints,
    limits: Ints,
    numbers: Ints,
    files: Ints,
    messages: Ints,
    table: Ints,
    course: Ints,
    listed: Ints,
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Go on with a journal that compacts. `listed` is as long as `files`: those that may be compacted, and some that
    have gone since."""
    batch = limits[BATCH]
    for i in range(len(position)):
        at = position[i]
        if numbers[BORN] + 2 > len(files):
            files, listed = twice(files), twice(listed)
        if numbers[_CHANGES] + 4 > len(course):
            course = twice(course)
        numbers[_LOOK] = 0
        _write(size[i], limits, numbers, files, listed)
        if partner[i] < 0 and ends[i] > at:
            if numbers[_FREE] == NONE:
                messages = _more_messages(messages, numbers)
            if 2 * numbers[_IN_TABLE] >= len(table):
                table = _more_table(table)
            _send(size[i] - batch, ends[i], numbers, files, messages, table)
        elif partner[i] >= 0:
            _die(at, limits, numbers, files, messages, table, listed)
        _note(at, numbers, course)
        _release(at, limits, numbers, files, course, listed)
        if not numbers[_LOOK]:
            continue
        while True:
            sources = choose_files(numbers, files, listed, limits)
            if not len(sources):
                break
            files, course, listed = _compact(sources, at, limits, numbers, files, messages, course, listed)
            if numbers[BORN] + 2 > len(files):
                files, listed = twice(files), twice(listed)
            if numbers[_CHANGES] + 4 > len(course):
                course = twice(course)
            _release(at, limits, numbers, files, course, listed)
    return files, messages, table, course, listed


@njit
def _write(size: int, limits: Ints, numbers: Ints, files: Ints, listed: Ints) -> None:
    """Write an operation, into a new segment where this one is full."""
    tail = numbers[TAIL]
    numbers[_WRITTEN] += size
    if tail == NONE or (numbers[_USED] and numbers[_USED] + size + limits[ROOM_MORE] > limits[CAPACITY]):
        born = begin_file(0, limits[CAPACITY], numbers, files)
        numbers[_LEVEL] += limits[SEGMENT]
        numbers[_ON_DISK] += 1
        if tail != NONE:
            numbers[_LOOK] = 1
            seal_file(tail, numbers, files)
            if files[tail, LIVE]:
                enlist(tail, limits, numbers, files, listed)
            else:
                empty_file(tail, limits, numbers, files)
        numbers[TAIL] = tail = born
        numbers[_USED] = 0
    numbers[_USED] += size
    files[tail, RECORDS] += 1


@njit
def begin_file(generation: int, taken: int, numbers: Ints, files: Ints) -> int:
    """Begin the row of a new file, in which nothing is yet."""
    born: int = numbers[BORN]
    numbers[BORN] = born + 1
    files[born, :] = 0
    files[born, GENERATION], files[born, TAKEN] = generation, taken
    files[born, FIRST] = files[born, LAST] = NONE
    files[born, THERE] = 1
    return born


@njit
def seal_file(file: int, numbers: Ints, files: Ints) -> None:
    """Count a file among those that are full."""
    numbers[_KEPT] += 1
    numbers[_KEPT_RECORDS] += files[file, RECORDS]
    numbers[_LIVE] += files[file, LIVE_BYTES]


@njit
def empty_file(file: int, limits: Ints, numbers: Ints, files: Ints) -> None:
    """Empty a full file that has lost its last live message."""
    files[file, THERE] = 0
    numbers[_LIVE] -= files[file, LIVE_BYTES]
    numbers[_KEPT] -= 1
    numbers[_KEPT_RECORDS] -= files[file, RECORDS]
    numbers[EMPTY] += 1
    numbers[EMPTY_BYTES] += limits[HEADER] + files[file, TAKEN]


@njit
def die(size: int, numbers: Ints) -> bool:
    """Count the bytes that have died in a full file. Return whether it is time to look what pays to be compacted."""
    numbers[_LIVE] -= size
    numbers[UNTIL_LOOK] -= size
    time: bool = numbers[UNTIL_LOOK] <= 0
    return time


@njit
def _release(at: int, limits: Ints, numbers: Ints, files: Ints, course: Ints, listed: Ints) -> None:
    """Let the files go in which nothing lives, behind a snapshot, if they are worth it."""
    size = snapshot_size(numbers)
    if not size:
        return
    empty, empty_bytes = numbers[EMPTY], numbers[EMPTY_BYTES]
    _write(size + limits[BATCH], limits, numbers, files, listed)
    _note(at, numbers, course)
    numbers[EMPTY] -= empty
    numbers[EMPTY_BYTES] -= empty_bytes
    numbers[_ON_DISK] -= empty
    numbers[_LEVEL] -= empty_bytes
    _note(at, numbers, course)


@njit
def snapshot_size(numbers: Ints) -> int:
    """Return the bytes of a snapshot that lets the empty files go; 0 while they are not worth one."""
    expected = KEPT_EXPECTED * numbers[_KEPT] + numbers[_KEPT_RECORDS] // 64
    if not numbers[EMPTY] or SNAPSHOT_WORTH * expected > numbers[EMPTY_BYTES]:
        return 0
    size: int = SNAPSHOT_BYTES + KEPT_BYTES * numbers[_KEPT] + numbers[_KEPT_RECORDS] // 8
    return size


@njit
def _note(at: int, numbers: Ints, course: Ints) -> None:
    """Write down what is on disk, where that has changed."""
    count = numbers[_CHANGES]
    if count and course[count - 1, 1] == numbers[_LEVEL] and course[count - 1, 2] == numbers[_ON_DISK]:
        return
    course[count, 0], course[count, 1], course[count, 2] = at, numbers[_LEVEL], numbers[_ON_DISK]
    numbers[_CHANGES] = count + 1


@njit
def _send(size: int, ends: int, numbers: Ints, files: Ints, messages: Ints, table: Ints) -> None:
    """Put a message into the segment that is written."""
    message = numbers[_FREE]
    numbers[_FREE] = messages[message, ALIKE]
    messages[message, SIZE] = size
    messages[message, ALIKE] = NONE
    put(message, numbers[TAIL], files, messages)
    if ends != NEVER_POSITION:
        slot = _slot(ends, table)
        if table[slot, 0] == NONE:
            table[slot, 0] = ends
            numbers[_IN_TABLE] += 1
        else:
            messages[message, ALIKE] = table[slot, 1]
        table[slot, 1] = message


@njit
def put(message: int, file: int, files: Ints, messages: Ints) -> None:
    """Add a message behind a file's others."""
    last = files[file, LAST]
    messages[message, FILE] = file
    messages[message, BEFORE], messages[message, BEHIND] = last, NONE
    if last == NONE:
        files[file, FIRST] = message
    else:
        messages[last, BEHIND] = message
    files[file, LAST] = message
    files[file, LIVE] += 1
    files[file, LIVE_BYTES] += messages[message, SIZE]


@njit
def take_out(message: int, files: Ints, messages: Ints) -> None:
    """Take a message out of its file."""
    file, before, behind = messages[message, FILE], messages[message, BEFORE], messages[message, BEHIND]
    if before == NONE:
        files[file, FIRST] = behind
    else:
        messages[before, BEHIND] = behind
    if behind == NONE:
        files[file, LAST] = before
    else:
        messages[behind, BEFORE] = before
    files[file, LIVE] -= 1
    files[file, LIVE_BYTES] -= messages[message, SIZE]


@njit
def _die(at: int, limits: Ints, numbers: Ints, files: Ints, messages: Ints, table: Ints, listed: Ints) -> None:
    """Take out the messages whose last ack stands here, and the files in which nothing is left."""
    slot = _slot(at, table)
    if table[slot, 0] == NONE:
        return
    message = table[slot, 1]
    _forget(slot, table)
    numbers[_IN_TABLE] -= 1
    while message != NONE:
        file = messages[message, FILE]
        take_out(message, files, messages)
        if file != numbers[TAIL]:
            if die(messages[message, SIZE], numbers):
                numbers[_LOOK] = 1
            enlist(file, limits, numbers, files, listed)
            if not files[file, LIVE]:
                empty_file(file, limits, numbers, files)
        following = messages[message, ALIKE]
        messages[message, ALIKE] = numbers[_FREE]
        numbers[_FREE] = message
        message = following


@njit
def enlist(file: int, limits: Ints, numbers: Ints, files: Ints, listed: Ints) -> None:
    """List a full file if it may be compacted from now on: it is mostly dead, or may be small."""
    if not files[file, LISTED] and (_is_short(file, files, limits) or is_dying(file, files, limits)):
        files[file, LISTED] = 1
        listed[numbers[LISTED_COUNT]] = file
        numbers[LISTED_COUNT] += 1


@njit
def choose_files(numbers: Ints, files: Ints, listed: Ints, limits: Ints) -> Ints:
    """Choose the files to compact next, as `compaction.choose` does. Those that have gone are listed no more."""
    count = 0
    for place in range(numbers[LISTED_COUNT]):
        if files[listed[place], THERE]:
            listed[count] = listed[place]
            count += 1
    numbers[LISTED_COUNT] = count
    there = np.sort(listed[:count])  # the oldest first
    header, bytes_max = limits[HEADER], limits[CAPACITY]
    percent = limits[PERCENT]
    dying, small = np.zeros(_GENERATIONS, np.int64), np.zeros(_GENERATIONS, np.int64)
    kind = np.zeros(len(there), np.int64)
    for place, file in enumerate(there):
        if is_dying(file, files, limits):
            kind[place] = _DYING
            dying[files[file, GENERATION]] += 1
        elif _is_short(file, files, limits) and files[file, LIVE] * TOGETHER <= limits[MESSAGES]:
            kind[place] = _SMALL
            small[files[file, GENERATION]] += 1
    for generation in range(_GENERATIONS):
        least = 1 if generation else limits[LEAST]
        if dying[generation] < least:
            continue
        group: Ints = there[(kind == _DYING) & (files[there, GENERATION] == generation)]
        order = np.argsort(files[group, LIVE_BYTES] / (files[group, TAKEN] + header), kind="mergesort")
        first = _first(group[order], files, least, bytes_max)
        if first:
            chosen: Ints = group[np.sort(order[:first])]
            live, size = files[chosen, LIVE].sum(), files[chosen, LIVE_BYTES].sum()
            after = size + header * max(-(-size // bytes_max), -(-live // limits[MESSAGES]))
            if after * 100 <= percent * (files[chosen, TAKEN] + header).sum():
                return chosen
    for generation in range(1, _GENERATIONS):
        if small[generation] < TOGETHER:
            continue
        group = there[(kind == _SMALL) & (files[there, GENERATION] == generation)]
        first = _first(group, files, TOGETHER, bytes_max)
        if first:
            return group[:first]
    numbers[UNTIL_LOOK] = max(min(numbers[_LIVE] // PARTS, bytes_max), 1)
    return there[:0]


@njit
def is_dying(file: int, files: Ints, limits: Ints) -> bool:
    """Tell whether at most `live_percent` of what a file takes is live."""
    header = limits[HEADER]
    dying: bool = files[file, LIVE_BYTES] * 100 <= limits[PERCENT] * (files[file, TAKEN] + header)
    return dying


@njit
def _is_short(file: int, files: Ints, limits: Ints) -> bool:
    """Tell whether a file is one of copies, and much shorter than it may be."""
    short: bool = files[file, GENERATION] > 0 and files[file, TAKEN] * TOGETHER <= limits[CAPACITY]
    return short


@njit
def _first(group: Ints, files: Ints, least: int, bytes_max: int) -> int:
    """Count how many of these, from the first on, are taken together; 0 if there are too few."""
    taken = size = 0
    for file in group:
        size += files[file, LIVE_BYTES]
        if size > bytes_max and taken >= least:
            break
        taken += 1
    return taken if taken >= least else 0


@njit
def _compact(
    sources: Ints, at: int, limits: Ints, numbers: Ints, files: Ints, messages: Ints, course: Ints, listed: Ints
) -> tuple[Ints, Ints, Ints]:
    """Copy what lives in these files; they go when all of it is copied."""
    header = limits[HEADER]
    generation = files[sources[0], GENERATION] + 1
    copies, taken, batch = NONE, 0, 0
    for source in sources:
        message = files[source, FIRST]
        while message != NONE:
            behind, size = messages[message, BEHIND], messages[message, SIZE]
            if copies != NONE and (files[copies, LIVE] >= limits[MESSAGES] or header + taken + size > limits[SEGMENT]):
                files, course, listed = _publish(copies, taken, at, limits, numbers, files, course, listed)
                copies = NONE
            if copies == NONE:
                if numbers[BORN] + 3 > len(files):
                    files, listed = twice(files), twice(listed)
                copies = begin_file(generation, 0, numbers, files)
                taken, batch = limits[BATCH], 0
            elif taken - batch >= BATCH_BYTES:
                batch = taken
                taken += limits[BATCH]
            put(message, copies, files, messages)
            files[copies, RECORDS] += 1
            taken += size
            numbers[_COPIED] += size
            message = behind
    if copies != NONE:
        files, course, listed = _publish(copies, taken, at, limits, numbers, files, course, listed)
    numbers[_MOST] = max(numbers[_MOST], generation)
    for source in sources:
        empty_file(source, limits, numbers, files)
    return files, course, listed


@njit
def _publish(
    copies: int, taken: int, at: int, limits: Ints, numbers: Ints, files: Ints, course: Ints, listed: Ints
) -> tuple[Ints, Ints, Ints]:
    """Let a file of copies count, beside those that it was copied from."""
    if numbers[BORN] + 2 > len(files):
        files, listed = twice(files), twice(listed)
    if numbers[_CHANGES] + 4 > len(course):
        course = twice(course)
    _write(COMPACTED_BYTES + limits[BATCH], limits, numbers, files, listed)
    files[copies, TAKEN] = taken
    seal_file(copies, numbers, files)
    enlist(copies, limits, numbers, files, listed)
    numbers[_LEVEL] += limits[HEADER] + taken
    numbers[_ON_DISK] += 1
    _note(at, numbers, course)
    return files, course, listed


@njit
def _more_messages(messages: Ints, numbers: Ints) -> Ints:
    """Make room for twice as many messages, the new rows free."""
    count = len(messages)
    longer = np.empty((max(2 * count, 64), messages.shape[1]), np.int64)
    longer[:count] = messages
    for message in range(count, len(longer)):
        longer[message, ALIKE] = message + 1
    longer[len(longer) - 1, ALIKE] = NONE
    numbers[_FREE] = count
    return longer


# The table: open addressing, linear probing, and deletion by moving what follows.


@njit
def _place(key: int, slots: int) -> int:
    """Return the place where a key belongs in a table whose length is a power of two."""
    return ((key * 0x2545F4914F6CDD1D) >> 20) & (slots - 1)


@njit
def _slot(key: int, table: Ints) -> int:
    """Return the place of a key, or the empty one where it would be put."""
    slots = len(table)
    slot = _place(key, slots)
    while table[slot, 0] != NONE and table[slot, 0] != key:
        slot = (slot + 1) & (slots - 1)
    return slot


@njit
def _forget(slot: int, table: Ints) -> None:
    slots = len(table)
    hole, at = slot, slot
    while True:
        at = (at + 1) & (slots - 1)
        if table[at, 0] == NONE:
            break
        home = _place(table[at, 0], slots)
        # It may move into the hole unless its home lies behind that.
        if (at - home) & (slots - 1) >= (at - hole) & (slots - 1):
            table[hole, 0], table[hole, 1] = table[at, 0], table[at, 1]
            hole = at
    table[hole, 0] = NONE


@njit
def _more_table(table: Ints) -> Ints:
    longer = np.full((2 * len(table), 2), NONE, np.int64)
    for k in range(len(table)):
        if table[k, 0] != NONE:
            slot = _slot(table[k, 0], longer)
            longer[slot, 0], longer[slot, 1] = table[k, 0], table[k, 1]
    return longer
