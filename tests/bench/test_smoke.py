"""The benchmarks run: each scenario with each peer that has it, with tiny counts. No timing is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.policies.advisor import Workload

from ..places import in_memory
from . import advice, page, peers, report
from .__main__ import main
from .runner import left_out, measure
from .scenarios import SCENARIOS

N = 60
LEFT = {("rabbitmq", scenario) for scenario in ("send-sync", "send-nosync", "send+ack-nosync")}
"""What is left to campaigns of a peer that takes seconds to start: recover-clean makes all the calls that it has, and
opens it again."""
PAIRS = [
    pytest.param(
        scenario, peer, id=f"{scenario}-{peer}", marks=[pytest.mark.campaign] if (peer, scenario) in LEFT else []
    )
    for scenario in SCENARIOS
    for peer in peers.MODULES
    if not left_out(scenario, [peer])
]


@pytest.mark.parametrize(("scenario", "peer"), PAIRS)
def test_every_peer_runs_what_it_has(scenario: str, peer: str, tmp_path: Path) -> None:
    threads = 2 if SCENARIOS[scenario].threads else 1
    line = measure(peer, scenario, tmp_path, N, threads)
    assert (line["peer"], line["scenario"], line["threads"]) == (peer, scenario, threads)
    assert line["n"] >= N
    assert line["seconds"] > 0
    assert (line["p50_us"] is not None) == (
        scenario in {"send-sync", "send-sync-apart", "sql-send"} or scenario.startswith("tx-")
    )


def ran(module: str, *options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])


def lines_of(run: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_anabranch_has_every_scenario() -> None:
    assert all(not left_out(scenario, ["anabranch"]) for scenario in SCENARIOS)


def test_the_command_prints_a_line_for_each_run_and_a_table_at_the_end(tmp_path: Path) -> None:
    options = ["--scenario", "send-nosync,send-many", "--peers", "lmdb,huey", "--n", "50", "--rounds", "2"]
    run = ran("tests.bench", *options, "--dir", tmp_path / "bench")
    assert run.returncode in {0, 2}, run.stderr
    if run.returncode == 2:  # the temporary directory of this machine is in memory, and the command says so
        assert "in memory" in run.stderr
        return
    lines = lines_of(run)
    turns = [("send-nosync", peer) for peer in ("lmdb", "huey", "huey", "lmdb")] + [("send-many", "lmdb")] * 2
    assert [(line["scenario"], line["peer"]) for line in lines] == turns
    assert list(lines[0]) == [
        *["peer", "scenario", "n", "payload_bytes", "threads", "seconds", "per_second", "p50_us", "p99_us"]
    ]
    assert "left out huey, which has no batch_sender" in run.stderr
    assert not list((tmp_path / "bench").iterdir()), "each run removes its directory"


@pytest.mark.parametrize(
    ("module", "options", "told"),
    [
        ("usage", ["--pairs", 20], ["processor time", "time on the clock"]),
        ("compaction", ["--sends", 100, "--threads", 2, "--segment-bytes", 65536], ["kept", "reclaimed", "compacted"]),
    ],
)
def test_what_it_costs_is_told(tmp_path: Path, module: str, options: list[object], told: list[str]) -> None:
    run = ran(f"tests.bench.{module}", "--rounds", 1, *options, "--directory", tmp_path)
    assert run.returncode == 0, run.stderr
    assert [line.partition(":")[0] for line in run.stdout.splitlines()] == told


def test_the_shared_store_is_measured_beside_pgmq() -> None:
    options = ["--peers", "anabranch,pgmq", "--processes", "1", "--rounds", "1", "--seconds", "0.1"]
    lines = lines_of(ran("tests.bench.shared", *options, "--work", "take50,wake", "--dir", in_memory() or "/tmp"))
    wanted = [(peer, work) for work in ("take", "wake") for peer in ("anabranch", "pgmq")]
    assert [(line["peer"], line["work"]) for line in lines] == wanted
    assert all(line.get("per_second", line.get("p50_ms", 0)) > 0 for line in lines)


def test_the_hosts_are_measured_beside_what_they_bring(tmp_path: Path) -> None:
    """In this environment huey is the only one."""
    options = ["--hosts", "huey,kombu", "--backends", "anabranch,FileHuey no sync", "--count", "5", "--rounds", "1"]
    run = ran("tests.bench.hosts", *options, "--dir", tmp_path)
    lines = lines_of(run)
    wanted = [(peer, work) for peer in ("anabranch", "FileHuey no sync") for work in ("huey-send", "huey-work")]
    assert [(line["peer"], line["scenario"]) for line in lines] == wanted
    assert all(line["per_second"] > 0 for line in lines)
    assert "left out kombu: No module named 'kombu'" in run.stderr


def test_the_ratio_says_how_many_times_a_peer_anabranch_is() -> None:
    def line(peer: str, per_second: float) -> dict[str, object]:
        line = {"peer": peer, "scenario": "s", "n": 1, "payload_bytes": 1, "threads": 1, "per_second": per_second}
        return line | {"seconds": 0.5, "p50_us": None, "p99_us": None}

    lines = [line("anabranch", speed) for speed in (100.0, 300.0, 200.0)] + [line("lmdb", 50.0)]
    rows = report.table(lines).splitlines()
    assert rows[2].split() == ["anabranch", "200", "100", "300", "0.5000", "1.00"]
    assert rows[3].split() == ["lmdb", "50", "50", "50", "0.5000", "4.00"]


def test_the_table_of_the_page_has_the_medians_and_the_best_peer() -> None:
    def line(peer: str, per_second: float, p99: float | None = None) -> dict[str, object]:
        return {"peer": peer, "per_second": per_second, "p99_us": p99}

    sends = [line("anabranch", 100.0, 1500.0), line("anabranch", 300.0, 2500.0), line("anabranch", 200.0, 9000.0)]
    others = [line("huey", 50.0), line("sqlite3", 100.0), line("raw", 400.0)]
    rows = page.table({page.ROWS[0]: [*sends, *others], page.ROWS[-1]: [line("anabranch", 4.0)]}).splitlines()
    assert rows[2].split(" | ")[2:] == ["200/s", "2.5 ms", "sqlite3 100/s", "2.00", "400/s", "0.50 |"]
    assert rows[3].split(" | ")[2:] == ["250 ms", "", "", "", "", " |"]


def test_the_command_prints_the_table_of_the_page(tmp_path: Path) -> None:
    run = ran("tests.bench.page", "--rows", "send-many,import", "--rounds", 1, "--scale", 0.0001, "--dir", tmp_path)
    assert run.returncode in {0, 2}, run.stderr
    if run.returncode == 0:  # else the temporary directory of this machine is in memory
        rows = [row.split(" | ") for row in run.stdout.splitlines()[4:]]
        assert [row[0] for row in rows] == ["| unsynced `send_many` of 1,000", "| `import`"]
        assert all(row[2] for row in rows)


@pytest.mark.parametrize("wrong", [["--scenario", "nope"], ["--n", "0"], ["--peers", "lmdb,nope"]])
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)
    assert wrong[1].split(",")[-1] in capsys.readouterr().err


def test_how_true_the_advice_is_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    text = f"name: slow\nseed: 3\nduration: 5m\ndestinations:{advice.WORKLOADS['slow']}"
    assert advice.check("slow", Workload.parse(text), 64 << 10) < 1.1
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[1].partition(",")[0] for row in rows] == list(advice.SHOWN)
    assert all(0.8 < float(row[3]) < 1.25 for row in rows), "predicted beside measured, at the peak"
