"""`anabranch queues`: the queues of a data directory, and what is in them."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ...policies.config import Config
from ...policies.names.destination import Destination, Kind
from ...policies.text import human_bytes
from .directory import on_directory, opened
from .messages import printable
from .output import echo_json, echo_table, json_option, working

if TYPE_CHECKING:
    from ..api.consumer import Consumer
    from ..router import Router


@click.command()
@on_directory()
@json_option
def command(config: Config, as_json: bool) -> None:
    """List the queues, and what is in them.

    `ready` is what a receiver would get, `leased` what a transaction has claimed that waits for its outcome, `delayed`
    what waits for its time, and `dead` how many dead letters come from there. `oldest` is how long ago the message was
    sent that is received next. `bytes` are those of the messages, without bodies that are kept apart. Durable
    subscriptions of topics are listed too, as TOPIC NAME, with their topic's bytes.

    No other process may have the directory open; nothing is changed.

    \b
    Example:
      anabranch queues data
      anabranch queues -c stores.yaml --json
    """
    with opened(config) as router:
        with working("Counting dead letters"):
            rows = list(_rows(router))
        directory = router.config.directory
    if as_json:
        echo_json({"directory": str(directory), "queues": rows})
    elif not rows:
        click.echo(f"{directory} holds no queues yet.")
    else:
        _print(rows)


def _rows(router: Router) -> Iterator[dict[str, Any]]:
    dead = _dead_letters(router)
    for destination in router.destinations():
        if destination.kind is Kind.QUEUE:
            row = _row(router, router.queue(destination), destination, dead[destination, None])
            if router.exists(destination):  # one that somebody only waited at is gone once its store is open
                yield row
        elif destination.kind is Kind.TOPIC:
            for subscriber in router.topic(destination).subscriptions():
                known = subscriber.subscription
                row = _row(router, subscriber, destination, dead[destination, known.key])
                yield {**row, "subscription": known.name, "client_id": known.client_id}


def _row(router: Router, consumer: Consumer, destination: Destination, dead: int) -> dict[str, Any]:
    from ...adapters.core.migration.copying import amount

    counts = consumer.counts()
    return {
        "queue": str(destination), "ready": counts.ready, "leased": counts.leased, "delayed": counts.delayed,
        "dead": dead, "oldest_ready_seconds": counts.oldest_ready_seconds,
        "bytes": router._registry.for_held(destination, lambda store: amount(store, destination).bytes, 0),
    }  # fmt: skip


def _dead_letters(router: Router) -> Counter[tuple[Destination, Any]]:
    """Return the dead letters by where they come from: each dead-letter queue is walked once."""
    from ..api.dead_letter import dead_letter_of, dead_letter_queue

    found: Counter[tuple[Destination, Any]] = Counter()
    queues: dict[Destination, None] = {}
    for destination in router.destinations():
        pattern = router._registry.option_for(destination, "dead_letter")
        if pattern is not None:
            queues[dead_letter_queue(pattern, destination)] = None
    for queue in queues:
        for message in router.queue(queue).browse() if router.exists(queue) else ():
            letter = dead_letter_of(message)
            if letter is not None and letter.source != queue:
                found[letter.source, letter.subscription] += 1
    return found


def _print(rows: list[dict[str, Any]]) -> None:
    from ...policies.text import human_age

    table: list[tuple[str, ...]] = [("queue", "ready", "leased", "delayed", "dead", "oldest", "bytes")]
    for row in rows:
        name = row["queue"].removeprefix(Kind.QUEUE.scheme)
        if "subscription" in row:
            client = f"{row['client_id']}/" if row["client_id"] else ""
            name = f"{row['queue']} {client}{row['subscription']}"
        age = row["oldest_ready_seconds"]
        counts = (f"{row[key]:,}" for key in ("ready", "leased", "delayed", "dead"))
        table.append((printable(name), *counts, "-" if age is None else human_age(age), human_bytes(row["bytes"])))
    if sys.stdout.isatty():  # elsewhere names are whole
        others = sum(2 + max(len(row[column]) for row in table) for column in range(1, len(table[0])))
        room = max(shutil.get_terminal_size().columns - others, 12)
        table = [(_shortened(name, room), *more) for name, *more in table]
    echo_table(table)


def _shortened(name: str, room: int) -> str:
    """Shorten a text to its beginning and its end."""
    return name if len(name) <= room else f"{name[: room // 2 - 1]}...{name[len(name) - room + room // 2 + 2 :]}"
