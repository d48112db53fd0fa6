"""A web application that does jobs, a request each. It opens the directory as it is loaded, before its server forks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import anabranch

router = anabranch.open(os.environ["ANABRANCH_DIRECTORY"], shared=True)


def app(environ: dict[str, Any], start_response: Callable[[str, list[tuple[str, str]]], object]) -> Iterable[bytes]:
    """Do a job, if there is one: tell who has done it."""
    job = router.queue("jobs").receive()
    if job is not None:
        with router.transaction() as transaction:
            transaction.ack(job)
            transaction.send("done", b"%s %d" % (job.body, os.getpid()))
    start_response("204 No Content", [])
    return []
