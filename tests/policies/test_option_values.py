"""The values that type checkers are told of are those that the models take."""

from __future__ import annotations

import enum
import types
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr

from anabranch.policies.config import fields, limits, option_values, options
from anabranch.policies.config.fields import Duration, FileMode, Size
from anabranch.policies.config.when_full import WhenFull

MODELS: dict[type[BaseModel], type] = {
    options.StoreOptions: option_values.StoreValues,
    options.JournalOptions: option_values.JournalValues,
    options.SqlOptions: option_values.SqlValues,
    options.MemoryOptions: option_values.MemoryValues,
    options.UsageOptions: option_values.UsageValues,
    options.TransactionOptions: option_values.TransactionValues,
    limits.LimitOptions: limits.LimitValues,
    fields.Redelivery: fields.RedeliveryValues,
}
WRITTEN = (Size, Duration, FileMode, SecretStr, Path)
"""Types, and marks of types, of values that may also be written as text."""


def parts(annotation: object) -> list[object]:
    """Return a type, or the members of the union that it is, and their marks."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated, typing.Required):
        return [part for one in typing.get_args(annotation) for part in parts(one)]
    return [annotation]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_each_field_takes_what_the_checkers_are_told(model: type[BaseModel]) -> None:
    models = {one.__name__: one for one in (limits.LimitOptions, WhenFull, fields.Redelivery)}
    values = typing.get_type_hints(MODELS[model], localns=models, include_extras=True)
    assert set(values) == set(model.model_fields)
    for name, field in model.model_fields.items():
        takes, told = [*parts(field.annotation), *field.metadata], parts(values[name])
        assert (type(None) in takes) == (type(None) in told), name
        assert field.is_required() == (typing.get_origin(values[name]) is typing.Required), name
        if any(one in WRITTEN or isinstance(one, WRITTEN) for one in takes):
            assert str in told, name
        for choice in (one for one in takes if isinstance(one, type) and issubclass(one, enum.Enum)):
            words = next(typing.get_args(one) for one in told if typing.get_origin(one) is typing.Literal)
            schema = model.model_json_schema()["properties"][name]
            assert set(words) == set(schema.get("enum", [member.value for member in choice])), name
