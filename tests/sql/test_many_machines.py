"""docs/many-machines.md: each command and each program of it, as it stands there, against a server; and what
examples/many-machines/compose.yaml starts, with the same commands and environment, as processes."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import anabranch
from anabranch.policies.config import loads

from ..contract.disk import PATIENCE
from .server import PostgresServer

ROOT: Final = Path(__file__).parents[2]
EXAMPLE: Final = ROOT / "examples" / "many-machines"
BLOCKS: Final = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "many-machines.md").read_text(), re.M | re.S)
COMMANDS: Final = {"anabranch": '"$PYTHON" -m anabranch "$@"', "python": '"$PYTHON" "$@"'}


@pytest.fixture
def shop(postgres: PostgresServer) -> Iterator[str]:
    """The database that the page makes; where it is."""
    if postgres.pid is None:
        postgres.start()
    with postgres.connect() as connection:
        for statement in next(text for kind, text in BLOCKS if kind == "sql").strip().split("\n"):
            connection.execute(statement)
    yield f"127.0.0.1:{postgres.port}"
    with postgres.connect() as connection:
        connection.execute("DROP DATABASE shop WITH (FORCE)")
        connection.execute("DROP ROLE shop")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The example's directory, and the two commands."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nexec {text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    return Path(shutil.copytree(EXAMPLE, tmp_path / "here"))


def run(here: Path, command: list[str], **environment: str) -> str:
    """What a command has said, which must end well."""
    path = f"{here.parent / 'bin'}:{os.environ['PATH']}"
    source = str(Path(anabranch.__file__).parents[1])
    more = {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": source, **environment}
    done = subprocess.run(
        command, cwd=here, env={**os.environ, **more}, capture_output=True, text=True, timeout=5 * PATIENCE, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_walk_through(here: Path, shop: str) -> None:
    for text in (text for kind, text in BLOCKS if kind == "python"):
        (here / text.split()[1]).write_text(text)
    blocks = [(kind, text.replace("localhost:5432", shop)) for kind, text in BLOCKS if kind in ("sh", "text")]
    script = "\n".join(f"{text}echo ---" for kind, text in blocks if kind == "sh")
    said = run(here, ["bash", "-e", "-c", script]).split("---\n")
    blocks.append(("sh", ""))
    number = -1
    for (kind, text), (following, shown) in itertools.pairwise(blocks):
        number += kind == "sh"
        if (kind, following) == ("sh", "text"):
            parts = map(re.escape, shown.split("..."))
            assert re.fullmatch("[^\n]*".join(parts), said[number]), (text, said[number], shown)
    assert number == len(said) - 2
    assert '"orders.new"' in said[2] or "orders.new" in said[2]
    assert "packed" not in said[2]


def test_the_configuration_of_the_page_is_that_of_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOP_DATABASE", "postgresql+psycopg://shop@localhost/shop")
    page = loads(next(text for kind, text in BLOCKS if kind == "yaml"), tmp_path)
    example = loads((EXAMPLE / "stores.yaml").read_text(), tmp_path)
    assert [(store.name, store.match, store.kind) for store in page.stores] == [
        (store.name, store.match, store.kind) for store in example.stores
    ]


def test_what_the_compose_file_starts(here: Path, shop: str, tmp_path: Path) -> None:
    composed: dict[str, Any] = yaml.safe_load((here / "compose.yaml").read_text())
    services: dict[str, Any] = composed["services"]
    database = services.pop("database")
    shared = database["environment"]
    url = "postgresql+psycopg://{POSTGRES_USER}:{POSTGRES_PASSWORD}@database:5432/{POSTGRES_DB}".format(**shared)
    workdir = re.search("^WORKDIR (.*)$", (here / "Dockerfile").read_text(), re.M)
    assert workdir is not None
    volumes = [volume.split(":") for service in services.values() for volume in service.get("volumes", [])]
    assert {name for name, _ in volumes} == set(composed["volumes"]) - {"database"}
    assert {path for _, path in volumes} == {f"{workdir[1]}/data"}
    copied = re.search("^COPY (.*) ./$", (here / "Dockerfile").read_text(), re.M)
    assert copied is not None
    sent, packed = 0, []
    for name, service in sorted(services.items()):
        assert service["environment"] == {"SHOP_DATABASE": url, "NODE": name}
        assert service["depends_on"] == {"database": {"condition": "service_healthy"}}
        container = tmp_path / name
        container.mkdir()
        for file in copied[1].split():
            shutil.copy(here / file, container)
        program, *arguments = service["command"]
        assert program == "python"
        given = {**service["environment"], "SHOP_DATABASE": url.replace("database:5432", shop)}
        if arguments[0] == "web.py":
            assert run(container, ["python", *arguments], **given) == f"{name}: {arguments[-1]} orders taken\n"
            sent += int(arguments[-1])
        else:
            packed += run(container, ["python", *arguments, "100"], **given).splitlines()
    assert len(packed) == len(set(packed)) == sent
