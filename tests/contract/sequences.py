"""The contract of last_seq."""

from __future__ import annotations

from anabranch.adapters.core import Store

from .disk import A, Disk, T, take
from .preparing import prepare, to


class SequencesContract:
    def test_last_seq(self, disk: Disk, store: Store) -> None:
        """What is sent comes behind it, whatever has become of what was sent before."""
        for place in ("here", "closed", "here", "crashed", "here"):
            before = store.last_seq
            sent = [r.seq for r in store.send_many(A, [b"x"] * 3)] + [store.send(T, b"to nobody").seq]
            assert min(sent) > before
            assert store.last_seq >= max(sent)
            take(store).ack()
            store.purge(A)
            store = disk.later(store, place)
            assert store.last_seq >= max(sent)

    def test_last_seq_after_a_branch(self, store: Store) -> None:
        name = prepare(store, 1, to(A, b"x", b"y"))
        before = store.last_seq
        seqs = [receipt.seq for receipt in store.commit_prepared(name).wait()]
        assert before < min(seqs) <= max(seqs) <= store.last_seq
