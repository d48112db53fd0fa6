"""A store gets another kind under its name: refused by name, moved by the command that the refusal names, and nothing
ignored (invariants 3 and 6)."""

from __future__ import annotations

import itertools
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import anabranch
from anabranch.adapters.core.migration import copying
from anabranch.policies.errors import PlacementError, StoreLockedError
from anabranch.router.cli.app import app
from anabranch.router.migration.plan import plan_of
from anabranch.router.migration.repartition import Repartitioning
from anabranch.router.offline.repartition import repartition
from anabranch.router.placement.on_disk.repartition_progress import NAME, ProgressFile
from anabranch.router.placement.record import DestinationsTable, StoreRow

from ..shares import Share
from ..sql.disk import TableSets, table_sets
from ..thirdparty.disk import SITE
from .test_repartition import Snapshots, facts, fill

assert SITE.is_dir()  # the third party is installed
OPTIONS: dict[str, dict[str, Any]] = {
    "journal": {"journal": {"segment_size": "64KiB", "sync": "never"}},
    "sqlite": {"sql": {"schema_prefix": "mq_"}},
    "postgresql": {"sql": {}},  # and its url
    "memory": {"memory": {}},
    "onefile": {"onefile": {"max_bytes": 10_000_000}},
}
DURABLE = [kind for kind in OPTIONS if kind != "memory"]
EACH = "each-"
"""Before a kind: of a store for each destination."""
SHAPES = [*OPTIONS, *(f"{EACH}{kind}" for kind in OPTIONS if kind != "postgresql")]


def key_of(shape: str) -> str:
    return next(iter(OPTIONS[shape.removeprefix(EACH)]))


CHANGES = [
    (one, other)
    for one, other in itertools.permutations(SHAPES, 2)
    if (key_of(one), one.startswith(EACH)) != (key_of(other), other.startswith(EACH))
]


LASTING = [shape for shape in SHAPES if "memory" not in shape]
REFUSED = [
    pytest.param(one, other, marks=[] if near else [pytest.mark.campaign, pytest.mark.weight(0)])
    for (first, one), (second, other) in itertools.permutations(enumerate(LASTING), 2)
    if (one, other) in CHANGES
    for near in [(second - first) % len(LASTING) in (1, 4)]
]
"""`make test` has some changes of each shape and some to each, also to the same kind for each destination, and back."""

sets = pytest.fixture(scope="module")(table_sets)


@pytest.fixture
def made(sets: TableSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Writes stores.yaml, one store `a`, of a shape, for everything; returns its path. `directory` may be a copy."""
    taken: dict[str, str] = {}

    def make(shape: str, directory: Path = tmp_path / "data") -> Path:
        options = {key: dict(value) for key, value in OPTIONS[shape.removeprefix(EACH)].items()}
        if shape == "postgresql":
            if shape not in taken:
                taken[shape] = sets.take()
            monkeypatch.setenv("CHANGED_KINDS_URL", sets.url)
            options["sql"] = {"url_env": "CHANGED_KINDS_URL", "schema_prefix": taken[shape], "pool_min": 0}
        store = {"name": "a", "match": [">"], "per_destination": shape.startswith(EACH), **options}
        file = tmp_path / "stores.yaml"
        file.write_text(json.dumps({"directory": str(directory), "stores": [store]}))
        return file

    yield make
    sets.give_back(list(taken.values()))


def cli(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def kinds(directory: Path) -> set[str]:
    with anabranch.open(directory) as router:
        return {store.kind for store in router.stats().stores.values()}


@pytest.mark.parametrize(("before", "after"), REFUSED, ids=str)
def test_it_is_refused_and_the_command_that_is_named_moves_it(
    made: Callable[..., Path], tmp_path: Path, before: str, after: str
) -> None:
    fill(anabranch.policies.config.load(made(before)))
    expected = facts(anabranch.policies.config.load(made(before)))
    was, data = key_of(before), tmp_path / "data"
    file = made(after)
    with pytest.raises(PlacementError) as caught:
        anabranch.open(file)
    text = str(caught.value)
    assert "nothing was changed" in text and "'a" in text
    if key_of(before) != key_of(after) and not after.startswith(EACH):
        assert f"is `{was}:` and holds" in text and f"the file says `{key_of(after)}:`" in text
    if before == was and was != key_of(after) and not after.startswith(EACH):
        assert "holds 60 messages, 3 durable subscriptions" in text
    command = text.partition("`")[2].partition("`")[0]
    assert command == f"anabranch repartition --config {file} {data}"
    if key_of(before) != key_of(after):
        checked = cli("check", "-c", str(file))
        assert checked.exit_code == 2 and command in checked.stderr
    made(before)
    assert facts(anabranch.policies.config.load(file)) == expected  # all is as it was
    made(after)
    moves = plan_of(anabranch.policies.config.load(file))
    result = cli(*shlex.split(command)[1:])
    assert result.exit_code == 0, result.output
    assert len(moves) == 6 and "6 destinations, 60 messages" in result.stdout
    assert facts(anabranch.policies.config.load(file)) == expected
    assert kinds(data) == {key_of(after)}
    assert [path.name for path in (data / "stores").iterdir()] == ["a"]
    assert not (data / NAME).exists()


@pytest.mark.parametrize(("before", "after"), [one for one in CHANGES if one[1].endswith("memory")], ids=str)
def test_what_holds_something_becomes_no_memory_store(
    made: Callable[..., Path], tmp_path: Path, before: str, after: str
) -> None:
    if before.endswith("memory"):
        return  # below
    with anabranch.open(made(before)) as router:
        router.queue("q").send(b"1")
    file = made(after)
    with pytest.raises(PlacementError, match=r"which keeps nothing: empty it first|would hide messages of 1 dest"):
        anabranch.open(file)
    with pytest.raises(PlacementError, match="a memory store, which keeps nothing when it is closed"):
        repartition(anabranch.policies.config.load(file))
    with anabranch.open(made(before)) as router:
        message = router.queue("q").receive()
        assert message is not None
        message.ack()
    repartition(anabranch.policies.config.load(made(after)))
    with anabranch.open(file) as router:
        router.queue("q").send(b"2")
        assert router.queue("q").depth() == 1
        assert {store.kind for store in router.stats().stores.values()} == {"memory"}


@pytest.mark.parametrize(("before", "after"), [one for one in CHANGES if one[0].endswith("memory")], ids=str)
def test_a_store_that_keeps_nothing_changes_by_itself(
    made: Callable[..., Path], tmp_path: Path, before: str, after: str
) -> None:
    with anabranch.open(made(before)) as router:
        router.queue("q").send(b"gone with the router")
    file = made(after)
    for number in (1, 2):
        with anabranch.open(file) as router:
            router.queue("q").send(b"%d" % number)
            assert {store.kind for store in router.stats().stores.values()} == {key_of(after)}
            assert router.queue("q").depth() == (number if "memory" not in after else 1)


def test_a_transaction_that_waits_keeps_a_memory_store(made: Callable[..., Path]) -> None:
    """Its manager is to be heard."""
    xid = anabranch.Xid(1, "waits", "")
    with anabranch.open(made("memory")) as router:
        tx = router.transaction(xid)
        tx.send("q", b"1")
        tx.prepare()
    changed = made("journal")
    try:
        anabranch.open(changed).close()
    except PlacementError as error:
        assert "is `memory:` and holds" in str(error)
    with anabranch.open(made("memory")) as router:
        assert router.recover() == [xid]


def test_what_another_router_has_open_stays(made: Callable[..., Path], tmp_path: Path) -> None:
    """A memory store in a directory of its own, which another data directory names too."""
    store = anabranch.StoreConfig("a", [">"], directory=tmp_path / "shared", memory={})
    with anabranch.open(anabranch.Config(tmp_path / "one", [store])) as router:
        router.queue("q").send(b"1")
    shutil.copytree(tmp_path / "one", tmp_path / "two", ignore=shutil.ignore_patterns("*.lock"))
    with anabranch.open(anabranch.Config(tmp_path / "one", [store])) as router:
        router.queue("q").send(b"1")
        changed = anabranch.StoreConfig("a", [">"], directory=tmp_path / "shared", journal={})
        with pytest.raises(StoreLockedError):
            anabranch.open(anabranch.Config(tmp_path / "two", [changed]))
        assert router.queue("q").depth() == 1


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(["journal", "sqlite", "memory"], 2)), ids=str)
def test_without_its_record_a_store_is_of_the_kind_that_it_was(
    made: Callable[..., Path], tmp_path: Path, before: str, after: str
) -> None:
    """placement.records was lost, and the directory says the configuration that it was opened under."""
    with anabranch.open(made(before)) as router:
        router.queue("q").send(b"1")
    (tmp_path / "data" / "placement.records").unlink()
    file = made(after)
    if before == "memory":
        with anabranch.open(file) as router:
            router.queue("q").send(b"2")
            assert {store.kind for store in router.stats().stores.values()} == {key_of(after)}
        return
    says = rf"1 message in store 'a' \(`{key_of(before)}:`\), routed to .* \(`{key_of(after)}:`\)"
    with pytest.raises(PlacementError, match=says):
        anabranch.open(file)
    with anabranch.open(made(before)) as router:
        assert router.queue("q").depth() == 1


def test_an_empty_store_of_a_kind_that_keeps_things_is_refused_too(made: Callable[..., Path], tmp_path: Path) -> None:
    """It knows ids of messages; and the command moves nothing, and gives it its kind."""
    with anabranch.open(made("journal")) as router:
        router.queue("q").send(b"1", message_id="x")
        router.delete("q")
    file = made("sqlite")
    with pytest.raises(PlacementError, match="and holds no message; the file says `sql:`"):
        anabranch.open(file)
    done = repartition(anabranch.policies.config.load(file))
    assert (done.moves, done.removed) == ((), ("a (journal)",))
    assert kinds(tmp_path / "data") == set()


def test_check_disturbs_nobody_who_has_the_directory_open(made: Callable[..., Path], tmp_path: Path) -> None:
    """It looks into the directory only where the configuration in force has another kind, and warns where it cannot."""
    file = made("journal")
    with anabranch.open(file) as router:
        router.queue("q").send(b"1")
        before = (tmp_path / "data" / "router.lock").read_bytes()
        assert cli("check", str(file)).stderr == ""
        made("sqlite")
        checked = cli("check", "-c", str(file))
        assert (checked.exit_code, checked.stderr.count("warning")) == (0, 1)
        assert "cannot be compared" in checked.stderr and "is open already" in checked.stderr
        assert (tmp_path / "data" / "router.lock").read_bytes() == before
    found = json.loads(cli("check", str(file), "--json").stdout)
    assert (found["valid"], len(found["problems"])) == (False, 1)


@pytest.mark.parametrize("store", ["name: every, match: ['>'], journal: {}", "name: a, match: [b], journal: {}"])
def test_check_finds_what_an_open_refuses_since_it_would_hide_messages(
    made: Callable[..., Path], tmp_path: Path, store: str
) -> None:
    """A store is renamed, or does not take what it holds any more."""
    file = made("journal")
    with anabranch.open(file) as router:
        router.queue("q").send(b"1")
        router.queue("q2").send(b"1")
        router.queue("q2").purge()
    file.write_text(f"directory: {tmp_path / 'data'}\nstores:\n- {{{store}}}\n")
    checked = cli("check", str(file))
    assert (checked.exit_code, checked.stdout) == (2, "")
    assert "the configuration would hide messages of 1 destination; nothing was changed" in checked.stderr
    with pytest.raises(PlacementError) as refused:
        anabranch.open(file)
    assert str(refused.value) in checked.stderr
    with anabranch.open(made("journal")) as router:
        router.queue("q").purge()
    file.write_text(f"directory: {tmp_path / 'data'}\nstores:\n- {{{store}}}\n")
    assert cli("check", str(file)).exit_code == 0
    anabranch.open(file).close()


def test_a_store_that_cannot_be_opened_is_refused_all_the_same(made: Callable[..., Path], tmp_path: Path) -> None:
    with anabranch.open(made("sqlite")) as router:
        router.queue("q").send(b"1")
    (tmp_path / "data" / "stores" / "a" / "store.db").write_bytes(b"no database")
    with pytest.raises(
        PlacementError, match=r"store 'a' .* is `sql:` and holds what cannot be told \(.*file says `jou"
    ):
        anabranch.open(made("journal"))


def test_a_router_in_use_refuses_it(made: Callable[..., Path], tmp_path: Path) -> None:
    before = made("journal")
    with anabranch.open(before) as router:
        router.queue("q").send(b"1")
        with pytest.raises(PlacementError, match=r"close the router, and run `anabranch repartition --config .*yaml"):
            router.repartition(made("sqlite"))
        assert router.queue("q").depth() == 1
    assert kinds(tmp_path / "data") == {"journal"}


def test_a_directory_of_its_own(tmp_path: Path) -> None:
    """It is put aside beside itself."""
    before = anabranch.StoreConfig("a", [">"], directory=tmp_path / "far", journal=OPTIONS["journal"]["journal"])
    after = anabranch.StoreConfig("a", [">"], directory=tmp_path / "far", sql={})
    fill(anabranch.Config(tmp_path / "data", [before]))
    expected = facts(anabranch.Config(tmp_path / "data", [before]))
    repartition(anabranch.Config(tmp_path / "data", [after]))
    assert facts(anabranch.Config(tmp_path / "data", [after])) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "far"]


def test_there_and_back_half_way(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """--restart with the configuration until now; --old says how to open what the other one has made."""
    before = anabranch.policies.config.load(made("journal"))
    fill(before)
    expected = facts(before)
    after = anabranch.policies.config.load(made("sqlite"))
    real = Repartitioning._move

    def once(self: Repartitioning, *given: Any) -> None:
        real(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Repartitioning, "_move", once)
        repartition(after)
    with pytest.raises(PlacementError, match="is being repartitioned"):
        anabranch.open(after)
    with pytest.raises(PlacementError, match="with --restart"):
        repartition(before)
    repartition(before, after, restart=True)
    assert facts(before) == expected
    assert [path.name for path in (before.directory / "stores").iterdir()] == ["a"]


PAIRS = [one for one in itertools.permutations(["journal", "sqlite", "onefile", "each-journal", "each-sqlite"], 2)
         if one in CHANGES]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=str)
def test_ended_at_any_step(
    made: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, share: Share
) -> None:
    """No router opens what is half way without all of it, and the next run moves the rest."""
    old = anabranch.policies.config.load(made(before))
    fill(old)
    expected = facts(old)
    monkeypatch.setattr(copying, "PAGE", 7)
    nth = PAIRS.index((before, after))  # together the changes are ended at all steps of the putting aside

    def wanted(step: int) -> bool:
        every = share.every(19 if step < 30 else 97)
        return step % every == nth % every

    with monkeypatch.context() as patched:
        snapshots = Snapshots(old.directory, tmp_path / "copies", patched, wanted)
        for name in ("rename", "rmdir"):
            snapshots.watch(Path, name)
        repartition(anabranch.policies.config.load(made(after)))
    assert snapshots.steps > 60
    for path in share.of(snapshots.paths):
        for early in (before, after):
            try:
                assert facts(anabranch.policies.config.load(made(early, path))) == expected
            except PlacementError:
                pass
        settings = anabranch.policies.config.load(made(after, path))
        repartition(settings)
        assert facts(settings) == expected
        assert [entry.name for entry in (path / "stores").iterdir()] == ["a"]


def test_a_power_failure_between_row_and_name(made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says where the directory is about to be, and that is all that reached the disk."""
    before = anabranch.policies.config.load(made("each-journal"))
    fill(before)
    expected = facts(before)
    real = DestinationsTable.record_store

    def record(self: DestinationsTable, row: StoreRow, destinations: Any = ()) -> None:
        real(self, row, destinations)
        if "~" in row.path:
            raise KeyboardInterrupt

    after = anabranch.policies.config.load(made("sqlite"))
    for _ in range(3):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(DestinationsTable, "record_store", record)
            repartition(after)
    repartition(after)
    assert facts(after) == expected
    assert ProgressFile(after.directory).open() is None
