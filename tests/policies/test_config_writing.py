"""A configuration as a file's text: it loads back as the same one, and holds no secret."""

from __future__ import annotations

import enum
import sqlite3
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, SecretStr

from anabranch.policies.config import (
    Config,
    JournalOptions,
    MemoryOptions,
    SqlOptions,
    StoreConfig,
    TransactionOptions,
    UsageOptions,
    dump_yaml,
    loads,
)
from anabranch.policies.config import writing as config_writing
from anabranch.policies.config import yaml_lines as config_yaml
from anabranch.policies.config.fields import Duration, FileMode, Size
from anabranch.policies.config.limits import OF_NONPERSISTENT
from anabranch.policies.config.writing import NOWHERE, plain_data
from anabranch.policies.errors import ConfigError
from anabranch.policies.names.pattern import escape

BASE = Path("/srv/app")
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
patterns = st.text("ab.é \n'\":#-", min_size=1, max_size=8).map(lambda name: "queue://" + escape(name))
paths = st.sampled_from(["/srv/app/data/x", "/srv/app/data/~y", "/srv/app/data/z:/w", "/far/é x", "/srv/app/data/ "])
BY_NAME: dict[str, st.SearchStrategy[Any]] = {
    "dead_letter": st.sampled_from(["queue://b", "dlq.{name}"]),
    "url": st.sampled_from(["postgresql+psycopg://me@h:5433/d?host=/tmp&port=1", "sqlite:////tmp/é.db"]),
    "username": texts,
    "password": st.none(),  # a literal secret is not written
    "creator": st.sampled_from(["package.module:function", "a:b"]),
    "schema_prefix": st.sampled_from(["", "mq_", "mq."]),
    "table_names": st.dictionaries(st.sampled_from(["messages", "ids"]), st.sampled_from(["T", "_x"])),
    "statements": st.dictionaries(texts, texts),
    "limits": st.lists(
        st.fixed_dictionaries({"match": st.just([">"])}, optional={"max_bytes": st.integers(1, 9), "max_messages":
                           st.just(3), "when_full": st.just("block"), "block_timeout": st.just(2.5)}),
        max_size=1),
    "destinations": st.lists(patterns, min_size=1, max_size=3),
}  # fmt: skip
"""Values of options whose type does not say what they may be."""


def values(name: str, annotation: Any, metadata: list[Any]) -> st.SearchStrategy[Any]:
    """Draw values of an option, by its type and its limits."""
    if name in BY_NAME:
        return BY_NAME[name]
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        return values(name, annotation, [*metadata, *more])
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if len(get_args(annotation)) > 1 and type(None) in get_args(annotation):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return st.none() | st.one_of(*(values(name, part, metadata) for part in parts))
    limits = {key: getattr(one, key) for one in metadata for key in ("ge", "gt", "le") if hasattr(one, key)}
    limits |= {k: v for m in metadata for one in getattr(m, "metadata", ()) for k in ("ge", "gt", "le")
               if (v := getattr(one, k, None)) is not None}  # fmt: skip
    for one in metadata:
        if isinstance(one, Size):
            return st.integers(one.least, min(one.most, 2**50))
        if isinstance(one, Duration):
            return st.floats(one.least, one.most)
        if isinstance(one, FileMode):
            return st.sampled_from([0o600, 0o640, 0o666])
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(limits["ge"], limits.get("le", 10**6))
    if annotation is float:
        return st.floats(limits.get("ge", limits.get("gt")), limits["le"], exclude_min="gt" in limits)
    if annotation is str:
        return texts
    if annotation is Path:
        return paths
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return st.sampled_from(annotation)
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel), f"say in BY_NAME what {name} may be"
    return options_of(annotation)


def options_of(model: type[BaseModel]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw some of its options, the required ones among them."""
    found = {key: values(key, info.annotation, info.metadata) for key, info in model.model_fields.items()}
    required = {key: value for key, value in found.items() if model.model_fields[key].is_required()}
    some = st.lists(st.sampled_from([key for key in found if key not in required]), max_size=4, unique=True)
    return some.flatmap(lambda keys: st.fixed_dictionaries(required | {key: found[key] for key in keys}))


KINDS: dict[str, type[BaseModel]] = {"journal": JournalOptions, "sql": SqlOptions, "memory": MemoryOptions}
stores = st.sampled_from(list(KINDS)).flatmap(
    lambda kind: st.fixed_dictionaries(
        {"kind": st.just(kind), "options": options_of(KINDS[kind]), "per_destination": st.booleans(),
         "directory": st.none() | paths, "index_directory": st.none() | paths,
         "create_directory": st.none() | st.booleans(), "match": st.lists(patterns, min_size=1, max_size=3)}
    )
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    stores, options_of(TransactionOptions), st.none() | options_of(UsageOptions), st.none() | paths, st.booleans(),
    st.sampled_from([0o600, 0o640]), st.booleans(),
)  # fmt: skip
def test_what_is_written_loads_as_itself(
    store: dict[str, Any],
    transactions: dict[str, Any],
    usage: Any,
    bindings: Any,
    create: bool,
    mode: int,
    control: bool,
) -> None:
    try:
        config = Config(
            "/srv/app/data", [StoreConfig("a-1", **store), StoreConfig("rest", [">"])], transactions, usage=usage,
            bindings_directory=bindings, create_directory=create, file_mode=mode, control=control,
        )  # fmt: skip
    except ConfigError:
        reject()
    assert loads(dump_yaml(config), BASE) == config
    assert loads(dump_yaml(config, config.directory), config.directory) == config


OPTIONS = [
    (kind, option)
    for kind, model in KINDS.items()
    for option in model.model_fields
    if option != "password" and (kind != "memory" or option not in OF_NONPERSISTENT)
]


@pytest.mark.parametrize(("kind", "option"), OPTIONS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_each_option_of_each_kind_is_written(kind: str, option: str, data: st.DataObject) -> None:
    info = KINDS[kind].model_fields[option]
    value = data.draw(values(option, info.annotation, info.metadata).filter(lambda one: one is not None))
    needed: dict[str, dict[str, Any]] = {
        "max_deliveries": {"dead_letter": "dlq"}, "when_full": {"max_messages": 5},
        "block_timeout": {"max_messages": 5, "when_full": "block"}, "lease_renewal": {"lease_expiration": 86400},
        "archive_max_bytes": {"archive_directory": "/a"}, "archive_max_age": {"archive_directory": "/a"},
        "pool_min": {"pool_max": -1}, "pool_max": {"pool_min": 0}, "router_timeout": {"shared": True},
    }  # fmt: skip
    of_shared = ("shared", "router_timeout")
    server = {"url": "postgresql+psycopg://h/d"} if option in ("username", "creator", *of_shared) else {}
    options = {**needed.get(option, {}), **server, option: value}
    try:
        match = "queue://>" if option in of_shared else ">"
        config = Config("/d", [StoreConfig("a", [match], kind=kind, options=options)])
    except ConfigError:
        reject()  # a few of the values
    text = dump_yaml(config)
    assert option in text
    assert loads(text, "/") == config


@given(st.text(max_size=8))
def test_both_ways_of_writing_yaml_read_back(text: str) -> None:
    for dumper in (config_writing._FAST, config_writing._Dumper):
        written = "a:\n" + "".join(f"  {line}\n" for line in config_writing._text([text], dumper).split("\n"))
        assert config_yaml.parse(written).data == {"a": [text]}


def test_a_path_that_is_no_utf8_is_written() -> None:
    config = Config("/d/\udcff", [StoreConfig("a", [">"])])
    assert loads(dump_yaml(config), BASE) == config


# Secrets -------------------------------------------------------------------------------------------------------------

SQL = "directory: d\nstores:\n- {name: led-ger, match: ['>'], sql: {%s}}\n"


def test_what_came_from_the_environment_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"U": "postgresql+psycopg://h/d", "WHO": "me", "PW": "hunter2"}.items():
        monkeypatch.setenv(name, value)
    config = loads(SQL % "url_env: U, username_env: WHO, password_env: PW", BASE)
    text = dump_yaml(config)
    assert plain_data(config)["stores"][0]["sql"] == {"url_env": "U", "username_env": "WHO", "password_env": "PW"}
    assert "hunter2" not in text and "postgresql" not in text and "#" not in text
    assert loads(text, BASE) == config
    changed = loads(SQL.replace("stores:", "defaults: {sql: {password_env: PW}}\nstores:") % "url_env: U", BASE)
    assert loads(dump_yaml(changed), BASE) == changed
    monkeypatch.delenv("PW")
    assert "password_env: PW" in dump_yaml(loads(text, BASE, names_suffice=True))


def test_a_literal_secret_is_replaced_by_a_variable_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = loads(SQL % "url: 'postgresql+psycopg://h/d', password: hunter2", BASE)
    text = dump_yaml(config)
    assert "hunter2" not in text
    assert "# password was given literally, which is not written here; set ANABRANCH_LED_GER_PASSWORD" in text
    with pytest.raises(ConfigError, match="no variable 'ANABRANCH_LED_GER_PASSWORD'"):
        loads(text, BASE)
    assert loads(text, BASE, names_suffice=True).stores[0].name == "led-ger"
    monkeypatch.setenv("ANABRANCH_LED_GER_PASSWORD", "hunter2")
    assert loads(text, BASE) == config


@pytest.mark.parametrize(
    ("url", "is_shown"),
    [
        ("postgresql+psycopg://app@localhost/ledger", True),
        ("postgresql+psycopg:///d?host=/run/postgresql&sslmode=require", True),
        ("sqlite:////var/lib/x.db", True),
        ("postgresql+psycopg://app:hunter2@localhost/ledger", False),
        ("postgresql+psycopg://app:@localhost/ledger", False),
        ("postgresql+psycopg://localhost/ledger?password=hunter2", False),
        ("postgresql+psycopg://localhost/ledger?sslpassword=hunter2", False),
        ("postgresql+psycopg://localhost/ledger?PASSWORD=hunter2", False),
        ("postgresql+psycopg://app:hun@ter2@localhost/ledger", False),
    ],
)
def test_a_url_is_written_where_it_holds_no_password(url: str, is_shown: bool) -> None:
    config = Config("/d", [StoreConfig("a", [">"], sql=SqlOptions(url=SecretStr(url)))])
    text = dump_yaml(config)
    assert (url in text) == is_shown and ("url_env: ANABRANCH_A_URL" in text) != is_shown
    assert "hun" not in text


def test_an_object_of_python_is_replaced_by_a_name_that_leads_nowhere() -> None:
    options = SqlOptions(url=SecretStr("postgresql+psycopg://h/d"), creator=lambda: sqlite3.connect(":memory:"))
    text = dump_yaml(Config("/d", [StoreConfig("a", [">"], sql=options)]))
    assert "# creator is an object of Python's, which is not written here" in text
    assert f"creator: {NOWHERE}" in text
    assert loads(text, "/").stores[0].kind == "sql"


# Paths and comments --------------------------------------------------------------------------------------------------


def test_paths_start_from_the_directory_so_that_it_can_be_moved() -> None:
    stores = [
        StoreConfig("a", ["a"], directory="/srv/d/stores/old", journal=JournalOptions(archive_directory=Path("/far"))),
        StoreConfig("b", [">"], directory="/srv/elsewhere", index_directory="/srv/d/index"),
    ]
    config = Config("/srv/d", stores, usage=UsageOptions(directory=Path("/srv/d/use")), bindings_directory="/safe")
    moved = loads(dump_yaml(config, config.directory), "/mnt/new")
    assert (moved.directory, moved.bindings) == (Path("/mnt/new"), Path("/safe"))
    assert moved.usage is not None and moved.usage.directory == Path("/mnt/new/use")
    assert [store.directory for store in moved.stores] == [Path("/mnt/new/stores/old"), Path("/srv/elsewhere")]
    assert moved.stores[1].index_directory == Path("/mnt/new/index")


def test_a_mode_is_written_in_octal() -> None:
    assert "file_mode: '0640'" in dump_yaml(Config("/d", [StoreConfig("a", [">"])], file_mode=0o640))


def test_a_default_that_was_given_is_written(tmp_path: Path) -> None:
    config = loads("{directory: d, stores: [{name: a, match: ['>'], journal: {sync: always}}]}", tmp_path)
    assert plain_data(config)["stores"] == [{"name": "a", "match": [">"], "journal": {"sync": "always"}}]
