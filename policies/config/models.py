"""The configuration as typed, frozen models: a data directory and its stores.

    Config("data", [StoreConfig("all", [">"], journal=JournalOptions(sync=Sync.PERIODIC))])

The constructors check what the file's loader checks, and raise one ConfigError that holds everything wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypedDict, TypeVar, Unpack

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ..errors import ConfigError, MissingExtraError
from ..names.destination import Destination, Kind, dead_letter_name
from ..names.pattern import Pattern
from ..names.routes import RouteTable
from ..paths import FILE_MODE
from ..units import format_duration
from .adapters import DEFAULT_KIND, known_kinds
from .checks import disagreements
from .durability import Sync
from .fields import (
    AT_LEAST_ONE,
    Base,
    Directory,
    FileMode,
    Model,
    Options,
    PatternText,
    from_environment,
    given,
    items,
    remember_variables,
)
from .options import (
    MODELS,
    JournalOptions,
    MemoryOptions,
    SqlOptions,
    TransactionOptions,
    UsageOptions,
    is_shared,
    options_model,
)
from .problems import KIND_ALIAS, OPTIONS_ALIAS, Located, describe_value, explain, fold

NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
"""The names that a store may have: a name is safe as a directory's."""

_FILE = "file that it was loaded from"
_LINES = "lines of its stores"
T = TypeVar("T")


def _store_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise ValueError(
            "expected a name that can be a directory's: 1 to 64 of A-Z a-z 0-9 . _ -, the first a letter or digit"
        )
    return name


def _some(values: tuple[T, ...]) -> tuple[T, ...]:
    # pydantic's min_length counts those that are valid, and so would add a second error to that of an only item.
    if not values:
        raise ValueError("expected at least one")
    return values


class KindOptions(TypedDict, total=False):
    """The kind of a store, as a keyword with its options; None or {} is that kind with defaults. A kind that is not one
    of ours is named by `kind`, and has its `options` beside it."""

    journal: JournalOptions | Mapping[str, Any] | None
    sql: SqlOptions | Mapping[str, Any] | None
    memory: MemoryOptions | Mapping[str, Any] | None
    kind: str
    options: BaseModel | Mapping[str, Any] | None


class StoreConfig(Model):
    """One store: its name, what it takes, and its options."""

    _unknown_key: ClassVar[str] = "neither a key of a store nor an installed kind of store"

    name: Annotated[str, Field(strict=True), AfterValidator(_store_name)]
    """The name of the store in errors, in statistics and on disk."""
    match: Annotated[tuple[PatternText, ...], AfterValidator(_some), AT_LEAST_ONE]
    """The patterns of the destinations that live in the store, such as `queue://orders.>`."""
    per_destination: Annotated[bool, Field(strict=True)] = False
    """Whether each destination that lands here gets a store of its own, with these options."""
    directory: Directory | None = None
    """The directory of its files, if not stores/<name> in the data directory."""
    index_directory: Directory | None = None
    """The directory of its index, if not beside its journal: on a faster disk, say."""
    create_directory: Annotated[bool, Field(strict=True)] | None = None
    """Whether `directory` is made if it is not there. None: as the whole file says."""
    kind: str = Field(default=DEFAULT_KIND, validation_alias=KIND_ALIAS)
    """The name of its adapter. In the file and in the constructor, the name of the key that holds the options."""
    options: SerializeAsAny[BaseModel] = Field(validation_alias=OPTIONS_ALIAS)
    """The options of that adapter: of a journal, JournalOptions."""

    def __init__(
        self,
        name: str,
        match: Iterable[str],
        *,
        per_destination: bool = False,
        directory: str | Path | None = None,
        index_directory: str | Path | None = None,
        create_directory: bool | None = None,
        **kind: Unpack[KindOptions],
    ) -> None:
        """Take at most one kind: `journal=JournalOptions(...)`, say. None is a journal with defaults. A kind that is
        installed beside ours is `kind="onefile", options={...}`.

        Raises ConfigError.
        """
        said: dict[str, Any] = dict(kind)
        if "kind" in said:
            said[said.pop("kind")] = said.pop("options", None)
        super().__init__(
            name=name,
            match=match if isinstance(match, str) else tuple(match),
            per_destination=per_destination,
            directory=directory,
            index_directory=index_directory,
            create_directory=create_directory,
            **said,
        )

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def _keys(cls) -> list[str]:
        fields = [name for name in cls.model_fields if name not in {"kind", "options"}]
        return [*fields, *known_kinds()]

    @classmethod
    def _misplaced(cls, key: str) -> str:
        """Return words for an option that stands one level too high."""
        kind = next((kind for kind, model in MODELS.items() if key in model.model_fields), None)
        return f"an option of {kind}; write `{kind}: {{{key}: ...}}`" if kind is not None else ""

    @model_validator(mode="before")
    @classmethod
    def _key_to_kind(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        found = [kind for kind in known_kinds() if kind in data]
        rest = {key: value for key, value in data.items() if key not in found}
        kind = found[0] if found else DEFAULT_KIND
        return {**rest, KIND_ALIAS: found if len(found) > 1 else kind, OPTIONS_ALIAS: data.get(kind)}

    @field_validator("kind", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise fold([Located((), f"a store has one kind; this one has {' and '.join(value)}")])
        return value

    @field_validator("options", mode="plain")
    @classmethod
    def _options_of_kind(cls, value: Any, info: ValidationInfo) -> BaseModel:
        kind = info.data.get("kind")
        if kind is None:
            return Options()
        options, problems = validated_options(kind, value, info.context)
        if options is None:
            raise fold(problems)
        return options

    @property
    def _sync(self) -> str:
        """Return when a journal forces its work to the disk: `always`, `never`, or `periodic, 1s` with its interval.
        Empty for a store of another kind."""
        if not isinstance(self.options, JournalOptions):
            return ""
        interval = f", {format_duration(self.options.sync_interval)}" if self.options.sync is Sync.PERIODIC else ""
        return f"{self.options.sync.value}{interval}"

    def _in_file(self) -> dict[str, Any]:
        """Return the given values in the shape of a file: the kind is the key of the options."""
        return {**given(self), self.kind: self.options}


class Config(Model):
    """A whole configuration. Immutable; to change it, load or build another."""

    directory: Directory
    """The data directory: lock, placement record, and the stores that name no directory of their own."""
    stores: Annotated[tuple[StoreConfig, ...], AfterValidator(_some), AT_LEAST_ONE]
    """The stores. Their order means nothing."""
    transactions: TransactionOptions = TransactionOptions()
    """Options of all transactions."""
    usage: UsageOptions | None = None
    """The usage log, which is on if this is given: `usage: {}`."""
    bindings_directory: Directory | None = None
    """Where the placement record and the decision log are kept: on a safer disk, say. None: in the data directory."""
    create_directory: Annotated[bool, Field(strict=True)] = True
    """Whether the data directory, and the directories that stores name, are made if they are not there. With `false` a
    missing one is an error: a disk that is not mounted looks just like that, and like an empty queue if it is made."""
    file_mode: Annotated[int, FileMode()] = FILE_MODE
    """The mode of files that are made, in octal: who may read and write them. A directory that may be read may be
    entered too."""
    control: Annotated[bool, Field(strict=True)] = True
    """Whether other processes of the user may look into the directory while it is open, and use it: the commands, and
    `anabranch.open(DIR, shared=True)`."""
    shared: Annotated[bool, Field(strict=True)] = False
    """Whether any number of processes of one user have the directory open at once: each is a client of the one that
    owns it, as with `anabranch.open(..., shared=True)`."""

    def __init__(
        self,
        directory: str | Path,
        stores: Iterable[StoreConfig],
        transactions: TransactionOptions | Mapping[str, Any] | None = None,
        *,
        usage: UsageOptions | Mapping[str, Any] | None = None,
        bindings_directory: str | Path | None = None,
        create_directory: bool = True,
        file_mode: int | str = FILE_MODE,
        control: bool = True,
        shared: bool = False,
    ) -> None:
        """Check the parts; relative directories start from the working directory. Raises ConfigError."""
        if isinstance(stores, StoreConfig):  # which is an iterable too, of its fields
            raise ConfigError(["stores: expected a list of stores; found one; write [StoreConfig(...)]"])
        said: dict[str, Any] = {} if transactions is None else {"transactions": transactions}
        if usage is not None:
            said["usage"] = usage
        if bindings_directory is not None:
            said["bindings_directory"] = bindings_directory
        super().__init__(
            directory=directory, stores=tuple(stores), create_directory=create_directory, file_mode=file_mode,
            control=control, shared=shared, **said,
        )  # fmt: skip

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def _keys(cls) -> list[str]:
        return [*cls.model_fields, "defaults"]

    @classmethod
    def _misplaced(cls, key: str) -> str:
        """Return words for an option that stands too high."""
        if key not in JournalOptions.model_fields:
            return ""
        return f"an option of journal; write `journal: {{{key}: ...}}` in a store, or under `defaults` for all of them"

    @property
    def file(self) -> Path | None:
        """The file that the configuration was loaded from. None for one that was made otherwise."""
        return self.__dict__.get(_FILE)

    def _place_of(self, store: StoreConfig) -> str:
        """Return words to begin an error with: `stores.yaml:3: store 'a'`, or the name alone where no file has the
        store."""
        line = self._line_of(store)
        file = f"{self.file}:{line}: " if self.file is not None and line else ""
        return f"{file}store {store.name!r}"

    def _line_of(self, store: StoreConfig) -> int:
        """Return the line of a store in the file, from 1; 0 where there is none."""
        line: int = self.__dict__.get(_LINES, {}).get(store.name, 0)
        return line

    def _remember_file(self, path: Path) -> None:
        """Keep the path. The file plays no part when two configurations are compared."""
        self.__dict__[_FILE] = path

    def _remember_lines(self, lines: Iterable[int]) -> None:
        """Keep the lines of the stores. They play no part when two configurations are compared."""
        self.__dict__[_LINES] = {store.name: line for store, line in zip(self.stores, lines, strict=True)}

    def _sync_of(self, name: str) -> str:
        """Return when the store that is open by this name forces its work to the disk, as StoreConfig._sync. Empty for
        one that is not configured."""
        return next((store._sync for store in self.stores if store.name == name.partition(":")[0]), "")

    def directory_of(self, store: StoreConfig) -> Path:
        """Return the directory in which this store keeps its files."""
        return store.directory or self.directory / "stores" / store.name

    @property
    def bindings(self) -> Path:
        """The directory of the placement record and the decision log."""
        return self.bindings_directory or self.directory

    def _bindings_conflict(self) -> str:
        """Return what is wrong with the bindings directory; empty if nothing is."""
        taken = [(self.directory_of(store), f"store {store.name!r} keeps files") for store in self.stores]
        return _meeting(
            self.bindings_directory, [(self.directory, "all else lies"), *taken], "choose a directory of its own"
        )

    def _usage_conflict(self, usage: UsageOptions) -> str:
        """Return what is wrong with the directory of a usage log; empty if nothing is."""
        taken = [(self.directory_of(store), f"store {store.name!r} keeps files") for store in self.stores]
        routers = [self.directory / name for name in ("stores", "decisions", "placement.records")]
        routers += [self.bindings_directory] if self.bindings_directory is not None else []
        taken += [(path, "the router keeps files") for path in routers]
        return _meeting(usage.directory, taken, "choose another directory")

    def _may_create(self, store: StoreConfig) -> bool:
        """Tell whether this store's directory is made if it is not there. One in the data directory always is."""
        if store.directory is None or store.create_directory is not None:
            return store.directory is None or bool(store.create_directory)
        return self.create_directory

    def routes(self) -> RouteTable[StoreConfig]:
        """Return the table that routes destinations to these stores."""
        return RouteTable((pattern, store) for store in self.stores for pattern in store.match)

    @model_validator(mode="wrap")
    @classmethod
    def _agrees_with_itself(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Check the stores against each other even where something else is wrong, so that errors come all at once."""
        try:
            config = handler(data)
            problems = config._conflicts()
        except ValidationError as error:
            problems = explain(error, cls)
        said = given(data)
        base = info.context if isinstance(info.context, Base) else Base(Path.cwd())
        if base is info.context and said.get("usage", "") is None:  # whether it is to be on, nobody can tell
            text = "expected options, or `{}` to switch the usage log on; leave the key out for none; found nothing"
            problems.append(Located(("usage",), text))
        stores = [
            store._in_file() if isinstance(store, StoreConfig) else given(store) for store in items(said.get("stores"))
        ]
        problems += disagreements(said.get("directory"), stores, base)
        if problems:
            raise fold(problems)
        return config

    def _conflicts(self) -> list[Located]:
        """Return the problems of parts that are right, and cannot be together."""
        problems = [*_shared_tables(self.stores), *_shared_maps(self.stores), *_leased_dead_letters(self.stores)]
        if self.usage is not None and (text := self._usage_conflict(self.usage)):
            problems.append(Located(("usage", "directory"), text))
        if text := self._bindings_conflict():
            problems.append(Located(("bindings_directory",), text))
        if self.shared and not self.control:
            text = "with `control: false` nobody else uses the directory; leave one of the two out"
            problems.append(Located(("shared",), text))
        return problems


def _meeting(path: Path | None, taken: Iterable[tuple[Path, str]], step: str) -> str:
    """Say which taken directory the path is, holds or lies in; empty if none."""
    for where, what in taken:
        if path is not None and (path == where or path in where.parents or where in path.parents):
            return f"{path} and {where}, where {what}, lie in one another; {step}"
    return ""


def _shared_tables(stores: Sequence[StoreConfig]) -> Iterator[Located]:
    """Yield SQL stores that would get the same tables of a database: tables belong to one store."""
    seen: dict[tuple[str, str], StoreConfig] = {}
    for place, store in enumerate(stores):
        if not isinstance(store.options, SqlOptions) or store.options.url is None:
            continue
        at = ("stores", place, store.kind, "url")
        if store.per_destination:
            text = "every destination's store would have these tables; leave `url` out, for a SQLite file each, or "
            yield Located(at, text + "leave out `per_destination`")
            continue
        first = seen.setdefault((store.options.url.get_secret_value(), store.options.schema_prefix), store)
        if first is not store:
            yield Located(
                at, f"store {first.name!r} has these tables; give one of the two a `schema_prefix` of its own"
            )


def _shared_maps(stores: Sequence[StoreConfig]) -> Iterator[Located]:
    """Yield patterns of shared stores that take maps."""
    for place, store in enumerate(stores):
        if is_shared(store.options):
            for index, text in enumerate(store.match):
                if Kind.MAP in Pattern.parse(text).kinds:
                    name = text.rpartition("://")[2]
                    problem = (
                        f"{text!r} takes maps, and a shared store keeps none; write queue://{name} and topic://{name}"
                    )
                    yield Located(("stores", place, "match", index), problem)


def _leased_dead_letters(stores: Sequence[StoreConfig]) -> Iterator[Located]:
    """Yield dead letters of a store that other nodes use too which would go to another such store: no transaction is
    over both (rule T6)."""
    leased = [
        (place, store, options)
        for place, store in enumerate(stores)
        if isinstance(options := store.options, SqlOptions) and (options.shared or options.lease_expiration is not None)
    ]
    owners = {Pattern.parse(text): store for store in reversed(stores if leased else ()) for text in store.match}
    routes = RouteTable((pattern.text, store) for pattern, store in owners.items())
    for place, store, options in leased:
        if options.dead_letter is None:
            continue
        found = routes.route(Destination.parse(dead_letter_name(options.dead_letter, "a.b")))
        if found is not None and found.target is not store and any(found.target is other for _, other, _ in leased):
            text = f"{options.dead_letter!r} lives in store {found.target.name!r}, and no transaction is over two "
            text += "stores that other nodes use too, so dead letters cannot move there; give this store a `match` for "
            text += "them"
            yield Located(("stores", place, store.kind, "dead_letter"), text)


def validated_options(kind: str, value: object, context: object) -> tuple[BaseModel | None, list[Located]]:
    """Return the options of a known kind, from a model or a mapping, or the problems with them."""
    try:
        model = options_model(kind)
    except (ValueError, MissingExtraError) as error:
        return None, [Located((kind,), str(error))]
    if isinstance(value, model):
        return value, []
    if value is not None and not isinstance(value, Mapping):
        found = type(value).__name__ if isinstance(value, BaseModel) else describe_value(value)
        text = f"expected a mapping of options; found {found}"
        return None, [Located((kind,), text)]
    names_suffice = isinstance(context, Base) and context.names_suffice
    said = given(value)
    values, wrong, named = from_environment(model, said, names_suffice)
    problems = [Located((kind, key), text) for key, text in wrong]
    variables = {key.removesuffix("_env"): said[key] for key in said if key not in values}
    try:
        options = model.model_validate(values, context=context)
    except ValidationError as error:
        told = {key.removesuffix("_env") for key, _ in wrong}
        for problem in explain(error, model):
            option = problem.path[0] if problem.path else ""
            if option in named:
                problems.append(Located((kind, f"{option}_env"), named[str(option)]))
            elif option in variables and option not in told:
                text = f"the environment's variable {variables[str(option)]!r}: {problem.text}"
                problems.append(Located((kind, f"{option}_env"), text, of_variable=True))
            elif option not in told:
                problems.append(Located((kind, *problem.path), problem.text))
    if problems:
        return None, problems
    remember_variables(options, variables)
    return options, []
