"""A symbolic link in a data directory is refused, wherever it lies, and nothing is read, written or removed where it
leads. Directories that the configuration names may be links."""

from __future__ import annotations

import shutil
from io import BytesIO
from pathlib import Path

import pytest
from pydantic import SecretStr

import anabranch
from anabranch import Config, JournalOptions, MemoryOptions, SqlOptions, StoreConfig, UsageOptions

SAID = "is a symbolic link, and nothing in a data directory may be one"
SEGMENT = 64 * 1024
QUEUES = ("log.q", "sql.q", "mem.q", "each.q")


def config(directory: Path) -> Config:
    journal = JournalOptions(segment_size=SEGMENT, large_message_size=1024, pool_files=1)
    stores = [
        StoreConfig("log", ["log.>"], journal=journal),
        StoreConfig("sql", ["sql.>"], sql=SqlOptions()),
        StoreConfig("mem", ["mem.>"], memory=MemoryOptions(max_bytes=SEGMENT, roll_over_size=SEGMENT)),
        StoreConfig("each", ["each.>"], per_destination=True, journal=JournalOptions(segment_size=SEGMENT)),
    ]
    return Config(directory, stores, usage=UsageOptions(max_bytes=1 << 20))


def use(router: anabranch.Router) -> list[anabranch.AnabranchError]:
    """Use every store; what they refuse."""
    refused: list[anabranch.AnabranchError] = []
    for name in QUEUES:
        try:
            queue = router.queue(name)
            for size in (100, 30_000, 30_000, 30_000):
                queue.send(bytes(size))
            queue.send(BytesIO(bytes(5000)))
            queue.send(bytes(100_000), persistent=False)
        except anabranch.AnabranchError as error:
            refused.append(error)
    try:
        with router.transaction() as transaction:
            transaction.send("log.q", b"both")
            transaction.send("each.q", b"both")
    except anabranch.AnabranchError as error:
        refused.append(error)
    return refused


def contents(path: Path) -> dict[str, bytes]:
    """Of a file, or of all that is in a directory."""
    paths = [path] if path.is_file() else sorted(path.rglob("*"))
    return {str(one.relative_to(path)): one.read_bytes() if one.is_file() else b"" for one in paths}


def opened_and_used(directory: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What is said of it, by errors and by the log."""
    caplog.clear()
    try:
        with anabranch.open(config(directory)) as router:
            said = [str(error) for error in use(router)]
    except anabranch.AnabranchError as error:
        said = [str(error)]
    return "\n".join([*said, caplog.text])


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with something of everything, closed."""
    with anabranch.open(config(tmp_path / "data")) as router:
        assert use(router) == []
    return tmp_path / "data"


def test_whatever_there_is_may_not_be_a_link(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each path in turn, files and directories: `usage` alone keeps nobody from the messages."""
    found = [path.relative_to(data) for path in sorted(data.rglob("*"))]
    names = {path.name for path in found}
    assert names >= {"index.mdb", "index.sums", "watermark", "journal", "large", "store.db", "decisions", "usage"}
    for number, path in enumerate(found):
        copy, elsewhere = tmp_path / "copy", tmp_path / f"elsewhere{number}"
        shutil.copytree(data, copy)
        (copy / path).rename(elsewhere)
        (copy / path).symlink_to(elsewhere)
        before = contents(elsewhere)
        said = opened_and_used(copy, caplog)
        assert str(copy / path) in said, path
        assert "symbolic link" in said or path.name == "router.lock", path
        assert contents(elsewhere) == before, path
        assert (copy / path).is_symlink(), path
        shutil.rmtree(copy)


@pytest.mark.parametrize("leads", ["to a file", "to a directory", "nowhere"])
@pytest.mark.parametrize(
    "name",
    [
        "journal/000000000009.seg", "journal/000000000009.tmp", "journal/9.spare", "journal/pool-9.free",
        "index.mdb.tmp", "index.mdb.sums", "index.sums.tmp", "swap", "damaged-2026", "store.db-wal",
    ],
)  # fmt: skip
def test_a_link_at_a_name_that_comes_later(
    data: Path, tmp_path: Path, name: str, leads: str, caplog: pytest.LogCaptureFixture
) -> None:
    victim = tmp_path / "victim"
    if leads == "to a file":
        victim.write_bytes(b"precious")
    elif leads == "to a directory":
        victim.mkdir()
    (data / "stores/log" / name).symlink_to(victim)
    said = opened_and_used(data, caplog)
    assert f"{data / 'stores/log' / name} {SAID}" in said
    assert "store 'log' cannot be opened" in said
    assert not (leads == "nowhere" and victim.exists())
    assert leads != "to a file" or victim.read_bytes() == b"precious"


def test_a_link_that_is_put_there_while_the_store_is_open(data: Path, tmp_path: Path) -> None:
    """The store stops, or goes on without it; it is not followed, and nothing that was sent is lost."""
    journal, victim = data / "stores/log/journal", tmp_path / "victim"
    victim.write_bytes(b"precious")
    with anabranch.open(config(data)) as router:
        queue = router.queue("log.q")
        held = queue.depth()
        last = max(int(path.stem) for path in journal.glob("*.seg"))
        names = [f"{number:012d}{end}" for number in range(last + 1, last + 9) for end in (".seg", ".tmp")]
        names += [f"pool-{number}.tmp" for number in range(1, 9)] + [f"{number}.spare" for number in range(3, 9)]
        links = [journal / name for name in names if not (journal / name).exists()]
        links += [data / "stores/log/index.mdb.tmp", data / "stores/log/index.mdb.sums"]
        for link in links:
            link.symlink_to(victim)
        (data / "stores/log/large").rename(tmp_path / "large")
        (data / "stores/log/large").symlink_to(tmp_path / "large")
        before = contents(tmp_path / "large")
        try:
            while True:
                queue.send(bytes(30_000))
                held += 1
                if held == 40:
                    break
        except anabranch.StoreFailedError as error:
            assert "symbolic link" in str(error)
        with pytest.raises(anabranch.AnabranchError):
            queue.send(BytesIO(bytes(5000)))
    assert victim.read_bytes() == b"precious"
    assert contents(tmp_path / "large") == before
    for link in links:
        if link.is_symlink():
            link.unlink()
    (data / "stores/log/large").unlink()
    (tmp_path / "large").rename(data / "stores/log/large")
    with anabranch.open(config(data)) as router:
        assert router.queue("log.q").depth() == held


def test_directories_that_the_configuration_names_may_be_links(tmp_path: Path) -> None:
    """Those of a store and of the usage log from when they are there: they are made by a rename."""
    for name in ("data", "index", "archive", "bindings"):
        (tmp_path / "real" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "real" / name)
    (tmp_path / "real/store.db").touch()
    (tmp_path / "link.db").symlink_to(tmp_path / "real/store.db")
    stores = [
        StoreConfig("a", ["a.>"], journal=JournalOptions(archive_directory=tmp_path / "archive", segment_size=SEGMENT),
                    directory=tmp_path / "store", index_directory=tmp_path / "index"),
        StoreConfig("b", ["b.>"], sql=SqlOptions(url=SecretStr(f"sqlite:///{tmp_path}/link.db"))),
    ]  # fmt: skip
    setup = Config(
        tmp_path / "data", stores, bindings_directory=tmp_path / "bindings",
        usage=UsageOptions(directory=tmp_path / "usage"),
    )  # fmt: skip
    for _ in range(2):
        with anabranch.open(setup) as router:
            for name in ("a.q", "b.q"):
                router.queue(name).send_many([bytes(30_000)] * 5)
                while (message := router.queue(name).receive(timeout=0)) is not None:
                    message.ack()
            router.compact()
            with router.transaction() as transaction:
                transaction.send("a.q", b"1")
                transaction.send("a.other", b"2")
            usage = router.usage_stats()
            assert usage is not None
            assert usage.failed is None
        for name in ("store", "usage"):
            if not (tmp_path / name).is_symlink():
                (tmp_path / name).rename(tmp_path / "real" / name)
                (tmp_path / name).symlink_to(tmp_path / "real" / name)
    assert list((tmp_path / "real/archive").rglob("*.seg"))


def test_a_store_of_its_own_that_is_a_link_is_told_of(data: Path, tmp_path: Path) -> None:
    place = data / "stores/each/queue.each.q"
    place.rename(tmp_path / "there")
    place.symlink_to(tmp_path / "there")
    with anabranch.open(config(data)) as router:
        with pytest.raises(anabranch.ConfigError, match=SAID) as raised:
            router.queue("each.q").send(b"1")
        assert "name the target in the configuration" in str(raised.value)
        router.queue("log.q").send(b"others go on")
