"""Every block of the pages: Python runs, configurations open, commands are ones that there are. A page with programs
needs a scene here; blocks for a program of others run in tests/hosts, where that is installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import click
import pytest
import sqlalchemy

import anabranch
import anabranch.aio
from anabranch.policies.advisor import Workload
from anabranch.policies.config import loads
from anabranch.router.cli.app import app

from ..contract.contract import StoreContract
from ..contract.disk import PATIENCE, Disk
from ..kernels import compiled  # noqa: F401  a fixture
from ..model.machine import StoreMachine
from ..pages import PAGES, ROOT, Block, blocks, indented, read
from ..shell import run
from ..thirdparty.disk import SITE

HOSTS: Final = ROOT / "tests/hosts"


class Stage:
    """Where the Python of a page runs, block after block, with the names of those before."""

    def __init__(self, page: str, heading: str | None, path: Path) -> None:
        self.page, self.heading = page, heading
        self.left = blocks(page, "python", heading=heading)
        self.path = path
        self.names: dict[str, Any] = {"anabranch": anabranch, "sqlalchemy": sqlalchemy}

    def run(self, number: int | None = None, **names: Any) -> None:
        """Run the next blocks, all unless a number is given, with these names."""
        self.names |= names
        for block in self.left[:number]:
            block.run(self.names)
        self.left[:number] = []

    def enter(self, name: str) -> None:
        """Let what comes run in a directory of its own."""
        self.path.joinpath(name).mkdir()
        os.chdir(self.path / name)


def opened(path: Path, *stores: anabranch.StoreConfig) -> anabranch.Router:
    return anabranch.open(anabranch.Config(path, stores or [anabranch.StoreConfig("all", [">"])]))


def end_owner(directory: Path) -> None:
    os.kill(int((directory / "router.lock").read_text().split()[0]), signal.SIGTERM)


def first_page(stage: Stage) -> None:
    stage.run(1)
    if not stage.left:  # the README's
        return
    configuration = blocks("docs/index.md", "yaml")[0].text
    Path("stores.yaml").write_text(configuration)
    with anabranch.open("stores.yaml") as router:
        router.queue("orders.asked").send(b"a train?")
        stage.run(router=router, message=router.queue("orders.asked").receive())
        depths = [router.queue(name).depth() for name in ("orders.asked", "orders.custom", "telemetry.clicks")]
        assert depths == [0, 1, 1]


def messages(stage: Stage) -> None:
    options = anabranch.JournalOptions(max_deliveries=1, dead_letter="dlq")
    with opened(stage.path / "data", anabranch.StoreConfig("all", [">"], journal=options)) as router:
        orders = router.queue("orders")
        orders.send_many([b"1", b"2", b"3"])  # for the page's last program, which puts dead letters back
        while (message := orders.receive()) is not None:
            message.release()
        router.sweep()
        stage.run(router=router)
        assert [s.subscription.name for s in router.topic("prices.eu").subscriptions()] == ["charts"]
        assert sorted(message.body for message in orders.browse()) == [b"1", b"2", b"3"]
        assert router.queue("jobs").depth() == 0
        assert [m.headers["dead_letter_reason"] for m in router.queue("dlq").browse()] == ["nobody makes three"]


def maps(stage: Stage) -> None:
    with opened(stage.path / "data") as router:
        router.queue("jobs").send(b"job-1")
        stage.run(router=router)
        assert router.queue("jobs").depth() == 0


def processes(stage: Stage) -> None:
    stage.run(1)
    end_owner(stage.path / "data")
    stage.enter("two")
    stage.run(1)
    stage.enter("three")
    (ends,) = (block._replace(text=re.sub(r"\.\.\.\n$", "return\n", block.text)) for block in stage.left)
    stage.left[:] = [ends]
    with anabranch.open("data", shared=True) as router:
        router.queue("orders").send_many([b"first", b"second"])
        stage.run()
        asyncio.run(stage.names["work"]())
        assert [message.body for message in router.queue("done").browse()] == [b"first"]
        assert [message.body for message in router.queue("orders").browse()] == [b"..."]
    end_owner(Path("data"))


def transactions(stage: Stage) -> None:
    with opened(stage.path / "first") as router:
        router.queue("orders").send(b"a train")
        board = router.topic("prices").subscribe("board")
        board.unsubscribe()
        stage.run(1, router=router, order=router.queue("orders").receive())
        assert [router.queue(name).depth() for name in ("orders", "orders.packed", "audit")] == [0, 1, 1]
        assert router.topic("prices").subscribe("board").depth() == 1
    stage.run(1)
    with opened(stage.path / "third") as router:
        stage.run(1, router=router)
        assert router.queue("orders").depth() == 1
    stage.enter("last")
    stage.run(1)
    with anabranch.open(stage.names["config"]) as router:
        assert [router.queue(name).depth() for name in ("orders", "audit")] == [1, 1]
    stage.names["engine"].dispose()


def configuration(stage: Stage) -> None:
    stage.run(1)
    for name, match in (("stores", "orders"), ("new", "orders.>")):
        Path(f"{name}.yaml").write_text(
            f"directory: data\nstores:\n- {{name: one, match: [{match!r}]}}\n- {{name: rest, match: ['>']}}\n"
        )
    with anabranch.open("stores.yaml") as router:
        router.queue("orders.new").send(b"a train")
    stage.run(__name__="a_program")
    assert [move.target for move in stage.names["done"].moves] == ["one"]


def sql(stage: Stage) -> None:
    url = f"sqlite:///{stage.path / 'ledger.db'}"
    engine = sqlalchemy.create_engine(url)
    sold = sqlalchemy.Table("sold", sqlalchemy.MetaData(), sqlalchemy.Column("name", sqlalchemy.Text))
    sold.create(engine)
    stage.run(1, engine=engine)
    store = anabranch.StoreConfig("ledger", ["ledger.>"], sql=anabranch.SqlOptions(url=url, schema_prefix="mq_"))
    with opened(stage.path / "data", store) as router:
        router.queue("ledger.orders").send(b"a hat")
        router.queue("ledger.invoices").declare()
        stage.run(router=router, sold=sold, sqlalchemy=SimpleNamespace(create_engine=lambda _: engine))
        assert [router.queue(f"ledger.{name}").depth() for name in ("orders", "invoices")] == [0, 1]
    with engine.connect() as connection:
        assert connection.execute(sqlalchemy.select(sold.c.name)).all() == [("hat",)]
    engine.dispose()


def adapters(stage: Stage) -> None:
    """An outline, which has the names right; tests/thirdparty has the whole, and runs it."""
    stage.run(Disk=Disk, StoreContract=StoreContract, StoreMachine=StoreMachine, pytest=pytest)


def named(stage: Stage, *called: str) -> None:
    """Write the files that a page shows; each program of it is called."""
    for block in blocks(stage.page, heading=stage.heading):
        if block.file:
            Path(block.file).write_text(block.text)
    stage.left = [block for block in stage.left if block.file not in called]


def tutorial(stage: Stage) -> None:
    page = blocks(stage.page)
    scripts = [block.text for block in page if block.language == "sh" and "pip install" not in block.text]
    named(stage, *re.findall(r"python (\w+\.py)", "".join(scripts)))
    said = "".join(run(script, stage.path) for script in scripts)
    told = "".join(block.text for block in page if block.language == "text")
    assert re.fullmatch(re.escape(told).replace(r"\*", ".*"), said), said


def says(said: str, program: str) -> Callable[[Stage], None]:
    """A recipe whose program says that."""

    def scene(stage: Stage) -> None:
        named(stage, program.split()[-1])
        assert re.fullmatch(said, run(f"python {program}", stage.path))

    return scene


def webhooks(stage: Stage) -> None:
    """It is delivered though it fails first."""
    named(stage, "enqueue.py", "deliver.py")
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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run(f"python enqueue.py http://127.0.0.1:{server.server_port}/", stage.path)
        with subprocess.Popen([sys.executable, "deliver.py"], stderr=subprocess.DEVNULL) as worker:
            assert delivered.wait(PATIENCE)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(PATIENCE) == 0
        server.shutdown()
    assert asked == [(b'{"paid": 17}', "event-17")] * 2
    with anabranch.open("stores.yaml", shared=True) as router:
        assert router.queue("hooks").depth() == 0


def gunicorn(stage: Stage) -> None:
    named(stage, "web.py")
    calls = "python <<< \"import web; [print(*web.app({'PATH_INFO': '/a'}, lambda *_: None)) for _ in range(2)]\""
    assert run(calls, stage.path) == "b'hit 1\\n'\nb'hit 2\\n'\n"


def hosts(stage: Stage) -> None:
    """The others are run by the tests of their programs, each where that is installed."""
    theirs = {block: re.findall(r"anabranch\.hosts\.(\w+)", block.text) for block in stage.left}
    for block, names in theirs.items():
        for name in names:
            assert (HOSTS / name / "test_page.py").exists(), f"{block.page}:{block.line} is run by no test"
    stage.left = [block for block, names in theirs.items() if not names]
    with anabranch.open("data") as router:
        router.queue("orders").send(b"a train")
    said: list[bytes] = []

    def end(body: bytes) -> None:
        said.append(body)
        os.kill(os.getpid(), signal.SIGTERM)

    stage.run(print=end)
    end_owner(stage.path / "data")
    assert said == [b"a train"]


def many_machines(stage: Stage) -> None:
    """They need a server: tests/sql/test_many_machines.py runs them."""
    named(stage, "web.py", "worker.py")


SCENES: Final[dict[str, Callable[[Stage], None]]] = {
    "README.md": first_page, "docs/index.md": first_page, "docs/messages.md": messages, "docs/maps.md": maps,
    "docs/processes.md": processes, "docs/transactions.md": transactions, "docs/configuration.md": configuration,
    "docs/many-machines.md": many_machines,
    "A worker inside another program": says("delivered a hook\n", "embedded.py"),
    "docs/sql.md": sql, "docs/adapters.md": adapters, "docs/hosts.md": hosts, "docs/tutorial.md": tutorial,
    "A webhook queue with retries": webhooks, "An outbox": says("placed: a train\n", "outbox.py"), "gunicorn": gunicorn,
    "asyncio": says("100 jobs done\n", "loop.py"),
    "Tests with pytest": says("(?s).*1 passed.*", "-m pytest -p no:cacheprovider test_reminders.py"),
}  # fmt: skip
"""By page, and by recipe of the cookbook."""
COOKBOOK: Final = "docs/cookbook.md"
PROGRAMS: Final = [(page, None) for page in PAGES if page != COOKBOOK and blocks(page, "python")] + [
    (COOKBOOK, recipe) for recipe in dict.fromkeys(block.heading for block in blocks(COOKBOOK, "python"))
]


@pytest.mark.parametrize(("page", "recipe"), PROGRAMS)
def test_the_programs_of_a_page_run(
    page: str, recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = recipe or page
    assert scene in SCENES, "programs that no test runs; say here what they need"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(anabranch.__file__).parents[1]))
    stage = Stage(page, recipe, tmp_path)
    SCENES[scene](stage)
    assert not stage.left, "programs that no test runs"


@pytest.mark.parametrize("block", [block for page in PAGES for block in blocks(page, "yaml")], ids=Block.__str__)
def test_a_configuration_of_a_page_is_good(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of one stands where it belongs."""
    monkeypatch.setenv("LEDGER_PASSWORD", "s3cret")
    monkeypatch.setenv("SHOP_DATABASE", "postgresql+psycopg://shop:secret@db.example.org/shop")
    text = block.text
    if text.startswith("sql:"):
        text = "- name: all\n  match: ['>']\n" + re.sub("^", "  ", text, flags=re.M)
    if text.startswith("- "):
        text = f"stores:\n{text}"
    for key, line in ("stores", "stores: [{name: all, match: ['>']}]"), ("directory", "directory: data"):
        if not re.search(f"^{key}:", text, re.M):
            text = f"{line}\n{text}"
    assert loads(text, tmp_path).stores


def anabranch_command(words: list[str]) -> None:
    """The parser takes it; the files need not be there."""
    context = click.Context(app)
    command = app.get_command(context, words[0])
    assert command is not None, f"no command {words[0]}"
    command.make_context(words[0], words[1:], parent=context)


def make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", read("Makefile"), re.M) + [
        f"test-hosts-{host.name}" for host in HOSTS.iterdir()
    ]
    assert [word for word in words if "=" not in word and word not in targets] == []


def pip(words: list[str]) -> None:
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert words[0] == "install"
    named = [name for word in words for name in re.findall(r"^anabranch\[(.*)\]$", word)]
    assert {extra for names in named for extra in names.split(",")} <= extras.keys()


def python(words: list[str]) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1]) is not None


CALLS: Final[dict[str, Callable[[list[str]], None]]] = {
    "anabranch": anabranch_command, "make": make, "pip": pip, "python": python, ".venv/bin/python": python
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_a_command_of_a_page_is_one_that_there_is(page: str) -> None:
    shown = [*(block.text for block in blocks(page, "sh")), *indented(page)]
    lines = [line for text in shown for line in text.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"(?<!`)`(pip install [^`]+)`", read(page))
    for line in lines:
        if line.partition(" ")[0] in CALLS:
            words = shlex.split(re.split(" >| &| \\| ", line)[0], comments=True)
            CALLS[words[0]](words[1:])
    for line in re.findall(r"`anabranch\s+([a-z][^`>]*)[^`]*`", read(page)):
        name, *words = shlex.split(line)
        if words and not words[-1].startswith("-"):
            anabranch_command([name, *words])
        else:  # it is spoken of
            command = app.get_command(click.Context(app), name)
            assert command is not None, f"no command {name}"
            assert {*words} <= {option for one in command.params for option in one.opts}, line


def test_the_lines_of_an_export_are_imported_and_exported_again(tmp_path: Path) -> None:
    (shown,) = blocks("docs/commands.md", "json")
    text = re.sub('.*"large".*\n.*"chunk".*\n', "", shown.text)  # a body that is not shown whole
    (tmp_path / "there.jsonl").write_text(text)
    (tmp_path / "stores.yaml").write_text("directory: data\nstores: [{name: all, match: ['>'], journal: {}}]\n")
    run("anabranch import -c stores.yaml there.jsonl; anabranch export data --out back.jsonl", tmp_path)
    assert (tmp_path / "back.jsonl").read_text() == text


@pytest.mark.usefixtures("compiled")
def test_the_trace_of_the_advisors_page_is_read(tmp_path: Path) -> None:
    shown = next(text for text in indented("docs/advisor.md") if text.startswith("seq,"))
    trace, _, command = shown.partition("\n\n")
    (tmp_path / "usage.csv").write_text(trace)
    run(command, tmp_path)
    assert {file.name for file in (tmp_path / "advice").iterdir()} >= {"stores.yaml", "summary.txt"}


def test_the_workload_of_the_advisors_page_is_whole() -> None:
    shown = next(text for text in indented("docs/advisor.md") if text.startswith("name: shop"))
    assert len(Workload.parse(shown).destinations) == 4


def test_the_entry_point_of_a_store_of_a_third_party_is_as_shown() -> None:
    (shown,) = blocks("docs/adapters.md", "toml")
    (there,) = SITE.glob("*.dist-info/entry_points.txt")
    points = tomllib.loads(shown.text)["project"]["entry-points"]["anabranch.adapters"]
    assert [f"{name} = {value}" for name, value in points.items()] == there.read_text().splitlines()[1:]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_says_its_language(page: str) -> None:
    """So that those above find it, and the site has colours."""
    assert {block.language for block in blocks(page)} <= {"python", "yaml", "sh", "json", "toml", "sql", "text"}
    for text in indented(page):
        with pytest.raises(SyntaxError):
            compile(text, page, "exec")
