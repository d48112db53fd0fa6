"""A watch over a cluster's executors while jobs wait for them: Spark itself waits for ever, and says nothing."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from ...errors import SparkError
from .cluster import PATIENCE_S, is_local
from .session import kinds_of_spark_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger: logging.Logger = logging.getLogger(__name__)

LOST_MAX_S: Final = 60.0
"""So long a job waits for another executor when all that it had are lost."""
_POLL_S: Final = 1.0


@contextmanager
def watched_executors(spark: SparkSession) -> Iterator[None]:
    """Watch over the executors that the jobs of the block have.

    While they have none it is said once, after some seconds: at first the cluster may be busy, or have no worker, and
    is waited for. Where there were some and all are lost, for a minute, the jobs are cancelled. Raises SparkError then.
    Not under dynamic allocation, which takes idle ones away and gives others in its own time.
    """
    context = getattr(spark, "_sc", None)  # a session of Spark Connect has none
    if context is None or is_local(context.master):
        yield
        return
    watch = _Watch(context)
    context.addJobTag(watch.tag)
    thread = threading.Thread(target=watch.run, name="anabranch-executors", daemon=True)
    thread.start()
    try:
        yield
    except kinds_of_spark_errors() as error:
        if watch.given_up:
            raise SparkError(
                f"all executors of {context.master} are lost, and no other came within {LOST_MAX_S:.0f} s; "
                "start its workers again, or use --engine local, which needs no Spark"
            ) from error
        raise
    finally:
        watch.ended.set()
        thread.join(_POLL_S)  # not for ever: it may ask a Java that is stuck
        if context._jsc is not None:  # else it was stopped meanwhile
            context.removeJobTag(watch.tag)


class _Watch:
    """A watch over the jobs of one tag, in a thread of its own."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.tag = f"anabranch-{secrets.token_hex(8)}"
        self.ended = threading.Event()
        self.given_up = False
        self._dynamic = context.getConf().get("spark.dynamicAllocation.enabled", "false") == "true"

    def run(self) -> None:
        had = told = False
        since: float | None = None
        while not self.ended.wait(_POLL_S):
            try:
                # The driver is among them. Between jobs a cluster may take idle executors back.
                there = self._context._jsc.sc().getExecutorMemoryStatus().size() > 1
                waits = not there and bool(self._context.statusTracker().getActiveJobsIds())
            except Exception:  # asked of a Spark that is going away
                logger.debug("cannot tell what executors there are", exc_info=True)
                return
            had |= there
            if not waits:
                since = None
                continue
            since = time.monotonic() if since is None else since
            waited = time.monotonic() - since
            if waited >= PATIENCE_S and not told:
                told = True
                logger.warning("%s", self._what(had))
            if waited >= LOST_MAX_S and had and not self._dynamic:
                self.given_up = True
                self._context._jsc.sc().cancelJobsWithTag(self.tag)
                return

    def _what(self, had: bool) -> str:
        master = self._context.master
        if had and not self._dynamic:
            return f"all executors of {master} are lost; waiting for others"
        return f"{master} has given no executor yet: it is busy, or has no worker; waiting for one"
