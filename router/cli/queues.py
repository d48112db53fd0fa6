"""Commands over whole destinations: `queues`, `move`, `requeue`, `purge` and `delete`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import click

from ...adapters.core.messages import Message
from ...adapters.core.store_types import StoreStats
from ...policies.config import Config
from ...policies.errors import NoRouteError
from ...policies.names.destination import Destination, Kind
from ...policies.text import count_of, human_age, human_bytes, printable
from ..api.consumer import Consumer
from ..api.dead_letter import dead_letter_of
from ..api.topic import Subscriber
from ..router import Router, inspection_of
from .directory import on_directory, opened
from .output import echo_json, echo_result, echo_table, echo_warnings, json_option, shortened, working
from .showing import (
    confirm,
    destination_in,
    queue_in,
    queue_named,
    require_known,
    require_lasting,
    yes_option,
)


@click.command()
@on_directory()
@json_option
@click.pass_context
def queues_command(ctx: click.Context, config: Config, as_json: bool) -> None:
    """List the queues, and what is in them.

    `ready` counts the messages that a receiver would get. `leased` counts those that a receiver holds, and has yet to
    ack, release or reject, or that a transaction has claimed. `delayed` counts scheduled ones, and `dead` the dead
    letters that come from there. `oldest` is how long ago the message was sent that is received next. `bytes` are those
    of the messages, without bodies that are kept apart. `sync` is when a journal forces its work to the disk. Durable
    subscriptions of topics are listed too, as TOPIC NAME,
    with their topic's bytes.

    What lies in a store that cannot be used is left out: a warning names the store, and the exit code is 1.

    Nothing is changed.

    \b
    Example:
      anabranch queues data
      anabranch queues -c stores.yaml --json
    """
    with opened(config) as router:
        stores = router.stats().stores
        failed = {name: store for name, store in stores.items() if store.failed is not None}
        with working("Counting dead letters"):
            rows = list(_rows(router, stores))
        directory = router.config.directory
    if as_json:
        reasons = {name: store.failed for name, store in failed.items()}
        echo_json({"directory": str(directory), "queues": rows, "failed": reasons})
    elif rows:
        _print(rows)
    elif not failed:
        click.echo(f"{directory} holds no queues yet.")
    if failed:
        echo_warnings(
            f"store {name} cannot be used; {count_of(len(store.destinations), 'destination')} left out: {store.failed}"
            for name, store in failed.items()
        )
        ctx.exit(1)


def _rows(router: Router, stores: Mapping[str, StoreStats]) -> Iterator[dict[str, Any]]:
    failed = [name for name, store in stores.items() if store.failed is not None]
    left_out = {destination for name in failed for destination in stores[name].destinations}
    syncs = {one: router.config._sync_of(name) for name, store in stores.items() for one in store.destinations}
    dead = inspection_of(router).dead_letters(failed)
    for destination in router.destinations():
        if destination in left_out:
            continue
        if destination.kind is Kind.QUEUE:
            row = row_of(router, router.queue(destination), dead[destination, None])
            if router.exists(destination):  # one that somebody only waited at is gone once its store is open
                yield row | {"sync": syncs.get(destination, "")}
        elif destination.kind is Kind.TOPIC:
            for subscriber in router.topic(destination).subscriptions():
                row = row_of(router, subscriber, dead[destination, subscriber.subscription.key])
                yield row | {"sync": syncs.get(destination, "")}


def row_of(router: Router, consumer: Consumer, dead: int) -> dict[str, Any]:
    """Return the figures of a queue, or of a durable subscription. `dead`: its dead letters, for which another queue is
    walked."""
    counts = consumer.counts()
    row = {
        "queue": str(consumer.destination), "ready": counts.ready, "leased": counts.leased, "delayed": counts.delayed,
        "dead": dead, "oldest_ready_seconds": counts.oldest_ready_seconds,
        "bytes": inspection_of(router).bytes_of(consumer.destination),
    }  # fmt: skip
    if isinstance(consumer, Subscriber):
        row |= {"subscription": consumer.subscription.name, "client_id": consumer.subscription.client_id}
    return row


HEADS: Final = ("queue", "ready", "leased", "delayed", "dead", "oldest", "bytes")


def shown(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a row of figures as text, in the order of HEADS."""
    name = row["queue"].removeprefix(Kind.QUEUE.scheme)
    if "subscription" in row:
        client = f"{row['client_id']}/" if row["client_id"] else ""
        name = f"{row['queue']} {client}{row['subscription']}"
    age = row["oldest_ready_seconds"]
    counts = (f"{row[key]:,}" for key in ("ready", "leased", "delayed", "dead"))
    return (printable(name), *counts, "-" if age is None else human_age(age), human_bytes(row["bytes"]))


def _print(rows: list[dict[str, Any]]) -> None:
    table = [(*HEADS, "sync"), *((*shown(row), row["sync"]) for row in rows)]
    if sys.stdout.isatty():  # elsewhere names are whole
        others = sum(2 + max(len(row[column]) for row in table) for column in range(1, len(table[0])))
        room = max(shutil.get_terminal_size().columns - others, 12)
        table = [(shortened(name, room), *more) for name, *more in table]
    echo_table(table)


@click.command()
@on_directory("SOURCE", "TARGET")
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Move so many; else all that are ready.")
@json_option
def move_command(config: Config, source: str, target: str, limit: int | None, as_json: bool) -> None:
    """Move the messages of one queue into another.

    The messages keep their order, ids, headers, priorities and expiry, and come behind what TARGET holds. Their time,
    and the count of their deliveries, begin anew. The command moves up to 1,000 messages in one transaction. Killed at
    any moment, each message is in one of the two queues, and the same command goes on. Scheduled messages stay in
    SOURCE.

    \b
    Example:
      anabranch move data orders.eu orders.all
      anabranch move data dlq inspected --limit 100
    """
    with opened(config) as router:
        origin, destination = queue_in(router, source), queue_named(router, target)
        require_lasting(router, destination.destination)
        with working(f"Moving {origin.destination.name}") as progress:
            moved = inspection_of(router).move(origin, destination, limit, progress)
        left = origin.depth()
    said = {"source": str(origin.destination), "target": str(destination.destination), "moved": moved, "left": left}
    lines = [f"{count_of(moved, 'message')} moved from {origin.destination} to {destination.destination}."]
    lines += [f"{origin.destination} holds {count_of(left, 'message')} still."] if left else []
    echo_result(as_json, said, *lines)


@click.command()
@on_directory("QUEUE")
@click.option("--limit", "-n", type=click.IntRange(min=1), metavar="N", help="Put so many back; else all.")
@json_option
def requeue_command(config: Config, queue: str, limit: int | None, as_json: bool) -> None:
    """Put the dead letters of a queue back where they came from.

    QUEUE is the dead-letter queue: the one that `dead_letter:` names in the configuration. Each letter has its message
    id, its headers and its priority again, and its count of deliveries begins anew. The command puts back up to 100
    letters in one transaction. Letters that were put back before an error stay so. Nothing is lost, so the command does
    not ask.

    \b
    Example:
      anabranch requeue data dlq
      anabranch requeue data dlq --limit 10 --json
    """
    with opened(config) as router:
        letters = queue_in(router, queue)
        require_lasting_sources(router, letters.browse(limit))
        done = router.requeue(letters, limit)
        left = letters.depth()
    said = {"queue": str(letters.destination), "requeued": done, "left": left}
    echo_result(as_json, said, f"{count_of(done, 'dead letter')} of {letters.destination} put back; {left:,} left.")


def require_lasting_sources(router: Router, letters: Iterable[Message]) -> None:
    """Raise DestinationError where dead letters would go back into memory that goes with this command."""
    if not inspection_of(router).is_own:
        return  # none is lost with this command
    for source in {letter.source for one in letters if (letter := dead_letter_of(one)) is not None}:
        with suppress(NoRouteError):  # said when it is its turn
            require_lasting(router, source)


@click.command()
@on_directory("QUEUE")
@yes_option
@json_option
def purge_command(config: Config, queue: str, yes: bool, as_json: bool) -> None:
    """Remove all messages of a queue, which stays.

    The command asks first, and says how many messages there are. --yes does not ask, and is needed where there is no
    terminal. Messages that a prepared transaction has claimed stay. All others are gone for good: `move` puts them
    elsewhere instead.

    \b
    Example:
      anabranch purge data orders
      anabranch purge data orders --yes --json
    """
    with opened(config) as router:
        target = queue_in(router, queue, loses=True)
        count = target.depth()
        if count:
            confirm(f"Remove {count_of(count, 'message')} of {target.destination} in {config.directory}?", yes)
        removed = target.purge()
        left = target.depth()
    said = {"queue": str(target.destination), "removed": removed, "left": left}
    echo_result(as_json, said, f"{count_of(removed, 'message')} of {target.destination} removed; {left:,} left.")


@click.command()
@on_directory("NAME")
@yes_option
@json_option
def delete_command(config: Config, name: str, yes: bool, as_json: bool) -> None:
    """Remove a queue, a topic or a map, with all in it.

    The command asks first, and says how many messages and durable subscriptions go with it. --yes does not ask, and is
    needed where there is no terminal. A later send makes the queue or topic anew.

    \b
    Example:
      anabranch delete data orders.old
      anabranch delete data topic://prices --yes
    """
    with opened(config) as router:
        destination = destination_in(name)
        require_known(router, destination, loses=True)
        confirm(f"Delete {destination} in {config.directory}, {_held(router, destination)}?", yes)
        removed = router.delete(destination)
    said = {"destination": str(destination), "removed": removed}
    echo_result(as_json, said, f"{destination} deleted, with {count_of(removed, 'message')}.")


def _held(router: Router, destination: Destination) -> str:
    count = inspection_of(router).depth(destination)
    if destination.kind is Kind.MAP:
        return f"with {count_of(count, 'value')}"
    held = f"with {count_of(count, 'message')}"
    if destination.kind is Kind.TOPIC:
        held += f" and {count_of(len(router.topic(destination).subscriptions()), 'durable subscription')}"
    return held
