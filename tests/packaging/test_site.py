"""The pages of the site (docs/): each public name is in the reference once, each error and each alert has an answer,
and the programs of the tutorial and of the cookbook run as a reader runs them."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import anabranch
import anabranch.aio
import anabranch.worker
from anabranch.policies import errors
from anabranch.policies.config import loads

from ..contract.disk import PATIENCE

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
COMMANDS: Final = {"anabranch": '"$PYTHON" -m anabranch "$@"', "python": '"$PYTHON" "$@"'}


def names_of_host(module: Path) -> set[str]:
    """What a module of anabranch.hosts offers; its program need not be there."""
    tree = ast.parse(module.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    defined = (node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {name for name in defined if not name.startswith("_")}


def test_each_public_name_is_in_the_reference_once() -> None:
    shown = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in DOCS.glob("reference/*.md")), re.M)
    public = {f"anabranch.{name}" for name in (*anabranch.__all__, "open", "DataManager")}
    public |= {f"anabranch.aio.{name}" for name in anabranch.aio.__all__}
    public |= {f"anabranch.worker.{name}" for name in anabranch.worker.__all__}
    hosts = ROOT / "src/anabranch/hosts"
    for module in (*hosts.glob("[!_]*.py"), *hosts.glob("*/__init__.py")):
        host = module.parent.name if module.name == "__init__.py" else module.stem
        public |= {f"anabranch.hosts.{host}.{name}" for name in names_of_host(module)}
    assert Counter(shown) == Counter(public), "a line `::: name` in docs/reference/"


def test_the_operators_page_answers_each_error_and_each_alert() -> None:
    page = (DOCS / "operating.md").read_text()
    raised = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == raised - {"AnabranchError"}
    groups = yaml.safe_load((ROOT / "examples/prometheus/alerts.yaml").read_text())["groups"]
    assert re.findall(r"^### (Anabranch\w+)$", page, re.M) == [rule["alert"] for one in groups for rule in one["rules"]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """One in which both commands are those of this tree."""
    (tmp_path / "bin").mkdir()
    for name, text in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\nexec {text}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    source = str(Path(anabranch.__file__).parents[1])
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHON": sys.executable, "PYTHONPATH": source}


def blocks(text: str) -> list[tuple[str, str]]:
    """The blocks of a page with their languages."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)


def write_files(text: str, where: Path) -> None:
    """Write what begins with its name."""
    for _, block in blocks(text):
        if named := re.match(r"# (\w+\.\w+)\n", block):
            (where / named[1]).write_text(block)


def run(command: list[str], where: Path, environment: dict[str, str]) -> str:
    """What a command has said, which must end well."""
    done = subprocess.run(command, cwd=where, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tutorial_does_what_it_says(tmp_path: Path, environment: dict[str, str]) -> None:
    page = (DOCS / "tutorial.md").read_text()
    write_files(page, tmp_path)
    said = "".join(
        run(["bash", "-ec", block], tmp_path, environment)
        for language, block in blocks(page)
        if language == "sh" and "pip install" not in block
    )
    told = "".join(block for language, block in blocks(page) if language == "text")
    assert re.fullmatch(re.escape(told).replace(r"\*", ".*"), said), said


def test_the_programs_of_the_first_page_and_of_many_processes_run(tmp_path: Path, environment: dict[str, str]) -> None:
    first = blocks((DOCS / "index.md").read_text())
    assert [language for language, _ in first] == ["python", "yaml"]
    many = dict(reversed(blocks((DOCS / "processes.md").read_text())))["python"]
    said = run([sys.executable, "-c", f"{first[0][1]}\n{many}"], tmp_path, environment)
    assert said == "b'resize cat.jpg'\n"
    assert [store.name for store in loads(first[1][1], tmp_path).stores] == ["orders", "telemetry", "scratch", "rest"]


def recipe(title: str, where: Path) -> None:
    """Write the files of a recipe of the cookbook."""
    page = (DOCS / "cookbook.md").read_text()
    write_files(page.split(f"\n## {title}\n")[1].split("\n## ")[0], where)


def test_the_cookbooks_programs_run(tmp_path: Path, environment: dict[str, str]) -> None:
    for title, command, said in [
        ("An outbox", ["outbox.py"], "placed: a train\n"),
        ("asyncio", ["loop.py"], "100 jobs done\n"),
        ("Tests with pytest", ["-m", "pytest", "-p", "no:cacheprovider", "test_reminders.py"], "(?s).*1 passed.*"),
    ]:
        where = tmp_path / title
        where.mkdir()
        recipe(title, where)
        assert re.fullmatch(said, run([sys.executable, *command], where, environment)), title


def test_the_cookbooks_hook_is_delivered_though_it_fails_first(tmp_path: Path, environment: dict[str, str]) -> None:
    recipe("A webhook queue with retries", tmp_path)
    asked: list[tuple[bytes, str]] = []
    delivered = threading.Event()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.rfile.read(int(self.headers["Content-Length"])), self.headers["Idempotency-Key"]))
            self.send_response(500 if len(asked) == 1 else 200)
            self.end_headers()
            if len(asked) == 2:
                delivered.set()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Receiver) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        run([sys.executable, "enqueue.py", f"http://127.0.0.1:{server.server_port}/"], tmp_path, environment)
        with subprocess.Popen([sys.executable, "deliver.py"], cwd=tmp_path, env=environment, stderr=-3) as worker:
            assert delivered.wait(PATIENCE)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE) == 0
        server.shutdown()
        answering.join()
    assert asked == [(b'{"paid": 17}', "event-17")] * 2
    with anabranch.open(tmp_path / "stores.yaml", shared=True) as router:
        assert router.queue("hooks").depth() == 0


def test_the_cookbooks_web_process_uses_the_directory(tmp_path: Path, environment: dict[str, str]) -> None:
    recipe("gunicorn", tmp_path)
    program = "import web; [print(*web.app({'PATH_INFO': '/a'}, lambda *_: None)) for _ in range(2)]"
    assert run([sys.executable, "-c", program], tmp_path, environment) == "b'hit 1\\n'\nb'hit 2\\n'\n"


def test_the_rest_of_the_cookbook_is_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe("Two machines on PostgreSQL", tmp_path)
    monkeypatch.setenv("SHOP_DATABASE", "postgresql+psycopg://shop:secret@db.example.org/shop")
    assert [store.name for store in loads((tmp_path / "stores.yaml").read_text(), tmp_path).stores] == ["shop", "local"]
