"""`Router.health` and `anabranch health`: which store cannot be used, and what it waits for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch import Config, JournalOptions, Router, SqlOptions, StoreConfig, Xid
from anabranch.router.cli.app import app
from anabranch.router.cli.ui.figures import Figures
from anabranch.router.placement import registry
from anabranch.router.router import inspection_of

from .test_slow_disk import Disk
from .test_slow_disk import disk as disk


def config(directory: Path) -> Config:
    return Config(
        directory,
        [
            StoreConfig("bad0", ["a.>"]),
            StoreConfig("b", ["b.>"], sql=SqlOptions()),
            StoreConfig("m", ["m.>"], memory={}),
        ],
    )


def states(router: Router) -> dict[str, str]:
    return {one.name: one.state for one in router.health().stores}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["health", *arguments])


def test_values_of_maps_do_not_wait(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        for name in ("a.states", "b.states", "m.states"):
            router.map(name).put("key", b"1")
        router.queue("a.q").send(b"1")
        topic = router.topic("b.prices")
        topic.subscribe("audit")
        topic.send(b"1")
        assert [one.oldest_ready_seconds is None for one in router.health().stores] == [False, False, True]


def test_dead_letters_do_not_wait(tmp_path: Path) -> None:
    stores = [StoreConfig("all", [">"], journal=JournalOptions(dead_letter="dead.*"))]
    for opening in range(2):
        with anabranch.open(Config(tmp_path / "data", stores)) as router:
            if not opening:
                router.queue("a").send_many([b"1", b"2"])
                for _ in range(2):
                    message = router.queue("a").receive()
                    assert message is not None
                    message.reject()
            (found,) = router.health().stores
            assert (found.messages, found.dead, found.oldest_ready_seconds) == (2, 2, None)
            (row,) = inspection_of(router).stores()
            assert (row["dead"], row["oldest_ready_seconds"], row["waiting_longest"]) == (2, None, [])


def test_all_is_well_until_a_store_is_not(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        for name in ("a.x", "b.x", "m.x"):
            router.queue(name).send(b"x")
        found = router.health()
        assert found.ok and (found.in_doubt, found.decision_log) == (0, None)
        assert {one.name: one.messages for one in found.stores} == {"bad0": 1, "b": 1, "m": 1}
        assert all(one.oldest_ready_seconds is not None and one.free_bytes for one in found.stores)
        held = router.transaction(xid=Xid(1, "a", ""))
        held.send("a.x", b"y")
        held.prepare()
        found = router.health()
        assert found.ok and (found.in_doubt, found.for_operator) == (1, 0)  # its manager will say
        shown = run(str(tmp_path / "data"), "--json")  # by this process, which has it open
        assert shown.exit_code == 0 and json.loads(shown.stdout)["in_doubt"] == 1
    (tmp_path / "data/stores/bad0/store.id").write_text("0" * 32 + "\n")
    with pytest.raises(anabranch.PlacementError):
        anabranch.open(config(tmp_path / "data"))
    assert run(str(tmp_path / "data")).exit_code == 2


def test_a_store_that_does_not_open_is_told_beside_the_others(tmp_path: Path) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        router.queue("a.x").send(b"x" * 1000)
        router.queue("b.x").send(b"x")
    (segment,) = (tmp_path / "data/stores/bad0/journal").glob("*.seg")
    segment.write_bytes(bytes(4096) + segment.read_bytes()[4096:])
    shown = run(str(tmp_path / "data"))
    assert shown.exit_code == 1
    assert "store bad0: " in shown.stderr and str(segment) in shown.stderr
    assert "unavailable" in shown.stdout and "b " in shown.stdout


def test_a_store_that_does_not_open_hides_no_figures_of_others(tmp_path: Path) -> None:
    """Invariant 7, of those who look on."""
    directory = str(tmp_path / "data")
    stores = [
        StoreConfig("bad0", ["a.>"], journal=JournalOptions(dead_letter="a.dead")),
        StoreConfig("b", ["b.>"], journal=JournalOptions(dead_letter="b.dead")),
    ]
    with anabranch.open(Config(tmp_path / "data", stores)) as router:
        for name in ("a.x", "a.dead", "b.x", "b.dead"):
            router.queue(name).send(b"x" * 1000)
    (segment,) = (tmp_path / "data/stores/bad0/journal").glob("*.seg")
    segment.write_bytes(bytes(4096) + segment.read_bytes()[4096:])
    with anabranch.open(Config(tmp_path / "data", stores)) as router:
        for _ in range(2):
            found = router.stats()
            assert list(found.stores) == ["b", "bad0"] and found.unresponsive == ()
            bad, good = found.stores["bad0"], found.stores["b"]
            assert str(segment) in str(bad.failed) and (bad.kind, bad.messages) == ("journal", 0)
            assert set(map(str, bad.destinations)) == {"queue://a.x", "queue://a.dead"}
            assert (good.failed, good.messages) == (None, 2)
        look = Figures(router, bodies=False).look()
        assert [row[0] for row in look["stores"]["rows"]] == ["b", "bad0"] and str(segment) in look["notes"][0]
        assert [row[0] for row in look["destinations"]["rows"]] == ["b.x"]
    with pytest.raises(anabranch.ClosedError):
        router.stats()
    for command in ("queues", "stats"):
        shown, plain = (CliRunner().invoke(app, [command, directory, *more]) for more in ([], ["--json"]))
        assert (shown.exit_code, plain.exit_code) == (1, 1)
        assert "\nb" in shown.stdout and "a.x" not in shown.stdout
        assert shown.stderr.startswith("Warning: store bad0 cannot be used") and str(segment) in shown.stderr
        assert str(segment) in plain.stdout and "b.x" in plain.stdout
    top = CliRunner().invoke(app, ["top", directory, "--once", "--interval", "100ms"])
    assert top.exit_code == 0 and "\nb " in top.stdout and "store bad0 cannot be used: " in top.stdout


def test_a_store_whose_disk_hangs_is_stalled(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    with anabranch.open(config(tmp_path / "data")) as router:
        for name in ("a.x", "b.x"):
            router.queue(name).send(b"x")
        monkeypatch.setattr(router._registry._health, "_seconds", 0.5)
        disk.hang()
        try:
            sent = router.queue("a.x").send_nowait(b"y")
            found = {one.name: one for one in router.health().stores}
            assert found["bad0"].state == "stalled"
            reason = str(found["bad0"].reason)
            assert str(tmp_path / "data/stores/bad0") in reason and "waits for its disk" in reason
            assert found["b"].messages == 1
            assert states(router)["bad0"] == "stalled"  # asked once more
        finally:
            disk.works.set()
        sent.result()
        monkeypatch.setattr(router._registry._health, "_seconds", registry.HEALTH_SECONDS)
        assert router.health().ok
