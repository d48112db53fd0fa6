"""Is each public type declared, so that every type checker sees the same? Run by `make lint`, as users would:
`pyright --verifytypes anabranch --ignoreexternal`.

The programs below anabranch.hosts are not installed here. What is unknown there may be theirs, and is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src"
COMMAND = ["-m", "pyright", "--verifytypes", "anabranch", "--ignoreexternal", "--outputjson"]


def problems() -> list[str]:
    """What has no declared type, a line each."""
    # The tree is found as users' packages are, through the interpreter that comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(SOURCES)}
    told = subprocess.run([sys.executable, *COMMAND], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(told.stdout)
    found = [problem["message"] for problem in report["generalDiagnostics"]]
    symbols = report["typeCompleteness"]["symbols"]
    if len(symbols) < 5000:
        found.append(f"only {len(symbols)} symbols were found")
    for symbol in symbols:
        of_host = symbol["name"].startswith("anabranch.hosts.")
        for problem in symbol["diagnostics"]:
            said = problem["message"]
            if problem["severity"] == "error" and not (of_host and "unknown" in said and "missing" not in said):
                line = problem.get("range", {}).get("start", {}).get("line", -1) + 1
                found.append(f"{problem.get('file', '')}:{line}: {symbol['name']}: {said}")
    return found


if __name__ == "__main__":
    missing = problems()
    print("\n".join(missing) or "Every public type is declared.")
    sys.exit(bool(missing))
