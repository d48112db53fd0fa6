"""A broker's persistence adapter as stores of ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from ..config import loads
from ..config.writing import dump
from ..errors import ConfigError, DestinationError, Problem
from ..names.destination import Destination, Kind
from ..text import free_name
from ..units import GIB, KIB, format_duration, format_size
from .adapters import persistence_adapter
from .choice import Filter, is_compacted, ours, unsure
from .placeholders import Placeholders
from .xml_reader import Element, read_xml

T = TypeVar("T")

SEGMENT_BYTES = 64 * KIB, GIB
BATCH_BYTES = 4 * KIB, GIB
"""The least and the most that our options take."""

_NO_COUNTERPART: Final = {
    "cleanupInterval": "a segment is released as soon as nothing in it is needed",
    "checksumJournalFiles": "records always carry checksums",
    "checkForCorruptJournalFiles": "what is read is always verified",
    "ignoreMissingJournalfiles": "what is missing is an error, never skipped",
    "enableAckCompaction": "acks keep no segment",
    "compactAcksAfterNoGC": "acks keep no segment",
    "compactAcksIgnoresStoreGrowth": "acks keep no segment",
    "preallocationScope": "segments are always allocated ahead",
    "preallocationStrategy": "segments are always allocated ahead",
    "forceRecoverIndex": "an index that is damaged is made anew by itself",
    "archiveCorruptedIndex": "an index that is damaged is made anew by itself",
    "failoverProducersAuditDepth": "duplicate_window remembers message ids, for all producers together",
    "maxFailoverProducersToTrack": "duplicate_window remembers message ids, for all producers together",
    "purgeRecoveredXATransactionStrategy": "`anabranch transactions` decides what is prepared",
    "concurrentStoreAndDispatchQueues": "what is sent is stored, also where it is acked at once",
    "concurrentStoreAndDispatchTopics": "what is sent is stored, also where it is acked at once",
}
_OTHERS: Final = frozenset(
    (
        "brokerName", "brokerService", "cleanupOnStop", "databaseLockedWaitDelay", "enableIndexDiskSyncs",
        "enableIndexPageCaching", "enableIndexRecoveryFile", "enableIndexWriteAsync", "enableSubscriptionStatistics",
        "indexCacheSize", "indexLFUEvictionFactor", "indexWriteBatchSize", "lockKeepAlivePeriod", "maxAsyncJobs",
        "transactionIdTransformer", "usageManager", "useIndexLFRUEviction", "useLock",
    )
)  # fmt: skip
"""Other attributes of <kahaDB> in ActiveMQ 5.17 that have no counterpart."""
_OF_ALL: Final = ("journalMaxFileLength", "journalWriteBatchSize", "journalCleanupInterval", "checkForCorruption")
"""Attributes of <mKahaDB> that are of the journal of its transactions."""
_SIZE: Final = re.compile(r"\s*(\d{1,19})\s*([kmg]?)b?\s*", re.IGNORECASE)
_FACTORS: Final = {"": 1, "k": KIB, "m": KIB**2, "g": GIB}


@dataclass(frozen=True, slots=True)
class Note:
    """A note of what could not be carried over, or not exactly."""

    line: int
    """The line in the file that was read; 0: all of it."""
    message: str


@dataclass(frozen=True, slots=True)
class StoresFound:
    """The stores that a broker's configuration stands for."""

    source: str
    stores: tuple[dict[str, Any], ...]
    """The stores, each as an entry of `stores:` in stores.yaml."""
    notes: tuple[Note, ...]

    def stores_yaml(self, directory: str = "data") -> str:
        """Return a configuration that opens as it is, with the notes as comments. Raises ConfigError if it would not
        open."""
        lines = [f"# Made by `anabranch mkahadb` from {self.source!r}."]
        for note in self.notes:
            where = f"line {note.line}: " if note.line else ""
            lines.append(f"# {where}{' '.join(note.message.split())}")
        document = {"directory": directory, "stores": list(self.stores)}
        text = "\n".join(lines) + "\n" + dump(document)
        loads(text, Path.cwd())
        return text


def read_stores(
    path: str | Path, properties: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> StoresFound:
    """Return the stores that a broker's XML configuration stands for, one for each KahaDB.

    `properties` are the values of `${...}`, before those of the environment (None: this process's). Raises ConfigError
    with every mistake and its line.
    """
    path = Path(path)
    known = Placeholders(properties or {}, os.environ if environment is None else environment)
    return _Reading(path, known).read(persistence_adapter(read_xml(path), path))


class _Reading:
    """The reading of one file."""

    def __init__(self, path: Path, placeholders: Placeholders) -> None:
        self._path, self._placeholders = path, placeholders
        self._problems: list[Problem] = []
        self._notes: list[Note] = []
        self._names: set[str] = set()

    def read(self, adapter: Element) -> StoresFound:
        if adapter.name == "mKahaDB":
            stores = self._of_multi(adapter)
        else:
            stores = [self._store("all", [">"], adapter)]
            self._directory(adapter)
        if self._problems:
            raise ConfigError(list(self._problems), str(self._path))
        self._note(
            0,
            "what of the broker lies elsewhere is not read: policies of destinations (prioritizedMessages, dead "
            "letters, expiry), limits, plugins",
        )
        found = StoresFound(str(self._path), tuple(stores), tuple(self._notes))
        try:
            found.stores_yaml()
        except ConfigError as error:
            raise ConfigError([Problem(problem.message) for problem in error.problems], str(self._path)) from error
        return found

    def _note(self, line: int, message: str) -> None:
        self._notes.append(Note(line, message))

    def _problem(self, line: int, message: str) -> None:
        self._problems.append(Problem(message, line))

    # Which destinations

    def _of_multi(self, adapter: Element) -> list[dict[str, Any]]:
        self._directory(adapter)
        for key in adapter.attributes:
            if key in _OF_ALL:
                self._note(adapter.line, f"{key}: of the journal of ActiveMQ's transactions; the decision log has none")
            elif key not in ("directory", "id"):
                self._unknown(adapter, key)
        filtered = [child for child in adapter.walk() if child.name == "filteredKahaDB"]
        if not filtered:
            self._problem(adapter.line, "<mKahaDB> without any <filteredKahaDB>: it takes no destination")
        stores, filters = [], []
        seen: dict[str, int] = {}
        for one in filtered:
            found = self._filters(one)
            match = [ours(filter_) for filter_ in found] if found else [">"]
            for pattern in match:
                if pattern in seen:
                    self._problem(one.line, f"{pattern} is in line {seen[pattern]} already; leave one of them")
                seen.setdefault(pattern, one.line)
            for filter_ in filter(is_compacted, found):
                self._note(one.line, f"ActiveMQ may take {ours(filter_)} for the same without its `*`; here it is not")
            stores.append(self._filtered(one, match))
            filters.append(found)
        if filtered and ">" not in seen and not {"queue://>", "topic://>"} <= set(seen):
            self._note(
                adapter.line, "no filter takes all destinations: what none takes is an error, here as in ActiveMQ"
            )
        lines = [one.line for one in filtered]
        if not self._problems:
            for place, mine, other, theirs in unsure(filters):
                self._note(
                    lines[place],
                    f"{ours(mine)} and {ours(theirs)} (line {lines[other]}) may match the same destination; which of "
                    f"them ActiveMQ takes is not sure, here it is {ours(mine)}",
                )
        return stores

    def _filters(self, one: Element) -> list[Filter]:
        """Return what a filter names; nothing: all destinations."""
        found: list[Filter] = []
        given = [key for key in ("queue", "topic") if one.attributes.get(key)]
        if len(given) > 1:
            self._problem(
                one.line,
                "queue and topic: ActiveMQ takes only one of them; write a filter for each, or both in one, "
                'queue="a.>,topic://b.>"',
            )
            return []
        for key in given:
            parts = (self._text(one, key) or "").split(",")
            filters = [self._filter(one, key, part.strip()) for part in parts]
            found += [filter_ for filter_ in filters if filter_ is not None]
        return found

    def _filter(self, one: Element, key: str, text: str) -> Filter | None:
        kind = Kind.QUEUE if key == "queue" else Kind.TOPIC
        for other in Kind:
            if text.startswith(other.scheme):
                kind, text = other, text.removeprefix(other.scheme)
        segments = text.split(".")
        try:
            if ">" in segments[:-1]:
                raise DestinationError(f"{text!r}: `>` stands for the rest, and is the last segment alone")
            Destination(kind, text)
        except DestinationError as error:
            self._problem(one.line, f"{key}: {error}")
            return None
        return kind, text

    def _filtered(self, one: Element, match: list[str]) -> dict[str, Any]:
        for key in one.attributes:
            if key not in ("queue", "topic", "perDestination", "id"):
                self._unknown(one, key)
        holder = one.child("persistenceAdapter")
        inner = (holder.children if holder is not None else one.children) or [Element("kahaDB", {}, one.line)]
        adapters = [child for child in inner if child.name not in ("usage", "locker")]
        if not adapters:
            adapters = [Element("kahaDB", {}, one.line)]
        each = self._value(one, "perDestination", _boolean) or False
        if each and match != [">"]:
            self._note(one.line, "perDestination with queue or topic: ActiveMQ does not promise that; here it works")
        store = self._store(_name_for(match, each), match, adapters[0], each)
        limit = next((child for child in one.walk() if child.name == "storeUsage"), None)
        if limit is not None and "limit" in limit.attributes:
            size = self._value(limit, "limit", _size)
            if size and "journal" in store:
                store["journal"]["max_bytes"] = format_size(size)
                self._note(limit.line, "storeUsage: max_bytes counts bytes of messages, where ActiveMQ counts files")
        return store

    # What each store is like

    def _store(self, base: str, match: list[str], adapter: Element, each: bool = False) -> dict[str, Any]:
        store: dict[str, Any] = {"name": free_name(base, self._names), "match": match}
        if each:
            store["per_destination"] = True
        if adapter.name == "memoryPersistenceAdapter":
            return store | {"memory": {}}
        if adapter.name != "kahaDB":
            self._problem(
                adapter.line,
                f"<{adapter.name}> cannot be converted, <kahaDB> and <mKahaDB> can; see docs/sql.md for databases",
            )
            return store
        index = self._text(adapter, "indexDirectory")
        if index is not None:
            store["index_directory"] = index
        store["journal"] = self._journal(adapter)
        return store

    def _journal(self, adapter: Element) -> dict[str, Any]:
        options: dict[str, Any] = {}
        sync = self._sync(adapter)
        if sync is not None:
            options["sync"] = sync
        if sync == "periodic" and (interval := self._value(adapter, "journalDiskSyncInterval", _milliseconds)):
            options["sync_interval"] = interval
        for key, option, bounds in (
            ("journalMaxFileLength", "segment_size", SEGMENT_BYTES),
            ("journalMaxWriteBatchSize", "batch_bytes_max", BATCH_BYTES),
        ):
            size = self._value(adapter, key, _size)
            if size is not None:
                within = min(max(size, bounds[0]), bounds[1])
                if within != size:
                    self._note(adapter.line, f"{key}: {option} is {format_size(within)} instead, which is the nearest")
                options[option] = format_size(within)
        if interval := self._value(adapter, "checkpointInterval", _milliseconds):
            options["checkpoint_interval"] = interval
        archive = self._text(adapter, "directoryArchive")
        if self._value(adapter, "archiveDataLogs", _boolean):
            options["archive_directory"] = archive or "archive"
        elif archive is not None:
            self._note(adapter.line, "directoryArchive without archiveDataLogs: nothing is archived")
        for key in adapter.attributes:
            self._no_counterpart(adapter, key)
        for child in adapter.children:
            self._note(child.line, f"<{child.name}> has no counterpart")
        return options

    def _sync(self, adapter: Element) -> str | None:
        strategy = self._text(adapter, "journalDiskSyncStrategy")
        enabled = self._value(adapter, "enableJournalDiskSyncs", _boolean)
        if strategy is None:
            return None if enabled is None else "always" if enabled else "never"
        if strategy.lower() not in ("always", "periodic", "never"):
            self._problem(adapter.line, f"journalDiskSyncStrategy: {strategy!r}: expected always, periodic or never")
            return None
        if enabled is False and strategy.lower() != "never":
            self._note(adapter.line, 'enableJournalDiskSyncs="false" and journalDiskSyncStrategy: the latter counts')
        return strategy.lower()

    def _no_counterpart(self, adapter: Element, key: str) -> None:
        carried = (
            "id", "directory", "indexDirectory", "journalDiskSyncStrategy", "enableJournalDiskSyncs",
            "journalDiskSyncInterval", "journalMaxFileLength", "journalMaxWriteBatchSize", "checkpointInterval",
            "archiveDataLogs", "directoryArchive",
        )  # fmt: skip
        if key in carried:
            return
        if key in _NO_COUNTERPART or key in _OTHERS:
            why = _NO_COUNTERPART.get(key, "")
            self._note(adapter.line, f"{key} has no counterpart{': ' if why else ''}{why}")
        else:
            self._unknown(adapter, key)

    def _unknown(self, element: Element, key: str) -> None:
        self._note(element.line, f"{key} is no attribute of <{element.name}> in ActiveMQ 5.17, and is left out")

    def _directory(self, adapter: Element) -> None:
        given = adapter.attributes.get("directory")
        if given is not None:
            self._note(adapter.line, f"directory={given!r} stays ActiveMQ's: our stores have a directory of their own")

    # Values

    def _value(self, element: Element, key: str, parse: Callable[[str], T]) -> T | None:
        text = element.attributes.get(key)
        if text is None:
            return None
        try:
            return parse(self._placeholders.resolve(text))
        except ValueError as error:
            self._problem(element.line, f"{key}: {error}")
            return None

    def _text(self, element: Element, key: str) -> str | None:
        return self._value(element, key, str.strip) or None


def _boolean(text: str) -> bool:
    if text.strip().lower() not in ("true", "false"):
        raise ValueError(f"{text!r}: expected true or false")
    return text.strip().lower() == "true"


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None or not int(match[1]):
        raise ValueError(f"{text!r}: expected a size such as 33554432, 512kb or 32mb")
    return int(match[1]) * _FACTORS[match[2].lower()]


def _milliseconds(text: str) -> str:
    if not re.fullmatch(r"\s*\d{1,12}\s*", text) or not int(text):
        raise ValueError(f"{text!r}: expected a number of milliseconds, 1 or more")
    return format_duration(int(text) / 1000)


def _name_for(match: list[str], each: bool) -> str:
    """Return the name of a store for these patterns, fit for a directory."""
    if match == [">"]:
        return "each" if each else "rest"
    text = match[0].partition("://")[2]
    kept = re.sub(r"[^A-Za-z0-9._-]+", "-", text.replace("[", "").replace("]", "")).strip("._-")[:56]
    return kept or ("queues" if match[0].startswith(Kind.QUEUE.scheme) else "topics")
