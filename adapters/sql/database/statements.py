"""Every statement of a store by its name, so that a configuration can give another for it.

    statements:
      update.delivered: "update ${schema-prefix}MESSAGES set DELIVERYCOUNT = :count where ID = :message"

A statement that is given takes the parameters that ours takes, all of them, and a query gives its columns in our order.
`${schema-prefix}` stands for the option; `${messages}`, `${xalog}` and so on for a table's whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Executable,
    Table,
    and_,
    bindparam,
    case,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.dialects import sqlite

from ....policies.config.options import SqlOptions
from ....policies.config.problems import did_you_mean
from ....policies.errors import ConfigError
from ....policies.names.destination import Kind
from . import dialects
from .schema import TABLES, Schema, schema

p = bindparam

_DIALECT: Final = sqlite.dialect()
"""A dialect that knows all that is ours; the parameters are those of any."""
_VARIABLE: Final = re.compile(r"\$\{([^}]*)\}")


def _insert(table: Table) -> Executable:
    return insert(table).values({column: p(column.name, type_=column.type) for column in table.c})


def _within(ids: ColumnElement[int]) -> ColumnElement[bool]:
    """Return the condition that ids lie between two, both included."""
    return and_(ids >= p("first"), ids <= p("last"))


def _reading(s: Schema) -> dict[str, Executable]:
    m = s.messages.c
    place = (m.id, m.priority, m.expirationtime, m.size, m.parts, m.deliverycount)
    row = (*place, m.sentat, m.messageid, m.headers)  # columns.py knows this order
    number = func.abs(m.destination)  # below 0 it waits (S7)
    small = case((m.size <= p("inline"), m.content), else_=None).label("small")
    there = m.destination == p("destination")
    in_all = _of(m.destination, "destination")
    of_priority = m.priority == p("priority")
    unacked = ~exists().where(s.acks.c.durable == p("durable"), s.acks.c.id == m.id)

    def page(*conditions: ColumnElement[bool]) -> Executable:
        behind = m.id > p("after")
        return select(*row, small).where(there, *conditions, behind).order_by(m.id).limit(p("most"))

    def with_waiting(*conditions: ColumnElement[bool]) -> Executable:
        """Return a page of messages, those that wait too, as of one moment. Between two statements a message could
        begin to wait, or come free, and be in neither."""
        apart, behind = m.destination == p("apart"), m.id > p("after")
        pages = [
            select(*row, small).where(where, *conditions, behind).order_by(m.id).limit(p("most")).subquery()
            for where in (there, apart)
        ]
        both = union_all(*(select(one) for one in pages)).subquery()
        return select(both).order_by(both.c[0]).limit(p("most"))

    later = and_(m.expirationtime >= p("after"), or_(m.expirationtime > p("after"), m.id > p("after_id")))
    counts = (m.priority, func.count(), func.sum(m.size), func.max(m.id))
    in_range = and_(_of(m.destination, "topic"), _within(m.id))
    waits = m.due > 0
    r = s.redeliveries.c
    there_still = exists().where(s.durables.c.number == s.acks.c.durable, s.durables.c.destination > 0)
    recipients = exists().where(s.durables.c.number == s.acks.c.durable, s.durables.c.startid <= s.acks.c.id)
    dangling = ~exists().where(m.id == s.acks.c.id) | ~recipients
    no_message = ~exists().where(m.id == r.id) | ~exists().where(s.durables.c.number == r.durable)
    nowhere = ~exists().where(m.id == s.chunks.c.id) & ~exists().where(s.xalog.c.id == s.chunks.c.id)
    return {
        "select.orphans.acks": select(*s.acks.c).where(dangling).limit(p("most")),
        "select.orphans.redeliveries": select(r.durable, r.id).where(no_message).limit(p("most")),
        "select.orphans.chunks": select(s.chunks.c.id, s.chunks.c.part).where(nowhere).limit(p("most")),
        "select.finished": select(m.id)
        .where(
            exists().where(s.destinations.c.number == number, s.destinations.c.kind == Kind.TOPIC.value),
            ~_waits(s),
        )
        .order_by(m.id)
        .limit(p("most")),
        "select.message": select(*row, m.content).where(m.id == p("message")),
        "select.place": select(*place, number).where(m.id == p("message")),
        "select.place.durable": select(*place, number).where(m.id == p("message"), unacked),
        "select.keyed": select(*place, m.mapkey).where(there, m.mapkey.in_(p("keys", expanding=True))),
        "select.keys": select(*place, m.mapkey)
        .where(there, m.mapkey >= p("start"))
        .order_by(m.mapkey)
        .limit(p("most")),
        "select.keys.twice": select(m.destination, m.mapkey)
        .where(m.mapkey.is_not(None), m.destination > 0)
        .group_by(m.destination, m.mapkey)
        .having(func.count() > 1)
        .limit(p("most")),
        "select.chunks": select(s.chunks.c.content).where(s.chunks.c.id == p("message")).order_by(s.chunks.c.part),
        "select.messages": page(),
        "select.messages.priority": page(of_priority),
        "select.messages.durable": page(unacked),
        "select.messages.durable.priority": page(unacked, of_priority),
        "select.messages.waiting": with_waiting(),
        "select.messages.priority.waiting": with_waiting(of_priority),
        "select.messages.durable.waiting": with_waiting(unacked),
        "select.messages.durable.priority.waiting": with_waiting(unacked, of_priority),
        "select.expired": select(*place, number)
        .where(m.expirationtime > 0, m.expirationtime <= p("now"), later)
        .order_by(m.expirationtime, m.id)
        .limit(p("most")),
        "select.expiry": select(func.min(m.expirationtime)).where(m.expirationtime > 0),
        "select.limited": select(number, m.id)
        .where(m.deliverycount >= p("least"), m.id > p("after"))
        .order_by(m.id)
        .limit(p("most")),
        "select.limited.durable": select(r.durable, r.id)
        .where(r.deliverycount >= p("least"), r.durable == p("durable"), r.id > p("after"))
        .order_by(r.id)
        .limit(p("most")),
        "select.due": select(*place, number, m.due)
        .where(waits, m.due <= p("now"))
        .order_by(m.due, m.id)
        .limit(p("most")),
        "select.due.durable": select(r.durable, r.id, r.due)
        .where(r.due > 0, r.due <= p("now"))
        .order_by(r.due, r.id)
        .limit(p("most")),
        "select.next": select(func.min(m.due)).where(waits),
        "select.next.durable": select(func.min(r.due)).where(r.due > 0),
        "select.until": select(m.due).where(m.id == p("message"), waits),
        "select.until.durable": select(r.due).where(r.durable == p("durable"), r.id == p("message"), r.due > 0),
        "select.waiting": select(number, func.count()).where(waits).group_by(m.destination),
        "select.waiting.durables": select(r.durable, func.count()).where(r.due > 0).group_by(r.durable),
        "select.count.waiting": select(func.count()).where(m.destination == -_number(m.destination, "destination")),
        "select.count.waiting.durable": select(func.count()).where(
            m.destination == -_number(m.destination, "destination"), m.id >= p("start"), unacked
        ),
        "select.count.waits": select(func.count()).where(r.durable == p("durable"), r.due > 0),
        "select.redelivered": select(r.id, r.deliverycount, r.due).where(r.durable == p("durable"), _within(r.id)),
        "select.redelivered.durables": select(r.durable).distinct(),
        "select.counts": select(number, *counts).group_by(number, m.priority),
        "select.counts.destination": select(*counts).where(in_all).group_by(m.priority),
        "select.counts.range": select(*counts).where(in_range).group_by(m.priority),
        "select.counts.finished": select(*counts).where(in_range, ~_waits(s)).group_by(m.priority),
        "select.count.durable": select(func.count()).where(in_all, m.id >= p("start"), unacked),
        "select.last": select(func.max(m.id)),
        "select.acked": select(s.acks.c.durable).where(s.acks.c.id == p("message")),
        "select.acks": select(s.acks.c.id, func.count()).where(_within(s.acks.c.id), there_still).group_by(s.acks.c.id),
    }


def _number(column: ColumnElement[int], name: str) -> ColumnElement[int]:
    return p(name, type_=column.type)


def _of(column: ColumnElement[int], name: str) -> ColumnElement[bool]:
    """Return the condition that a message is of a destination, be it that it waits (S7)."""
    return column.in_([_number(column, name), -_number(column, name)])


def _waits(s: Schema) -> ColumnElement[bool]:
    """Return the condition that a topic's message is for a subscription that has yet to ack it."""
    m, acks, durables = s.messages.c, s.acks.c, s.durables.c
    acked = exists().where(acks.durable == durables.number, acks.id == m.id).correlate(s.durables, s.messages)
    of_topic = durables.destination == func.abs(m.destination)
    return exists().where(of_topic, durables.startid <= m.id, ~acked).correlate(s.messages)


def _writing(s: Schema) -> dict[str, Executable]:
    m, acks, durables = s.messages.c, s.acks.c, s.durables.c
    ended = select(durables.number).where(durables.destination == p("destination"))
    statements: dict[str, Executable] = {
        "insert.message": _insert(s.messages),
        "insert.chunk": _insert(s.chunks),
        "update.delivered": update(s.messages).where(m.id == p("message")).values(deliverycount=p("count")),
        "update.wait": update(s.messages)
        .where(m.id == p("message"), m.destination == p("number"))
        .values(destination=p("apart"), due=p("until")),
        "update.wait.longer": update(s.messages)
        .where(m.id == p("message"), m.destination == p("apart"))
        .values(due=p("until")),
        "update.wait.over": update(s.messages)
        .where(m.id == p("message"), m.destination == p("apart"))
        .values(destination=p("number"), due=None),
        "update.wait.durable": update(s.redeliveries)
        .where(s.redeliveries.c.durable == p("subscription"), s.redeliveries.c.id == p("message"))
        .values(due=p("until")),
        "update.waits.durable": update(s.redeliveries)
        .where(s.redeliveries.c.durable == p("subscription"), _within(s.redeliveries.c.id), s.redeliveries.c.due > 0)
        .values(due=None),
        "delete.message.waiting": delete(s.messages).where(m.id == p("message"), m.destination == p("apart")),
        "delete.redelivery": delete(s.redeliveries).where(
            s.redeliveries.c.durable == p("subscription"), s.redeliveries.c.id == p("message")
        ),
        "insert.destination": _insert(s.destinations),
        "delete.destination": delete(s.destinations).where(s.destinations.c.number == p("destination")),
        "update.destination.removed": update(s.destinations)
        .where(s.destinations.c.number == p("destination"))
        .values(kind=-1 - s.destinations.c.kind),
        "insert.durable": _insert(s.durables),
        "update.durable.ended": update(s.durables)
        .where(durables.number == p("subscription"))
        .values(destination=-durables.destination),
        "update.durables.ended": update(s.durables)
        .where(durables.destination == p("topic"))
        .values(destination=-durables.destination),
        "delete.durable": delete(s.durables).where(durables.number == p("subscription")),
        "delete.ended.acks": delete(s.acks).where(acks.durable.in_(ended)),
        "delete.ended.redeliveries": delete(s.redeliveries).where(s.redeliveries.c.durable.in_(ended)),
        "delete.ended": delete(s.durables).where(durables.destination == p("destination")),
        "delete.durable.acks": delete(s.acks).where(acks.durable == p("subscription"), _within(acks.id)),
        "delete.durable.redeliveries": delete(s.redeliveries).where(
            s.redeliveries.c.durable == p("subscription"),
            _within(s.redeliveries.c.id),
        ),
    }
    # A dead message takes what hangs on it along: one message, a range, or those that the last subscription has acked.
    in_range = and_(_of(m.destination, "topic"), _within(m.id))
    finished = and_(in_range, ~_waits(s))
    of_topic = select(durables.number).where(durables.destination == p("topic"))
    for what, table in (("chunks", s.chunks), ("acks", s.acks), ("redeliveries", s.redeliveries)):
        ids = table.c.id
        statements[f"delete.{what}"] = delete(table).where(ids == p("message"))
        statements[f"delete.range.{what}"] = delete(table).where(ids.in_(select(m.id).where(in_range)))
    statements["delete.message"] = delete(s.messages).where(m.id == p("message"))
    statements["delete.range.messages"] = delete(s.messages).where(in_range)
    statements["delete.finished.chunks"] = delete(s.chunks).where(s.chunks.c.id.in_(select(m.id).where(finished)))
    statements["delete.finished.messages"] = delete(s.messages).where(finished)
    # After the messages: what says that they are finished must not go before.
    for what, table in (("acks", s.acks), ("redeliveries", s.redeliveries)):
        orphan = ~exists().where(m.id == table.c.id)
        statements[f"delete.finished.{what}"] = delete(table).where(
            table.c.durable.in_(of_topic), _within(table.c.id), orphan
        )
    # An interrupted caller may do this twice: the second time must change nothing.
    unacked = ~exists().where(acks.durable == p("subscription"), acks.id == m.id)
    subscription = p("subscription", type_=acks.durable.type)
    has_ended = exists().where(durables.destination == -p("topic", type_=durables.destination.type))
    for name, which in (
        ("insert.ack", m.id == p("message")),
        ("insert.acks.range", in_range),
        ("insert.acks.unwanted", and_(has_ended, _of(m.destination, "topic"), ~_waits(s))),
    ):
        statements[name] = (
            insert(s.acks)
            .from_select(["durable", "id"], select(subscription, m.id).where(which, unacked))
            .execution_options(preserve_rowcount=True)
        )
    statements["insert.redelivery"] = insert(s.redeliveries).from_select(
        ["durable", "id", "deliverycount"],
        select(subscription, m.id, p("count", type_=s.redeliveries.c.deliverycount.type)).where(
            m.id == p("message"), unacked
        ),
    )
    return statements


def _keeping(s: Schema) -> dict[str, Executable]:
    """Return the statements that are not about messages: transactions, duplicates, the store itself."""
    x, d, store, large, o = s.xalog.c, s.duplicates.c, s.store.c, s.large.c, s.outbox.c
    heads = (o.number, o.caller)
    written = (*heads, func.sum(func.length(o.content)))
    return {
        "insert.xalog": _insert(s.xalog),
        "delete.xalog": delete(s.xalog).where(x.id == p("prepared")),
        "select.xalog": select(x.id, x.xid, x.content).order_by(x.xid),
        "insert.committed": _insert(s.committed),
        "delete.committed": delete(s.committed).where(s.committed.c.xid == p("transaction")),
        "select.committed": select(s.committed.c.xid).order_by(s.committed.c.xid),
        "insert.duplicate": _insert(s.duplicates),
        "delete.duplicates": delete(s.duplicates).where(d.number <= p("upto")),
        "delete.duplicates.destination": delete(s.duplicates).where(d.destination == p("topic")),
        "select.duplicates": select(d.number, d.destination, d.messageid, d.id).order_by(d.number),
        "insert.outbox": _insert(s.outbox),
        "delete.outbox": delete(s.outbox).where(o.number == p("number")),
        "select.outbox": select(*written)
        .where(o.number > p("after"))
        .group_by(*heads)
        .order_by(o.number)
        .limit(p("most")),
        "select.outbox.caller": select(*written)
        .where(o.caller == p("caller"), o.number > p("after"))
        .group_by(*heads)
        .order_by(o.number)
        .limit(p("most")),
        "select.outbox.rows": select(o.number, o.destination, o.id, o.durable, o.content)
        .where(o.caller == p("caller"), _within(o.number))
        .order_by(o.number, o.part),
        "select.destinations": select(s.destinations.c.number, s.destinations.c.kind, s.destinations.c.name),
        "select.durables": select(*s.durables.c).order_by(s.durables.c.number),
        "select.store": select(store.version, store.batch, store.lastid, store.lastnumber).where(
            store.storeid == p("owner")
        ),
        "insert.large": _insert(s.large),
        "delete.large": delete(s.large).where(large.bodyid == p("body"), _within(large.part)),
        "delete.large.part": delete(s.large).where(large.bodyid == p("body"), large.part == p("which")),
        "update.large.start": update(s.large)
        .where(large.bodyid == p("body"), large.part == 0)
        .values(content=p("start", type_=large.content.type)),
        "select.large": select(large.content).where(large.bodyid == p("body"), large.part == p("which")),
        "select.large.starts": select(large.bodyid, large.content).where(large.part == 0),
        "select.large.last": select(func.max(large.part)).where(large.bodyid == p("body")),
        "select.large.bodies": select(large.bodyid).distinct(),
        "select.store.locked": select(store.batch).where(store.storeid == p("owner")).with_for_update(),
        "update.store": update(s.store)
        .where(store.storeid == p("owner"), store.batch == p("before"))
        .values(batch=p("now"), lastid=p("last"), lastnumber=p("number")),
    }


def _leasing(s: Schema) -> dict[str, Executable]:
    """Return the statements of the lease, which all nodes have alike (lease.py)."""
    row, now = s.lease.c, dialects.now_ms()
    own = row.storeid == p("owner")
    return {
        "insert.lease": insert(s.lease).values(storeid=p("owner"), holder=None, expires=0),
        "select.lease": select(row.holder, row.expires - now).where(own),
        "update.lease.taken": update(s.lease)
        .where(own, or_(row.holder.is_(None), row.holder == p("node"), row.expires <= now))
        .values(holder=p("node"), expires=now + p("span")),
        "update.lease.renewed": update(s.lease)
        .where(own, row.holder == p("node"), row.expires > now)
        .values(expires=now + p("span")),
        "update.lease.released": update(s.lease).where(own, row.holder == p("node")).values(holder=None, expires=0),
        "update.store.taken": update(s.store).where(s.store.c.storeid == p("owner")).values(batch=s.store.c.batch + 1),
    }


@lru_cache(maxsize=64)
def _ours(tables: Schema) -> Mapping[str, Executable]:
    return {**_reading(tables), **_writing(tables), **_keeping(tables), **_leasing(tables)}


class Statements(Mapping[str, Executable]):
    """Each statement by its name, for one schema, with those that the configuration gives instead."""

    def __init__(self, tables: Schema, given: Mapping[str, str] | None = None) -> None:
        """Take our statements and those given. Raises ConfigError that says everything that is wrong with those
        given."""
        self.given: Final = frozenset(given or ())
        self._statements = dict(_ours(tables))
        problems: list[str] = []
        for name, written in (given or {}).items():
            problem, statement = _read(tables, self._statements, name, written)
            if statement is not None:
                self._statements[name] = statement
            problems += problem
        if problems:
            raise ConfigError(problems)

    def __getitem__(self, name: str) -> Executable:
        return self._statements[name]

    def __iter__(self) -> Any:
        return iter(self._statements)

    def __len__(self) -> int:
        return len(self._statements)


def parameters(statement: Executable) -> frozenset[str]:
    """Return the names of a statement's parameters."""
    binds = statement.compile(dialect=_DIALECT).binds  # type: ignore[attr-defined]
    return frozenset(name for name, bind in binds.items() if bind.required)


def variables(tables: Schema) -> dict[str, str]:
    """Return what each `${name}` stands for."""
    names = {name: getattr(tables, name).fullname for name in TABLES}
    return {"schema-prefix": tables.prefix, **names}


def substituted(tables: Schema, what: str, written: str) -> tuple[list[str], str]:
    """Return what is wrong with the variables of SQL that the configuration gives, and the SQL with their values.
    `what` names the SQL, for the errors."""
    values = variables(tables)
    unknown = sorted({name for name in _VARIABLE.findall(written) if name not in values})
    if unknown:
        listed = ", ".join(f"${{{name}}}" for name in unknown)
        there = ", ".join(f"${{{name}}}" for name in values)
        return [f"{what}: unknown variable {listed}; there are {there}"], ""
    return [], _VARIABLE.sub(lambda match: values[match[1]], written)


def keepalive_statement(options: SqlOptions) -> str:
    """Return the keepalive statement of the configuration, as the database gets it; empty: none is run. Raises
    ConfigError for what is wrong with its variables."""
    tables = schema(options.schema_prefix, options.table_names)
    problems, statement = substituted(tables, "keepalive_statement", options.keepalive_statement)
    if problems:
        raise ConfigError(problems)
    return statement


def _read(
    tables: Schema, ours: Mapping[str, Executable], name: str, written: str
) -> tuple[list[str], Executable | None]:
    """Return what is wrong with a statement that is given, and the statement."""
    if name not in ours:
        return [f"statements: there is no statement {name!r}; {did_you_mean(name, sorted(ours))}"], None
    wrong, sql = substituted(tables, f"statements: {name}", written)
    if wrong:
        return wrong, None
    statement = text(sql)
    expected, given = parameters(ours[name]), parameters(statement)
    problems = [
        *(f"statements: {name}: the parameter :{missing} is missing" for missing in sorted(expected - given)),
        *(
            f"statements: {name}: unknown parameter :{more}; it has {_list(expected)}"
            for more in sorted(given - expected)
        ),
    ]
    return problems, statement


def _list(names: Iterable[str]) -> str:
    return ", ".join(f":{name}" for name in sorted(names)) or "none"
