"""The model of a store that compacts, beside such a store: the same files after each step."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest

from anabranch.adapters.core import Store
from anabranch.adapters.core.messages import Message
from anabranch.adapters.core.record.encoding import HEAD
from anabranch.adapters.journal import JournalStore
from anabranch.adapters.journal.compaction import Compactor
from anabranch.adapters.journal.encoding import ACK_PAYLOAD, SEND_OVERHEAD
from anabranch.adapters.wal import format as w
from anabranch.policies.advisor.model.cost_model import CostModel
from anabranch.policies.advisor.model.kernel import JournalRules
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.statistics.sizes import JournalSizes
from anabranch.policies.compaction import choose

from ..contract.disk import A, B, C, assert_whole, drain, take
from ..journal.disk import JournalDisk
from ..shares import Share
from .conftest import measure, told
from .reference import CompactingJournal

SEGMENT = 64 * 1024
SIZES = JournalSizes()


def test_the_sizes_are_those_of_the_format() -> None:
    assert SIZES.send_overhead == SEND_OVERHEAD + HEAD.size
    assert SIZES.ack_overhead == w.RECORD_HEADER.size + ACK_PAYLOAD.size


def found(store: Store) -> list[tuple[int, int, int, int]]:
    """Generation, live messages, their bytes and the file's, of each file in which something lives."""
    assert isinstance(store, JournalStore)
    with store._engine.lock:
        store._engine.current()
        files = [segment for segment in store.backend._log.table.all if segment.live]
        return [(s.generation, s.live, s.live_bytes, w.HEADER_BYTES + s.taken) for s in files]


@pytest.mark.parametrize(("seed", "percent", "least"), [(0, 50, 1), (1, 50, 2), (2, 80, 4), (3, 30, 1)])
def test_the_same_files_after_each_step(
    tmp_path: Path, seed: int, percent: int, least: int, share: Share, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random sends and acks: of some queues messages stay for long. Compaction comes where the test has it come, in
    both; nothing is released meanwhile, which would write snapshots."""
    chance = random.Random(seed)
    monkeypatch.setattr("anabranch.adapters.journal.compaction.MESSAGES_MAX", 40)
    monkeypatch.setattr("anabranch.adapters.journal.compaction.choose", functools.partial(choose, messages_max=40))
    monkeypatch.setattr(Compactor, "notice", lambda self: None)
    with JournalDisk(tmp_path, pool_files=0, sync="never", compact_live_percent=percent) as disk:
        store = disk.create(checkpoint_interval=3600.0, checkpoint_operations=1_000_000)
        store.backend._applier.on_empty = lambda: None
        queues = (A, B, C)
        for queue in queues:  # so that no send has to declare one
            store.send(queue, b"")
        for queue in queues:
            drain(store, queue)
        model = CompactingJournal(
            JournalRules(SEGMENT, SIZES.capacity(SEGMENT), live_percent=percent, min_segments=least, messages_max=40)
        )
        model._used = store.backend._log.tail.offset - w.HEADER_BYTES
        waiting: dict[int, list[tuple[int, Message]]] = {at: [] for at in range(3)}
        sent = compacted_times = 0
        for _ in range(3000 if share.whole else 700):
            at = chance.choices(range(3), (6, 3, 1))[0]
            if chance.random() < 0.5:
                body = bytes(chance.choice([10, 500, 3000, 9000]))
                store.send(queues[at], body)
                sent += 1
                model.send(sent, SIZES.send_overhead + len(body))
                waiting[at].append((sent, take(store, queues[at])))
            elif waiting[at]:
                number, message = waiting[at].pop(0 if at else chance.randrange(len(waiting[at])))
                message.ack()
                model.ack(number, SIZES.ack_overhead)
            if chance.random() < 0.05:
                copied = store.backend._compactor.run(least)
                assert copied == model.compact()
                compacted_times += bool(copied)
            assert found(store) == model.files
        assert compacted_times > 1
        assert_whole(store)


def test_what_is_never_acked_is_copied_a_few_times() -> None:
    """One of 50 stays: without compaction every segment does."""
    steps = [(op, "queue://a", f"{n}") for n in range(5000) for op in ("send", "ack") if op == "send" or n % 50]
    operations = build(told(steps))
    plain = measure(operations, ((0,),), CostModel(SEGMENT, live_percent=0))
    use = measure(operations, ((0,),), CostModel(SEGMENT))
    pending = 100 * (1000 + SIZES.send_overhead)
    assert plain.peak_bytes > 5_000_000
    assert plain.copied_bytes == 0
    assert pending < use.peak_bytes < pending + 8 * SEGMENT
    assert use.mean_bytes < use.peak_bytes
    assert use.most_copied <= 2
    assert pending / 2 < use.copied_bytes < 2 * pending
    assert use.written_bytes > 5_000_000
