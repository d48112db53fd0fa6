"""Actors, for web processes that call them and `dramatiq examples.dramatiq.app`, which executes them.

DIRECTORY=data dramatiq examples.dramatiq.app
DIRECTORY=data python -c 'from examples.dramatiq.app import greet; greet.send("carol")'
"""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq

import anabranch

from .broker import AnabranchBroker

directory = Path(os.environ["DIRECTORY"])
router = anabranch.open(directory, shared=True)
dramatiq.set_broker(AnabranchBroker(router))


@dramatiq.actor(max_retries=3, min_backoff=10)  # type: ignore[untyped-decorator]
def greet(name: str) -> None:
    with (directory / "greetings").open("a") as file:
        file.write(f"hello {name}\n")
