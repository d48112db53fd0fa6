"""A Spark master that is not there, is not one, or does not answer: told in one line, and at once where it can be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from anabranch.policies.advisor import generate, write_trace
from anabranch.policies.advisor.model import kernel
from anabranch.policies.advisor.spark import cluster, workers
from anabranch.policies.advisor.spark.cluster import check_master, warned_of_waiting
from anabranch.policies.advisor.spark.session import spark_errors
from anabranch.policies.advisor.spark.trace import by_value
from anabranch.policies.advisor.statistics import lives
from anabranch.policies.errors import ConfigError, SparkError

from .conftest import shape
from .standalone import standalone_cluster

TRACE = "seq,ts,op,destination,message_id,size\n0,1,send,a,1,9\n1,2,ack,a,1,9\n"


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of this machine that nobody listens at, and nobody else gets meanwhile."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    "form", ["spark://127.0.0.1:{}", "spark://[::1]:{0},127.0.0.1:{0}", "k8s://https://127.0.0.1:{}"]
)
def test_a_cluster_that_is_not_there_is_told_at_once(form: str, closed_port: int) -> None:
    master = form.format(closed_port)
    with pytest.raises(SparkError) as caught:
        check_master(master)
    assert str(caught.value).startswith(f"no Spark cluster answers at --master {master} (")
    assert f"127.0.0.1:{closed_port}: Connection refused" in str(caught.value)
    assert "start it, or correct the URL, or leave --master out to use this machine" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_master_of_several_is_enough(closed_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        check_master(f"spark://127.0.0.1:{closed_port},127.0.0.1:{server.getsockname()[1]}")


@pytest.mark.parametrize(
    "master",
    ["foo", "spark://", "spark://host:x", "spark://a:1,:2", "sc://host", "mesos://host:5050", "local[x]", "localhost"],
)
def test_what_is_no_master_is_told_with_what_is_one(master: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_master(master)
    assert str(caught.value) == (
        f"--master {master} is not a Spark master; expected local[*], spark://host:7077, k8s://https://host:443 or yarn"
    )


@pytest.mark.parametrize("master", ["local", "local[2]", "local[*]", "local[*, 3]", "local-cluster[2,1,1024]"])
def test_this_machine_is_not_tried(master: str) -> None:
    check_master(master)


def test_yarn_needs_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    with pytest.raises(ConfigError, match="set HADOOP_CONF_DIR"):
        check_master("yarn")
    monkeypatch.setenv("YARN_CONF_DIR", "/etc/hadoop")
    check_master("yarn")


def test_who_waits_is_told_and_who_does_not_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "PATIENCE_S", 0.001)
    asked = threading.Event()

    def works() -> bool:
        asked.set()
        return False

    with warned_of_waiting("waiting", works):
        assert asked.wait(60)
    assert not caplog.records
    told = threading.Event()
    monkeypatch.setattr(cluster.logger, "warning", lambda *_: told.set())
    with warned_of_waiting("waiting"):
        assert told.wait(60)


def test_sparks_own_errors_become_one_line(spark: object) -> None:
    with (
        pytest.raises(SparkError, match=r"^Spark did not finish its work: .*no such view.*--engine local") as caught,
        spark_errors(),
    ):
        spark.sql("SELECT * FROM `no such view`")  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)


def test_a_module_that_workers_lack_is_named(spark: Any) -> None:
    def lacking(batches: object) -> Iterator[object]:
        import no_such_module  # type: ignore[import-not-found]

        yield no_such_module

    with pytest.raises(SparkError) as caught, spark_errors():
        spark.range(1).mapInArrow(lacking, "id long").collect()
    assert str(caught.value) == (
        "Spark did not finish its work: ModuleNotFoundError: No module named 'no_such_module'; install no_such_module "
        "for the Python of Spark's workers, which needs numpy, pyarrow and numba, and for a workload this package"
    )


def test_at_the_command_line(tmp_path: Path, closed_port: int) -> None:
    (tmp_path / "t.csv").write_text(TRACE)
    command = [sys.executable, "-m", "anabranch", "recommend", "--trace", "t.csv", "--out", "advice", "--master"]
    master = f"spark://127.0.0.1:{closed_port}"
    done = subprocess.run([*command, master], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"Error: no Spark cluster answers at --master {master} (")
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


def test_one_that_listens_and_says_nothing(tmp_path: Path) -> None:
    """The wait is told; SIGTERM ends it, with its Java, and nothing stays behind."""
    (tmp_path / "t.csv").write_text(TRACE)
    (tmp_path / "scratch").mkdir()
    code = (
        "from anabranch.policies.advisor.spark import cluster; cluster.PATIENCE_S = 0.1\n"
        "from anabranch.router.cli import main; main()"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        master = f"spark://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", code, "recommend", "--trace", "t.csv", "--out", "advice", "--master", master],
            cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path / "scratch")},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stderr is not None
        assert (
            process.stderr.readline()
            == f"Warning: Spark's master {master} has not answered yet; still waiting for it\n"
        )
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (143, "", "Terminated.\n")
    assert not [path for path in (tmp_path / "scratch").iterdir() if "anabranch" in path.name]


_ON_TWO_WORKERS = """
import sys

from anabranch.policies.errors import SparkError
from anabranch.policies.advisor import RecommendOptions, read_trace
from anabranch.policies.advisor.spark import executors
from anabranch.policies.advisor.model.engine import LocalEngine
from anabranch.policies.advisor.model.cost_model import CostModel
from anabranch.policies.advisor.advice.opening import open_engine
from anabranch.policies.advisor.statistics.operations import build
from anabranch.policies.advisor.spark.session import spark_session

executors.LOST_MAX_S = 3
partitions = [((0, 2), (1, 3, 4))]
here = LocalEngine(build(read_trace("t.parquet"), model="kahadb"))


def same(segment_bytes):
    return there.measure(partitions, CostModel(segment_bytes)) == here.measure(partitions, CostModel(segment_bytes))


def tell(*what):
    print(*what, flush=True)
    sys.stdin.readline()


try:
    options = RecommendOptions(model="kahadb", engine="spark", master=sys.argv[1])
    with open_engine("t.parquet", options, lambda *_: None, rows_a_task=1500) as there:
        context = spark_session().sparkContext
        count = context._jsc.sc().getExecutorMemoryStatus().size() - 1  # the driver is among them
        tell(count, same(65536))
        tell(same(32768))
        same(131072)
except SparkError as error:
    tell(error)
"""


@pytest.mark.campaign  # a minute of processor time: six Java processes, and one of Python for each task
@pytest.mark.weight(0)
def test_a_worker_may_be_lost_but_not_all(tmp_path: Path) -> None:
    """What a lost worker held is made again on the other, with the same figures; without any, it ends with an error."""
    write_trace(generate(shape("transactions", "20m")), tmp_path / "t.parquet")
    with standalone_cluster(tmp_path, 2) as cluster:
        process = subprocess.Popen(
            [sys.executable, "-c", _ON_TWO_WORKERS, cluster.master],
            cwd=tmp_path,
            env=os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        with process:
            told = []
            for worker in range(2):
                told.append(process.stdout.readline())
                cluster.kill(worker)
                process.stdin.write("\n")
                process.stdin.flush()
            out, err = process.communicate("\n")
    assert told == ["2 True\n", "True\n"], err
    assert out == (
        f"all executors of {cluster.master} are lost, and no other came within 3 s; start its workers again, or use "
        "--engine local, which needs no Spark\n"
    ), err


def test_workers_need_nothing_of_this_package() -> None:
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    by_value(workers)
    by_value(lives)
    by_value(kernel)
    try:
        rules = kernel.JournalRules(1 << 20, 1 << 20, live_percent=50)
        journals: dict[tuple[int, tuple[int, ...]], kernel.StoreJournal] = {(0, (0,)): kernel.store_journal(rules)}
        tasks = [workers.match_task, workers.order_task, partial(workers.flow_task, journals, 9)]
        pickled = untyped.dumps(tasks)
    finally:  # other tests' workers have this package
        untyped.unregister_pickle_by_value(kernel)
    code = "import pickle, sys; sys.modules['anabranch'] = None; print(len(pickle.loads(sys.stdin.buffer.read())))"
    done = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"3\n", b"")
