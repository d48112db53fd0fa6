"""Parts that options are made of: frozen models, sizes, durations and other fields, the waits of messages that were
given back, texts from the environment."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Required, Self, TypedDict, Unpack, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from ..errors import ConfigError, DestinationError
from ..names.pattern import Pattern
from ..paths import FILE_MODE, URL_SCHEME, from_home
from ..units import (
    DURATION_PATTERN,
    SIZE_BYTES_MAX,
    SIZE_PATTERN,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)
from .problems import Hidden, explain
from .yaml_lines import Path as Place


class Model(BaseModel):
    """A frozen model that refuses unknown keys, and whose constructor raises ConfigError with all that is wrong."""

    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError([problem.describe(values) for problem in explain(error, type(self))]) from None

    # Tells pydantic that this is no constructor to call for nested models: their errors belong to the outermost.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    _unknown_key: ClassVar[str] = "unknown key"
    """Words for a key that is not among `_keys`."""

    @classmethod
    def _keys(cls) -> list[str]:
        """Return the keys that a file may use here."""
        return list(cls.model_fields)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        result = handler(schema)
        properties = handler.resolve_ref_schema(result)["properties"]
        for name in properties.keys() & (told := cls._descriptions()).keys():
            properties[name]["description"] = told[name]
        return result

    @classmethod
    def _descriptions(cls) -> dict[str, str]:
        """Return the docstrings of the fields, where the source is there. Pydantic could do that while the class is
        made, which takes a third of all the time that `import anabranch` does."""
        told: dict[str, str] = {}
        for base in (one for one in reversed(cls.__mro__) if issubclass(one, Model)):
            with suppress(OSError, TypeError):  # TypeError: of a class that was typed in
                (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
                assert isinstance(definition, ast.ClassDef)
                for field, text in itertools.pairwise(definition.body):
                    match field, text:
                        case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(words))):
                            told[name] = inspect.cleandoc(words)
        return told


class Options(Model):
    """The base of the options of every kind of store."""

    def may_be_shown(self, option: str) -> bool:
        """Tell whether a secret option holds nothing that has to be kept secret, so that a file may repeat it."""
        return False


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
class FileMode:
    """`Annotated[int, FileMode()]`: who may read and write files, written in octal as `0640` or `"0o640"`."""

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        to_text = core_schema.plain_serializer_function_ser_schema(octal, when_used="json")
        return core_schema.no_info_plain_validator_function(self._parse, serialization=to_text)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        # An editor that knows YAML 1.2 alone reads 0640 as the decimal 640.
        number = {"type": "integer", "minimum": FILE_MODE, "maximum": 666}
        return {"anyOf": [number, {"type": "string", "pattern": "^0?o?6[0246][0246]$"}]}

    def _parse(self, value: object) -> int:
        mode = value if isinstance(value, int) and not isinstance(value, bool) else -1
        if isinstance(value, str) and re.fullmatch("0?o?[0-7]{3}", value):
            mode = int(value.removeprefix("0").removeprefix("o"), 8)
        if mode & ~0o666 or mode & FILE_MODE != FILE_MODE:
            # YAML has made a number of what was written: 0777 is the number 511, and 644 is 01204.
            octal = f" (this number is 0{mode:o} in octal)" if mode >= 0 and isinstance(value, int) else ""
            raise ValueError(
                "expected the mode of files in octal with a 0 in front, such as 0600 or 0640: the owner reads and "
                f"writes, nobody executes{octal}"
            )
        return mode


def octal(mode: int) -> str:
    """Return a mode as people write it."""
    return f"{mode:04o}"


@dataclass(frozen=True, slots=True)
class Base:
    """The validation context of a file."""

    directory: Path
    """The directory that relative paths of the file start from."""
    names_suffice: bool = False
    """Whether the name of a variable stands for a value that the environment lacks: no store is to be opened."""
    where: Callable[[Place], str] = lambda _place: ""
    """Words for another place in the file, in an error: ` (line 7)`."""


def _written(value: object) -> object:
    # Path("") is ".", which nobody means who leaves a value empty.
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("expected the path of a directory")
    if isinstance(value, (str, Path)) and URL_SCHEME.match(str(value)):
        raise ValueError("expected the path of a directory of this machine, not a URL")
    return value


def _absolute(path: Path, info: ValidationInfo) -> Path:
    base = info.context.directory if isinstance(info.context, Base) else Path.cwd()
    return Path(os.path.normpath(base / from_home(path)))


Directory = Annotated[Path, BeforeValidator(_written), AfterValidator(_absolute)]
"""A path made absolute: a file's start from where the file is, others from the working directory. `~` is the home."""

Positive = Annotated[int, Field(strict=True, ge=1)]


def _pattern(text: str) -> str:
    Pattern.parse(text)
    return text


PatternText = Annotated[str, Field(strict=True), AfterValidator(_pattern)]
"""A pattern of destinations."""
AT_LEAST_ONE: Final[Any] = Field(json_schema_extra={"minItems": 1})
"""A note for the schema of a tuple: its validator refuses an empty one."""


# The waits of messages that were given back -------------------------------------------------------------------------


class RedeliveryValues(TypedDict, total=False):
    """The values that `Redelivery` takes, for type checkers."""

    delay: Required[float | str]
    multiplier: float
    max_delay: float | str
    jitter: float


class Redelivery(Model):
    """The wait of a message that was given back."""

    delay: Annotated[float, Duration(0.001, 30 * 86_400)]
    """The wait after the first time, in seconds."""
    multiplier: Annotated[float, Field(strict=True, ge=1, le=1000, allow_inf_nan=False)] = 1.0
    """Each wait is so many times as long as the one before."""
    max_delay: Annotated[float, Duration(0.001, 365 * 86_400)] = 3600.0
    """The longest wait, in seconds."""
    jitter: Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)] = 0.0
    """The part by which a wait is longer or shorter, at random at most: 0.1 is a tenth. Messages that failed together
    then do not come back together."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[RedeliveryValues]) -> None: ...

    @model_validator(mode="after")
    def _first_wait_fits(self) -> Self:
        if self.delay > self.max_delay:
            raise ValueError(
                f"delay, {self.delay:g} s, is longer than max_delay, {self.max_delay:g} s: no message would wait so "
                "long; give a max_delay that is as long, at least"
            )
        return self

    def seconds(self, times: int) -> float:
        """Return the wait of a message that was given back so often by now, before `jitter`."""
        try:
            return min(self.delay * self.multiplier ** (times - 1), self.max_delay)
        except OverflowError:
            return self.max_delay


# Values that nobody has checked yet ----------------------------------------------------------------------------------


def given(value: object) -> Mapping[str, Any]:
    """Return the keys and values of a mapping or a model, without defaults. Anything else has none."""
    if isinstance(value, BaseModel):
        return {key: getattr(value, key) for key in value.model_fields_set}
    return value if isinstance(value, Mapping) else {}


def items(value: object) -> Sequence[Any]:
    """Return a list or a tuple as it is. Anything else has no items."""
    return value if isinstance(value, list | tuple) else ()


def parsed(text: object) -> Pattern | None:
    """Return the pattern that a text is. None stands for none, an error that is told where the text is read."""
    try:
        return Pattern.parse(text) if isinstance(text, str) else None
    except DestinationError:
        return None


# Secrets and texts from the environment -----------------------------------------------------------------------------


def from_environment(
    model: type[BaseModel], values: Mapping[str, Any], names_suffice: bool = False
) -> tuple[dict[str, Any], list[tuple[str, str]], dict[str, str]]:
    """Replace each `x_env: NAME` by `x` from the environment, if `x` is a text option of the model.

    Return the values, what is wrong as keys and messages, and messages by option. A variable may be missing, or `x` be
    given too. Texts that must not be shown come out as Hidden. With `names_suffice` a missing variable is not wrong:
    its name is the value. The last messages are for a name that does not do.
    """
    fields = model.model_fields
    result: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    named: dict[str, str] = {}
    for key, value in values.items():
        option = key.removesuffix("_env")
        if option == key or key in fields or not takes_text(fields.get(option)):
            is_secret = isinstance(value, str) and takes_secret(fields.get(key))
            result[key] = Hidden(value) if is_secret else value
        elif option in values:
            wrong.append((key, f"{option!r} is given too; keep one of the two"))
        elif not isinstance(value, str):
            wrong.append((key, "expected the name of an environment variable"))
        elif value in os.environ:
            result[option] = Hidden(os.environ[value])
        else:
            missing = f"the environment has no variable {value!r}; set it before the program starts"
            if names_suffice:
                result[option], named[option] = Hidden(value), missing
            else:
                wrong.append((key, missing))
    return result, wrong, named


_VARIABLES: Final = "variables of the environment"
"""The place where a model keeps them. Like cached values they play no part when two models are compared."""


def remember_variables(options: BaseModel, variables: Mapping[str, str]) -> None:
    """Keep for each option the environment variable that its value was taken from."""
    if variables:
        options.__dict__[_VARIABLES] = dict(variables)


def variables_of(options: BaseModel) -> Mapping[str, str]:
    """Return the environment variables that values were taken from, by option."""
    found: Mapping[str, str] = options.__dict__.get(_VARIABLES, {})
    return found


def takes_text(info: FieldInfo | None) -> bool:
    """Tell whether the option is a text (or a secret text), so that it may come from the environment."""
    return info is not None and not {str, SecretStr}.isdisjoint({info.annotation, *get_args(info.annotation)})


def takes_secret(info: FieldInfo | None) -> bool:
    """Tell whether the option is a secret."""
    return info is not None and SecretStr in {info.annotation, *get_args(info.annotation)}
