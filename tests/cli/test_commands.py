"""The commands, run in this process."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from unittest import mock

import pytest
from click.testing import CliRunner

import anabranch
from anabranch.policies.config import json_schema, load, loads
from anabranch.router.cli.app import COMMANDS, app
from anabranch.router.cli.configuration import TEMPLATE
from anabranch.router.placement.registry import StoreRegistry

from .commands import run

KINDS = Path(__file__).parents[1] / "kahadb" / "data" / "kinds-kahadb.tar.xz"


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_an_example_and_json(name: str) -> None:
    result = run(name, "--help", code=0)
    assert "Example:\n    anabranch " + name in result.stdout
    assert ("--json" in result.stdout) == (name != "serve")  # which says nothing but its log


@pytest.mark.parametrize("group", [(), ("schema",)])
def test_the_list_of_commands_fits_a_terminal(group: tuple[str, ...]) -> None:
    """No sentence is cut short at 80 columns."""
    page = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": "80"}, terminal_width=80).stdout
    commands = page.split("Commands:\n")[1].splitlines()
    assert len(commands) >= 5
    assert [line for line in commands if not line.endswith(".") or line.endswith("...")] == []


def test_init_writes_a_file_that_check_and_route_like() -> None:
    assert run("init").exit_code == 0
    assert Path("stores.yaml").read_text() == TEMPLATE
    checked = run("check")
    assert (checked.exit_code, checked.stderr) == (0, "")
    assert "orders (journal, sync: always): queue://orders.>" in checked.stdout
    assert "rest (journal, sync: periodic, 1s): >" in checked.stdout
    assert [p.name for p in Path().iterdir()] == ["stores.yaml"]  # nothing else was created
    assert run("route", "orders.x").stdout.startswith(
        "queue://orders.x goes to store orders (journal, sync: always) by pattern queue://orders.>\n"
    )


def test_the_templates_comments_are_good_when_uncommented() -> None:
    text = TEMPLATE
    for line in ("# defaults:\n#   journal", "# per_destination", "# create_directory", "# file_mode"):
        text = text.replace(line, line.replace("# ", "").replace("#   ", "   "))
    config = loads(text, Path("/"))
    assert config.stores[2].per_destination
    assert (config.create_directory, config.file_mode) == (False, 0o640)


def test_init_overwrites_nothing() -> None:
    Path("stores.yaml").write_text("mine")
    result = run("init", code=2)
    assert result.stderr == "stores.yaml: exists already and was left as it is; give another name\n"
    assert Path("stores.yaml").read_text() == "mine"
    assert json.loads(run("init", "other.yaml", "--json").stdout) == {"written": "other.yaml"}
    assert run("init", ".").stderr == ".: is a directory; give the name of a file in it, as stores.yaml\n"
    assert run("init", "stores.yaml/inside.yaml").stderr.startswith("stores.yaml: exists already")


def test_stats_tell_of_destinations_and_subscriptions() -> None:
    Path("s.yaml").write_text("{directory: d, stores: [{name: a, match: ['>'], journal: {}}]}")
    with anabranch.open("s.yaml") as router:
        router.queue("q").send(b"1", deliver_in=3600)
        prices = router.topic("prices")
        prices.subscribe("audit", client_id="c")
        prices.send(b"2")
        assert router.stats().stores["a"].delayed == 1
    shown = run("stats", "-c", "s.yaml")
    heads, cells = (line.split() for line in shown.stdout.splitlines())
    assert (shown.exit_code, heads[3:6], cells[3:6]) == (0, ["messages", "delayed", "destinations"], ["2", "1", "2"])
    assert (heads[2], cells[2]) == ("sync", "always")
    store = json.loads(run("stats", "-c", "s.yaml", "--json").stdout)["stores"]["a"]
    assert store["sync"] == "always"
    assert store["destinations"] == {"queue://q": 1, "topic://prices": 1}
    assert store["subscriptions"] == [{"topic": "prices", "client": "c", "name": "audit", "messages": 1}]


def test_each_list_says_when_a_journal_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    journals = "{name: a, match: ['>'], journal: {sync: periodic}}, {name: each, match: ['e.>'], per_destination: true}"
    Path("s.yaml").write_text(f"{{directory: d, stores: [{journals}, {{name: m, match: ['m.>'], memory: {{}}}}]}}")
    with anabranch.open("s.yaml") as router:
        router.topic("t").subscribe("audit")
        for name in ("e.x", "m.x", "q"):
            router.queue(name).send(b"1")
    asked = mock.Mock(wraps=StoreRegistry.stats)
    monkeypatch.setattr(StoreRegistry, "stats", lambda self: asked(self))
    queues = json.loads(run("queues", "d", "--json").stdout)["queues"]
    assert asked.call_count == 1, "all stores are asked once"
    assert {one["queue"]: one["sync"] for one in queues} == {
        "queue://e.x": "always", "queue://q": "periodic, 1s", "topic://t": "periodic, 1s"
    }  # fmt: skip
    assert [line.split()[-1] for line in run("queues", "d").stdout.splitlines()] == ["sync", "always", "1s", "1s"]
    syncs = {"a": "periodic, 1s", "each:queue://e.x": "always", "m": ""}
    for command, *options in (["top", "--once", "-i", "0.1"], ["health"]):
        found = json.loads(run(command, "d", *options, "--json").stdout)["stores"]
        assert {one.get("store") or one["name"]: one["sync"] for one in found} == syncs
        shown = run(command, "d", *options).stdout
        assert re.search(r"^a +(journal|ok) +periodic, 1s  ", shown, re.MULTILINE)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("statements: {delete.message: 'delete from ${messages}'}", "statements: delete.message: the parameter"),
        ("table_names: {mesages: x}", "table_names: there is no table mesages"),
        ("url: 'app:s3cret@localhost/x'", "the url of an sql store is not one"),
        ("schema_prefix: 'mq.'", "SQLite has no schemas"),
        ("pool_max: 3", "not less than pool_min, which is 5; or -1 for no limit\n"),
    ],
)
def test_check_says_what_only_the_adapter_knows(options: str, says: str) -> None:
    Path("s.yaml").write_text(f"directory: d\nstores:\n- {{name: a, match: ['>'], sql: {{{options}}}}}\n")
    result = run("check", "s.yaml", code=2)
    assert result.stderr.startswith("s.yaml:") and "store 'a': " in result.stderr
    assert says in result.stderr and "s3cret" not in result.stderr
    assert [p.name for p in Path().iterdir()] == ["s.yaml"]


def test_check_names_the_variable_that_holds_what_is_no_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "hello")
    Path("s.yaml").write_text("directory: d\nstores:\n- {name: a, match: ['>'], sql: {url_env: SHOP_DATABASE}}\n")
    assert run("check", "s.yaml").stderr.startswith(
        "s.yaml:3: store 'a': the url of an sql store, of the environment's variable 'SHOP_DATABASE' (url_env), is not"
    )


def test_init_makes_the_directory() -> None:
    assert run("init", "config/deep/stores.yaml").exit_code == 0
    assert Path("config/deep/stores.yaml").read_text() == TEMPLATE


def test_check_says_every_error_with_file_and_line() -> None:
    Path("bad.yaml").write_text("directory: d\nstores:\n- {name: a, match: [a], jurnal: {}}\nx: 1\n")
    result = run("check", "bad.yaml", code=2)
    assert result.stderr == (
        "bad.yaml:3: store 'a': jurnal: neither a key of a store nor an installed kind of store; "
        "did you mean 'journal'?\n"
        "bad.yaml:4: x: unknown key; allowed: directory, stores, transactions, usage, bindings_directory, "
        "create_directory, file_mode, control, shared, defaults\n"
    )
    as_json = run("check", "--json", "bad.yaml")
    found = json.loads(as_json.stdout)
    assert (as_json.exit_code, found["valid"], [p["line"] for p in found["problems"]]) == (2, False, [3, 4])
    assert run("check", "missing.yaml").stderr == "missing.yaml: no such file; `anabranch init` writes one\n"


def test_check_as_json() -> None:
    run("init")
    stores = ["orders", "telemetry", "rest"]
    wanted = {"path": "stores.yaml", "valid": True, "problems": [], "warnings": [], "stores": stores}
    assert json.loads(run("check", "--json").stdout) == wanted


def test_check_warns_of_what_is_probably_not_meant() -> None:
    """Wildcards of other brokers, which are names here."""
    Path("s.yaml").write_text(
        "directory: d\ndefaults: {journal: {dead_letter: 'dlq.*'}}\nstores:\n- name: a\n"
        "  match: ['queue://orders.#', 'x#y', 'orders.[#]']\n- {name: b, match: ['#', '>'], sql: {}}\n"
    )
    result = run("check", "s.yaml")
    assert (result.exit_code, result.stdout.splitlines()[0][:17]) == (0, "s.yaml is valid. ")
    lines = result.stderr.splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["s.yaml:4", "warning"],
        ["s.yaml:5", "warning"],
        ["s.yaml:6", "warning"],
    ]
    assert "store 'a': journal.dead_letter: 'dlq.*' is the name of a queue" in lines[0]
    assert "store 'a': match[0]: pattern 'queue://orders.#': # is no wildcard here" in lines[1]
    assert "'orders.>'" in lines[1]
    assert "store 'b': match[0]: pattern '#'" in lines[2]
    found = json.loads(run("check", "s.yaml", "--json").stdout)
    assert (found["valid"], [warning["line"] for warning in found["warnings"]]) == (True, [4, 5, 6])


def test_check_warns_of_a_rest_that_is_no_segment() -> None:
    Path("s.yaml").write_text("directory: d\nstores:\n- {name: a, match: ['orders/>', 'x.a[b>]', 'a.[>]', '>']}\n")
    (line,) = run("check", "s.yaml").stderr.splitlines()
    assert "match[0]: pattern 'orders/>': > is a wildcard as a whole last segment alone" in line


def test_check_warns_of_braces_that_stand_for_nothing() -> None:
    Path("s.yaml").write_text(
        "directory: d\nstores:\n- {name: a, match: ['>'], journal: {dead_letter: 'dlq.{nme}'}}\n"
        "- {name: b, match: ['b.>'], journal: {dead_letter: 'dlq.{name}'}}\n"
    )
    lines = run("check", "s.yaml").stderr.splitlines()
    assert len(lines) == 1
    assert "journal.dead_letter: 'dlq.{nme}' is the name of a queue with braces in it; only {name} stands" in lines[0]


def test_check_warns_of_dead_letters_that_stay_where_they_are() -> None:
    Path("s.yaml").write_text(
        "directory: d\nstores:\n- {name: a, match: ['>'], journal: {dead_letter: '{name}'}}\n"
        "- {name: b, match: ['b.>'], journal: {dead_letter: 'queue://{name}'}}\n"
    )
    lines = run("check", "s.yaml").stderr.splitlines()
    assert [line.partition(" is the queue itself that a message comes from")[0] for line in lines] == [
        "s.yaml:3: warning: store 'a': journal.dead_letter: '{name}'",
        "s.yaml:4: warning: store 'b': journal.dead_letter: 'queue://{name}'",
    ]


def test_check_warns_of_directories_that_are_missing_and_must_not_be_made() -> None:
    text = "directory: {}\ncreate_directory: false\nstores: [{{name: a, match: ['>'], directory: {}}}]\n"
    Path("s.yaml").write_text(text.format("data", "disk"))
    result = run("check", "s.yaml")
    assert (result.exit_code, len(result.stderr.splitlines())) == (0, 2)
    assert f"s.yaml: warning: the data directory, {Path('data').absolute()}, is not there" in result.stderr
    assert f"the directory of store 'a', {Path('disk').absolute()}, is not there" in result.stderr
    assert [path.name for path in Path().iterdir()] == ["s.yaml"]
    Path("data").mkdir(mode=0o700)
    Path("disk").mkdir(mode=0o700)
    assert run("check", "s.yaml").stderr == ""


def test_compact_gives_back_what_holds_nothing() -> None:
    Path("s.yaml").write_text(
        "{directory: d, stores: [{name: a, match: [a.>], journal: {segment_size: 64KiB, compact_live_percent: 0}},"
        "                        {name: b, match: [b.>], sql: {}}, {name: c, match: [c.>], memory: {}}]}"
    )
    with anabranch.open("s.yaml") as router:
        for name in ("a", "b", "c"):
            for _ in range(5):
                router.queue(f"{name}.kept").send(b"x")
                router.queue(f"{name}.q").send_many([b"x" * 1000] * 120)
                router.queue(f"{name}.q").purge()
        files = sum(path.stat().st_size for path in Path("d").rglob("*"))
    result = run("compact", "-c", "s.yaml", "--json", code=0)
    freed = json.loads(result.stdout)["freed_bytes"]
    assert set(freed) == {"a", "b", "c"}
    assert freed["b"] > 100_000
    assert sum(path.stat().st_size for path in Path("d").rglob("*")) < files - 100_000
    with anabranch.open("s.yaml") as router:
        assert [router.queue(f"{name}.kept").depth() for name in ("a", "b")] == [5, 5]
    again = run("compact", "-c", "s.yaml", "--store", "b")
    assert (again.exit_code, again.stdout) == (0, "b: nothing to give back\n")
    missing = run("compact", "-c", "s.yaml", "--store", "none")
    assert (missing.exit_code, missing.stderr) == (
        2,
        "Error: there is no store 'none' to compact; there are: a, b, c\n",
    )


def test_stats_tell_that_an_index_was_rebuilt() -> None:
    Path("s.yaml").write_text("{directory: data, stores: [{name: all, match: ['>']}]}")
    with anabranch.open("s.yaml") as router:
        router.queue("orders").send(b"x")
    Path("data/stores/all/index.mdb").write_bytes(b"not an index")
    result = run("stats", "--config", "s.yaml", "--json")
    assert (result.exit_code, json.loads(result.stdout)["stores"]["all"]["messages"]) == (0, 1)
    assert result.stderr.startswith("Warning: store all: the index is rebuilt from the journal: ")
    assert run("stats", "--config", "s.yaml").stderr == ""


def test_route_warns_of_a_wildcard() -> None:
    run("init")
    result = run("route", "orders.*")
    assert (result.exit_code, result.stdout.splitlines()[0][:37]) == (0, "queue://orders.* goes to store orders")
    assert result.stderr.startswith("Warning: queue://orders.* holds the wildcard *, which only patterns have; ")
    assert run("route", "orders.#").stderr == ""


def test_a_cluster_has_no_use_without_spark() -> None:
    result = run(
        "recommend", "--trace", "t.csv", "--out", "o", "--engine", "local", "--master", "spark://h:7077", code=2
    )
    assert result.stderr == (
        "Error: --engine local uses no Spark, so --master spark://h:7077 has no effect; leave one of them out\n"
    )


def test_route_as_json() -> None:
    run("init")
    found = json.loads(run("route", "--config", "stores.yaml", "topic://ticks.eu", "--json").stdout)
    assert (found["store"], found["pattern"]) == ("telemetry", "topic://ticks.*")
    assert (found["kind"], found["sync"]) == ("journal", "never")
    assert [(m["store"], m["pattern"], m["reason"].split(":")[0]) for m in found["matches"]] == [
        ("telemetry", "topic://ticks.*", "wins over '>'"),
        ("rest", ">", "loses to 'topic"),
    ]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("order.x", "no pattern in stores.yaml matches queue://order.x; the closest are: queue://orders.>"),
        ("a,b", "comma"),
        ("jms://a", "unknown scheme 'jms'"),
        ("", "needs a name"),
    ],
)
def test_route_of_what_has_none(name: str, says: str) -> None:
    Path("stores.yaml").write_text("{directory: d, stores: [{name: a, match: ['queue://orders.>', 'topic://t']}]}")
    result = run("route", name, code=2)
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_schema() -> None:
    assert json.loads(run("schema").stdout) == json_schema()


def test_the_trace_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "advisor.md").read_text()
    lines = page.partition("`usage.csv`:\n\n")[2].partition("\n\n")[0].splitlines()
    Path("usage.csv").write_text("".join(f"{line.strip()}\n" for line in lines))
    good = ("recommend", "--trace", "usage.csv", "--out", "advice", "--engine", "local")
    result = run(*good)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("Keep one store")
    assert "The trace left nothing open." in result.stdout
    assert result.stdout.endswith("The report, for a browser: advice/report.html\n")
    assert "Keep one store" in Path("advice/report.html").read_text()
    assert run("check", "advice/stores.yaml").exit_code == 0
    written = Path("advice/stores.yaml").read_text()
    again = run(*good)
    assert (again.exit_code, again.stdout, again.stderr) == (
        2,
        "",
        "Error: advice/recommendation.json exists already and was left as it is; give another directory, or replace it "
        "(--force; from Python: overwrite=True)\n",
    )
    assert Path("advice/stores.yaml").read_text() == written
    capped = run(*good, "--peak-max", "1MiB", "--force", code=1)
    assert capped.stdout.startswith("The cap on the peak, 1.0 MB, cannot be kept")
    wrong = run(*good, "--segment-size", "0", "--disk-gib", "-1", code=2)
    assert "(--segment-size)" in wrong.stderr and "(--disk-gib)" in wrong.stderr
    Path("stores.yaml").write_text("directory: data\nstores: [{name: a, match: ['>'], journal: {sync: never}}]\n")
    beside = run(*good, "--current", "stores.yaml", "--pin", "orders,audit", "--durability", "audit=never", "--force")
    assert (beside.exit_code, beside.stderr) == (0, "")
    assert beside.stdout.startswith("Leave it as it is")
    assert load("advice/stores.yaml") == load("stores.yaml")


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("recommend", "--workload", "s3://b/w.yaml", "--out", "o"), "--workload s3://b/w.yaml"),
        (("recommend", "--from-kahadb", "gs://b/k", "--out", "o"), "--from-kahadb gs://b/k"),
        (("init", "s3a://bucket/stores.yaml"), "PATH s3a://bucket/stores.yaml"),
        (("check", "https://host/stores.yaml"), "PATH https://host/stores.yaml"),
        (("stats", "-c", "s3a://bucket/stores.yaml"), "--config s3a://bucket/stores.yaml"),
        (("explain", "hdfs://nn/kahadb"), "DIRECTORY hdfs://nn/kahadb"),
    ],
)
def test_another_file_system_is_refused_and_nothing_is_made(arguments: tuple[str, ...], what: str) -> None:
    result = run(*arguments, code=2)
    assert result.stderr.startswith(f"Error: {what}: files are read and written on this machine alone, and ")
    assert result.stderr.count("\n") == 1
    assert not list(Path().iterdir())


def test_a_trace_elsewhere_needs_spark() -> None:
    result = run("recommend", "--trace", "hdfs://nn:8020/t.parquet", "--out", "o", "--engine", "local", code=2)
    assert result.stderr.startswith("Error: hdfs://nn:8020/t.parquet is read by Spark alone; leave --engine local out")
    assert not list(Path().iterdir())


def test_what_is_in_the_way_of_a_recommendation_is_told_before_the_work() -> None:
    Path("blocked/stores.yaml").mkdir(parents=True)
    Path("file").touch()
    for out, says in (
        (
            "blocked",
            "blocked/stores.yaml is in the way: a file of that name is to be written; give another directory\n",
        ),
        ("file", "file is in the way: a directory is needed there; give another directory\n"),
        ("file/deeper", "file is in the way: a directory is needed there; give another directory\n"),
    ):
        result = run("recommend", "--trace", "missing.csv", "--out", out)
        assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"Error: {says}")
    assert [path.name for path in Path("blocked").iterdir()] == ["stores.yaml"]


def test_a_recommendation_from_a_broker_takes_the_size_of_its_files(tmp_path: Path) -> None:
    with tarfile.open(KINDS.with_name("mixed-kahadb.tar.xz")) as tar:
        tar.extractall(tmp_path, filter="data")
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    given = ("recommend", "--from-kahadb", str(directory), "--engine", "local", "--json")
    for more, sizes in (("--model", "kahadb"), [64 << 10]), ((), [32 << 20]):
        result = run(*given, *more, "--out", f"advice-{len(more)}", code=0)
        assert [one["segment_bytes"] for one in json.loads(result.stdout)["parameters"]["segment_sizes"]] == sizes
        assert ("Files of 64KiB, as the broker has them" in result.stderr) is bool(more)
        assert ("for ActiveMQ add --model kahadb" in result.stderr) is not bool(more)


def test_explain(tmp_path: Path) -> None:
    with tarfile.open(KINDS) as tar:
        tar.extractall(tmp_path, filter="data")
    (directory,) = (path for path in tmp_path.iterdir() if path.is_dir())
    text = run("explain", str(directory), code=0)
    assert text.stdout.endswith("\n") and not text.stdout.endswith("\n\n")
    assert json.loads(run("explain", "--json", str(directory)).stdout)["stores"]
    Path("s.yaml").write_text("{directory: d, stores: [{name: a, match: ['>']}]}")
    refused = run("explain", "--config", "s.yaml", str(directory), code=2)
    assert f"and {directory} is a KahaDB; leave it out" in refused.stderr


def test_explain_our_own() -> None:
    Path("s.yaml").write_text("{directory: d, stores: [{name: a, match: ['>'], journal: {}}]}")
    with anabranch.open("s.yaml") as router:
        router.queue("q").send(b"1")
        held = run("explain", "d/stores/a")
        assert (held.exit_code, held.stdout) == (1, "")
        assert held.stderr.startswith("Error: store 'a' in d/stores/a is open, by this process")
        live = run("explain", "d")
        assert (live.exit_code, live.stderr, "queue://q" in live.stdout) == (0, "", True)
    told = run("explain", "d")
    assert (told.exit_code, told.stderr) == (0, "")
    assert "queue://q" in told.stdout and told.stdout.endswith("\n")
    (store,) = json.loads(run("explain", "d", "--config", "s.yaml", "--json").stdout)["stores"]
    assert store["segments"][0]["reasons"][0]["destination"] == "queue://q"
    segment = Path(store["segments"][0]["path"])
    segment.write_bytes(b"\xff" * 4096 + segment.read_bytes()[4096:])
    damaged = run("explain", "d")
    assert (damaged.exit_code, damaged.stderr) == (1, "")
    assert f"{segment} at offset 0: not a journal segment" in " ".join(damaged.stdout.split())


def test_explain_of_what_is_neither() -> None:
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/file").write_text("")
    for name, says in (("empty", "is empty"), ("other", "holds no stores of Anabranch's and no KahaDB journal")):
        result = run("explain", name, code=2)
        assert result.stderr.startswith(f"Error: {name} {says}; give a data directory")


def test_explain_of_what_is_no_journal(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        result = run("explain", str(directory), code=2)
        assert str(directory) in result.stderr
        assert result.stderr.count("\n") == 1


def test_an_unknown_command_or_option() -> None:
    mistyped = run("rout", code=2)
    assert mistyped.stderr.endswith("Error: No such command 'rout'; did you mean 'route'?\n")
    assert run("check", "--jsn").exit_code == 2
