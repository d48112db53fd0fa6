"""The configuration file and the objects: what is accepted, and what each mistake is called, with its line."""

from __future__ import annotations

import pickle
import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from anabranch.policies.config import (
    Config,
    JournalOptions,
    Options,
    StoreConfig,
    TransactionOptions,
    dump_yaml,
    load,
    loads,
    warnings,
)
from anabranch.policies.config.durability import Sync
from anabranch.policies.errors import ConfigError
from anabranch.policies.names.destination import Destination
from anabranch.policies.names.pattern import Pattern, escape

BASE = Path("/srv/app")

GOOD = """
directory: data
defaults:
  journal: {sync: never, segment_size: 1MiB}
stores:
  - name: custom
    match: [queue://orders.custom]
    journal: {sync: always, segment_size: 32MiB, checkpoint_interval: 2m}
  - name: telemetry
    match: ["queue://telemetry.>", "topic://ticks.*"]
    directory: /fast/telemetry
    index_directory: ../index
  - name: rest
    match: [">"]
    per_destination: true
    journal:
"""


def problems(text: str) -> list[tuple[int, str]]:
    with pytest.raises(ConfigError) as caught:
        loads(textwrap.dedent(text), BASE)
    return [(problem.line, problem.message) for problem in caught.value.problems]


def one(text: str) -> tuple[int, str]:
    (problem,) = problems(text)
    return problem


def journal(line: str) -> str:
    return f"directory: d\nstores:\n- name: a\n  match: [a]\n  journal:\n    {line}\n"


# What is accepted ----------------------------------------------------------------------------------------------------


def test_a_good_file() -> None:
    config = loads(GOOD, BASE)
    custom, telemetry, rest = config.stores
    assert config.directory == BASE / "data"
    assert (custom.name, custom.kind, custom.match) == ("custom", "journal", ("queue://orders.custom",))
    assert custom.options == JournalOptions(sync=Sync.ALWAYS, segment_size=2**25, checkpoint_interval=120.0)
    assert telemetry.options == rest.options == JournalOptions(sync=Sync.NEVER, segment_size=2**20)
    assert (telemetry.directory, telemetry.index_directory) == (Path("/fast/telemetry"), Path("/srv/index"))
    assert rest.per_destination and not custom.per_destination
    assert config.directory_of(custom) == BASE / "data/stores/custom"
    assert config.directory_of(telemetry) == Path("/fast/telemetry")


def test_routes_of_a_configuration() -> None:
    routes = loads(GOOD, BASE).routes()
    for name, store in [("orders.custom", "custom"), ("topic://ticks.x", "telemetry"), ("ticks.x", "rest")]:
        match = routes.route(Destination.parse(name))
        assert match is not None and match.target.name == store


def test_a_file_is_read_relative_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "stores.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(path).directory == tmp_path / "data"
    assert load(str(path)) == loads(GOOD, tmp_path)


def test_objects_and_file_are_one_thing() -> None:
    store = StoreConfig(name="a", match=["queue://a"], journal=JournalOptions(sync="never"))
    built = Config(directory="/srv/app/d", stores=[store])
    assert built == loads("{directory: d, stores: [{name: a, match: ['queue://a'], journal: {sync: never}}]}", BASE)
    assert StoreConfig("a", ["a"]).options == JournalOptions()
    assert StoreConfig("a", ["a"], journal={"sync": "never"}).options == JournalOptions(sync=Sync.NEVER)
    assert Config("here", [store]).directory == Path.cwd() / "here"
    assert pickle.loads(pickle.dumps(built)) == built
    assert hash(built) == hash(pickle.loads(pickle.dumps(built)))


def test_models_are_frozen() -> None:
    config = loads(GOOD, BASE)
    for target, name in [(config, "directory"), (config.stores[0], "name"), (config.stores[0].options, "sync")]:
        with pytest.raises(ValueError, match="frozen"):
            setattr(target, name, "x")


def test_anchors_and_merge_keys() -> None:
    config = loads(
        """
        directory: d
        stores:
          - {name: a, match: [a], journal: &slow {sync: never, pool_files: 7}}
          - {name: b, match: [b], journal: {<<: *slow, pool_files: 1}}
        """,
        BASE,
    )
    assert config.stores[1].options == JournalOptions(sync=Sync.NEVER, pool_files=1)


patterns = st.text("ab.*?[]>/\\é \n'\":#-", min_size=1, max_size=8).map(lambda name: "queue://" + escape(name))
options = st.builds(
    JournalOptions,
    sync=st.sampled_from(Sync),
    sync_interval=st.floats(0.001, 3600),
    segment_size=st.integers(2**16, 2**30),
    pool_files=st.integers(0, 100),
    archive_directory=st.sampled_from([None, Path("/archive/x y")]),
    max_bytes=st.none() | st.integers(1, 2**50),
)
stores = st.lists(
    st.builds(
        lambda match, per, options: (match, per, options), st.lists(patterns, min_size=1), st.booleans(), options
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=50)
@given(stores)
def test_a_dumped_configuration_loads_as_itself(drawn: list[tuple[list[str], bool, JournalOptions]]) -> None:
    taken: set[Pattern] = set()
    built = []
    for place, (match, per_destination, journal_options) in enumerate(drawn):
        fresh = [text for text in dict.fromkeys(match) if Pattern.parse(text) not in taken]
        taken.update(map(Pattern.parse, fresh))
        if fresh:
            built.append(
                StoreConfig(
                    f"s{place}",
                    fresh,
                    per_destination=per_destination,
                    directory=f"/x/{place}",
                    journal=journal_options,
                )
            )
    config = Config("/srv/data", built)
    assert loads(dump_yaml(config), BASE) == config


def test_transactions() -> None:
    text = "directory: d\ntransactions: {sync: never, timeout: 90s, max_bytes: 1MiB}\nstores: [{name: a, match: [a]}]\n"
    config = loads(text, BASE)
    options = TransactionOptions(sync=Sync.NEVER, timeout=90, max_bytes=2**20)
    assert config.transactions == options
    assert (options.max_open, options.max_operations) == (10_000, 100_000)
    assert loads(dump_yaml(config), BASE) == config
    assert Config("/srv/app/d", config.stores, transactions=options) == config
    assert Config("/d", config.stores).transactions == TransactionOptions()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("{sync: periodic}", "sync: expected 'always' or 'never'; found 'periodic'"),
        ("{sync: allways}", "sync: expected 'always' or 'never'; found 'allways'"),
        ("{sync: off}", "sync: expected 'always' or 'never'; found false"),
        ("{timeout: 0}", "timeout: expected at least 1ms"),
        ("{max_open: 0}", "max_open: "),
        ("{max_bytes: 2GiB}", "max_bytes: expected at least 1B and at most 1GiB"),
        ("{max_opened: 1}", "max_opened: unknown key; did you mean 'max_open'?"),
    ],
)
def test_wrong_options_of_transactions(options: str, says: str) -> None:
    line, message = one(f"directory: d\ntransactions:\n  {options}\nstores: [{{name: a, match: [a]}}]\n")
    assert (line, message.startswith(f"transactions.{says}")) == (3, True), message


# Errors --------------------------------------------------------------------------------------------------------------


def test_all_errors_of_a_file_at_once() -> None:
    assert problems(
        """\
        directory: data
        defaults:
          journal: {sync_interval: 1 year, segmnt_size: 1}
        stores:
          - name: a
            match: [queue://a, "b[", 5]
            journal: {sync: sometimes, segment_size: 1KiB, pool_files: true}
          - name: a
            name: b
            match: [queue://a]
            per_destination: maybe
          - name: B/..
            mach: [x]
            directory: data/stores/a/x
            jurnal: {}
          - foo
          - {name: x, match: x, journal: [1]}
          - {name: X, match: [], index_directory: data}
        extra: 1
        """
    ) == [
        (
            3,
            "defaults.journal.sync_interval: expected a duration: seconds or a number with a unit (us ms s m h d), "
            "such as 0.5, 500ms or 2m; found '1 year'",
        ),
        (3, "defaults.journal.segmnt_size: unknown key; did you mean 'segment_size'?"),
        (
            6,
            "store 'a': match[1]: pattern 'b[': no ] closes the [ in segment 'b[' (a . always separates segments); "
            "a literal [ is written [[]; found 'b['",
        ),
        (6, "store 'a': match[2]: expected text; found the number 5; put it in quotes if it is meant as text"),
        (7, "store 'a': journal.sync: expected 'always', 'periodic' or 'never'; found 'sometimes'"),
        (7, "store 'a': journal.segment_size: expected at least 64KiB and at most 1GiB; found '1KiB'"),
        (7, "store 'a': journal.pool_files: expected a whole number; found true"),
        (8, "store 'a': name: store number 1 (line 5) has this name too; rename one"),
        (9, "key 'name' stands here twice, first in line 8; keep one"),
        (10, "store 'a': match[0]: pattern 'queue://a' stands in store 'a' already (line 6); keep one of the two"),
        (11, "store 'a': per_destination: expected true or false; found 'maybe'"),
        (
            12,
            "store 'B/..': name: expected a name that can be a directory's: 1 to 64 of A-Z a-z 0-9 . _ -, the first a "
            "letter or digit; found 'B/..'",
        ),
        (12, "store 'B/..': match: is missing, and is required"),
        (13, "store 'B/..': mach: neither a key of a store nor an installed kind of store; did you mean 'match'?"),
        (
            14,
            "store 'B/..': directory: /srv/app/data/stores/a/x is inside store 'a' (line 5)'s /srv/app/data/stores/a; "
            "give each store a directory of its own",
        ),
        (
            14,
            "store 'B/..': directory: /srv/app/data/stores/a/x is inside store 'a' (line 8)'s /srv/app/data/stores/a; "
            "give each store a directory of its own",
        ),
        (15, "store 'B/..': jurnal: neither a key of a store nor an installed kind of store; did you mean 'journal'?"),
        (16, "store number 4: expected a mapping of keys and values; found 'foo'"),
        (17, "store 'x': match: expected a list; found 'x'; write [\"x\"]"),
        (17, "store 'x': journal: expected a mapping of options; found a list"),
        (18, "store 'X': match: expected at least one; found an empty list"),
        (18, "store 'X': name: store number 5 (line 17) has the name 'x': on some disks they are one; rename one"),
        (
            18,
            "store 'X': index_directory: /srv/app/data is where the stores without a directory of their own are; "
            "choose another",
        ),
        (
            19,
            "extra: unknown key; allowed: directory, stores, transactions, usage, bindings_directory, "
            "create_directory, file_mode, control, shared, defaults",
        ),
    ]


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 0, "`anabranch init` writes an example"),
        ("# only words\n", 0, "`anabranch init` writes an example"),
        ("[1]", 1, "expected a mapping of keys and values; found a list"),
        ("directory: d\n", 1, "stores: is missing"),
        ("directory: d\nstores: {a: b}\n", 2, "stores: expected a list; found a mapping"),
        ("directory: 5\nstores: [{name: a, match: [a]}]", 1, "directory: expected a path; found the number 5"),
        ("directory: ''\nstores: [{name: a, match: [a]}]", 1, "directory: expected the path of a directory"),
        (
            "directory: s3a://b/d\nstores: [{name: a, match: [a]}]",
            1,
            "directory: expected the path of a directory of this machine",
        ),
        ("directory: d\nstores:\n- {name: 2024-01-01, match: [a]}", 3, "expected text; found 2024-01-01 (a date)"),
        ("directory: d\nstores: [{name: a, match: [a]}]\ndefaults: 5", 3, "defaults: expected a mapping"),
        ("directory: d\nstores: [{name: a, match: [a]}]\ndefaults: {jurnal: 5}", 3, "did you mean 'journal'?"),
        ("directory: d\n1: x\nstores: [{name: a, match: [a]}]", 2, "key 1 is not text; put it in quotes"),
        ("directory: d\nstores:\n- name: a\n  match: >", 4, "match: expected a list; found ''; write [\">\"]"),
        ("directory: d\nstores:\n- name: a\n  match: queue://x", 4, "found 'queue://x'; write [\"queue://x\"]"),
        ("directory: d\nstores: [{name: a, match: [>]}]", 2, 'need quotes: ["*.eu", ">"]'),
        ("directory: d\nstores: [{name: a, match: [*.a]}]", 2, "need quotes"),
        ("directory: d\nstores:\n- name: a\n  match: [a]\n   x: 1", 5, "not YAML"),
        ('directory: d\nstores:\n  - name: a\n   match: [">"]', 4, "mapping start>'; keys that belong together"),
        ("directory: d\n---\nstores: 1", 2, "expected a single document"),
        ("directory: !!python/object:os.system d\nstores: [{name: a, match: [a]}]", 1, "cannot be read"),
        ("directory: d\nstores: \x07", 2, "U+0007 is not allowed"),
        ("a: &a [*a]", 1, "aliases expand without end"),
        ("[" * 1000, 0, "nested too deeply"),
        (journal("sync: off"), 6, "found false"),
        (journal("sync_interval: 1ns"), 6, "such as 0.5, 500ms or 2m; found '1ns'"),
        (journal("sync_interval: 2h"), 6, "expected at least 1ms and at most 1h; found '2h'"),
        (journal("segment_size: 32M"), 6, "such as 65536, 32MiB or 10 MB; found '32M'"),
        (journal("file_mode: 644"), 6, "writes, nobody executes (this number is 01204 in octal); found the number 644"),
        (journal("file_mode: 0777"), 6, "writes, nobody executes (this number is 0777 in octal); found the number 511"),
        (journal("file_mode: rw-"), 6, "writes, nobody executes; found 'rw-'"),
        (journal("max_messages: 0"), 6, "expected at least 1; found the number 0"),
        (journal("max_leases: 1.5"), 6, "expected a whole number; found the number 1.5"),
        (journal("archive_directory: []"), 6, "expected a path; found an empty list"),
        (journal("archive_max_bytes: 1GiB"), 5, "archive_max_bytes limits nothing without archive_directory"),
        (journal("pool_files: -2"), 6, "expected at least -1; found the number -2"),
        (journal("compact_live_percent: 96"), 6, "expected at most 95; found the number 96"),
        (journal("compact_min_segments: 0"), 6, "expected at least 1; found the number 0"),
    ],
)
def test_one_error(text: str, line: int, says: str) -> None:
    found = problems(text)
    assert any(at == line and says in message for at, message in found), found


def test_one_store_instead_of_a_list() -> None:
    with pytest.raises(ConfigError) as raised:
        Config("d", StoreConfig("a", [">"]))  # type: ignore[arg-type]
    assert str(raised.value) == "stores: expected a list of stores; found one; write [StoreConfig(...)]"
    with pytest.raises(ConfigError, match=r"^match: expected a list; found '>'; write \[\">\"\]$"):
        StoreConfig("a", ">")


def test_aliases_cannot_blow_up() -> None:
    levels = ["a0: &a0 [x,x,x,x,x,x,x,x,x,x]"] + [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "aliases expand without end" in one("\n".join(levels))[1]


def test_two_stores_with_one_pattern_however_written() -> None:
    text = """\
        directory: d
        stores:
        - {name: a, match: ["x[ab]"]}
        - {name: b, match: [y, "x[ba]"]}
        """
    assert one(text) == (
        4,
        "store 'b': match[1]: pattern 'x[ba]' stands in store 'a' already (line 3); keep one of the two",
    )


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("/x", "/x", "is also"),
        ("/x", "/x/../x/", "is also"),
        ("/x", "/x/y", "is inside"),
        ("/x/y", "/x", "holds"),
        ("/x", "/xy", None),
        ("d/a", "d/b", None),
        ("/x", "d/stores/b", None),
        ("/x", "d/stores", "is where the stores"),
        ("/x", ".", "holds /srv/app/d"),
        ("/x", "d/decisions/b", "router's own decisions"),
    ],
)
def test_directories_that_meet(first: str, second: str, says: str | None) -> None:
    stores = f"{{name: a, match: [a], directory: {first}}}, {{name: b, match: [b], directory: {second}}}"
    text = f"{{directory: d, stores: [{stores}]}}"
    if says is None:
        loads(text, BASE)
    else:
        assert says in one(text)[1]


def test_an_index_may_be_in_its_own_store_but_not_in_another() -> None:
    stores = "{name: a, match: [a], directory: /x, index_directory: %s}, {name: b, match: [b], directory: /y}"
    text = f"{{directory: d, stores: [{stores}]}}"
    assert loads(text % "/x/index", BASE)
    assert "is inside store" in one(text % "/y/index")[1] or "holds" in one(text % "/y/index")[1]


def test_objects_have_the_same_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        StoreConfig("a b", "queue://a", jurnal={}, per_destination=1)  # type: ignore[call-arg, arg-type]
    assert [problem.message.partition(":")[0] for problem in caught.value.problems] == [
        "name",
        "match",
        "per_destination",
        "jurnal",
    ]
    with pytest.raises(ConfigError, match="sync: expected 'always', 'periodic' or 'never'; found 'x'"):
        JournalOptions(sync="x")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="stores: expected at least one"):
        Config("d", [])
    with pytest.raises(ConfigError) as caught:
        Config("d", [StoreConfig("a", ["a"]), StoreConfig("A", ["a"])])
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError) as caught:  # between stores, beside what is wrong elsewhere
        Config("", [StoreConfig("a", ["a"]), StoreConfig("b", ["a"])])
    assert [problem.message.partition(":")[0] for problem in caught.value.problems] == ["directory", "store 'b'"]
    with pytest.raises(ConfigError, match=r"journal: expected a mapping of options; found Options$"):
        StoreConfig("a", ["a"], journal=Options())  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "says"), [(None, "no such file"), (b"directory: \xff\n", "not UTF-8")])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "stores.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        load(path)
    assert str(caught.value).startswith(str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_errors_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "stores.yaml"
    path.write_text("directory: d\nstores: []\n")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value) == f"{path}:2: stores: expected at least one; found an empty list"


@settings(max_examples=200)
@given(st.text("ab: -[]{}\n'\"&*!|>%#,0.<", max_size=40))
def test_no_text_does_worse_than_a_configuration_error(text: str) -> None:
    for whole in (text, GOOD + text, GOOD.replace("32MiB", text)):
        try:
            loads(whole, BASE)
        except ConfigError as error:
            assert error.problems


# Third parties' kinds, and secrets -----------------------------------------------------------------------------------


def vault_store(options: str) -> str:
    return f"directory: d\nstores:\n- name: a\n  match: [a]\n  vault: {{{options}}}\n"


@pytest.mark.usefixtures("vault")
def test_a_third_partys_kind() -> None:
    store = loads(vault_store("url: x, batch: 1MiB, pool: {least: 3}"), BASE).stores[0]
    found: Any = store.options
    assert (store.kind, found.url, found.batch, found.pool.least) == ("vault", "x", 2**20, 3)
    assert (
        found
        == StoreConfig("a", ["a"], kind="vault", options={"url": "x", "batch": 2**20, "pool": {"least": 3}}).options
    )
    assert one(vault_store("")) == (5, "store 'a': vault.url: is missing, and is required")
    assert one(vault_store("url: x, pool: {lest: 3}")) == (
        5,
        "store 'a': vault.pool.lest: unknown key; did you mean 'least'?",
    )
    assert one(vault_store("url: x, btach: 1")) == (5, "store 'a': vault.btach: unknown key; did you mean 'batch'?")


@pytest.mark.usefixtures("vault")
def test_kinds_that_cannot_be() -> None:
    both = "directory: d\nstores:\n- {name: a, match: [a], vault: {url: x}, journal: {}}\n"
    assert one(both) == (3, "store 'a': a store has one kind; this one has journal and vault")
    text = "directory: d\nstores:\n- {name: a, match: [a], %s: {x: 1}}\n"
    assert "the adapter 'broken' (vault_adapter_missing:Broken) cannot be loaded: No module" in one(text % "broken")[1]
    assert one(text % "plain")[1] == "store 'a': plain.x: unknown key; allowed: nothing"
    assert one(text % "mongo")[1].endswith(
        "allowed: name, match, per_destination, directory, index_directory, create_directory, broken, journal, memory, "
        "plain, sql, vault"
    )


@pytest.mark.usefixtures("vault")
def test_a_third_party_s_kind_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "site" / "vault_adapter_missing.py").write_text(
        "import anabranch\nraise anabranch.MissingExtraError('vaults need hvac: pip install hvac')\n"
    )
    text = "directory: d\nstores:\n- {name: a, match: [a], broken: {x: 1}}\n"
    assert one(text) == (3, "store 'a': broken: vaults need hvac: pip install hvac")


@pytest.mark.usefixtures("vault")
def test_defaults_of_a_kind_need_not_be_whole() -> None:
    defaults = "defaults: {vault: {batch: 2KiB, password: a}}"
    text = f"directory: d\n{defaults}\nstores:\n- {{name: a, match: [a], vault: {{url: x}}}}\n"
    found: Any = loads(text, BASE).stores[0].options
    assert (found.batch, found.url) == (2048, "x")
    assert one(text.replace("2KiB", "2")) == (2, "defaults.vault.batch: expected at least 1KiB; found the number 2")


@pytest.mark.usefixtures("vault")
def test_a_secret_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_PASSWORD", "hunter2")
    monkeypatch.setenv("VAULT_URL", "there")
    config = loads(vault_store("url_env: VAULT_URL, password_env: VAULT_PASSWORD"), BASE)
    found: Any = config.stores[0].options
    assert found.url == "there" and type(found.url) is str
    assert isinstance(found.password, SecretStr) and found.password.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(config) + str(config) + config.model_dump_json()
    assert "hunter2" not in dump_yaml(config) and "there" not in dump_yaml(config)
    assert loads(dump_yaml(config), BASE) == config


@pytest.mark.usefixtures("vault")
def test_mistakes_with_secrets_are_named_and_the_secret_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_PASSWORD", "hunter2")
    assert problems(
        vault_store("url_env: NOT_THERE, password: x, password_env: VAULT_PASSWORD, batch: 1, batch_env: X")
    ) == [
        (5, "store 'a': vault.url_env: the environment has no variable 'NOT_THERE'; set it before the program starts"),
        (5, "store 'a': vault.password_env: 'password' is given too; keep one of the two"),
        (5, "store 'a': vault.batch: expected at least 1KiB; found the number 1"),
        (5, "store 'a': vault.batch_env: unknown key; did you mean 'batch'?"),
    ]
    assert "the name of an environment variable" in one(vault_store("url_env: 5"))[1]
    assert one(vault_store("url: x, password: [hunter2]")) == (
        5,
        "store 'a': vault.password: expected text; found a list",
    )
    defaults = "defaults: {vault: {password_env: VAULT_PASSWORD}}"
    in_defaults = f"directory: d\n{defaults}\nstores:\n- {{name: a, match: [a], vault: {{url: x, pin: y}}}}\n"
    found: Any = loads(in_defaults.replace("pin", "password"), BASE).stores[0].options
    assert found.password.get_secret_value() == "y"
    found = loads(in_defaults, BASE).stores[0].options
    assert found.password.get_secret_value() == "hunter2"


@pytest.mark.usefixtures("vault")
def test_names_of_variables_suffice_where_no_store_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VAULT_URL", "there")
    defaults = "defaults: {vault: {password_env: VAULT_PASSWORD}}"
    text = f"directory: d\n{defaults}\nstores:\n- {{name: a, match: [a], vault: {{url_env: VAULT_URL}}}}\n"
    with pytest.raises(ConfigError, match="no variable 'VAULT_PASSWORD'"):
        loads(text, BASE)
    found: Any = loads(text, BASE, names_suffice=True).stores[0].options
    assert (found.url, found.password.get_secret_value()) == ("there", "VAULT_PASSWORD")
    with pytest.raises(ConfigError) as raised:  # what is wrong otherwise is wrong still
        loads(text.replace("url_env: VAULT_URL", "url: x, url_env: VAULT_URL, batch: 1"), BASE, names_suffice=True)
    assert len(raised.value.problems) == 2
    prefix = "directory: d\nstores:\n- {name: a, match: [a], sql: {schema_prefix_env: NO-TABLE}}\n"
    with pytest.raises(ConfigError) as raised:  # a name that cannot stand for the value
        loads(prefix, BASE, names_suffice=True)
    assert "store 'a': sql.schema_prefix_env: the environment has no variable 'NO-TABLE'" in str(raised.value)


def test_a_wrong_value_of_a_variable_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "mysql://hunter2@x")
    line, text = one("directory: d\nstores:\n- {name: a, match: ['queue://>'], sql: {url_env: SHOP_DATABASE}}\n")
    assert (line, text.partition(": nobody has")[0]) == (
        3, "store 'a': sql.url_env: the environment's variable 'SHOP_DATABASE'"
    )  # fmt: skip
    assert "hunter2" not in text


def test_what_yaml_makes_of_a_text_and_a_list_is_said() -> None:
    assert one("directory: d\nstores: {orders: {match: ['>']}}\n") == (
        2, "stores: expected a list; found a mapping; begin each store with `- name: orders`"
    )  # fmt: skip
    assert one(journal("sync: no"))[1].endswith("; found false, as YAML reads `no` and `off` without quotes")
    one("directory: d\nstores:\n- {name: a, match: 'queue://a.>', journal: {dead_letter: a.dead}}\n")


def test_a_shared_store_of_a_shared_directory_is_doubted(tmp_path: Path) -> None:
    sql = "sql: {url_env: NOT_THERE, shared: true}"
    text = f"directory: d\nshared: true\nstores:\n- {{name: a, match: ['queue://>'], {sql}}}\n"
    (tmp_path / "s.yaml").write_text(text)
    (found,) = warnings(tmp_path / "s.yaml")
    assert found.line == 4 and "cannot send to or ack in the shared store 'a' in a transaction" in found.message
    (tmp_path / "s.yaml").write_text(text.replace("shared: true\nstores", "stores"))
    assert warnings(tmp_path / "s.yaml") == []


def test_an_option_one_level_too_high() -> None:
    line, text = one("directory: d\nstores:\n- name: a\n  match: [a]\n  sync: always\n")
    assert (line, "an option of journal; write `journal: {sync: ...}`" in text) == (5, True)
    line, text = one("directory: d\nsync: always\nstores:\n- name: a\n  match: [a]\n")
    assert (line, "under `defaults`" in text) == (2, True)


def test_a_tab() -> None:
    line, text = one("directory: d\nstores:\n\t- name: a\n")
    assert (line, "use spaces" in text) == (3, True)


def test_tables_of_a_database_are_one_stores() -> None:
    text = """
directory: d
stores:
- {name: a, match: [a], sql: {url: "postgresql+psycopg://u:secret@h/d"}}
- {name: b, match: [b], sql: {url: "postgresql+psycopg://u:secret@h/d"}}
- {name: c, match: [c], sql: {url: "postgresql+psycopg://u:secret@h/d", schema_prefix: c_}}
- {name: e, match: ["e.>"], per_destination: true, sql: {url: "postgresql+psycopg://u:secret@h/d", schema_prefix: e_}}
- {name: f, match: ["f.>"], per_destination: true, sql: {}}
"""
    with pytest.raises(ConfigError) as caught:
        loads(text, Path("/"))
    assert [problem.line for problem in caught.value.problems] == [5, 7]
    assert "store 'a' has these tables; give one of the two a `schema_prefix`" in str(caught.value)
    assert "leave out `per_destination`" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_dead_letters_do_not_go_from_one_leased_store_to_another() -> None:
    text = """
directory: d
stores:
- {name: a, match: [a, "%s"], sql: {url: "postgresql+psycopg://h/d", lease_expiration: 10s, dead_letter: dead}}
- {name: b, match: [">"], %s}
"""
    leased = 'sql: {url: "postgresql+psycopg://h/other", lease_expiration: 10s}'
    loads(text % ("dead", leased), Path("/"))
    loads(text % ("other", "journal: {}"), Path("/"))
    with pytest.raises(ConfigError, match=r"line 4: .*'dead' lives in store 'b'.*give this store a `match`"):
        loads(text % ("other", leased), Path("/"))
    with pytest.raises(ConfigError) as caught:  # beside others
        loads((text % ("other", leased)).replace('">"', '">", a'), Path("/"))
    assert [problem.line for problem in caught.value.problems] == [4, 5]


def test_an_option_that_a_store_takes_back_from_the_defaults() -> None:
    defaults = "defaults: {journal: {max_deliveries: 3, dead_letter: dlq}}"
    text = f"directory: d\n{defaults}\nstores:\n- {{name: a, match: [a], journal: {{dead_letter: null}}}}\n"
    line, message = one(text)
    assert (line, "journal.max_deliveries: expected a `dead_letter` queue" in message) == (4, True)


def test_the_usage_log_is_on_if_it_is_asked_for(tmp_path: Path) -> None:
    text = "directory: d\nstores: [{name: a, match: [a]}]\n"
    assert loads(text, tmp_path).usage is None
    for more in ("usage: {}", "usage: {max_bytes: 1GiB, destinations: ['queue://a.>'], sample: 0.5, directory: x}"):
        config = loads(f"{text}{more}\n", tmp_path)
        assert config.usage is not None
        assert loads(dump_yaml(config), tmp_path) == config
    for more, says in (
        ("usage:", "usage: expected options, or `{}` to switch the usage log on"),
        ("usage: {sample: 0}", "usage.sample: "),
        ("usage: {sample: 1.5}", "usage.sample: "),
        ("usage: {max_bytes: 1KiB}", "usage.max_bytes: expected at least 1MiB"),
        ("usage: {destinations: []}", "usage.destinations: "),
        ("usage: {destinations: ['ftp://a']}", "usage.destinations[0]: "),
        ("usage: {directory: d/stores/a}", "usage.directory: "),
        ("usage: {enabled: 1}", "usage.enabled: "),
        ("usage: {sample: true}", "usage.sample: "),
    ):
        with pytest.raises(ConfigError) as caught:
            loads(f"{text}{more}\n", tmp_path)
        assert [problem.line for problem in caught.value.problems] == [3]
        assert says in str(caught.value)


def test_a_directory_that_is_shared_lets_others_in() -> None:
    line, message = one("directory: d\nstores: [{name: a, match: [a]}]\ncontrol: false\nshared: true\n")
    assert (line, message.partition(";")[0]) == (4, "shared: with `control: false` nobody else uses the directory")
