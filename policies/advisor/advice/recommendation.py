"""The advisor's answer: values only, and the way that they are written to files.

    recommendation.json   all of it, for programs
    stores.yaml           a configuration that opens as it is
    summary.txt           the same for people
    report.html           with pictures, for a browser or on paper

Every figure in them comes from the exact model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ...config.durability import Sync
from ...config.writing import dump
from ...outputs import check_files, is_elsewhere, local_path, write_files
from ...text import free_name, wrapped
from ...units import format_size
from ..model.broker import BrokerPeak
from ..search.catch_all import CATCH_ALL, REST, unseen_sync
from ..statistics.destination_usage import DestinationUsage
from ..trace.table import Finding
from .figures import Figures
from .schema import VERSION
from .sharing import SHARED_STORE, URL_VARIABLE, Sharing

PEAK_CAP = "peak-cap"
"""The finding that no partitioning keeps the cap on the peak."""
DESTINATIONS_IN_COMMENTS = 100
"""Shared destinations that the comments of stores.yaml name."""
FILES = ("recommendation.json", "stores.yaml", "summary.txt", "report.html")


@dataclass(frozen=True, slots=True)
class StorePlan:
    """One store of a candidate."""

    name: str
    destinations: tuple[str, ...]
    filters: tuple[str, ...]
    sync: str
    gib_hours: float
    peak_bytes: int
    written_bytes: int
    copied_bytes: int
    """The bytes that compaction copies: each byte is read once and written once."""
    saves_mean_bytes: float | None = None
    """Disk on average, if of the current configuration this store alone were changed; None where it is as it was."""
    saves_peak_bytes: int | None = None
    saves_copied_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A partitioning and its exact figures."""

    name: str
    segment_bytes: int
    """Size of one journal file."""
    stores: tuple[StorePlan, ...]
    mean_bytes: float
    peak_bytes: int
    gib_hours: float
    spanning_transactions: int
    cost: float
    written_bytes: int
    """The bytes that operations put into the journals, and compaction's own records."""
    copied_bytes: int
    """The bytes that compaction copies: each is read once and written once. 0 without compaction, as under ActiveMQ's
    model."""
    most_copied: int
    """The copies of the message that is copied most often."""
    broker_peak: BrokerPeak | None = None
    """The disk that ActiveMQ is to be expected to take, under its model."""
    possible: bool = True
    """Whether it could be recommended: it joins nothing that has to be apart, and keeps pins and the most stores."""

    @property
    def catch_all(self) -> str | None:
        """Return the store that takes what the trace did not show; None where none of these does."""
        return next((store.name for store in self.stores if CATCH_ALL in store.filters), None)

    def to_json(self) -> dict[str, Any]:
        stores = [{**asdict(s), "destinations": list(s.destinations), "filters": list(s.filters)} for s in self.stores]
        return {**asdict(self), "stores": stores}


Render: TypeAlias = Callable[["Recommendation", str], Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The advisor's answer. `candidates` holds the recommended one too, first."""

    recommended: Candidate
    candidates: tuple[Candidate, ...]
    findings: tuple[Finding, ...]
    parameters: dict[str, Any]
    destinations: tuple[DestinationUsage, ...]
    render: Render = field(repr=False, compare=False)
    """The function that makes the FILES, by name, for the place where they are to be."""
    figures: Figures | None = None
    """The figures that the report alone shows: pictures over time, who keeps whose files, what else could be."""
    revised: str | None = None
    """The configuration in force with the recommended stores in it, where there is one."""
    directory: str | None = None
    """The data directory of that configuration; None also where each of several nodes has its own."""
    sharing: Sharing | None = None
    """Of a trace of several nodes: which destinations need a store that they share."""

    @property
    def cap_kept(self) -> bool:
        """Tell whether the recommended one stays under the cap on the peak; True where none was given."""
        return all(finding.code != PEAK_CAP for finding in self.findings)

    @property
    def has_rest(self) -> bool:
        """Tell whether `stores_yaml` has one more store, for what the trace did not show."""
        return self.revised is None and self.recommended.catch_all is None

    def candidate(self, name: str) -> Candidate:
        """Return a candidate by name: recommended, all-together, all-separate, current, second, third. Raises
        KeyError."""
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise KeyError(name)

    def to_json(self) -> dict[str, Any]:
        """Return JSON's own types throughout, as `recommendation_schema` says."""
        return {
            "version": VERSION,
            "recommended": self.recommended.to_json(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "destinations": [asdict(one) for one in self.destinations],
            "findings": [asdict(finding) for finding in self.findings],
            "parameters": self.parameters,
            **({} if self.sharing is None else {"sharing": self.sharing.to_json()}),
        }

    def stores_yaml(self) -> str:
        """Write a configuration for the recommended partitioning: the one in force, revised, or a new one. Where no
        store of it takes what the trace did not show, one more does."""
        comments = [line for text in self._on_sharing() for line in wrapped(text, 100)]
        comments = ["".join(c if c.isprintable() else "?" for c in line) for line in comments]
        return "".join(f"# {line}\n" for line in comments) + (self.revised or self._new_yaml())

    def _on_sharing(self) -> list[str]:
        """Say in the file what the nodes share."""
        if self.sharing is None:
            return []
        missing = self.revised is None and self.sharing.missing
        variable = f"{URL_VARIABLE} is the URL of the database that the nodes share. Set it on each of them."
        return [*self.sharing.sentences(DESTINATIONS_IN_COMMENTS), *([variable] if missing else [])]

    def _new_yaml(self) -> str:
        size = format_size(int(self.parameters["segment_bytes"]))
        stores: list[dict[str, Any]] = [
            {
                "name": s.name,
                "match": list(s.filters),
                **(
                    SHARED_STORE
                    if self.sharing is not None and self.sharing.is_shared(s.destinations)
                    else {"journal": {"sync": s.sync, "segment_size": size}}
                ),
            }
            for s in self.recommended.stores
        ]
        rest = REST if self.has_rest else self.recommended.catch_all
        if self.has_rest:
            sync = unseen_sync({text: Sync(policy) for text, policy in self.parameters["durability"].items()})
            stores.append({"name": rest, "match": [CATCH_ALL], "journal": {"sync": sync.value, "segment_size": size}})
        document = {"directory": "data", "stores": stores}
        header = (
            "# Recommended by `anabranch recommend`. Destinations that the trace did not show go to the store "
            f"{rest!r}.\n"
        )
        return header + dump(document)

    def write(self, out: str | Path, *, overwrite: bool = False, master: str | None = None) -> list[Path | str]:
        """Write its files into a directory, which is made where it is missing; other files there stay.

        `out`: a path of this machine, or the URL of any file system that Spark's Hadoop knows, which is reached through
        the session that is there, or a new one on `master`. Returns the paths written, or URLs. They appear whole or
        not at all, in another file system as far as that renames at once. Raises what `check_place` raises, and
        OSError.
        """
        named = self.render(self, str(out))
        if is_elsewhere(out):
            from ..spark.hadoop import file_system

            with file_system(str(out), master) as files:
                return [*files.write_files(str(out), named, overwrite=overwrite)]
        return [*write_files(local_path(out, "out"), named, overwrite=overwrite)]


def check_place(out: str | Path, *, overwrite: bool = False, master: str | None = None) -> None:
    """Raise ConfigError where `Recommendation.write` would refuse to write; for before the work. Touches nothing.

    That is where one of its files is there already, unless `overwrite`, where something else is in the way, and where
    it is not this user's to write. Raises SparkError where the file system of a URL cannot be reached.
    """
    if is_elsewhere(out):
        from ..spark.hadoop import file_system

        with file_system(str(out), master) as files:
            files.check_files(str(out), FILES, overwrite=overwrite)
    else:
        check_files(local_path(out, "out"), FILES, overwrite=overwrite)


def store_names(stores: Sequence[Sequence[str]], weights: dict[str, int]) -> list[str]:
    """Name each store, fit for a directory: the prefix its destinations share, else its heaviest destination.

    No two are alike, also where case does not count, and none is the catch-all's.
    """
    taken = {REST}
    names = []
    for members in stores:
        base = _safe(_common_prefix(members) or min(members, key=lambda name: (-weights[name], name)))
        names.append(free_name(base, taken))
    return names


def _common_prefix(members: Sequence[str]) -> str:
    """Return the name segments that all of them begin with."""
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
