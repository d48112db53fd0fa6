"""The JSON Schema takes what the loader takes, and refuses what editors should mark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from anabranch.policies.config import JournalOptions, MemoryOptions, SqlOptions, TransactionOptions, json_schema, loads
from anabranch.policies.config.fields import Model

from .test_config import GOOD


def validator() -> Draft202012Validator:
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(json.loads(json.dumps(schema)))


@pytest.fixture(scope="module")
def own() -> Draft202012Validator:
    """The schema of the kinds that come with the product."""
    return validator()


def test_a_good_file_validates(own: Draft202012Validator) -> None:
    loads(GOOD, Path("/"))
    own.validate(yaml.safe_load(GOOD))


@pytest.mark.parametrize(
    "text",
    [
        "{directory: d}",
        "{directory: d, stores: []}",
        "{directory: d, stores: [{name: a}]}",
        "{directory: d, stores: [{name: a/b, match: [a]}]}",
        "{directory: d, stores: [{name: a, match: []}]}",
        "{directory: d, stores: [{name: a, match: [a], jurnal: {}}]}",
        "{directory: d, stores: [{name: a, match: [a], journal: {sync: maybe}}]}",
        "{directory: d, stores: [{name: a, match: [a], journal: {segment_size: 32M}}]}",
        "{directory: d, stores: [{name: a, match: [a], journal: {sync_interval: soon}}]}",
        "{directory: d, stores: [{name: a, match: [a]}], defaults: {jurnal: {}}}",
        "{directory: d, stores: [{name: a, match: [a]}], transactions: {sync: periodic}}",
        "{directory: d, stores: [{name: a, match: [a]}], transactions: {timeout: soon}}",
        "{directory: d, stores: [{name: a, match: [a]}], transactions: {max_opened: 1}}",
    ],
)
def test_a_bad_file_does_not(own: Draft202012Validator, text: str) -> None:
    assert not own.is_valid(yaml.safe_load(text))


@pytest.mark.parametrize("model", [JournalOptions, MemoryOptions, SqlOptions, TransactionOptions])
def test_every_option_is_described(model: type[Model]) -> None:
    options = json_schema()["$defs"][model.__name__]["properties"]
    assert {option.removesuffix("_env") for option in options} == set(model.model_fields)
    assert all(option["description"] for option in options.values())


@pytest.mark.usefixtures("vault")
def test_third_parties_options_and_their_environment_variables() -> None:
    schema = validator()
    store = {"name": "a", "match": ["a"]}
    assert schema.is_valid({"directory": "d", "stores": [{**store, "vault": {"url_env": "URL", "password_env": "P"}}]})
    assert not schema.is_valid({"directory": "d", "stores": [{**store, "vault": {"batch_env": "B"}}]})
    assert not schema.is_valid({"directory": "d", "stores": [{**store, "vault": {}, "journal": {}}]})


DOCUMENTATION = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()


@pytest.mark.parametrize("model", [JournalOptions, MemoryOptions, SqlOptions, TransactionOptions])
def test_the_documentation_says_every_option_with_its_default(model: type[Model]) -> None:
    for name, default in model().model_dump(mode="json").items():
        shown = "none" if default is None else f"`{default}`"
        description = " ".join(model._descriptions()[name].split())
        assert f"| `{name}` | {shown} | {description}" in DOCUMENTATION


def test_the_documentations_examples_are_good(own: Draft202012Validator) -> None:
    shown = (code.partition("```")[0] for code in DOCUMENTATION.split("```yaml\n")[1:])
    stores, limits, transactions, usage, mounted = (text for text in shown if "stores:" in text)
    assert not loads(mounted, Path("/")).create_directory
    assert [store.name for store in loads(stores, Path("/")).stores] == ["custom", "telemetry", "rest"]
    assert loads(transactions, Path("/")).transactions.timeout == 60
    recorded = loads(usage, Path("/")).usage
    assert recorded is not None
    assert recorded.max_bytes == 1 << 30
    assert getattr(loads(limits, Path("/")).stores[0].options, "block_timeout", None) == 10.0
    for example in (stores, mounted, limits, transactions, usage):
        own.validate(yaml.safe_load(example))
