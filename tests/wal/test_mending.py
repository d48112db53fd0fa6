"""A damaged log, mended (MD1 to MD3). Of journals, with all that their index knows: tests/journal/test_salvage.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.adapters.wal import SegmentFiles, records, survey
from anabranch.adapters.wal import format as w
from anabranch.adapters.wal.files.segment_files import read_header
from anabranch.adapters.wal.recovery.mending import Mender
from anabranch.policies.errors import CorruptionError

from .logs import LOG_ID, SEGMENT_BYTES, created

COUNT = 200


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Some segments of a log whose records are their own numbers."""
    opened = created(tmp_path / "log")
    opened.write(*(str(number).encode().ljust(1000, b".") for number in range(COUNT)))
    opened.close()
    return tmp_path / "log"


def segments(log: Path) -> list[Path]:
    return sorted(log.glob("*.seg"))


def held(log: Path) -> list[int]:
    """What reads back."""
    found = records(survey(SegmentFiles(log, SEGMENT_BYTES), LOG_ID))
    return [int(record.payload.rstrip(b".")) for record in found if record.kind != w.LOST]


def mend(log: Path, aside: Path | None = None) -> int:
    """How many records are lost."""
    mender = Mender(log, LOG_ID)
    losses = mender.look()
    mender.write(aside)
    return sum(loss.last_lsn - loss.first_lsn + 1 for loss in losses)


def test_what_is_whole_is_left_alone(log: Path) -> None:
    before = [path.read_bytes() for path in segments(log)]
    assert mend(log) == 0
    assert [path.read_bytes() for path in segments(log)] == before


@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_damaged_header_costs_nothing(log: Path, which: int) -> None:
    """The seed of its checksums follows from them, and a header is made that has it."""
    path = segments(log)[which]
    content = bytearray(path.read_bytes())
    content[:200] = bytes(200)
    path.write_bytes(content)
    with pytest.raises(CorruptionError):
        held(log)
    assert mend(log) == 0
    assert held(log) == list(range(COUNT))


@pytest.mark.parametrize("which", [0, 1])
def test_a_segment_that_is_gone_costs_what_was_in_it(log: Path, which: int) -> None:
    path = segments(log)[which]
    first = read_header(path).base_lsn
    last = read_header(segments(log)[which + 1]).base_lsn - 1
    path.unlink()
    lost = mend(log)
    assert held(log) == [*range(first - 1), *range(last, COUNT)]
    assert lost == last - first + 1


def test_the_newest_segment_is_known_to_be_gone(log: Path) -> None:
    first = read_header(segments(log)[-1]).base_lsn
    segments(log)[-1].unlink()
    assert mend(log) == COUNT - first + 1
    assert held(log) == list(range(first - 1))


def test_damaged_files_are_kept_where_one_says(log: Path) -> None:
    path = segments(log)[1]
    content = bytearray(path.read_bytes())
    content[w.HEADER_BYTES + 500] ^= 1
    path.write_bytes(content)
    assert mend(log, log.parent / "extras") == 1
    assert (log.parent / "extras" / path.name).read_bytes() == content
    assert len(held(log)) == COUNT - 1


def test_another_logs_segment_is_no_damage(log: Path, tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match="move it away"):
        Mender(log, bytes(16)).look()


def test_nothing_at_all_cannot_be_mended(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    with pytest.raises(CorruptionError, match="nothing of the log"):
        Mender(tmp_path / "log", LOG_ID).look()
