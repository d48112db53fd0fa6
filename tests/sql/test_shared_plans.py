"""How the server looks for what the statements of a shared store name, whatever its statistics say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest

from anabranch.adapters.core.messages import Outgoing

from ..contract.disk import A
from .shared import SharedDisk, SharedTables, shared_tables
from .test_shared_groups import asking, nodes

READ_ALL: Final = {"stats", "stats_of_topics", "orphans"}
"""Statements that read all queues."""
COMMANDS: Final = {"begin", "lock_waiting", "empty_waiting"}
"""Those that cannot be prepared."""


sets = pytest.fixture(shared_tables)


@pytest.mark.parametrize("count", [100, 30_000])
def test_rows_are_found_by_the_same_index_where_the_table_is_said_to_be_empty(
    tmp_path: Path, sets: SharedTables, count: int
) -> None:
    """Rule Q22: autovacuum says so of a queue that is quick, and millions may come before it looks again."""
    with SharedDisk(tmp_path, sets) as disk:
        store = disk.create()
        table = f"{store.options.schema_prefix}shared_messages"
        sets.run(
            [
                f"INSERT INTO {table} (due, sent, queue, priority, content, member, expires, deliveries) SELECT 0, 0, "
                "mod(n, 3), 4, '', CASE WHEN mod(n, 2) = 0 THEN 'g' || mod(n, 50) END, mod(n, 4), mod(n, 5) "
                f"FROM generate_series(1, {count}) AS n",
                f"ANALYZE {table}",
            ]
        )
        full = scans(store, table)
        sets.run([f"DELETE FROM {table}", f"ANALYZE {table}"])
        empty = scans(store, table)
        assert {name: empty[name] for name in full if name not in READ_ALL} == {
            name: found for name, found in full.items() if name not in READ_ALL
        }
        assert {name for name, found in empty.items() for *_, on in found if not on} == READ_ALL


TAKES: Final = {"take", "take_grouped", "take_newest", "take_grouped_newest"}


@pytest.mark.parametrize("name", [*sorted(TAKES), "ack", "ack_all", "release", "hold", "purge", "delete"])
def test_what_is_looked_up_is_not_read_with_the_rest_of_its_queue(
    tmp_path: Path, sets: SharedTables, name: str
) -> None:
    """Behind ten messages, some with a group, that are leased and settled."""
    with SharedDisk(tmp_path, sets) as disk:
        store: Any = disk.create()
        store.send_many(A, [Outgoing(b"", group="g" if number % 5 == 0 else None) for number in range(10)])
        number = store._queues.number(A)
        table = f"{store.options.schema_prefix}shared_messages"
        sets.run(
            [
                f"INSERT INTO {table} (due, expires, sent, queue, priority, content) "
                f"SELECT 0, 0, 0, {number}, 4, '' FROM generate_series(1, 30000)",
                f"ANALYZE {table}",
            ]
        )
        with asking(store, sets) as (cursor, statements, given):
            take = [*given[:-1], 10]
            if name in TAKES:
                asked: Any = take
            else:
                rows = cursor.execute(statements["take"], take).fetchall()
                assert len(rows) >= 8
                columns = [[number] * len(rows), [row[0] for row in rows], [row[2] for row in rows]]
                asked = {
                    "ack": columns,
                    "ack_all": [1, 1, *columns, len(rows)],
                    "release": [0, *columns, [0] * len(rows)],
                    "hold": [0, 0, 1, *columns],
                    "purge": [number, 0, max(row[0] for row in rows) + 10, 10],
                    "delete": [number, 0, max(row[0] for row in rows), 10],
                }[name]
            (((plan,),),) = cursor.execute(
                f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statements[name]}", asked
            ).fetchall()
        assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 300


def scans(store: Any, table: str) -> dict[str, list[tuple[str, str, str]]]:
    """How each statement looks into MESSAGES: by which index, and on what condition."""
    found = {}
    with store._database.engine.connect() as connection:
        cursor = psycopg.RawCursor(connection.connection.driver_connection)
        for name, text in store._database._statements.items():
            if name in COMMANDS:
                continue
            given = ", ".join(["NULL"] * max(map(int, re.findall(r"\$(\d+)", text)), default=0))
            cursor.execute(f"PREPARE asked AS {text}")
            (((plan,),),) = cursor.execute(f"EXPLAIN (FORMAT JSON) EXECUTE asked{given and f'({given})'}").fetchall()
            cursor.execute("DEALLOCATE asked")
            scans = [
                one for one in nodes(plan["Plan"]) if one.get("Relation Name") == table and "Scan" in one["Node Type"]
            ]
            found[name] = sorted((one["Alias"], one["Index Name"], condition(one)) for one in scans)
    return found


def condition(scan: dict[str, Any]) -> str:
    """That of the index, without numbers of parameters, and that there is one of which the least is looked for."""
    return re.sub(r"\$\d+|( AND)? \(*\w+ IS NOT NULL|[()]", "", " " + scan.get("Index Cond", "")).strip()
