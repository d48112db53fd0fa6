"""What is listed as not remote is there, so that the list says what is left out and nothing else."""

from __future__ import annotations

from importlib import import_module

import pytest

from .not_remote import OF_ROUTERS


@pytest.mark.parametrize("module", OF_ROUTERS)
def test_what_is_left_out_of_the_tests_of_routers_is_there(module: str) -> None:
    there = import_module(f"tests.{module}")
    found = {name for group in (there, *filter(_is_class, vars(there).values())) for name in vars(group)}
    assert set(OF_ROUTERS[module]) - found == set()


def _is_class(value: object) -> bool:
    return isinstance(value, type)
