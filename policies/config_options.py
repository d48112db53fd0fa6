"""The options of a store, one frozen model a kind, and where the models come from.

A kind is the name of an adapter, registered in the entry-point group `anabranch.adapters`. A third party's adapter
class carries its model as `options_model`:

    class MongoOptions(Options):
        url: str
        password: SecretStr | None = None        # the file may say `password_env: NAME` instead
        batch: Annotated[int, Size(1024)] = 65536

    class MongoStore:
        options_model = MongoOptions

Adapters are found by name and imported only when a store is of their kind; the journal's options live here, so that
checking a file imports no adapter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from .config_problems import Hidden, explain
from .durability import Sync
from .errors import ConfigError
from .units import (
    DURATION_PATTERN,
    GIB,
    KIB,
    MIB,
    SIZE_BYTES_MAX,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)

ADAPTERS_GROUP = "anabranch.adapters"
DEFAULT_KIND = "journal"


class Model(BaseModel):
    """A frozen model that refuses unknown keys, and whose constructor raises ConfigError with all that is wrong."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError([problem.describe(values) for problem in explain(error, type(self))]) from None

    # Tells pydantic that this is no constructor to call for nested models: their errors belong to the outermost.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    unknown_key: ClassVar[str] = "unknown key"
    """What to say of a key that is not among `keys`."""

    @classmethod
    def keys(cls) -> list[str]:
        """The keys that a file may use here."""
        return list(cls.model_fields)


class Options(Model):
    """What the options of every kind of store begin from."""


# Types of fields -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """`Annotated[int, Size(65536)]`: bytes, written as a number or as `32MiB`, between two limits."""

    least: int = 0
    most: int = SIZE_BYTES_MAX

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        to_text = core_schema.plain_serializer_function_ser_schema(format_size, when_used="json")
        return core_schema.no_info_plain_validator_function(self._parse, serialization=to_text)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        number = {"type": "integer", "minimum": self.least, "maximum": self.most}
        return {"anyOf": [number, {"type": "string", "pattern": SIZE_PATTERN}]}

    def _parse(self, value: object) -> int:
        size = parse_size(value)
        if not self.least <= size <= self.most:
            limit = f" and at most {format_size(self.most)}" if self.most < SIZE_BYTES_MAX else ""
            raise ValueError(f"expected at least {format_size(self.least)}{limit}")
        return size


@dataclass(frozen=True, slots=True)
class Duration:
    """`Annotated[float, Duration(0.001, 60)]`: seconds, written as a number or as `500ms`, between two limits."""

    least: float = 0.0
    most: float = 365 * 86400.0

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        to_text = core_schema.plain_serializer_function_ser_schema(format_duration, when_used="json")
        return core_schema.no_info_plain_validator_function(self._parse, serialization=to_text)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        number = {"type": "number", "minimum": self.least, "maximum": self.most}
        return {"anyOf": [number, {"type": "string", "pattern": DURATION_PATTERN}]}

    def _parse(self, value: object) -> float:
        seconds = parse_duration(value)
        if not self.least <= seconds <= self.most:
            limits = f"at least {format_duration(self.least)} and at most {format_duration(self.most)}"
            raise ValueError(f"expected {limits}")
        return seconds


@dataclass(frozen=True, slots=True)
class Base:
    """The validation context of a file: what its relative directories start from."""

    directory: Path


def _written(value: object) -> object:
    # Path("") is ".", which nobody means who leaves a value empty.
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("expected the path of a directory")
    return value


def _absolute(path: Path, info: ValidationInfo) -> Path:
    base = info.context.directory if isinstance(info.context, Base) else Path.cwd()
    return Path(os.path.normpath(base / path.expanduser()))


Directory = Annotated[Path, BeforeValidator(_written), AfterValidator(_absolute)]
"""A path made absolute: a file's start from where the file is, others from the working directory. `~` is the home."""

Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]


# The journal ---------------------------------------------------------------------------------------------------------


class JournalOptions(Options):
    """A segmented append-only journal with an index: the default kind of store."""

    sync: Sync = Sync.ALWAYS
    """When work is forced to the disk: `always` before a call returns, `periodic` each sync_interval, `never`."""
    sync_interval: Annotated[float, Duration(0.001, 3600)] = 1.0
    """Under `sync: periodic`: the most that a power loss may cost, in seconds, beside one sync of work."""
    segment_size: Annotated[int, Size(64 * KIB, GIB)] = 32 * MIB
    """Bytes of one journal file. Disk space comes free in whole files, and files are preallocated at this size."""
    checkpoint_interval: Annotated[float, Duration(0.01, 3600)] = 5.0
    """The index is written out after this many seconds of work; what came later is replayed after a crash."""
    checkpoint_operations: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 20_000
    """The index is written out after this many operations even if the interval is not over."""
    batch_bytes_max: Annotated[int, Size(4 * KIB, GIB)] = MIB
    """The most bytes that are gathered into one write and one sync. A segment's size limits it too."""
    pool_files: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 2
    """How many released segment files are kept for use again instead of being deleted."""
    archive_directory: Directory | None = None
    """Released segments are moved here instead of being used again or deleted."""
    duplicate_window: Annotated[int, Field(strict=True, ge=0, le=10_000_000)] = 10_000
    """How many of the latest message ids are remembered to store a repeated send once. 0: none."""
    max_leases: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 100_000
    """How many messages may be received and not yet acked or released at one time."""
    message_bytes_max: Annotated[int, Size(1)] = 100 * MIB
    """The largest message, headers included. A larger one is refused before anything is written."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds; a send beyond it fails. None: until the disk is full."""
    max_messages: Positive | None = None
    """The most messages that the store holds; a send beyond it fails. None: no limit."""


# Transactions --------------------------------------------------------------------------------------------------------


class TransactionOptions(Options):
    """What holds for all transactions of a router."""

    sync: Annotated[Sync, Field(json_schema_extra={"enum": ["always", "never"]})] = Sync.ALWAYS
    """`always`: what makes a transaction over several stores atomic is forced to the disk whatever the stores' own
    policies say. `never`: only as they say; a power failure may then leave a part of one."""
    timeout: Annotated[float, Duration(0.001)] = 300.0
    """Seconds after which a transaction that was neither committed nor prepared is rolled back."""
    max_open: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 10_000
    """How many transactions may be open at one time, prepared ones included."""
    max_operations: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 100_000
    """How many sends and acks one transaction may hold."""
    max_bytes: Annotated[int, Size(1, GIB)] = 64 * MIB
    """How many bytes of messages one transaction may hold; they are kept in memory until it ends."""

    @field_validator("sync", mode="before")  # or a mistyped one would be told of periodic
    @classmethod
    def _always_or_never(cls, value: object) -> object:
        if value not in (Sync.ALWAYS, Sync.NEVER, Sync.ALWAYS.value, Sync.NEVER.value):
            raise ValueError("expected 'always' or 'never'")
        return value


# Kinds ---------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _adapters(_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """The registered adapters; sys.path decides. Asking takes a millisecond, too much for each of 500 stores."""
    return {entry.name: entry for entry in entry_points(group=ADAPTERS_GROUP)}


def known_kinds() -> list[str]:
    """The names of the registered adapters, sorted. Imports none of them."""
    return sorted({DEFAULT_KIND, *_adapters(tuple(sys.path))})


def options_model(kind: str) -> type[BaseModel]:
    """The model of a known kind's options; imports its adapter, unless it is the journal. Raises ValueError."""
    if kind == DEFAULT_KIND:
        return JournalOptions
    return cast("type[BaseModel]", getattr(load_adapter(kind), "options_model", Options))


def load_adapter(kind: str) -> Any:
    """The adapter class of a kind, imported (adapters/base.py, Adapter). Raises ValueError, which says why not."""
    entry = _adapters(tuple(sys.path)).get(kind)
    if entry is None:
        raise ValueError(f"no adapter {kind!r} is installed; there are: {', '.join(known_kinds())}")
    try:
        return entry.load()
    except Exception as error:
        # Third-party code: whatever its import raises, the file's author needs to know which line asked for it.
        raise ValueError(f"the adapter {kind!r} ({entry.value}) cannot be loaded: {error}") from error


def from_environment(model: type[BaseModel], values: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The values with each `x_env: NAME` replaced by `x` from the environment, if `x` is a text option of the model.

    Beside them comes what is wrong, as key and message: a variable that is missing, an `x` that is given too. Texts
    that must not be shown come out as Hidden.
    """
    fields = model.model_fields
    result: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for key, value in values.items():
        option = key.removesuffix("_env")
        if option == key or key in fields or not takes_text(fields.get(option)):
            is_secret = isinstance(value, str) and takes_secret(fields.get(key))
            result[key] = Hidden(value) if is_secret else value
        elif option in values:
            wrong.append((key, f"{option!r} is given too; keep one of the two"))
        elif not isinstance(value, str):
            wrong.append((key, "expected the name of an environment variable"))
        elif value not in os.environ:
            wrong.append((key, f"the environment has no variable {value!r}; set it before the program starts"))
        else:
            result[option] = Hidden(os.environ[value])
    return result, wrong


def takes_text(info: FieldInfo | None) -> bool:
    """Whether the option is a text (or a secret text), so that it may come from the environment."""
    return info is not None and not {str, SecretStr}.isdisjoint({info.annotation, *get_args(info.annotation)})


def takes_secret(info: FieldInfo | None) -> bool:
    """Whether the option is a secret."""
    return info is not None and SecretStr in {info.annotation, *get_args(info.annotation)}
