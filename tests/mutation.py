"""Measure what tests notice: change the code in one place at a time, and see which test fails first.

    python -m tests.mutation --mutants 200 adapters/core router/transactions -- tests/contract/test_memory.py tests/core

A *mutant* has one comparison, number, operator, condition, return or statement of a function changed. The tests run in
the order in which they are given, those alone that call the function, in a fork of one process for each mutant. So a
test that is named last, and is never the first to fail, says again what the others say. One line a mutant is printed,
then how many were killed, and by which files. Survivors are not all faults of the tests: some mutants do the same as
the code. The compiled loops are left out, and what
needs PostgreSQL.
"""

from __future__ import annotations

import argparse
import ast
import gc
import importlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

import pytest

from . import places
from .sql import server

ROOT: Final = Path(__file__).resolve().parents[1]
FLIPPED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
HANGS: Final = 10.0
"""Seconds beyond 20 times its usual ones after which a test hangs, and the mutant is killed."""

Place = tuple[str, int, str]
"""Of a function: its file, its first line, its name."""
Change = Callable[[], None]


@dataclass
class Mutant:
    """One change, made in a module's tree and taken back."""

    tree: ast.Module
    function: Place
    line: int
    text: str
    make: Change
    undo: Change

    def code(self) -> CodeType:
        """Compile the changed function."""
        self.make()
        try:
            todo = [compile(self.tree, self.function[0], "exec", dont_inherit=True)]
        finally:
            self.undo()
        while todo:
            code = todo.pop()
            if (code.co_firstlineno, code.co_name) == self.function[1:]:
                return code
            todo += [const for const in code.co_consts if isinstance(const, CodeType)]
        raise LookupError(self.function)

    def __str__(self) -> str:
        return f"{Path(self.function[0]).relative_to(ROOT)}:{self.line} {self.text}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, str, Any]]:
    """Yield what may be changed at a node, as a text, the object, its field and the other value."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = FLIPPED[type(node.ops[0])]
        yield f"{type(node.ops[0]).__name__} to {other.__name__}", node, "ops", [other()]
    elif isinstance(node, ast.BoolOp):
        yield "and, or exchanged", node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        yield "+, - exchanged", node, "op", ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", node, "op", ast.UAdd()  # +x is true where x is, of the bools that conditions are
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        value: int = node.value  # type: ignore[assignment]
        other_value = not value if isinstance(value, bool) else value + 1
        yield f"{value} to {other_value}", node, "value", other_value
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None", node, "value", ast.copy_location(ast.Constant(None), node.value)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if not isinstance(block, list):
            continue
        for at, one in enumerate(block):
            text = ast.unparse(one)
            call = isinstance(one, ast.Expr) and isinstance(one.value, ast.Call) and not text.startswith("log.")
            store = isinstance(one, ast.Assign | ast.AugAssign) and not isinstance(
                getattr(one, "targets", [0])[0], ast.Name
            )
            if call or store or isinstance(one, ast.Raise):
                gone = [*block[:at], ast.copy_location(ast.Pass(), one), *block[at + 1 :]]
                yield f"without {text.splitlines()[0][:60]}", one, name, (node, gone)


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield each mutant of a module's functions."""
    tree = ast.parse(path.read_text())

    def walk(node: ast.AST, function: Place | None) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function is None:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            function = (str(path), first, node.name)
        for text, at, name, other in changes(node) if function is not None else ():
            owner, value = other if isinstance(other, tuple) else (at, other)
            before = getattr(owner, name)
            make, undo = (lambda to=to, owner=owner, name=name: setattr(owner, name, to) for to in (value, before))
            assert function is not None
            yield Mutant(tree, function, at.lineno, text, make, undo)  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.Assert | ast.JoinedStr | ast.arguments):
                yield from walk(child, function)

    return walk(tree, None)


@dataclass(eq=False)
class Sampling:
    """The plugin that runs the collected tests on each mutant instead of once."""

    modules: list[Path]
    number: int
    seed: int
    seconds: float
    failed: str = ""
    calls: dict[str, list[Place]] = field(default_factory=dict)
    """By the test: which functions it calls."""
    took: dict[str, float] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = report.nodeid

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for path in self.modules:
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            importlib.import_module(f"anabranch.{name}")
        gc.unfreeze()
        files = {str(path) for path in self.modules}
        live: dict[Place, list[FunctionType]] = {}
        for one in gc.get_objects():
            if isinstance(one, FunctionType) and (file := os.path.realpath(one.__code__.co_filename)) in files:
                live.setdefault((file, one.__code__.co_firstlineno, one.__code__.co_name), []).append(one)
        items = [item for item in session.items if not server.asks_for_one(item)]
        self._look(items, live)
        every = [mutant for path in self.modules for mutant in mutants(path) if mutant.function in live]
        sample = random.Random(self.seed).sample(every, min(self.number, len(every)))
        print(f"\n{len(items)} tests, {len(sample)} of {len(every)} mutants", flush=True)
        killers: Counter[str] = Counter()
        for mutant in sorted(sample, key=lambda one: (one.function, one.line)):
            killer = self._killer(mutant, items, live[mutant.function])
            killers[killer.partition("::")[0]] += 1
            print(f"{'killed' if killer else 'SURVIVED'} {mutant} {killer}", flush=True)
        survived = killers.pop("", 0)
        print(f"{len(sample) - survived} of {len(sample)} killed: {100 - 100 * survived / len(sample):.1f} %")
        for file, count in killers.most_common():
            print(f"{count:5} {file}")
        return True

    def _look(self, items: list[pytest.Item], live: dict[Place, list[FunctionType]]) -> None:
        """Run all once, as they are, to learn which functions each calls."""
        keys = {function.__code__: place for place, functions in live.items() for function in functions}
        called: set[Place] = set()

        def profile(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and (place := keys.get(frame.f_code)) is not None:
                called.add(place)

        def child(tell: Callable[[Any], None]) -> None:
            threading.setprofile(profile)
            sys.setprofile(profile)
            for item, following in itertools.zip_longest(items, items[1:]):
                called.clear()
                begun = time.monotonic()
                self._run(item, following)
                tell([item.nodeid, time.monotonic() - begun, sorted(called.copy()), self.failed == item.nodeid])

        for told in _forked(child, lambda _: 600):
            assert isinstance(told, list), f"behind {list(self.calls)[-1:]} {told or 'a test hangs as it is'}"
            name, took, places_of, failed = told
            if failed:
                print(f"left out, since it fails as it is: {name}")
                places_of = []
            self.took[name], self.calls[name] = took, [tuple(place) for place in places_of]

    def _killer(self, mutant: Mutant, items: list[pytest.Item], functions: list[FunctionType]) -> str:
        """Return the first test that fails or hangs with a mutant; nothing if none does."""
        concerned = [item for item in items if mutant.function in self.calls[item.nodeid]]
        code = mutant.code()

        def child(tell: Callable[[Any], None]) -> None:
            for function in functions:
                function.__code__ = code
            until = time.monotonic() + self.seconds
            for item, following in itertools.zip_longest(concerned, concerned[1:]):
                tell(item.nodeid)
                self._run(item, following)
                if self.failed or time.monotonic() > until:
                    break
            tell([self.failed])

        last = ""
        for told in _forked(child, lambda name: HANGS + 20 * self.took.get(name, 0)):
            if isinstance(told, list):
                return str(told[0])
            last = last if told is None else told
        return f"{last} (ended or hangs)"

    def _run(self, item: pytest.Item, following: pytest.Item | None) -> None:
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)


def _forked(child: Callable[[Callable[[Any], None]], None], patience: Callable[[str], float]) -> Iterator[Any]:
    """Run `child` in a fork and yield what it tells; None, and nothing after it, where it tells nothing for so long."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        try:
            child(lambda told: _write(writing, json.dumps(told) + "\n"))
        except BaseException:
            _write(writing, json.dumps({"error": traceback.format_exc()}) + "\n")
        finally:
            os._exit(0)
    os.close(writing)
    last: Any = ""
    try:
        with open(reading, "rb", buffering=0) as pipe:  # noqa: PTH123  a descriptor
            rest = b""
            while select.select([pipe], [], [], patience(last if isinstance(last, str) else ""))[0]:
                if not (got := pipe.read(1 << 20)):
                    return
                *lines, rest = (rest + got).split(b"\n")
                for line in lines:
                    yield (last := json.loads(line))
            yield None
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _write(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=200, help="how many, drawn from all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--seconds", type=float, default=20, help="for each mutant; one that is not killed by then lives"
    )
    parser.add_argument("modules", nargs="+", help="files or folders whose functions are changed")
    split = sys.argv.index("--")
    given = parser.parse_args(sys.argv[1:split])
    os.environ["ANABRANCH_PURE"] = "1"
    found: list[Path] = []
    for path in (ROOT / name for name in given.modules):
        found += path.rglob("*.py") if path.is_dir() else [path]
    sampling = Sampling(sorted(found), given.mutants, given.seed, given.seconds)
    with tempfile.TemporaryDirectory(prefix="anabranch-mutants-", dir=places.in_memory()) as scratch:
        places.MEMORY = Path(scratch)
        options = ["-q", "-s", "-p", "no:cacheprovider"]
        done = pytest.main([*options, *sys.argv[split + 1 :]], plugins=[sampling])
        shutil.rmtree(scratch, ignore_errors=True)
        Path(scratch).mkdir()
    return int(done)


if __name__ == "__main__":
    sys.exit(main())
