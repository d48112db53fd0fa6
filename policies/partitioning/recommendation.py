"""What the advisor answers: values only, and how they are written to files.

    recommendation.json   all of it, for programs
    stores.yaml           a configuration that opens as it is
    summary.txt           the same for people

Every figure in them comes from the exact model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from ..outputs import check_files, local_path, write_files
from ..units import format_size
from .trace import Finding

REST = "rest"
"""The store that takes what the trace did not show."""
FILES = ("recommendation.json", "stores.yaml", "summary.txt")


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store of a candidate."""

    name: str
    destinations: tuple[str, ...]
    filters: tuple[str, ...]
    sync: str
    gib_hours: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partitioning and its exact figures."""

    name: str
    stores: tuple[StorePlan, ...]
    mean_bytes: float
    peak_bytes: int
    gib_hours: float
    spanning_transactions: int
    cost: float

    def to_json(self) -> dict[str, Any]:
        stores = [
            {"name": s.name, "destinations": list(s.destinations), "filters": list(s.filters)} for s in self.stores
        ]
        return {
            "name": self.name,
            "stores": stores,
            "mean_bytes": self.mean_bytes,
            "peak_bytes": self.peak_bytes,
            "gib_hours": self.gib_hours,
            "spanning_transactions": self.spanning_transactions,
            "cost": self.cost,
        }


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The advisor's answer. `candidates` holds the recommended one too, first."""

    recommended: Candidate
    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    parameters: dict[str, Any]

    @property
    def cap_kept(self) -> bool:
        """Whether the recommended one stays under the cap on the peak; True where none was given."""
        return all(finding.code != "peak-cap" for finding in self.findings)

    def candidate(self, name: str) -> Candidate:
        """By name: recommended, all-together, all-separate, current, second, third. Raises KeyError."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """JSON's own types throughout."""
        return {
            "recommended": self.recommended.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "findings": [asdict(finding) for finding in self.findings],
            "parameters": self.parameters,
        }

    def stores_yaml(self) -> str:
        """A configuration for the recommended partitioning, with a catch-all store for other destinations."""
        size = format_size(int(self.parameters["segment_bytes"]))
        stores: list[dict[str, Any]] = [
            {"name": s.name, "match": list(s.filters), "journal": {"sync": s.sync, "segment_size": size}}
            for s in self.recommended.stores
        ]
        stores.append({"name": REST, "match": [">"], "journal": {"sync": "always", "segment_size": size}})
        document = {"directory": "data", "stores": stores}
        header = (
            "# Recommended by `anabranch recommend`. Destinations that the trace did not show go to the store "
            f"{REST!r}.\n"
        )
        return header + yaml.safe_dump(document, sort_keys=False, allow_unicode=True, width=100)

    def write(self, out: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Writes its three files into a directory, which is made where it is missing; other files there stay.

        Returns the paths written. They appear whole or not at all. Raises what `check_place` raises, and OSError.
        """
        import json

        from .render import render_text

        texts = (json.dumps(self.to_json(), indent=2) + "\n", self.stores_yaml(), render_text(self))
        return write_files(local_path(out, "out"), dict(zip(FILES, texts, strict=True)), overwrite=overwrite)


def check_place(out: str | Path, *, overwrite: bool = False) -> None:
    """Raises ConfigError where `Recommendation.write` would refuse to write; for before the work. Touches nothing.

    That is where one of its files is there already, unless `overwrite`, where something else is in the way, and where
    `out` is no directory of this machine, or not this user's to write.
    """
    check_files(local_path(out, "out"), FILES, overwrite=overwrite)


def store_names(stores: Sequence[Sequence[str]], weights: dict[str, int]) -> list[str]:
    """A name for each store, fit for a directory: the prefix its destinations share, else its heaviest destination.

    No two are alike, also where case does not count, and none is the catch-all's.
    """
    taken = {REST}
    names = []
    for members in stores:
        base = _safe(_common_prefix(members) or min(members, key=lambda name: (-weights[name], name)))
        name, number = base, 2
        while name.lower() in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name.lower())
        names.append(name)
    return names


def _common_prefix(members: Sequence[str]) -> str:
    """The name segments that all of them begin with."""
    split = [name.partition("://")[2].split(".") for name in members]
    prefix = []
    for segments in zip(*split, strict=False):
        if len(set(segments)) > 1:
            break
        prefix.append(segments[0])
    return ".".join(prefix)


def _safe(text: str) -> str:
    text = text.partition("://")[2] or text
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in text).strip(".-_")[:56]
    return kept or "store"
