"""The tables of a store; docs/sql.md explains each column.

MESSAGES, XALOG and DURABLES with the columns that SwiftMQ's JDBC store has are the public schema; further columns and
tables are ours. All are small letters to SQLAlchemy, which is to say that no database minds the case.

S1  A row of MESSAGES is a message; it goes when it is dead. For a body longer than `chunk_size` CONTENT is null and
    PARTS says how many rows of CHUNKS hold it.
S2  A topic's message is for a subscription whose STARTID is not above the message's ID. It has a row in ACKS for each
    of these that has acked it, while another one has not.
S3  STORE.BATCH counts the transactions that have written; each says which one it is, so that two owners cannot both
    write, and that one whose COMMIT was cut off can be looked up.
S4  STORE.LASTID is the highest ID ever given out.
S5  Of a map's messages MAPKEY is the key, in UTF-8, and no two have the same; of all others it is null.
S6  PARTS is -1 where CONTENT says which body the message has, which is in LARGE: its row of part 0 says that it is
    whole.
S7  Of a message that waits for its time, for all, DUE says until when, and DESTINATION is its destination's number with
    a minus: so it is in nobody's way who looks for messages that are free. A message that waits for one subscription
    alone has DUE in REDELIVERIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import BigInteger, Column, Index, Integer, LargeBinary, MetaData, SmallInteger, String, Table, Text

from ....policies.errors import ConfigError

VERSION: Final = 3

TABLES: Final = (
    "messages", "chunks", "destinations", "durables", "acks", "redeliveries", "xalog", "committed", "duplicates",
    "outbox", "store", "lease", "large",
)  # fmt: skip

_Big: Final = BigInteger().with_variant(Integer, "sqlite")
"""An integer of 64 bits everywhere, for numbers of destinations too, since asking for one takes a number. SQLite makes
it the row's own number."""


def _key(name: str, kind: Any = _Big) -> Column[Any]:
    return Column(name, kind, primary_key=True, autoincrement=False)


def _column(name: str, kind: Any, nullable: bool = False) -> Column[Any]:
    return Column(name, kind, nullable=nullable)


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """The tables under one prefix and, where they are renamed, under their own names."""

    metadata: MetaData
    prefix: str
    """The prefix as it is written: `mq.` is a schema of the database, `mq_` the beginning of each name."""
    messages: Table
    chunks: Table
    destinations: Table
    durables: Table
    acks: Table
    redeliveries: Table
    xalog: Table
    committed: Table
    duplicates: Table
    outbox: Table
    store: Table
    lease: Table
    large: Table

    @property
    def tables(self) -> list[Table]:
        """Return all tables, those that are made first first."""
        return [getattr(self, name) for name in TABLES]


def schema(prefix: str = "", names: Mapping[str, str] | None = None) -> Schema:
    """Return the tables under a prefix that options have checked. `names` gives some of TABLES other names. Raises
    ConfigError."""
    renamed = {name.lower(): given.lower() for name, given in (names or {}).items()}
    unknown = sorted(renamed.keys() - set(TABLES))
    if unknown:
        raise ConfigError([f"table_names: there is no table {', '.join(unknown)}; there are: {', '.join(TABLES)}"])
    table_names = [renamed.get(name, name) for name in TABLES]
    twice = sorted({name for name in table_names if table_names.count(name) > 1})
    if twice:
        raise ConfigError([f"table_names: two tables would be called {', '.join(twice)}"])
    return _schema(prefix.lower(), tuple(sorted(renamed.items())))


@lru_cache(maxsize=64)
def _schema(prefix: str, names: tuple[tuple[str, str], ...]) -> Schema:
    owner, dot, start = prefix.rpartition(".")
    metadata = MetaData(schema=owner if dot else None)
    renamed = dict(names)

    def table(name: str, *columns: Column[Any]) -> Table:
        return Table(start + renamed.get(name, name), metadata, *columns)

    messages = table(
        "messages",
        _key("id"),
        _column("queuename", Text),
        _column("destination", BigInteger),
        _column("priority", Integer),
        _column("deliverycount", Integer),
        _column("expirationtime", BigInteger),
        _column("sentat", BigInteger),
        _column("size", BigInteger),
        _column("parts", Integer),
        _column("messageid", Text, nullable=True),
        _column("headers", LargeBinary, nullable=True),
        _column("content", LargeBinary, nullable=True),
        _column("mapkey", LargeBinary, nullable=True),
        _column("due", BigInteger, nullable=True),
    )
    Index(f"{messages.name}_place", messages.c.destination, messages.c.id)
    keyed = messages.c.mapkey.is_not(None)
    Index(
        f"{messages.name}_key", messages.c.destination, messages.c.mapkey,
        sqlite_where=keyed, postgresql_where=keyed,
    )  # fmt: skip
    expiring = messages.c.expirationtime > 0
    Index(
        f"{messages.name}_expiry", messages.c.expirationtime, messages.c.id,
        sqlite_where=expiring, postgresql_where=expiring,
    )  # fmt: skip
    waiting = messages.c.due > 0
    Index(f"{messages.name}_due", messages.c.due, messages.c.id, sqlite_where=waiting, postgresql_where=waiting)
    acks = table("acks", _key("durable", BigInteger), _key("id", BigInteger))
    Index(f"{acks.name}_message", acks.c.id)
    redeliveries = table(
        "redeliveries",
        _key("durable", BigInteger),
        _key("id", BigInteger),
        _column("deliverycount", Integer),
        _column("due", BigInteger, nullable=True),
    )
    Index(f"{redeliveries.name}_message", redeliveries.c.id)
    waiting = redeliveries.c.due > 0
    columns = redeliveries.c.due, redeliveries.c.id
    Index(f"{redeliveries.name}_due", *columns, sqlite_where=waiting, postgresql_where=waiting)
    outbox = table(
        "outbox",
        _key("number", BigInteger),
        _key("part", Integer),
        _column("caller", String(32)),
        _column("destination", Text),
        _column("id", BigInteger),
        _column("durable", BigInteger),
        _column("content", LargeBinary, nullable=True),
    )
    Index(f"{outbox.name}_caller", outbox.c.caller, outbox.c.number)
    return Schema(
        metadata=metadata,
        prefix=prefix,
        messages=messages,
        chunks=table("chunks", _key("id", BigInteger), _key("part", Integer), _column("content", LargeBinary)),
        destinations=table("destinations", _key("number"), _column("kind", SmallInteger), _column("name", Text)),
        durables=table(
            "durables",
            _key("number"),
            _column("clientid", Text),
            _column("durablename", Text),
            _column("topicname", Text),
            _column("selector", Text, nullable=True),
            _column("nolocal", SmallInteger),
            _column("destination", BigInteger),
            _column("startid", BigInteger),
        ),
        acks=acks,
        redeliveries=redeliveries,
        xalog=table("xalog", _key("id"), _column("xid", String(64)), _column("content", LargeBinary, nullable=True)),
        committed=table("committed", _key("xid", String(64))),
        duplicates=table(
            "duplicates",
            _key("number"),
            _column("destination", BigInteger),
            _column("messageid", Text),
            _column("id", BigInteger),
        ),
        outbox=outbox,
        store=table(
            "store",
            _key("storeid", String(32)),
            _column("version", Integer),
            _column("batch", BigInteger),
            _column("lastid", BigInteger),
            _column("lastnumber", BigInteger),
        ),
        lease=table(
            "lease",
            _key("storeid", String(32)),
            _column("holder", Text, nullable=True),
            _column("expires", BigInteger),
        ),
        large=table("large", _key("bodyid", String(32)), _key("part", Integer), _column("content", LargeBinary)),
    )


def priority_index(tables: Schema) -> Index:
    """Return the index that receiving by priority goes by, in stores that do. It is not among those that `schema`
    makes."""
    messages = tables.messages
    index = Index(f"{messages.name}_order", messages.c.destination, messages.c.priority, messages.c.id)
    messages.indexes.discard(index)  # else all tables that this process makes later would have it
    return index
