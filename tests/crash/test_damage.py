"""Torn and damaged files: every kind of file, at random places (invariant 9).

A trial damages one file of a closed or killed store and opens it in a process of its own, since a damaged LMDB file may
well kill the process. What it may find: all is right; an error of ours when opening; an error of ours when a message
is read. What it may not: a message gone silently, one that was never sent, another error, a hang.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import anabranch
from anabranch.adapters.journal import JournalStore

from ..contract.children import reaped
from ..contract.disk import eventually
from ..shares import Share
from ..wal.logs import quiet
from .damage import STATES, campaign
from .damaging import Trial, answers, outcomes
from .ledger import body_of, identity_of

Damage = Callable[[bytes, random.Random], bytes]
SENT = 260
LOST = "silently lost "


def options() -> anabranch.JournalOptions:
    return anabranch.JournalOptions(segment_size=64 * 1024, checkpoint_interval=3600.0, pool_files=2)


def config(directory: Path) -> anabranch.Config:
    return anabranch.Config(directory, [anabranch.StoreConfig("all", [">"], journal=options())])


def flip(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def zero(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    size = min(chance.choice((1, 16, 512, 4096)), len(data) - at)
    return data[:at] + bytes(size) + data[at + size :]


def noise(data: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(data))
    size = min(chance.choice((4, 64, 4096)), len(data) - at)
    return data[:at] + chance.randbytes(size) + data[at + size :]


def truncate(data: bytes, chance: random.Random) -> bytes:
    return data[: chance.randrange(len(data))]


DAMAGES: dict[str, Damage] = {"flip": flip, "zero": zero, "noise": noise, "truncate": truncate}


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A store closed in order, one killed: with sealed segments, gaps, a pool, acks, some of it behind a snapshot."""
    base = tmp_path_factory.mktemp("damage")
    for state in ("closed", "killed"):
        pid = os.fork()
        if pid == 0:
            prepare(base, state)
            os._exit(0)
        assert reaped(pid) == (0 if state == "closed" else -signal.SIGKILL)
    return {state: base / state for state in ("closed", "killed", "left")}


def prepare(base: Path, state: str) -> None:
    with anabranch.open(config(base / state)) as router:
        queue = router.queue("q")
        for number in range(SENT):
            queue.send(body_of(f"s.{number}", 1500 + 37 * (number % 40)), message_id=f"s.{number}")
            if number % 5 and number < 200:
                message = queue.receive()
                assert message is not None
                message.ack()
            if number == 150:
                router.reclaim()
        (base / "left").write_text(" ".join(identity_of(message.body) for message in queue.browse()))
        if state == "killed":
            os.kill(os.getpid(), signal.SIGKILL)


def victims(directory: Path) -> dict[str, list[Path]]:
    """The files by kind; a lock file's content says only who holds it."""
    kinds = {"segment": "*.seg", "pool": "*.free", "index": "index.mdb", "sums": "index.sums"}
    kinds |= {"placement": "placement.records", "id": "store.id", "lock": "*.lock"}
    return {kind: sorted(directory.rglob(pattern)) for kind, pattern in kinds.items()}


def look(directory: Path, left: list[str]) -> str:
    """What opening and reading finds: "right", "named: ..." or "WRONG: ..."."""
    named = ""
    try:
        with anabranch.open(config(directory)) as router:
            router.stats()  # opens the store
            queue = router.queue("q")
            ids: list[str] = []
            after = 0
            while after < 2 * SENT:
                try:
                    for message in queue.browse(after=after):
                        ids.append(identity_of(message.body))
                        after = message.seq
                    break
                except anabranch.CorruptionError as error:
                    named = f"named: {error}"
                    after += 1
            lost = [identity for identity in left if identity not in ids]
            wrong = [identity for identity in ids if identity not in left]
            if wrong or ids != sorted(ids, key=left.index):
                return f"WRONG: {wrong or 'out of order'} {named}"
            if lost and not named:
                return f"WRONG: {LOST}{' '.join(lost)}"
            return named or "right"
    except (anabranch.CorruptionError, anabranch.PlacementError) as error:
        return f"named: {error}"
    except BaseException:
        return f"WRONG: {traceback.format_exc()}"


def trial(source: Path, kind: str, damage: str, seed: int) -> Trial:
    """One file of that kind, damaged in that way."""
    chance = random.Random(f"{kind} {damage} {seed}")
    victim = chance.choice(victims(source)[kind])
    change = DAMAGES[damage]
    return Trial(victim.relative_to(source), f"{damage} {seed}", lambda data: change(data, chance) if data else b"?")


def judged(left: list[str], newest: Path | None, directory: Path, trial: Trial) -> tuple[str, str]:
    """Of a store that was killed, nothing vouches for the last batches of its newest segment but themselves (rule J4):
    they look torn."""
    outcome, _, text = look(directory, left).partition(": ")
    if trial.victim == newest and text.startswith(LOST):
        lost = text.removeprefix(LOST).split()
        if lost == left[-len(lost) :] and len(lost) < 10:
            return "right", "a torn tail"
    return outcome, text


@pytest.mark.weight(0.2)
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("state", ["closed", "killed"])
@pytest.mark.parametrize("kind", ["segment", "pool", "index", "sums", "placement", "id", "lock"])
def test_damage_is_named_or_harmless(
    stores: dict[str, Path], tmp_path: Path, kind: str, state: str, damage: str, share: Share
) -> None:
    source, left = stores[state], stores["left"].read_text().split()
    if kind in ("pool", "lock") and not victims(source)[kind]:
        return  # a killed store may leave no pool, a closed one no locks
    newest = victims(source)["segment"][-1].relative_to(source) if state == "killed" else None
    seeds = share.of(range(share.count(6 if kind in ("segment", "index") else 2, 200)))
    trials = (trial(source, kind, damage, seed) for seed in seeds)
    found = list(outcomes(source, tmp_path / "data", trials, partial(judged, left, newest)))
    assert [f"{tried}: {text}" for tried, outcome, text in found if outcome not in ("right", "named")] == []
    share.counts.append(f"{len(found)} trials")


@pytest.mark.parametrize("state", ["closed", "killed"])
def test_an_index_deleted_comes_back_whole(stores: dict[str, Path], tmp_path: Path, state: str) -> None:
    shutil.copytree(stores[state], tmp_path / "data")
    for index in (tmp_path / "data").rglob("index.mdb"):
        index.unlink()
    assert look(tmp_path / "data", stores["left"].read_text().split()) == "right"


def worked_and_marked(directory: Path, kill: bool) -> None:
    """Messages over several segments, and a mark at their end; prepared transactions of two stores. To be called in a
    process of its own."""
    with anabranch.open(two(directory)) as router:
        for number in range(75):
            router.queue("a").send(body_of(f"s.{number}", 3000))
        for number in range(3):
            tx = router.transaction(anabranch.Xid(1, f"x{number}"))
            tx.send("a", body_of(f"held.a{number}"))
            tx.send("b", body_of(f"held.b{number}"))
            tx.prepare()
        logs = [store.backend._log for store in router._registry.open_stores() if isinstance(store, JournalStore)]
        decisions = router._coordinator.log._log
        assert decisions is not None
        for log in (*logs, decisions):
            eventually(lambda log=log: log._marked == log._accepted.filled)  # type: ignore[misc]
            with quiet(log):  # nor is the mark's second place being written
                pass
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)


def in_child(run: Callable[[], str]) -> str:
    """What it returns in a process of its own, or how that ended."""
    ((ended, answer),) = answers([run])
    return ended or answer


def two(directory: Path) -> anabranch.Config:
    return anabranch.Config(
        directory,
        [anabranch.StoreConfig("b", ["b"], journal=options()), anabranch.StoreConfig("all", [">"], journal=options())],
    )


def wiped(segment: Path) -> None:
    """All its records are zeros."""
    data = segment.read_bytes()
    segment.write_bytes(data[:4096] + bytes(len(data) - 4096))


def shown(directory: Path) -> str:
    """How many messages there are and how many transactions wait, or the error."""
    try:
        with anabranch.open(two(directory)) as router:
            return f"{router.queue('a').depth()} {len(router.recover())}"
    except anabranch.AnabranchError as error:
        return f"named: {error}"


@pytest.mark.parametrize("lost", [Path.unlink, wiped], ids=["gone", "wiped"])
@pytest.mark.parametrize("state", ["closed", "killed"])
@pytest.mark.parametrize("log", ["stores/all", "decisions"])
def test_a_lost_newest_segment_is_never_silence(
    tmp_path: Path, log: str, state: str, lost: Callable[[Path], None]
) -> None:
    """Not even together with the index (rule J7)."""
    directory = tmp_path / "data"
    pid = os.fork()
    if pid == 0:
        try:
            worked_and_marked(directory, kill=state == "killed")
        finally:
            os._exit(0)
    assert reaped(pid) == (0 if state == "closed" else -signal.SIGKILL)
    shutil.copytree(directory, tmp_path / "whole")
    assert in_child(lambda: shown(tmp_path / "whole")) == "75 3"
    shutil.copytree(directory, tmp_path / "no index")
    for damaged_copy in (directory, tmp_path / "no index"):
        lost(max((damaged_copy / log / "journal").glob("*.seg")))
    for index in (tmp_path / "no index").rglob("index.mdb"):
        index.unlink()
    for damaged_copy in (directory, tmp_path / "no index"):
        found = in_child(lambda copy=damaged_copy: shown(copy))  # type: ignore[misc]
        assert found.startswith("named:"), found


@pytest.mark.weight(4)
@pytest.mark.parametrize("state", STATES)
def test_damage_in_a_directory_of_all_kinds_of_stores(tmp_path: Path, state: str, share: Share) -> None:
    tally = campaign(tmp_path, print, share, 91, positions=share.count(8, 24), states=[state])
    share.counts.append(f"{tally.done} of {tally.trials} trials, {len(tally.bad)} wrong")
    assert tally.bad == []
    assert len(tally.table) > 5, "files of most kinds were damaged"
