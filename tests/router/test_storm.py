"""8 threads commit over three stores while stores and the decision log fail by turns and are reopened: each transaction
is in all of its stores or in none, and what its caller was told stands (invariants 2, 3, 4, 7)."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import anabranch
from anabranch.policies.errors import AnabranchError, TransactionInDoubt
from anabranch.router.transactions import decision_cleanup, resolver

from ..contract.disk import PATIENCE, eventually
from ..shares import Share
from .disk import Faults, bodies, config, drain

STORES = "abc"


class Outcomes:
    """What the callers were told, by the body that each transaction sends everywhere."""

    def __init__(self) -> None:
        self.committed: set[bytes] = set()
        self.rolled_back: set[bytes] = set()
        self.unknown: set[bytes] = set()
        self.over: dict[bytes, str] = {}
        self.acked: Counter[str] = Counter()


def work(router: anabranch.Router, worker: int, said: Outcomes, stop: threading.Event) -> None:
    """Transactions that send to two or three stores, and now and then ack what is in one of them; each third has an
    xid, and is prepared first."""
    choose = random.Random(worker)
    number = 0
    while not stop.is_set():
        number += 1
        body = f"{worker}.{number}".encode()
        stores = "".join(choose.sample(STORES, choose.choice([2, 3])))
        xid = anabranch.Xid(worker, f"{number}") if number % 3 == 0 else None
        said.over[body] = stores
        acked = 0
        try:
            tx = router.transaction(xid)
            for store in stores:
                tx.send(f"{store}.q", body)
            message = router.queue(f"{stores[0]}.in").receive() if choose.random() < 0.5 else None
            if message is not None:
                tx.ack(message)
                acked = 1
            if xid is None:
                tx.commit()
                said.committed.add(body)
            else:
                tx.prepare()
                commit = choose.random() < 0.7
                (router.commit if commit else router.rollback)(xid)
                (said.committed if commit else said.rolled_back).add(body)
                acked *= commit
            said.acked[stores[0]] += acked
        except AnabranchError as error:
            # A prepared one whose outcome could not be said waits for it.
            held = xid is not None and tx.state == "prepared"
            (said.unknown if isinstance(error, TransactionInDoubt) or held else said.rolled_back).add(body)
            if tx.state == "open":
                tx.rollback()


def trouble(router: anabranch.Router, faults: Faults, said: Outcomes, times: Iterable[int]) -> int:
    """So often something fails, while transactions are committed, and is mended and reopened; how often."""
    choose, done = random.Random(7), 0
    for _ in times:
        committed = len(said.committed)
        eventually(lambda committed=committed: len(said.committed) > committed)  # type: ignore[misc]
        done += 1
        part = choose.choice([*STORES, "decisions"])
        faults.fail(
            choose.choice(["pwrite", "fdatasync"]), "/decisions/" if part == "decisions" else f"/stores/{part}/"
        )

        def failed(part: str = part) -> bool:
            if part == "decisions":
                return router._coordinator.log.unusable is not None
            return any(store.name == part and store.stats().failed for store in router._registry.open_stores())

        eventually(failed)
        faults.mend()
        if part == "decisions":
            router.reopen_decisions()
        else:
            router.reopen(part)
    return done


@pytest.mark.parametrize("sync", [anabranch.Sync.ALWAYS, anabranch.Sync.NEVER])
def test_stores_and_log_fail_by_turns(
    tmp_path: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, sync: anabranch.Sync, share: Share
) -> None:
    monkeypatch.setattr(resolver, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(decision_cleanup, "FORGET_SECONDS", 0.02)
    said, stop = Outcomes(), threading.Event()
    options = anabranch.JournalOptions(segment_size=64 * 1024, sync=sync)
    configuration = config(tmp_path / "data", options, sync=anabranch.Sync.ALWAYS)
    before = 2000
    with anabranch.open(configuration) as router:
        for store in STORES:
            router.queue(f"{store}.in").send_many([f"{n}".encode() for n in range(before)])
        with ThreadPoolExecutor(9) as pool:
            workers = [pool.submit(work, router, worker, said, stop) for worker in range(8)]
            try:
                times = share.of(range(share.count(25, 1000)))
                done = pool.submit(trouble, router, faults, said, times).result()
            finally:
                stop.set()
            for worker in workers:
                worker.result(PATIENCE)
        for xid in router.recover():
            router.rollback(xid)
        eventually(lambda: not router.in_doubt())
        check(router, said, before)
    with anabranch.open(configuration) as router:
        assert (router.recover(), router.in_doubt()) == ([], [])
        check(router, said, before)
        share.counts.append(f"{done} failures, {len(said.over)} transactions")
        for store in STORES:
            rest = [int(body) for body in drain(router, f"{store}.in")]
            assert rest == sorted(rest), "what was rolled back is at its old place"


def check(router: anabranch.Router, said: Outcomes, before: int) -> None:
    found = {store: bodies(router, f"{store}.q")[0] for store in STORES}
    there = {store: set(some) for store, some in found.items()}
    assert {store: len(some) for store, some in found.items()} == {store: len(some) for store, some in there.items()}
    for body, stores in said.over.items():
        places = {body in there[store] for store in stores}
        assert len(places) == 1, f"{body!r} over {stores} is in {[s for s in stores if body in there[s]]}"
        assert (body in said.committed) <= places.pop(), f"{body!r} was committed"
        assert not (body in said.rolled_back and body in there[stores[0]]), f"{body!r} was rolled back"
    assert len(said.committed) > 20
    for store in STORES:
        acked = before - len(bodies(router, f"{store}.in")[0])
        assert said.acked[store] <= acked <= said.acked[store] + len(said.unknown)
