"""The Ctrl-C storms of sigint.py with small counts."""

from __future__ import annotations

import pytest

from ..shares import Share


@pytest.mark.parametrize("sync", ["always", "never"])
@pytest.mark.parametrize("threads", [1, 8, 32])
def test_a_storm_of_interrupts_leaves_everything_in_order(threads: int, sync: str, share: Share) -> None:
    storm(share, "--threads", str(threads), "--sync", sync)


@pytest.mark.parametrize("sync", ["always", "never"])
def test_a_storm_over_two_stores(sync: str, share: Share) -> None:
    storm(share, "--threads", "8", "--sync", sync, "--across")


@pytest.mark.parametrize("kinds", ["memory", "sql", "journal,memory", "journal,sql"])
def test_a_storm_over_other_kinds_of_stores(kinds: str, share: Share) -> None:
    storm(share, "--threads", "8", "--stores", kinds, *(["--across"] if "," in kinds else []))


def storm(share: Share, *options: str) -> None:
    share.run("tests.crash.sigint", "--signals", str(share.count(80, 3000)), "--seed", "1", *options)
