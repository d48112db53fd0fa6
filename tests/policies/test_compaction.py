"""Which files are compacted next, and how often that copies a message."""

from __future__ import annotations

import random
from bisect import bisect
from dataclasses import dataclass

from anabranch.policies.compaction import TOGETHER, choose


@dataclass(eq=False)
class File:
    number: int
    taken: int
    live_bytes: int
    generation: int = 0

    @property
    def live(self) -> int:
        return self.live_bytes


def chosen(files: list[File], least: int = 2, percent: int = 50, size: int = 1000, header: int = 0) -> list[int]:
    return [file.number for file in choose(files, percent, least, size, header)]


def test_what_is_mostly_dead_is_chosen() -> None:
    assert chosen([File(1, 1000, 500), File(2, 1000, 501), File(3, 1000, 1), File(4, 1000, 0)]) == [1, 3]
    assert chosen([File(1, 1000, 500), File(2, 1000, 501)]) == []
    assert chosen([File(1, 1000, 500), File(2, 1000, 501)], least=1) == [1]
    assert chosen([File(n, 1000, 300) for n in range(1, 9)]) == [1, 2, 3]


def test_generations_stay_apart() -> None:
    """Files of copies go with other files of copies, or alone, but never with a segment."""
    assert chosen([File(1, 1000, 500), File(2, 1000, 10, generation=1)]) == [2]
    assert chosen([File(1, 1000, 500), File(2, 1000, 9, 1), File(3, 1000, 9, 1)]) == [2, 3]
    assert chosen([File(1, 1000, 500), File(2, 1000, 510, 1), File(3, 1000, 9, 2), File(4, 1000, 9, 2)]) == [3, 4]


def test_the_deadest_go_first() -> None:
    assert chosen([File(1, 1000, 500), File(2, 1000, 400), File(3, 1000, 490), File(4, 1000, 100)]) == [2, 3, 4]


def test_headers_count() -> None:
    """A file of copies with little in it is mostly header: two of them become one."""
    assert chosen([File(1, 90, 90, 1), File(2, 90, 90, 1)], header=100) == []
    assert chosen([File(n, 90, 90, 1) for n in (1, 2, 3)], header=1000) == [1, 2, 3]
    assert chosen([File(1, 90, 90, 1)], header=1000) == []
    assert chosen([File(1, 90, 40, 1)], header=1000) == []


def test_none_is_copied_that_would_take_as_much() -> None:
    """Two files as large as may be do not become fewer."""
    assert chosen([File(1, 1000, 700), File(2, 1000, 700)], percent=70, header=100) == []
    assert chosen([File(1, 1000, 300), File(2, 1000, 700)], percent=70, header=100) == [1, 2]


def test_small_files_are_put_together() -> None:
    small = [File(n, 10, 10, generation=1) for n in range(1, TOGETHER)]
    assert chosen(small) == []
    assert chosen([*small, File(TOGETHER, 10, 10, generation=1)]) == list(range(1, TOGETHER + 1))


def test_no_message_is_copied_often() -> None:
    """Messages may live for very different times. The copies of one are the logarithm of what was written."""
    chance = random.Random(5)
    files: list[tuple[File, list[float]]] = []
    most = 0
    for n in range(1, 4001):
        deaths = sorted(n + chance.paretovariate(0.5) for _ in range(20))
        files.append((File(n, 2000, 2000), deaths))
        while True:
            for one, of in files:
                one.live_bytes = 100 * (len(of) - bisect(of, n))
            files = [(one, of) for one, of in files if one.live]
            sources = choose([one for one, _ in files[:-1]], 50, 4, 2000, 0)
            if not sources:
                break
            together = sorted(death for one, of in files if one in sources for death in of if death > n)
            files = [(one, of) for one, of in files if one not in sources]
            copied = File(n, 100 * len(together), 100 * len(together), 1 + sources[0].generation)
            most = max(most, copied.generation)
            files.insert(0, (copied, together))
    assert most <= 12  # log2(4000)
    pending = sum(one.live_bytes for one, _ in files)
    assert sum(one.taken for one, _ in files) < 2 * pending + 12 * 3 * 2000


def test_files_that_are_full_of_messages_are_not_put_together() -> None:
    """Full files would become as many, and be put together once more, for ever."""
    small = [File(n, 10, 10, generation=1) for n in range(TOGETHER)]
    assert choose(small, 50, 2, 1000, 0, messages_max=10 * TOGETHER)
    assert not choose(small, 50, 2, 1000, 0, messages_max=10 * TOGETHER - 1)
