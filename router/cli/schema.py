"""`anabranch schema`: the JSON Schema of the configuration file."""

from __future__ import annotations

import click

from ...policies.config import json_schema
from .output import echo_json, json_option


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Print the configuration file's JSON Schema.

    For editors: completion, descriptions, most mistakes while typing. It is JSON with or without --json.

    \b
    Example:
      anabranch schema > stores.schema.json
    """
    echo_json(json_schema())
