"""From an ActiveMQ broker's journal to advice, without the command line. Needs anabranch[recommend], but no Java.

    python examples/recommend_from_activemq.py [KAHADB_DIRECTORY]

By default it takes the toy maker's journal that lies here.
"""

from __future__ import annotations

import sys
import tarfile
import tempfile
from pathlib import Path

from anabranch.adapters import kahadb
from anabranch.policies.advisor import RecommendOptions, from_events, recommend

ARCHIVE = Path(__file__).parent / "toymaker" / "toymaker-kahadb.tar.xz"


def advise(directory: Path) -> None:
    for store in kahadb.explain(directory).stores:
        print(store.summary)
    usage = kahadb.usage_trace(directory)
    # For a broker: its model, its file size, and order alone, since this journal was written within seconds.
    options = RecommendOptions(model="kahadb", segment_bytes=512 * 1024, clock="seq", engine="local")
    answer = recommend(from_events(usage), options)
    for warning in usage.findings.warnings():
        print(f"Warning: {warning}")
    before = answer.candidate("all-together").peak_bytes
    print(f"Peak {before / 1e6:.1f} MB in one store, {answer.recommended.peak_bytes / 1e6:.1f} MB as recommended:")
    for plan in answer.recommended.stores:
        print(f"  {plan.name}: {', '.join(plan.filters)}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        advise(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            with tarfile.open(ARCHIVE) as tar:
                tar.extractall(scratch, filter="data")
            advise(next(Path(scratch).iterdir()))
