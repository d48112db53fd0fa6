"""A store whose disk hangs holds up its own clients alone."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import anabranch

from ..contract.disk import PATIENCE


def test_a_disk_that_hangs_holds_up_no_other_store(tmp_path: Path) -> None:
    stores = [anabranch.StoreConfig("slow", ["slow"]), anabranch.StoreConfig("rest", [">"])]
    config = anabranch.Config(tmp_path / "data", stores)
    hangs, go_on = threading.Event(), threading.Event()
    sync = os.fdatasync

    def fdatasync(fd: int) -> None:
        if "/stores/slow/" in str(Path(f"/proc/self/fd/{fd}").readlink()) and hangs.is_set():
            assert go_on.wait(PATIENCE)
        sync(fd)

    with ExitStack() as stack:
        stack.enter_context(anabranch.open(config)).serve()
        one, other = (stack.enter_context(anabranch.open(config, shared=True)) for _ in range(2))
        for router in (one, other):
            for name in ("slow", "q"):
                router.queue(name).send(b"first")
        with patch.object(os, "fdatasync", fdatasync):
            hangs.set()
            held_up = one.queue("slow").send_nowait(b"slow")
            for number in range(50):
                other.queue("q").send(b"%d" % number)
            again = other.queue("slow").send_nowait(b"slow, too")
            assert one.queue("q").send(b"from the same client").seq
            assert not held_up.done()
            go_on.set()
            assert held_up.result(PATIENCE).seq < again.result(PATIENCE).seq
        assert [message.body for message in one.queue("slow").browse()] == [b"first"] * 2 + [b"slow", b"slow, too"]
        assert other.queue("q").depth() == 53
        assert other.queue("slow").send(b"as before").seq
