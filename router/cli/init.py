"""`anabranch init`: a commented configuration to begin from."""

from __future__ import annotations

from pathlib import Path

import click

from ...policies.errors import ConfigError
from ...policies.outputs import write_new_file
from .output import LocalPath, echo_json, json_option

TEMPLATE = """\
# Which stores there are, what lives in each, and how durable it is.
# `anabranch check` says what is wrong with this file, `anabranch route NAME` where a destination goes and why.

directory: data                          # relative to this file; stores live in data/stores/<name>
# create_directory: false                # once it is there: a disk that is not mounted is an error then, no empty queue
# file_mode: 0640                        # who may read the files; 0600 where nothing is said: this user alone

# usage: {}                              # records who is sent what and when it is acked, for `anabranch recommend`

# Options for all stores that do not give them themselves:
# defaults:
#   journal: {segment_size: 32MiB}

stores:
  # Few messages that stay for long: in a journal of their own they keep nobody else's files.
  - name: orders
    match: ["queue://orders.>"]          # > is any number of segments, also none; * is one; exact names win
    journal:
      sync: always                       # on disk when send() returns

  # Many that are gone in a moment: their files are used again at once.
  - name: telemetry
    match: ["queue://telemetry.>", "topic://ticks.*"]
    journal:
      sync: never                        # the operating system chooses when

  # All the rest: queues, topics and maps.
  - name: rest
    match: [">"]
    # per_destination: true              # a store of its own for each destination that lands here
    journal:
      sync: periodic                     # a power loss costs at most the interval plus one sync of work
      sync_interval: 1s
"""


@click.command()
@click.argument("path", type=LocalPath(), default=Path("stores.yaml"))
@json_option
def command(path: Path, as_json: bool) -> None:
    """Write a commented configuration file.

    The file is PATH, or stores.yaml. Its directory is made if it is missing. A file that exists is never replaced.

    \b
    Example:
      anabranch init
      anabranch init config/stores.yaml
    """
    if path.is_dir():
        raise ConfigError(["is a directory; give the name of a file in it, as stores.yaml"], str(path))
    try:
        write_new_file(path, TEMPLATE)
    except FileExistsError as error:
        # The directory's name may be a file's too.
        taken = error.filename if error.filename is not None else path
        raise ConfigError(["exists already and was left as it is; give another name"], str(taken)) from None
    if as_json:
        echo_json({"written": str(path)})
    else:
        click.echo(f"Wrote {path}. Look through it, then: anabranch check {path}")
