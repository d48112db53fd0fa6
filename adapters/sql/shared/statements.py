"""The statements of a shared store, for PostgreSQL.

Q11  A row of MESSAGES is a message of a queue; it goes when it is acked. Nobody holds it if UNTIL is 0. Else the router
    HOLDER has leased it until then, by the clock of the database: FOR_GOOD is without an end. TAKE is a number of that
    lease alone, so that who comes too late settles nothing.
Q12  A lease counts as over once UNTIL has passed, or its HOLDER has no row in ROUTERS. HOLDER 0, which always has one,
    is that of branches: there TAKE has a minus sign, so that no token settles what they ack.
Q13  Whatever changes with a lease is in no index, and pages are filled to a part of their size: such an update stays in
    its page, and the index does not grow by it.
Q14  Of the messages of a group (MEMBER) only the first one in the table can be leased, unless it has expired or has
    reached the delivery limit: so while it is held, or waits, no other one is. One that another transaction is at
    (XMAX) holds its group, too: it may be leased just before it expires, which is asked once more with the row locked.
    Senders to a group come one after the other, each with its id, until their commits: no message comes before one that
    is leased.
Q15  A queue keeps its number for ever, though it is deleted: who sends at the same moment sends to a queue that is
    there anew.
Q16  A durable subscription is a queue of its own, with a number that is never used again, and no name: SUBSCRIPTIONS in
    the row of its topic says that it is there. A message for a topic is a row for each of these, all with one id.
Q17  Who sends to a topic holds its row FOR SHARE until the commit, and reads SUBSCRIPTIONS as they are then; who
    changes them changes that row. So what is sent comes before a change or after it: nothing is left to one that has
    ended, and a retroactive one misses nothing.
Q18  What has expired is taken for all subscriptions of a topic at once, if none holds it: their rows become one, with
    the number of the topic.
Q19  Whether its group is held is asked of each message by itself in a queue that had no groups when it was looked for
    (heads.py). In others only of the first ones: of what is behind NEAR, the groups that come often are looked up once,
    and their messages cost no more than others to be passed. Who takes the last messages goes the same way backwards.
Q20  When a subscription ends its row goes, and its messages are nobody's: no row has their number, and nothing but what
    removes them finds them. Who ended it does, in pages; or who opens the store next, or finds that router gone.
Q21  A router whose row is not seen may have entered since the statement began: what was leased meanwhile is looked at
    anew, but its router with the eyes of the beginning. So routers enter one after the other, and one is gone only if
    its number is not above the last that is seen.
Q22  Where statistics say that MESSAGES is empty, as they do of queues that are quick, the planner takes any scan for as
    good as any other, and may read all that has been sent since, and all that is gone and kept for some transaction.
    So a row that another one names is looked up by what can be neither hashed nor merged (AT: `ANY` of one queue, and
    both bounds of the id; a comparison of rows would be read to the end of the queue); what only asks whether there is
    one is fenced off (OFFSET 0); and of what has a group the first are found by the order, not farther than AHEAD.
"""

from __future__ import annotations

import itertools
import re
from typing import Final

FOR_GOOD: Final = (1 << 63) - 1
"""The value of UNTIL for a lease without an end."""
_CLOCK: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
"""The clock of the database: milliseconds since the epoch."""
NOW: Final = f"(SELECT {_CLOCK})"
"""The same, asked once each time that a statement names it."""
_TOOK: Final = "(date_part('epoch', clock_timestamp() - statement_timestamp()) * 1000000)::bigint"
"""How long (us) the server has been at a statement when it comes to a row."""
_UNTIL: Final = f"coalesce({NOW} + nullif(%s::bigint, 0), {FOR_GOOD})"
"""The value of UNTIL for a lease of so many milliseconds; 0: without an end."""
FIELDS: Final = "id, queue, take, deliveries, sent, expires, priority, messageid, headers, content"
"""The columns of which messages are made."""
_T_FIELDS: Final = ", ".join(f"t.{name}" for name in FIELDS.split(", "))
_COPIED: Final = "id, expires, sent, priority, messageid, member, headers, content"
"""Those that are the same for all subscriptions."""
_M_COPIED: Final = ", ".join(f"m.{name}" for name in _COPIED.split(", "))

_ENTERED: Final = 1 << 62
"""What SEEN of the row 0 of ROUTERS is above the number of the router that has entered last (Q21)."""
_LOST: Final = (
    f"(m.holder <= (SELECT z.seen - {_ENTERED} FROM {{p}}shared_routers z WHERE z.number = 0) "
    "AND NOT EXISTS (SELECT 1 FROM {p}shared_routers r WHERE r.number = m.holder))"
)
_FREE: Final = f"(m.until < {NOW} OR {_LOST})"
_AT: Final = "{row}.queue = ANY(ARRAY[{place}.queue]) AND {row}.id >= {place}.id AND {row}.id <= {place}.id"
"""A row is at a place that another one names (Q22)."""
_LEASED: Final = f"{_AT.format(row='m', place='a')} AND m.take = a.take AND NOT {_FREE}"

_MARK: Final = "WITH me AS (UPDATE {p}shared_connections SET last = %s WHERE number = %s RETURNING 1)"
"""What a statement begins with that changes something: rule D1."""
_LATER: Final = _MARK.replace("RETURNING 1", "RETURNING set_config('synchronous_commit', 'off', true)")
"""For one of which nothing is lost with the server: what was leased is free again then."""
_NUMBERED: Final = (
    "WITH there AS (SELECT 1 FROM {p}shared_messages), me AS (UPDATE {p}shared_connections SET last = %s, "
    "ids = ARRAY[nextval({ids})] WHERE number = %s RETURNING ids[1] AS id)"
)
"""For a send, whose id is known that way too. Nothing reads THERE: it has the table be said to be missing, and not its
sequence."""
_ALL_NUMBERED: Final = (
    "WITH there AS (SELECT 1 FROM {p}shared_messages), me AS (UPDATE {p}shared_connections c SET last = a.last, "
    "ids = ARRAY(SELECT nextval({ids}) FROM generate_series(1, a.count)) FROM (SELECT %s::bigint AS last, "
    "%s::bigint AS number, %s::bigint AS count) AS a WHERE c.number = a.number RETURNING ids)"
)
"""For so many sends at once."""
_ALL_SENT: Final = (
    f"{_ALL_NUMBERED}, new AS (INSERT INTO {{p}}shared_messages "
    "(id, sent, due, expires, queue, priority, messageid, member, headers, content) "
    f"SELECT a.id, {NOW}, {{same}}, headers, content FROM me, "
    "unnest(me.ids, {each}%s::bytea[], %s::bytea[]) WITH ORDINALITY AS a (id, {names}headers, content, place) "
    "ORDER BY place) SELECT ids, ARRAY(SELECT w.queue FROM {p}shared_waiting w WHERE w.queue = ANY(%s)) FROM me"
)
"""Their end. Each array costs a part of what its row does: what is the same for all is told once."""
_AWAITED: Final = "EXISTS (SELECT 1 FROM {p}shared_waiting w WHERE w.queue = m.queue)"


def _filled(text: str, **values: str) -> str:
    """Return a part of a statement with values for some of what it leaves open."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


_LIVE: Final = f"(m.expires = 0 OR m.expires > {NOW}) AND m.deliveries + {{late}} < {{limit}}"
"""It has neither expired nor reached the delivery limit."""
_READY: Final = f"m.queue = {{queue}} AND m.id >= {{first}} AND {_FREE} AND m.due <= {NOW} AND {_LIVE}"
"""What can be leased from an id on (Q12), unless its group is held."""

_NEAR: Final = 100
_SAMPLE: Final = 20_000
_AHEAD: Final = 1000
_OFTEN: Final = 3
"""So many messages of groups are asked for one by one (Q19), if the first AHEAD have as many. Of SAMPLE messages behind
them the groups are looked up first to which more than OFTEN belong."""
_OF_GROUP: Final = (
    "FROM {p}shared_messages g WHERE g.queue = {of}.queue AND g.member = {of}.member "
    f"AND ({_LIVE.replace('m.', 'g.')} OR NOT {_FREE.replace('m.', 'g.')} OR g.xmax <> 0)"
)
"""What keeps others of a group from being leased, if it comes before them (Q14)."""
_LET: Final = f"NOT EXISTS (SELECT 1 {_filled(_OF_GROUP, of='m')} AND g.id < m.id)"
"""The group of a message is not held."""
_ALONE: Final = (
    f"NOT EXISTS (SELECT 1 {_filled(_OF_GROUP, of='m')} AND g.id <> m.id "
    f"AND (g.id < m.id OR NOT {_FREE.replace('m.', 'g.')}))"
)
"""Nor by one behind it, which may have been leased meanwhile."""
_GROUPS: Final = (
    ", ahead AS (SELECT id, member FROM {p}shared_messages WHERE queue = {queue} AND id >= {first} "
    f"ORDER BY id LIMIT {_AHEAD}), near AS (SELECT coalesce((SELECT id FROM ahead WHERE member IS NOT NULL "
    f"ORDER BY id OFFSET {_NEAR} LIMIT 1), (SELECT max(id) FROM ahead)) AS id), "
    "busy AS MATERIALIZED (SELECT s.member, (SELECT g.id "
    f"{_filled(_OF_GROUP, of='s')} ORDER BY g.id LIMIT 1) AS first FROM (SELECT queue, member FROM "
    f"{{p}}shared_messages WHERE queue = {{queue}} AND id > (SELECT id FROM near) ORDER BY id LIMIT {_SAMPLE}) s "
    f"WHERE s.member IS NOT NULL GROUP BY s.queue, s.member HAVING count(*) > {_OFTEN})"
)
_LET_OF_GROUPS: Final = (
    f"CASE WHEN m.id <= (SELECT id FROM near) OR m.member NOT IN (SELECT member FROM busy) THEN {_LET} "
    "ELSE m.id IN (SELECT first FROM busy) END"
)
"""The same in a queue that has groups."""
_BACKWARDS: Final = {
    "ORDER BY m.id LIMIT": "ORDER BY m.id DESC LIMIT",
    "ORDER BY id ": "ORDER BY id DESC ",
    "max(id)": "min(id)",
    "id > (SELECT id FROM near)": "id < (SELECT id FROM near)",
    "id <= (SELECT id FROM near)": "id >= (SELECT id FROM near)",
}
"""What makes a statement that takes the first messages take the last ones. The first of a group stays its first."""

_INTO: Final = (
    "INSERT INTO {p}shared_messages AS m (id, queue, messageid, due, expires, sent, priority, member, headers, content)"
)
_GIVEN: Final = f"%s, %s, {NOW}, %s, %s::text, %s::bytea, %s::bytea"
"""The columns of a message from DUE on, as parameters."""
_SUBSCRIBERS: Final = (
    "topic AS MATERIALIZED (SELECT q.number, q.subscriptions, ARRAY(SELECT w.queue FROM {p}shared_waiting w WHERE "
    "w.queue = ANY(q.subscriptions)) AS awaited FROM {p}shared_queues q WHERE q.number IN (SELECT queue FROM new) "
    "ORDER BY 1 FOR SHARE OF q)"
)
"""Topics, with the numbers of their subscriptions and of those that are waited for (Q17)."""
_OF_TOPIC: Final = "ANY(ARRAY(SELECT s.number FROM {p}shared_queues s WHERE s.topic = %s UNION ALL SELECT %s::integer))"
"""Where the messages of a topic are; it takes the topic's number twice."""
_OTHERS: Final = (
    "SELECT 1 FROM (SELECT os.number AS queue, m.id FROM {p}shared_queues os WHERE os.topic = s.topic OFFSET 0) a "
    f"JOIN {{p}}shared_messages o ON {_AT.format(row='o', place='a')} "
    f"WHERE o.queue < m.queue OR NOT {_FREE.replace('m.', 'o.')} OFFSET 0"
)

_ACK: Final = (
    "DELETE FROM {p}shared_messages m USING unnest(%s::integer[], %s::bigint[], %s::bigint[]) "
    f"AS a (queue, id, take) WHERE {_LEASED} RETURNING a.queue, a.id, a.take, m.member IS NOT NULL AS is_grouped"
)
_PAGE: Final = (
    "WITH page AS MATERIALIZED (SELECT m.queue, m.id FROM {p}shared_messages m WHERE m.queue = %s AND m.id > %s "
    "AND m.id <= %s{which} ORDER BY m.id LIMIT %s FOR UPDATE{skip}) DELETE FROM {p}shared_messages t USING page "
    f"WHERE {_AT.format(row='t', place='page')} RETURNING t.id"
)
_EACH: Final = (
    f"count(*) FILTER (WHERE NOT {_FREE}) AS leased, bool_and({_FREE} AND m.due > {NOW}) AS waits, "
    f"bool_or({_FREE} AND m.due <= {NOW}) AS ready"
)
"""How the subscriptions of a topic have a message."""

_NEW: Final = {
    "one": "SELECT id, %s::integer AS queue, %s::text AS messageid FROM me",
    **{
        how: "INSERT INTO {p}shared_ids (queue, messageid, id) SELECT %s, %s, id FROM me ON CONFLICT (queue, "
        f"messageid) DO {conflict} RETURNING queue, messageid, id"
        for how, conflict in (("named", "NOTHING"), ("requeued", "UPDATE SET id = EXCLUDED.id"))
    },
}
"""The id of one message, its queue or topic and its name; nothing for a duplicate."""

TABLES: Final = (
    "CREATE TABLE {p}shared_store (storeid varchar(32) PRIMARY KEY, version integer NOT NULL)",
    "CREATE TABLE {p}shared_queues (number integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
    "name text UNIQUE, declared boolean NOT NULL, subscriptions integer[] NOT NULL DEFAULT '{}', topic integer, "
    "client text, subscription text, selector text, nolocal boolean, CHECK ((name IS NULL) = (topic IS NOT NULL)))",
    "CREATE INDEX ON {p}shared_queues (topic) WHERE topic IS NOT NULL",
    "CREATE TABLE {p}shared_messages (id bigint GENERATED BY DEFAULT AS IDENTITY, until bigint NOT NULL DEFAULT 0, "
    "due bigint NOT NULL, expires bigint NOT NULL, sent bigint NOT NULL, queue integer NOT NULL, "
    "holder integer NOT NULL DEFAULT 0, take bigint NOT NULL DEFAULT 0, deliveries integer NOT NULL DEFAULT 0, "
    "priority integer NOT NULL, messageid text, member text, headers bytea, content bytea NOT NULL, "
    "PRIMARY KEY (queue, id)) "
    "WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, "
    "autovacuum_vacuum_insert_scale_factor = 0.2)",
    "CREATE INDEX ON {p}shared_messages (queue, member, id) WHERE member IS NOT NULL",
    "CREATE INDEX ON {p}shared_messages (expires) WHERE expires > 0",
    "CREATE INDEX ON {p}shared_messages (deliveries) WHERE deliveries > 0",
    "CREATE TABLE {p}shared_ids (queue integer NOT NULL, messageid text NOT NULL, id bigint NOT NULL, "
    "PRIMARY KEY (queue, messageid))",
    "CREATE INDEX ON {p}shared_ids (id)",
    "CREATE TABLE {p}shared_routers (number integer PRIMARY KEY, "
    "node varchar(32) NOT NULL, name text NOT NULL, seen bigint NOT NULL) WITH (fillfactor = 50)",
    f"INSERT INTO {{p}}shared_routers (number, node, name, seen) VALUES (0, '', 'branches', {_ENTERED})",
    "CREATE TABLE {p}shared_connections (number bigint PRIMARY KEY, last bigint NOT NULL, "
    "ids bigint[] NOT NULL DEFAULT '{}', "
    "router integer NOT NULL, made bigint NOT NULL) WITH (fillfactor = 50)",
    "CREATE UNLOGGED TABLE {p}shared_waiting (queue integer NOT NULL, router integer NOT NULL, "
    "PRIMARY KEY (queue, router))",
    "CREATE TABLE {p}shared_branches (xid varchar(64) PRIMARY KEY, router integer NOT NULL, content bytea NOT NULL)",
    "CREATE TABLE {p}shared_committed (xid varchar(64) PRIMARY KEY)",
)
"""What makes the tables; `{p}` is the prefix."""

_STATEMENTS: Final = {
    # Queues
    "queue": "SELECT number, declared FROM {p}shared_queues WHERE name = %s",
    "declare": "INSERT INTO {p}shared_queues AS q (name, declared) VALUES (%s, %s) ON CONFLICT (name) DO UPDATE "
    "SET declared = EXCLUDED.declared OR q.declared RETURNING number",
    "queues": "SELECT q.number, q.name FROM {p}shared_queues q WHERE q.name IS NOT NULL AND (q.declared OR EXISTS "
    "(SELECT 1 FROM {p}shared_messages m WHERE m.queue = q.number OFFSET 0))",
    "newer_queues": "SELECT q.number, q.name FROM {p}shared_queues q WHERE q.number > %s AND q.name IS NOT NULL "
    "AND (q.declared OR EXISTS (SELECT 1 FROM {p}shared_messages m WHERE m.queue = q.number OFFSET 0)) "
    "ORDER BY 1",
    "queue_of": "SELECT coalesce(q.name, t.name), q.client, q.subscription FROM {p}shared_queues q "
    "LEFT JOIN {p}shared_queues t ON t.number = q.topic WHERE q.number = %s",
    "undeclare": "UPDATE {p}shared_queues SET declared = false, subscriptions = '{}' WHERE number = %s",
    # Subscriptions (rule Q16)
    "subscriber": "SELECT s.number FROM {p}shared_queues t JOIN {p}shared_queues s ON s.topic = t.number "
    "WHERE t.name = %s AND s.client = %s AND s.subscription = %s",
    "subscriptions": "SELECT s.number, t.name, s.client, s.subscription, s.selector, s.nolocal FROM {p}shared_queues s "
    "JOIN {p}shared_queues t ON t.number = s.topic WHERE s.topic IS NOT NULL",
    "subscription": "SELECT client, subscription, selector, nolocal FROM {p}shared_queues WHERE topic = %s "
    "AND client = %s AND subscription = %s",
    "lock_topic": "SELECT number FROM {p}shared_queues WHERE name = %s FOR UPDATE",
    "subscribe": "WITH new AS (INSERT INTO {p}shared_queues (topic, client, subscription, selector, nolocal, declared) "
    "VALUES (%s, %s, %s, %s, %s, true) RETURNING number, topic) UPDATE {p}shared_queues q SET subscriptions = "
    "q.subscriptions || new.number FROM new WHERE q.number = new.topic RETURNING new.number",
    "copy_held": f"INSERT INTO {{p}}shared_messages ({_COPIED}, queue, due) SELECT DISTINCT ON (m.id) {_M_COPIED}, %s, "
    f"CASE WHEN m.deliveries > 0 THEN 0 ELSE m.due END FROM {{p}}shared_messages m WHERE m.queue = "
    "ANY(ARRAY(SELECT s.number FROM {p}shared_queues s WHERE s.topic = %s)) ORDER BY m.id, m.due",
    "unsubscribe": "WITH gone AS (DELETE FROM {p}shared_queues WHERE number = %s RETURNING number, topic) "
    "UPDATE {p}shared_queues q SET subscriptions = array_remove(q.subscriptions, gone.number) FROM gone "
    "WHERE q.number = gone.topic",
    "unsubscribe_all": "DELETE FROM {p}shared_queues WHERE topic = %s RETURNING number, client, subscription",
    # Sends: the order of the rows is that of the ids
    **{
        f"send_{how}": f"{_NUMBERED}, new AS ({new}) {_INTO} SELECT id, queue, messageid, {_GIVEN} FROM new "
        f"RETURNING id, {_AWAITED}"
        for how, new in _NEW.items()
    },
    **{
        f"send_leased_{how}": f"{_NUMBERED}, new AS ({new}) {_INTO[:-1]}, until, holder, take, deliveries) "
        f"SELECT id, queue, messageid, {_GIVEN}, {_UNTIL}, %s, %s, {{handed}} FROM new RETURNING id, false"
        for how, new in _NEW.items()
    },
    **{
        f"send_topic_{how}": f"{_NUMBERED}, new AS ({new}), {_SUBSCRIBERS}, stored AS ({_INTO} SELECT new.id, s, "
        f"new.messageid, {_GIVEN} FROM new, topic, unnest(topic.subscriptions) AS s) SELECT new.id, topic.awaited, "
        "topic.subscriptions FROM new, topic"
        for how, new in _NEW.items()
    },
    "send": _filled(
        _ALL_SENT,
        same="due, expires, queue, priority, messageid, member",
        each="%s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::text[], %s::text[], ",
        names="due, expires, queue, priority, messageid, member, ",
    ),
    "send_alike": _filled(
        _ALL_SENT, same="%s::bigint, %s::bigint, %s::integer, %s::integer, %s::text, %s::text", each="", names=""
    ),
    "lock_group": "SELECT pg_advisory_xact_lock(%s)",
    "send_topics": "WITH new AS MATERIALIZED (SELECT nextval({ids}) AS "
    "id, a.* FROM (SELECT * FROM unnest(%s::bigint[], %s::bigint[], %s::integer[], %s::integer[], %s::text[], "
    "%s::text[], %s::bytea[], %s::bytea[]) WITH ORDINALITY AS a (due, expires, queue, priority, messageid, member, "
    f"headers, content, place) ORDER BY place) a), {_SUBSCRIBERS}, stored AS ({_INTO} SELECT "
    f"new.id, s, new.messageid, new.due, new.expires, {NOW}, new.priority, new.member, new.headers, new.content "
    "FROM new JOIN topic ON topic.number = new.queue, unnest(topic.subscriptions) AS s ORDER BY new.id) SELECT new.id, "
    "topic.awaited, topic.subscriptions FROM new JOIN topic ON topic.number = new.queue ORDER BY new.id",
    "members": "SELECT subscriptions FROM {p}shared_queues WHERE number = %s",
    "id_of": "SELECT id FROM {p}shared_ids WHERE queue = %s AND messageid = %s",
    "forget_ids": "DELETE FROM {p}shared_ids WHERE id <= "
    "(SELECT id FROM {p}shared_ids ORDER BY id DESC OFFSET %s LIMIT 1)",
    # Leases
    "take": f"{{mark}}{{groups}}, ready AS MATERIALIZED (SELECT m.queue, m.id FROM {{p}}shared_messages m "
    f"WHERE {_READY} AND (m.member IS NULL OR {{lets}}) ORDER BY m.id LIMIT $9 FOR UPDATE SKIP LOCKED) "
    f"UPDATE {{p}}shared_messages AS t SET until = {_UNTIL.replace('%s', '$6')}, holder = $7, take = $8, "
    f"deliveries = deliveries + {{counted}} FROM ready WHERE {_AT.format(row='t', place='ready')} "
    f"AND (t.expires = 0 OR t.expires > {_CLOCK}) RETURNING {_T_FIELDS}, {_TOOK}",
    "has_groups": "SELECT EXISTS (SELECT 1 FROM {p}shared_messages WHERE queue = %s AND member IS NOT NULL)",
    "taken": f"SELECT {FIELDS}, 0::bigint FROM {{p}}shared_messages WHERE queue = %s AND id >= %s AND take = %s "
    "AND until > 0 ORDER BY id LIMIT %s",
    # What was sent so by a router that others have taken for dead is nobody's.
    "taken_by_router": f"SELECT {FIELDS} FROM {{p}}shared_messages m WHERE m.queue = %s AND m.id = %s AND m.take = %s "
    f"AND NOT {_LOST}",
    "taken_undelivered": " UNION ".join(
        f"SELECT {FIELDS} FROM {{p}}shared_messages WHERE {which} AND take = %s AND until > 0"
        for which in (f"expires > 0 AND expires <= {NOW}", "deliveries > 0 AND deliveries >= %s")
    ),
    "take_spent": "WITH spent AS MATERIALIZED (SELECT m.queue, m.id FROM {p}shared_messages m WHERE "
    f"{{spent}} AND {_FREE} LIMIT %s FOR UPDATE SKIP LOCKED) UPDATE {{p}}shared_messages AS t SET "
    f"until = {FOR_GOOD}, holder = %s, take = %s, deliveries = deliveries + {{counted}} FROM spent "
    f"WHERE {_AT.format(row='t', place='spent')} RETURNING {_T_FIELDS}",
    "take_expired_of_topics": "WITH first AS MATERIALIZED (SELECT m.id, s.topic FROM {p}shared_messages m "
    "CROSS JOIN LATERAL (SELECT q.topic FROM {p}shared_queues q WHERE q.number = m.queue AND q.topic IS NOT NULL "
    "OFFSET 0) s WHERE m.expires > 0 "
    f"AND m.expires <= {NOW} AND {_FREE} AND NOT EXISTS ({_OTHERS}) LIMIT %s FOR UPDATE OF m SKIP LOCKED), "
    "gone AS (DELETE FROM {p}shared_messages m USING (SELECT s.number AS queue, first.id, first.topic FROM first "
    "JOIN {p}shared_queues s ON s.topic = first.topic OFFSET 0) a WHERE "
    f"{_AT.format(row='m', place='a')} AND {_FREE} RETURNING {_M_COPIED}, "
    "m.deliveries + {counted} AS deliveries, a.topic) "
    f"INSERT INTO {{p}}shared_messages ({_COPIED}, deliveries, queue, due, until, holder, take) "
    f"SELECT DISTINCT ON (id) {_COPIED}, deliveries, topic, 0, {FOR_GOOD}, %s, %s FROM gone "
    f"ORDER BY id, deliveries DESC ON CONFLICT (queue, id) DO NOTHING RETURNING {FIELDS}",
    # Whether there may be any: most often there is none, and this changes nothing.
    "has_undelivered": "SELECT EXISTS (SELECT 1 FROM {p}shared_messages m WHERE m.expires > 0 "
    f"AND m.expires <= {NOW} AND {_FREE} OFFSET 0) OR EXISTS (SELECT 1 FROM {{p}}shared_messages m WHERE "
    f"m.deliveries > 0 AND m.deliveries >= %s - 1 AND m.deliveries + {{late}} >= %s AND {_FREE} OFFSET 0)",
    "take_again": f"UPDATE {{p}}shared_messages AS m SET until = {_UNTIL}, holder = %s, take = %s "
    f"WHERE m.queue = %s AND m.id = %s AND {_FREE} AND (m.member IS NULL OR {_ALONE}) RETURNING {FIELDS}",
    "held": f"SELECT {FIELDS} FROM {{p}}shared_messages m WHERE m.queue = %s AND m.id = %s AND m.take = %s "
    f"AND NOT {_FREE}",
    "ack_one": f"{_MARK} DELETE FROM {{p}}shared_messages m WHERE m.queue = (SELECT %s::integer FROM me) AND m.id = %s "
    f"AND m.take = %s AND NOT {_FREE} RETURNING m.id, m.member IS NOT NULL",
    "ack": _ACK,
    "ack_all": f"{_MARK}, gone AS ({_ACK.replace('WHERE', 'WHERE EXISTS (SELECT 1 FROM me) AND', 1)}) SELECT "
    "array_agg(CASE WHEN is_grouped THEN queue ELSE 0 END), 1 / (count(*) = %s)::integer FROM gone",
    "release": "UPDATE {p}shared_messages AS m SET until = 0, deliveries = m.deliveries + %s, "
    "due = CASE WHEN a.delay = 0 "
    f"THEN 0 ELSE {NOW} + a.delay END FROM unnest(%s::integer[], %s::bigint[], %s::bigint[], %s::bigint[]) "
    f"AS a (queue, id, take, delay) WHERE {_LEASED} RETURNING a.queue, a.id, a.take",
    "hold": f"UPDATE {{p}}shared_messages AS m SET until = {_UNTIL}, holder = %s, take = m.take * %s FROM "
    "unnest(%s::integer[], %s::bigint[], %s::bigint[]) AS a (queue, id, take) "
    f"WHERE {_LEASED} RETURNING a.queue, a.id, a.take",
    # Looking
    "ids_after": "SELECT id FROM {p}shared_messages WHERE queue = %s AND id > %s ORDER BY id LIMIT %s",
    "find": f"SELECT {FIELDS} FROM {{p}}shared_messages WHERE queue = %s AND id = %s",
    "ids_after_of_topic": "SELECT DISTINCT x.id FROM unnest(ARRAY(SELECT s.number FROM {p}shared_queues s WHERE "
    "s.topic = %s UNION ALL SELECT %s::integer)) AS q (queue), (SELECT %s::bigint AS after, %s::bigint AS most) g, "
    "LATERAL (SELECT m.id FROM {p}shared_messages m WHERE m.queue = q.queue AND m.id > g.after ORDER BY m.id "
    "LIMIT g.most) x ORDER BY 1",
    "find_of_topic": f"SELECT {FIELDS} FROM {{p}}shared_messages WHERE queue = {_OF_TOPIC} AND id = %s LIMIT 1",
    "free_ids_after": f"SELECT m.id FROM {{p}}shared_messages m WHERE m.queue = %s AND m.id > %s AND {_FREE} "
    "ORDER BY m.id LIMIT %s",
    "find_free": f"SELECT {FIELDS} FROM {{p}}shared_messages m WHERE m.queue = %s AND m.id = %s AND {_FREE}",
    "gone": "SELECT count(*) FROM unnest(%s::bigint[]) AS a (id) WHERE NOT EXISTS (SELECT 1 FROM unnest(%s::integer[]) "
    "AS q (queue), LATERAL (SELECT 1 FROM {p}shared_messages m WHERE m.queue = q.queue AND m.id = a.id OFFSET 0) AS x)",
    "depth": "SELECT count(*) FROM {p}shared_messages WHERE queue = %s",
    "amount": "SELECT count(m.id), coalesce(sum(octet_length(content) + coalesce(octet_length(headers), 0)), 0), "
    "q.declared FROM {p}shared_queues q LEFT JOIN {p}shared_messages m ON m.queue = q.number WHERE q.number = %s "
    "GROUP BY q.declared",
    "amount_of_topic": "SELECT count(*), coalesce(sum(x.size), 0), (SELECT declared FROM {p}shared_queues "
    "WHERE number = %s) FROM (SELECT max(octet_length(content) + coalesce(octet_length(headers), 0)) AS size "
    "FROM {p}shared_messages WHERE queue = ANY(ARRAY(SELECT number FROM {p}shared_queues WHERE topic = %s)) "
    "GROUP BY id) x",
    "depth_of_topic": f"SELECT count(DISTINCT id) FROM {{p}}shared_messages WHERE queue = {_OF_TOPIC}",
    "counts": f"SELECT count(*) FILTER (WHERE {_FREE} AND m.due <= {NOW}), count(*) FILTER (WHERE NOT {_FREE}), "
    f"count(*) FILTER (WHERE {_FREE} AND m.due > {NOW}), {NOW} - (array_agg(m.sent ORDER BY m.id) "
    f"FILTER (WHERE {_FREE} AND m.due <= {NOW}))[1] FROM {{p}}shared_messages m WHERE m.queue = %s",
    "counts_of_topic": "SELECT count(*), coalesce(sum(x.leased), 0)::bigint, count(*) FILTER (WHERE x.waits), "
    f"{NOW} - min(x.sent) FILTER (WHERE x.ready) FROM (SELECT min(m.sent) AS sent, {_EACH} FROM {{p}}shared_messages m "
    f"WHERE m.queue = {_OF_TOPIC} GROUP BY m.id) x",
    "stats": f"SELECT q.number, q.name, count(m.id), count(m.id) FILTER (WHERE NOT {_FREE}), "
    f"count(m.id) FILTER (WHERE {_FREE} AND m.due > {NOW}) FROM {{p}}shared_queues q LEFT JOIN {{p}}shared_messages m "
    "ON q.number = m.queue GROUP BY q.number HAVING q.declared OR count(m.id) > 0",
    "stats_of_topics": "SELECT t.name, count(*), count(*) FILTER (WHERE x.waits) FROM (SELECT s.topic, m.id, "
    f"{_EACH} FROM {{p}}shared_queues s JOIN {{p}}shared_messages m ON m.queue = s.number WHERE s.topic IS NOT NULL "
    "GROUP BY s.topic, m.id) x JOIN {p}shared_queues t ON t.number = x.topic GROUP BY t.name",
    "orphans": "WITH RECURSIVE q AS (SELECT min(queue) AS number FROM {p}shared_messages UNION ALL SELECT (SELECT "
    "min(m.queue) FROM {p}shared_messages m WHERE m.queue > q.number) FROM q WHERE q.number IS NOT NULL) SELECT number "
    "FROM q WHERE number NOT IN (SELECT number FROM {p}shared_queues)",
    "wrong_topics": "SELECT q.name FROM {p}shared_queues q WHERE q.name IS NOT NULL AND q.subscriptions <> "
    "ARRAY(SELECT s.number FROM {p}shared_queues s WHERE s.topic = q.number ORDER BY 1)",
    "purge": _filled(_PAGE, which=f" AND {_FREE}", skip=" SKIP LOCKED"),
    "delete": _filled(_PAGE, which="", skip=""),
    "first_live": "SELECT coalesce((SELECT id FROM {p}shared_messages WHERE queue = %s AND id >= %s ORDER BY id "
    "LIMIT 1), pg_sequence_last_value({ids}), 0)",
    "highest_in": "SELECT max(id) FROM {p}shared_messages WHERE queue = %s",
    "delete_ids": "DELETE FROM {p}shared_ids WHERE queue = %s",
    "highest": "SELECT coalesce(max((SELECT max(m.id) FROM {p}shared_messages m WHERE m.queue = q.number)), 0) "
    "FROM {p}shared_queues q",
    # Routers, and who waits where
    "enter": "WITH entered AS (UPDATE {p}shared_routers SET seen = seen + 1 WHERE number = 0 RETURNING seen) "
    f"INSERT INTO {{p}}shared_routers (number, node, name, seen) SELECT seen - {_ENTERED}, %s::text, %s::text, {NOW} "
    "FROM entered RETURNING number, seen",
    "enter_anew": "DELETE FROM {p}shared_routers WHERE node = %s",
    # With it, when the one was seen that was longest not seen. It need not wait for the disk: it is said again.
    "seen": f"UPDATE {{p}}shared_routers AS r SET seen = {NOW} WHERE r.number = %s AND r.node = %s RETURNING r.seen, "
    "(SELECT coalesce(min(o.seen), r.seen) FROM {p}shared_routers o WHERE o.number <> r.number), "
    "set_config('synchronous_commit', 'off', true)",
    "leave": "DELETE FROM {p}shared_routers WHERE number = %s",
    "bury": f"DELETE FROM {{p}}shared_routers WHERE seen < {NOW} - %s RETURNING name",
    "wait": "INSERT INTO {p}shared_waiting (queue, router) VALUES (%s, %s) ON CONFLICT DO NOTHING",
    "wake": "WITH gone AS (DELETE FROM {p}shared_waiting WHERE queue = ANY(%s) RETURNING queue) "
    "SELECT pg_notify(%s, string_agg(DISTINCT queue::text, ',')) FROM gone HAVING count(*) > 0",
    "notify": "SELECT pg_notify(%s, %s)",
    "size_of_waiting": "SELECT pg_relation_size('{p}shared_waiting')",
    "lock_waiting": "LOCK TABLE {p}shared_waiting IN ACCESS EXCLUSIVE MODE NOWAIT",
    "empty_waiting": "TRUNCATE {p}shared_waiting",
    "ready": "SELECT w.queue FROM unnest(%s::integer[], %s::bigint[]) AS w (queue, first) WHERE EXISTS "
    f"(SELECT 1 FROM {{p}}shared_messages m WHERE {_filled(_READY, queue='w.queue', first='w.first')} OFFSET 0)",
    # Transactions
    "prepare": "INSERT INTO {p}shared_branches (xid, router, content) VALUES (%s, %s, %s)",
    "branch": "SELECT content FROM {p}shared_branches WHERE xid = %s FOR UPDATE",
    "drop_branch": "DELETE FROM {p}shared_branches WHERE xid = %s",
    "branches": "SELECT xid, content, router = %s OR NOT EXISTS (SELECT 1 FROM {p}shared_routers r WHERE r.number = "
    "router) FROM {p}shared_branches ORDER BY xid",
    "commit_branch": "INSERT INTO {p}shared_committed (xid) VALUES (%s)",
    "committed": "SELECT xid FROM {p}shared_committed ORDER BY xid DESC LIMIT %s",
    "has_committed": "SELECT 1 FROM {p}shared_committed WHERE xid = %s",
    "forget": "DELETE FROM {p}shared_committed WHERE xid = ANY(%s)",
    "begin": "BEGIN; UPDATE {p}shared_connections SET last = {token} WHERE number = {number}",
    "connection": "WITH old AS (DELETE FROM {p}shared_connections WHERE number = %s) "
    f"INSERT INTO {{p}}shared_connections (number, last, router, made) VALUES (%s, 0, %s, {NOW})",
    "last": "SELECT last, ids FROM {p}shared_connections WHERE number = %s",
    "disconnect": "DELETE FROM {p}shared_connections WHERE number = %s RETURNING last, ids",
    "forget_connections": "DELETE FROM {p}shared_connections c WHERE "
    f"c.made < {NOW} - 86400000 AND NOT EXISTS (SELECT 1 FROM {{p}}shared_routers r WHERE r.number = c.router)",
}


class Statements(dict[str, str]):
    """The statements of the tables under one prefix, by name, with parameters in libpq's form."""

    def __init__(self, prefix: str, count_on_receive: bool, ids: str = "0") -> None:
        """`ids`: the sequence of ids, as SQL; to look for it in each statement costs as much as half a send.
        `count_on_receive`: each lease is counted when it begins. So it has to be where one is all that there may be:
        what ran out and was not counted is in no index."""
        self.prefix = prefix
        # A lease that has run out counts as a delivery, unless it was counted when it began.
        late = "0" if count_on_receive else "(until > 0)::integer"
        mark = _MARK if count_on_receive else _LATER
        # The subscription may have ended (Q20), or this router been taken for dead.
        there = (
            "(SELECT s.number FROM me, {p}shared_queues s, {p}shared_routers r WHERE s.number = $3 AND r.number = $7)"
        )
        take = _filled(_STATEMENTS["take"], queue=there, first="$4", limit="$5")
        statements = {
            **_STATEMENTS,
            "take": _filled(take, groups="", lets=_LET, limit="$5"),
            "take_grouped": _filled(take, groups=_GROUPS, lets=_LET_OF_GROUPS, queue="$3", first="$4", limit="$5"),
        }
        for name in ("take", "take_grouped", "taken"):
            statements[f"{name}_newest"] = _backwards(statements[name])
        counted = "1" if count_on_receive else late
        handed = str(int(count_on_receive))
        given = {"mark": mark, "counted": counted, "handed": handed, "limit": "%s", "p": prefix, "ids": ids}
        said = {name: _filled(text, **given) for name, text in statements.items()}
        spent = said.pop("take_spent")
        # What a subscription has left that has ended is nobody's.
        is_queue, exists = (
            f"EXISTS (SELECT 1 FROM {prefix}shared_queues s WHERE s.number = m.queue{which} OFFSET 0)"
            for which in (" AND s.topic IS NULL", "")
        )
        said["take_expired"] = _filled(spent, spent=f"m.expires > 0 AND m.expires <= {NOW} AND {is_queue}")
        said["take_undeliverable"] = _filled(
            spent, spent=f"m.deliveries > 0 AND m.deliveries + {{late}} >= %s AND {exists}"
        )
        super().__init__({name: _numbered(_filled(text, late=late)) for name, text in said.items()})
        self.marked: Final = frozenset(name for name, text in self.items() if " me AS (" in text)
        """Statements whose first two parameters are a number of the caller's and that of its connection."""


def _backwards(text: str) -> str:
    """Return the same that begins with the last message."""
    for forwards, backwards in _BACKWARDS.items():
        text = text.replace(forwards, backwards)
    return text


def _numbered(text: str) -> str:
    """Return a statement with $1, $2 and so on for its parameters."""
    numbers = itertools.count(1)
    return re.sub("%s", lambda _: f"${next(numbers)}", text)
