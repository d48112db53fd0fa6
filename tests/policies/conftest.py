"""A third party's adapter, installed for real: a distribution with an entry point, on the path of one test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ADAPTER = '''
from typing import Annotated

from pydantic import BaseModel, SecretStr

from anabranch.policies.config import Options, Size


class Pool(BaseModel):
    model_config = {"extra": "forbid"}

    least: int = 1


class VaultOptions(Options):
    url: str
    """Where the database is."""
    password: SecretStr | None = None
    pin: SecretStr = SecretStr("")
    batch: Annotated[int, Size(1024)] = 65536
    pool: Pool = Pool()


class Vault:
    options_model = VaultOptions


class Plain:
    pass
'''


@pytest.fixture
def vault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install kinds `vault` (with options), `plain` (without) and `broken` (not importable)."""
    site = tmp_path / "site"
    info = site / "vault-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vault\nVersion: 1.0\n")
    entries = "vault = vault_adapter:Vault\nplain = vault_adapter:Plain\nbroken = vault_adapter_missing:Broken\n"
    (info / "entry_points.txt").write_text("[anabranch.adapters]\n" + entries)
    (site / "vault_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(site)
    # Without that of tests/thirdparty, if it is collected too.
    monkeypatch.setattr(sys, "path", [path for path in sys.path if "thirdparty" not in path])
