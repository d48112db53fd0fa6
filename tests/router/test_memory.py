"""What stores that are opened and closed in turn leave behind in memory. In a process of its own: others of this one
have opened stores before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TOGETHER = 32
"""Stores that are open at once."""
STORES = 150
BYTES_MAX = 26 << 20
"""Of memory that is in use more than before: less than 1 MiB for each that is open. LMDB alone would take 2 MiB for
each. What is free, and not given back to the system yet, does not count: that is the allocator's matter."""

PROGRAM = """
import ctypes, gc, sys
from pathlib import Path
import anabranch
from anabranch.router.placement import open_stores

def anonymous():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

open_stores.OPEN_STORES_MAX = int(sys.argv[2])
options = anabranch.JournalOptions(sync=anabranch.Sync.NEVER, segment_size=64 * 1024, pool_files=0)
config = anabranch.Config(sys.argv[1], [anabranch.StoreConfig("s", [">"], per_destination=True, journal=options)])
with anabranch.open(config) as router:
    before = anonymous()
    for _ in range(2):
        for n in range(int(sys.argv[3])):
            router.queue(f"d.{n}").send(b"x")
    print(anonymous() - before)
"""


def test_stores_that_are_opened_in_turn_do_not_add_up(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "data"), str(TOGETHER), str(STORES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < BYTES_MAX
