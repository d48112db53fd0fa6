"""The campaign of native.py, and what it sees when something refused is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import anabranch

from ..shares import Share
from .ledger import Operation, body_of
from .native import KINDS, config, took_effect

SEED = 317
"""Its one round meets all kinds more than once."""


@pytest.mark.weight(2)
def test_errors_of_the_c_library_lose_nothing(tmp_path: Path, share: Share) -> None:
    rounds = ("--seed", str(SEED), "--rounds", str(share.count(1, 2000)))
    share.run("tests.crash.native", *rounds, "--directory", str(tmp_path))
    assert share.counts[0].startswith("0 wrong")
    assert [kind for kind in KINDS if f" {kind} " not in share.counts[0]] == []


def test_what_was_refused_and_is_there_is_seen(tmp_path: Path) -> None:
    refused: list[Operation] = [{"op": "tx", "send": [["j.q", f"r0p4.{n}"]], "ack": []} for n in range(2)]
    with anabranch.open(config(tmp_path, 0)) as router:
        assert took_effect(router, refused) == []
        router.queue("j.q").send(body_of("r0p4.1"))
        assert took_effect(router, refused) == ["refused, and there: ('j.q', 'r0p4.1')"]
