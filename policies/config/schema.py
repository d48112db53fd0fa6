"""The configuration's JSON Schema, for editors: completion, descriptions, and most errors while typing."""

from __future__ import annotations

import itertools
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from .adapters import known_kinds
from .fields import takes_text
from .models import NAME_PATTERN, Config, StoreConfig
from .options import options_model

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema of the file, with the options of every adapter that is installed and can be loaded."""
    kinds: dict[str, type[BaseModel]] = {}
    for kind in known_kinds():
        try:
            kinds[kind] = options_model(kind)
        except ValueError:
            continue  # one broken adapter must not take the editor's help for all others away
    models: list[type[BaseModel]] = [Config, StoreConfig, *kinds.values()]
    references, schema = models_json_schema([(model, "validation") for model in models])
    definitions: dict[str, Any] = schema["$defs"]
    by_kind = {kind: references[(model, "validation")] for kind, model in kinds.items()}
    for kind, model in kinds.items():
        _allow_environment(definitions[by_kind[kind]["$ref"].rpartition("/")[2]], model)
    _kinds_as_keys(definitions["StoreConfig"], by_kind)
    top = definitions.pop("Config")
    top["properties"]["defaults"] = {
        "type": "object",
        "description": "Options for all stores of a kind that do not give them themselves.",
        "properties": {kind: {"$ref": reference["$ref"]} for kind, reference in by_kind.items()},
        "additionalProperties": False,
    }
    return {"$schema": DIALECT, **top, "title": "Anabranch stores", "$defs": definitions}


def _kinds_as_keys(store: dict[str, Any], by_kind: dict[str, dict[str, str]]) -> None:
    """Make the kind of a store the key that holds its options, of which there is at most one."""
    for key in [key for key in store["properties"] if key.startswith("__")]:
        del store["properties"][key]
    store["required"] = [key for key in store["required"] if not key.startswith("__")]
    store["properties"]["name"]["pattern"] = f"^{NAME_PATTERN}$"
    for kind, reference in by_kind.items():
        store["properties"][kind] = {"anyOf": [reference, {"type": "null"}]}
    store["allOf"] = [{"not": {"required": list(pair)}} for pair in itertools.combinations(by_kind, 2)]
    if not store["allOf"]:
        del store["allOf"]


def _allow_environment(definition: dict[str, Any], model: type[BaseModel]) -> None:
    """Let `password_env: NAME` stand in the place of `password`."""
    for name in [name for name, info in model.model_fields.items() if takes_text(info)]:
        definition["properties"][f"{name}_env"] = {
            "type": "string",
            "description": f"The environment variable that {name} is taken from.",
        }
        if name in definition.get("required", []):
            definition["required"].remove(name)
