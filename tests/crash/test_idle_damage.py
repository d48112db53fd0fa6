"""What is vouched for once a store is idle: damage of it is told, whatever the policy (rule J4, invariant 9)."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.wal.files.watermark import WatermarkFile
from anabranch.policies.config.durability import Sync

from ..contract.disk import eventually

SENT = 50
PROGRAM = """
import sys
from pathlib import Path
from tests.crash import test_idle_damage as t
with t.anabranch.open(t.config(Path(sys.argv[1]), t.Sync(sys.argv[2]))) as router:
    for number in range(t.SENT):
        router.queue("q").send(b"%04d" % number * 250)
    print(flush=True)
    sys.stdin.read()
"""


def config(directory: Path, sync: Sync) -> anabranch.Config:
    journal = anabranch.JournalOptions(sync=sync, checkpoint_interval=3600.0)
    return anabranch.Config(directory, [anabranch.StoreConfig("a", [">"], journal=journal)])


@pytest.mark.parametrize("sync", list(Sync))
def test_what_was_sent_before_it_was_idle_is_never_cut_in_silence(tmp_path: Path, sync: Sync) -> None:
    """The last batch, too: the mark is behind it."""
    data = tmp_path / "data"
    journal = data / "stores/a/journal"
    command = [sys.executable, "-c", PROGRAM, str(data), sync.value]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        store_id = bytes.fromhex((data / "stores/a/store.id").read_text())

        def marked() -> int:
            mark = WatermarkFile(journal, store_id).read()
            return 0 if mark is None else mark.lsn

        eventually(lambda: marked() > SENT, marked)  # beside them there is the record that names the destination
        process.kill()
        assert process.wait() == -signal.SIGKILL
    (segment,) = journal.glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[content.rindex(b"%04d" % (SENT - 1))] ^= 1
    segment.write_bytes(content)
    with (
        pytest.raises(anabranch.CorruptionError, match="were known to be on disk and do not read back"),
        anabranch.open(config(data, sync)) as router,
    ):
        router.queue("q").depth()
