"""The options of each kind of store of ours, and of transactions: one frozen model each.

They live here and not with the adapters, so that checking a file imports none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, Unpack, cast
from urllib.parse import parse_qsl, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    SecretStr,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..names.destination import Destination, Kind, dead_letter_name
from ..units import GIB, KIB, MIB
from .adapters import OURS, load_adapter
from .durability import OnCorruption, Sync
from .fields import AT_LEAST_ONE, Directory, Duration, FileMode, Options, PatternText, Positive, Redelivery, Size
from .limits import SOME, LimitOptions
from .option_values import JournalValues, MemoryValues, SqlValues, TransactionValues, UsageValues
from .problems import Located, fold
from .when_full import WhenFull


def _dead_letter(pattern: str) -> str:
    queue = Destination.parse(dead_letter_name(pattern, "x"))
    if queue.kind is not Kind.QUEUE:
        raise ValueError("expected a queue, such as `dlq`: in a topic without subscriptions dead letters would be gone")
    return pattern


_IDENTIFIER = r"[A-Za-z_][A-Za-z0-9_]{0,47}"


def _prefix(text: str) -> str:
    if not re.fullmatch(rf"({_IDENTIFIER}\.)?({_IDENTIFIER})?", text):
        raise ValueError("expected a prefix of names, `mq_`, or a schema and a dot, `mq.`: of letters, digits and _")
    return text


def _identifier(text: str) -> str:
    if not re.fullmatch(_IDENTIFIER, text):
        raise ValueError("expected a name: letters, digits and _, the first no digit, at most 48 of them")
    return text


class StoreOptions(Options):
    """The options of every kind of store of ours; a third party's model may begin from them too."""

    priorities: Annotated[bool, Field(strict=True)] = False
    """Whether messages of a higher priority are received before those of a lower one. Else it is only kept."""
    dead_letter: Annotated[str, AfterValidator(_dead_letter)] | None = None
    """The queue for messages that are not delivered any more; `{name}` in it stands for the name of the destination
    they come from. None: they are deleted, and counted; the log warns of all but the expired."""
    max_deliveries: Positive | None = None
    """A message that was given back so often is not delivered again but put into `dead_letter`, which must be given."""
    count_deliveries: Literal["on_return", "on_receive"] = "on_return"
    """When a delivery is counted: when the message comes back, or before it is handed out (`on_receive`), which costs a
    write each time. Then a process that dies while it holds a message is counted too, and `max_deliveries` stops what
    kills it."""
    redelivery: Redelivery | None = None
    """How long a message that was given back waits, while others pass it: `delay`, `multiplier`, `max_delay`, `jitter`.
    None: it is free at once."""
    duplicate_window: Annotated[int, Field(strict=True, ge=0, le=10_000_000)] = 10_000
    """How many of the latest message ids are remembered to store a repeated send once. 0: none."""
    max_leases: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 100_000
    """How many messages may be received and not yet acked or released at one time."""
    lease_timeout: Annotated[float, Duration(0.001)] | None = None
    """How long a received message may be held before it is free again, unless its receiver acks, releases or extends
    it, or has said `lease=`. None: as long as its process lives."""
    message_bytes_max: Annotated[int, Size(1)] = 100 * MIB
    """The largest message, headers included. A larger one is refused before anything is written."""
    large_message_size: Annotated[int, Size(1024)] = MIB
    """A body that is read from a file and is longer is kept apart from its message, and may have any size. So it is
    beyond `message_bytes_max`, where that is less."""
    max_messages: Positive | None = None
    """The most messages that the store holds. None: no limit."""
    min_free_disk: Annotated[int, Size(1)] | None = None
    """So much stays free on the disk that the store is on; what all stores on it are about to write counts as used.
    None: until the disk is full."""
    when_full: WhenFull = WhenFull.FAIL
    """The end of a send that goes beyond a limit: `fail`, `block`, `drop_new` or `drop_old`."""
    block_timeout: Annotated[float, Duration(0.0, 86400)] = 30.0
    """The longest that a send waits for room under `when_full: block`; then it fails."""
    limits: tuple[LimitOptions, ...] = ()
    """Limits of destinations, by pattern."""
    nonpersistent_max_messages: Positive | None = None
    """The most messages with `persistent=False` that the store holds. None: no limit beside that of all messages."""
    nonpersistent_max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of them that it holds, swapped ones included. None: likewise."""
    nonpersistent_memory: Annotated[int, Size(64 * KIB)] = 64 * MIB
    """The most bytes that they take in memory, what the store needs to find them included; others are swapped."""
    roll_over_size: Annotated[int, Size(64 * KIB, GIB)] = 16 * MIB
    """Bytes of one swap file; it is deleted when all messages in it are gone."""
    file_mode: Annotated[int, FileMode()] | None = None
    """The mode of files that the store makes, in octal. None: as the whole file says."""

    @field_validator("max_deliveries")
    @classmethod
    def _spent_ones_go_somewhere(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value is not None and info.data.get("dead_letter", "") is None:
            raise ValueError("expected a `dead_letter` queue beside it, such as `dead_letter: dlq`")
        return value


# The journal ---------------------------------------------------------------------------------------------------------


class JournalOptions(StoreOptions):
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
    """The most bytes of a `send_many` that are written as one batch; a longer one is several. A segment's size limits
    it too."""
    pool_files: Annotated[int, Field(strict=True, ge=-1, le=10_000)] = 2
    """How many released segment files are kept for use again instead of being deleted. -1: all."""
    min_files: Annotated[int, Field(strict=True, ge=0, le=10_000)] = 0
    """So many segment files there are at least, in use or kept for use: they are made ahead, in the background."""
    compact_live_percent: Annotated[int, Field(strict=True, ge=0, le=95)] = 50
    """A segment whose messages have died but for at most this part of its bytes, header included, is compacted: what
    lives in it is copied, and it is released. 0: none is. At most 95."""
    compact_min_segments: Annotated[int, Field(strict=True, ge=1, le=10_000)] = 4
    """So many such segments are compacted together; fewer wait for more."""
    on_corruption: OnCorruption = OnCorruption.REFUSE
    """The way to treat a damaged journal. `refuse` changes nothing and raises CorruptionError. `salvage` goes on with
    all that can be read and writes a report of what is lost."""
    archive_directory: Directory | None = None
    """Released segments are moved here instead of being used again or deleted."""
    archive_max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes that a store's archived segments take; the oldest are deleted. None: no limit."""
    archive_max_age: Annotated[float, Duration(0.001)] | None = None
    """Archived segments that were last written so long ago are deleted. None: never."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds. None: until the disk is full."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[JournalValues]) -> None: ...

    @model_validator(mode="after")
    def _limits_have_an_archive(self) -> Self:
        for name in ("archive_max_bytes", "archive_max_age"):
            if getattr(self, name) is not None and self.archive_directory is None:
                raise ValueError(f"{name} limits nothing without archive_directory; give that too, or drop it")
        return self


# SQL -----------------------------------------------------------------------------------------------------------------


_SCHEME: Final = re.compile(r"([A-Za-z0-9_+]+)://")
_TESTED: Final = ("sqlite", "sqlite+pysqlite", "postgresql+psycopg")
"""Databases and drivers, as a URL begins with them."""


def _untested(scheme: str, allowed: bool) -> str:
    """Return the problem with a URL that begins so; `allowed`: whether `untested_database` is set. The rest of the URL,
    which may hold a password, is not told."""
    backend = scheme.partition("+")[0].lower()
    if scheme in _TESTED or (allowed and backend != "postgres"):
        return ""
    anyway = "set `untested_database: true` to use it all the same; nothing is promised then"
    if backend in ("postgres", "postgresql"):
        step = f"write postgresql+psycopg:// in place of {scheme}://, and the rest of the url as it is"
        return f"{step}; PostgreSQL is tested with that driver alone{f'. Or {anyway}' if backend != 'postgres' else ''}"
    return (
        f"nobody has tested {scheme}://; SQLite and PostgreSQL (postgresql+psycopg://) are tested. Use one of them, or "
        f"{anyway}"
    )


_OF_SHARED: Final = frozenset(
    ("count_deliveries", "creator", "dead_letter", "duplicate_window", "file_mode", "keepalive_interval",
     "keepalive_statement", "lease_timeout", "max_deliveries", "message_bytes_max", "outcome_timeout", "password",
     "pool_idle_timeout", "pool_max", "pool_min", "pool_timeout", "redelivery", "response_timeout", "router_timeout",
     "schema_prefix", "shared", "url", "username")
)  # fmt: skip
"""The options that mean something with `shared`."""
_PLAIN_QUERY: Final = frozenset(
    ("application_name", "connect_timeout", "dbname", "host", "hostaddr", "options", "port", "service", "sslmode",
     "target_session_attrs", "user")
)  # fmt: skip
"""Parameters of a URL, of libpq's, that hold no secret."""
_FUNCTION: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*[.:][^\W\d]\w*")


def _is_engine(value: object) -> bool:
    """Tell whether the value is an Engine of SQLAlchemy's, which need not be installed here."""
    return hasattr(value, "raw_connection") and hasattr(value, "url")


def _creator(value: object) -> object:
    if isinstance(value, str) and _FUNCTION.fullmatch(value):
        return value
    if not isinstance(value, str) and (_is_engine(value) or callable(value)):
        return value
    raise ValueError(
        f"{value!r} is no name of a function, package.module:function; from Python a function or an Engine will do"
    )


Creator = Annotated[Any, AfterValidator(_creator), WithJsonSchema({"type": "string"})]
"""A maker of connections; see SqlOptions."""


def is_shared(options: object) -> bool:
    """Return whether these are the options of tables that any number of routers use at once."""
    return isinstance(options, SqlOptions) and options.shared


def refused_to_clients(store: str) -> str:
    """Return what a client of a shared directory cannot do in a store that is itself shared, and the next step."""
    return (
        f"a client of a directory opened with shared=True cannot send to or ack in the shared store {store!r} in a "
        "transaction; give each process a directory of its own"
    )


class SqlOptions(StoreOptions):
    """Tables of a database, by SQLAlchemy: SQLite in the store's own directory, or a server such as PostgreSQL."""

    untested_database: Annotated[bool, Field(strict=True)] = False
    """Whether a database or a driver may be used that nobody has tested, and of which nothing is promised. Tested are
    SQLite, and PostgreSQL by the driver psycopg."""
    url: SecretStr | None = None
    """SQLAlchemy's URL of the database, such as postgresql+psycopg://user@host/name. None: SQLite in the store's
    directory. Never shown, since it may hold a password."""
    username: str | None = None
    """The role, instead of that in the URL; `username_env: NAME` takes it from the environment."""
    password: SecretStr | None = None
    """The password, where the URL has none; best given as `password_env: NAME`."""
    creator: Creator | None = None
    """The maker of connections instead of the URL, which then says no more than database and driver. It is the name of
    a function without arguments, `package.module:function`, that returns a new connection of the driver. From Python it
    may be the function, or an Engine of SQLAlchemy's, which brings its URL along."""
    pool_min: Annotated[int, Field(strict=True, ge=0, le=1000)] = 5
    """How many connections to a server are kept open. SQLite has no use for this and the options of the pool below."""
    pool_max: Annotated[int, Field(strict=True, ge=-1, le=10_000)] = -1
    """The most connections at one time; who needs one more waits. At least 2 and not less than pool_min, or -1: no
    limit."""
    pool_timeout: Annotated[float, Duration(0.001, 3600)] = 30.0
    """How long an operation waits for a connection when all are in use; then it fails."""
    pool_idle_timeout: Annotated[float, Duration(0.01)] = 120.0
    """A connection beyond pool_min that nobody has needed for so long is closed."""
    keepalive_interval: Annotated[float, Duration(0.01)] = 60.0
    """On a connection that nobody has needed for so long keepalive_statement is run, and again and again after it."""
    keepalive_statement: str = "SELECT 1"
    """The statement that keeps a connection alive; a connection that does not answer is dropped. It may have the
    variables that `statements` has. Empty: nothing."""
    response_timeout: Annotated[float, Duration(0.1)] = 120.0
    """An operation that the server has not answered for so long fails: its connection is cut off."""
    lease_expiration: Annotated[float, Duration(0.5, 86400)] | None = None
    """For a database that several nodes may own in turn: how long a node that has gone silent keeps it, by the clock of
    the database. None: no lease, one node alone."""
    lease_renewal: Annotated[float, Duration(0.05, 86400)] | None = None
    """How often the owner renews its lease. None: four times in lease_expiration. At most half of that."""
    lease_wait: Annotated[float, Duration(0.0)] = 0.0
    """How long open waits for a lease that another node holds; then it fails and names that node. 0: it fails at
    once."""
    shared: Annotated[bool, Field(strict=True)] = False
    """Whether any number of routers use the store at the same time, on any machines. For PostgreSQL. With it some
    options of other stores mean nothing, and are refused."""
    router_timeout: Annotated[float, Duration(0.5, 3600)] = 5.0
    """How long a router of a shared store may be silent before the others take it for dead: what it held is then free
    again."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds. None: no limit."""
    schema_prefix: Annotated[str, AfterValidator(_prefix)] = ""
    """The text before the name of each table: `mq_`, or with a dot behind it a schema of the database, `mq.`. Small and
    capital letters are the same."""
    table_names: Mapping[str, Annotated[str, AfterValidator(_identifier)]] = {}
    """Other names for tables: `{messages: JMS_MESSAGES}`."""
    create_tables: Annotated[bool, Field(strict=True)] = True
    """Whether tables that are missing are created when the store is. Else they must be there: `anabranch schema print`
    shows how."""
    statements: Mapping[str, str] = {}
    """Other SQL for some of the statements, by name: docs/sql.md lists them with their parameters."""
    chunk_size: Annotated[int, Size(KIB, 256 * MIB)] = MIB
    """Longer bodies are stored in several rows, each of so many bytes."""
    sync_period: Annotated[float, Duration(0.0, 10.0)] = 0.0
    """How long a database transaction waits for more work to be done in it. 0: what was asked for while the one before
    was under way is done together."""
    batch_operations_max: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = 1000
    """The most sends and acks that share one database transaction."""
    outcome_timeout: Annotated[float, Duration(0.0, 3600)] = 5.0
    """How long a call whose COMMIT was cut off waits for the database to tell whether it took effect; then it fails
    with OutcomeUnknownError, and the store finds out later."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[SqlValues]) -> None: ...

    def may_be_shown(self, option: str) -> bool:
        """Tell whether the option is a URL without a password, with nothing behind its `?` that may be one."""
        if option != "url" or self.url is None:
            return False
        url = urlsplit(self.url.get_secret_value())
        return url.password is None and _PLAIN_QUERY.issuperset(dict(parse_qsl(url.query, keep_blank_values=True)))

    @model_validator(mode="before")
    @classmethod
    def _url_of_an_engine(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("url") is None and _is_engine(values.get("creator")):
            return {**values, "url": values["creator"].url.render_as_string(hide_password=False)}
        return values

    @model_validator(mode="after")
    def _creator_has_a_url(self) -> Self:
        if self.creator is not None and self.url is None:
            raise ValueError("creator needs a url that says which database it connects to; give that too")
        return self

    @model_validator(mode="after")
    def _users_are_of_servers(self) -> Self:
        if self._is_sqlite():
            for name in ("username", "password"):
                if getattr(self, name) is not None:
                    text = "SQLite has no users; leave it out, or give the `url` of a server"
                    raise fold([Located((name,), text)])
        return self

    def _is_sqlite(self) -> bool:
        scheme = _SCHEME.match(self.url.get_secret_value()) if self.url is not None else None
        return self.url is None or (scheme is not None and scheme[1] in ("sqlite", "sqlite+pysqlite"))

    @model_validator(mode="after")
    def _is_tested(self) -> Self:
        scheme = _SCHEME.match(self.url.get_secret_value()) if self.url is not None else None
        problem = _untested(scheme[1], self.untested_database) if scheme is not None else ""
        if problem:
            raise fold([Located(("url",), problem)])
        return self

    @model_validator(mode="after")
    def _shared_ones_are_simple(self) -> Self:
        if not self.shared:
            if "router_timeout" in self.model_fields_set:
                raise ValueError("router_timeout means nothing without `shared: true`; give that too, or drop it")
            return self
        scheme = _SCHEME.match(self.url.get_secret_value()) if self.url is not None else None
        # What does not begin as a URL may be the name of a variable that holds one.
        if self.url is None or (scheme is not None and scheme[1] != "postgresql+psycopg"):
            text = (
                "a store with `shared: true` is in a database of PostgreSQL: write postgresql+psycopg://USER@HOST/NAME"
            )
            raise fold([Located(("url",), text)])
        unfit = [name for name in type(self).model_fields if name in self.model_fields_set - _OF_SHARED]
        if unfit:
            raise fold([Located((name,), "a shared store has no such option; leave it out") for name in unfit])
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        if self.pool_max != -1 and self.pool_max < max(2, self.pool_min):
            raise ValueError(
                f"pool_max {self.pool_max} is too few: give at least 2, and not less than pool_min, which is "
                f"{self.pool_min}; or -1 for no limit"
            )
        if self.lease_renewal is not None and self.lease_expiration is None:
            raise ValueError("lease_renewal means nothing without lease_expiration; give that too")
        if self.lease_renewal is not None and self.lease_renewal > (self.lease_expiration or 0.0) / 2:
            raise ValueError("lease_renewal is more than half of lease_expiration: renew more often")
        if self.min_free_disk is not None and self.url is not None:
            text = "the disk of a database is not this store's: leave `url` out, for SQLite in its directory, or this"
            raise fold([Located(("min_free_disk",), text)])
        return self


# Memory --------------------------------------------------------------------------------------------------------------


class MemoryOptions(StoreOptions):
    """Memory alone: nothing survives a restart. Beyond `max_bytes` messages lie in swap files."""

    max_bytes: Annotated[int, Size(64 * KIB)] = 64 * MIB
    """The most bytes that messages take in memory, what the store needs to find them included; others are swapped."""
    max_stored_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that the store holds, swapped ones included. None: until the disk is full."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[MemoryValues]) -> None: ...


# Usage log -----------------------------------------------------------------------------------------------------------


class UsageOptions(Options):
    """The usage log, which records who is sent what and when it is acked, for `anabranch recommend`. It holds no
    bodies."""

    directory: Directory | None = None
    """Where it keeps its files, if not in usage/ in the data directory."""
    destinations: Annotated[tuple[PatternText, ...], SOME, AT_LEAST_ONE] = (">",)
    """Patterns of the destinations that are recorded."""
    sample: Annotated[float, Field(strict=True, gt=0.0, le=1.0)] = 1.0
    """The part of the messages that is recorded: each with its send and all its acks, or not at all."""
    max_bytes: Annotated[int, Size(MIB)] = 256 * MIB
    """The most bytes that its files take together; the oldest are removed."""
    flush_interval: Annotated[float, Duration(0.05, 60.0)] = 1.0
    """Seconds between two writes: what a crash loses at most."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[UsageValues]) -> None: ...


class TransactionOptions(Options):
    """The options of all transactions of a router."""

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

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[TransactionValues]) -> None: ...

    @field_validator("sync", mode="before")  # or a mistyped one would be told of periodic
    @classmethod
    def _always_or_never(cls, value: object) -> object:
        if value not in (Sync.ALWAYS, Sync.NEVER, Sync.ALWAYS.value, Sync.NEVER.value):
            raise ValueError("expected 'always' or 'never'")
        return value


# By kind -------------------------------------------------------------------------------------------------------------


MODELS: Final[Mapping[str, type[BaseModel]]] = MappingProxyType(
    dict(zip(OURS, (JournalOptions, SqlOptions, MemoryOptions), strict=True))
)


def options_model(kind: str) -> type[BaseModel]:
    """Return the model of a known kind's options. The adapter is imported, unless it is one of ours. Raises ValueError
    and MissingExtraError."""
    return MODELS.get(kind) or cast("type[BaseModel]", getattr(load_adapter(kind), "options_model", Options))
