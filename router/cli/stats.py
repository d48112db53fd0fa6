"""`anabranch stats`: what the stores of a data directory hold."""

from __future__ import annotations

from dataclasses import fields

import click

from ...policies.config import Config
from ...policies.text import human_bytes
from .directory import on_directory, opened
from .output import echo_json, echo_table, json_option


@click.command()
@on_directory()
@json_option
def command(config: Config, as_json: bool) -> None:
    """Show what each store holds, and what it takes on disk.

    Delayed messages are scheduled ones: they wait for their time. Dropped messages are counted from when a store is
    opened. Router.stats() counts them in the process that has the store open.

    The command opens the stores, so no other process may have them open. Nothing is created.

    \b
    Example:
      anabranch stats data
      anabranch stats -c stores.yaml --json
    """
    with opened(config) as router:
        directory, stats = router.config.directory, router.stats()
    if as_json:
        stores = {}
        for name, store in stats.stores.items():
            stores[name] = {field.name: getattr(store, field.name) for field in fields(store)} | {
                "destinations": {str(d): n for d, n in store.destinations.items()},
                "subscriptions": [
                    {"topic": s.topic.name, "client": s.client_id, "name": s.name, "messages": n}
                    for s, n in store.subscriptions.items()
                ],
            }
        echo_json({"directory": str(directory), "stores": stores, "unresponsive": list(stats.unresponsive)})
        return
    if not stats.stores:
        click.echo(f"{directory} holds no stores yet.")
        return
    rows = [("store", "kind", "messages", "delayed", "destinations", "files", "journal", "live", "pool")]
    for name, store in stats.stores.items():
        files = store.segments.get("active", 0) + store.segments.get("retained", 0) + store.segments.get("copies", 0)
        rows.append(
            (
                name, store.kind, f"{store.messages:,}", f"{store.delayed:,}", f"{len(store.destinations):,}",
                f"{files:,}", human_bytes(store.journal_bytes), f"{store.live_percent:.0f} %",
                human_bytes(store.pool_bytes),
            )
        )  # fmt: skip
    for name in stats.unresponsive:
        click.echo(f"Store {name} does not answer; its last figures are shown, if there are any.", err=True)
    echo_table(rows, left=(0, 1))
