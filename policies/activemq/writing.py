"""Stores of ours as an `<mKahaDB>` for ActiveMQ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import quoteattr

from ..config import Config, StoreConfig
from ..config.durability import Sync
from ..config.fields import Options
from ..config.options import JournalOptions
from ..names.destination import Kind
from ..names.pattern import Pattern
from ..units import KIB
from .choice import Filter, is_compacted, ours, unsure

DIRECTORY: Final = "${activemq.data}/mkahadb"
"""The directory where ActiveMQ keeps an mKahaDB. It is not that of a KahaDB that is there: its messages would stay out
of sight."""
NAMESPACE: Final = "http://activemq.apache.org/schema/core"
_WHOLE_FILE: Final = {
    "transactions": "limits and timeouts of transactions are no attributes of <mKahaDB>",
    "usage": "ActiveMQ records no usage; `anabranch recommend` reads what archiveDataLogs keeps (option from-kahadb)",
    "bindings_directory": "an mKahaDB keeps its transactions in its own directory, and records no places",
    "create_directory": "ActiveMQ makes directories that are missing",
    "file_mode": "ActiveMQ makes files as the broker's umask has them",
    "control": "whoever looks into a broker asks it by JMX",
    "shared": "a broker owns its directory, and clients come over the network",
}
"""Keys beside `stores`, and why they have no counterpart."""
_GLOB: Final = re.compile(r"[*?\[\]]")
_ESCAPED: Final = re.compile(r"\[(.)\]")


@dataclass(frozen=True, slots=True)
class MKahaDB:
    """The element that goes into `<broker>` in place of its `<persistenceAdapter>`."""

    xml: str
    """The XML, with the notes as a comment."""
    notes: tuple[str, ...]
    """Notes of what has no counterpart in ActiveMQ, or none that is quite the same."""


def write_mkahadb(config: Config, directory: str = DIRECTORY, source: str = "stores.yaml") -> MKahaDB:
    """Return the stores of a configuration as a persistence adapter, as ActiveMQ 5.17 reads it. `directory` is the
    attribute of that name there.

    `source` names the configuration in the comment.
    """
    return _Writing(config).write(directory, source)


class _Writing:
    def __init__(self, config: Config) -> None:
        self._config = config
        self._notes: list[str] = []
        self._of_one_kind = {Pattern.parse(text) for store in config.stores for text in store.match if "://" in text}

    def write(self, directory: str, source: str) -> MKahaDB:
        for key, field in type(self._config).model_fields.items():
            if key not in ("directory", "stores") and getattr(self._config, key) != field.default:
                self._notes.append(f"{key}: {_WHOLE_FILE.get(key, 'no counterpart in ActiveMQ')}")
        filters = {store.name: self._filters(store) for store in self._config.stores}
        lines = []
        takes_all = False
        for store in self._config.stores:
            found = filters[store.name]
            if found is None:
                self._notes.append(f"store {store.name}: ActiveMQ has no filter for its patterns; it is left out")
                continue
            takes_all |= not found
            lines += self._store(store, found, directory)
        if not takes_all:
            self._notes.append(
                "no store takes all destinations: of one that no filter matches ActiveMQ refuses every message"
            )
        self._doubts(filters)
        head = [
            f"Made by `anabranch mkahadb` from {source}. Put it into <broker> in place of its <persistenceAdapter>.",
            "A KahaDB that is there is not taken over: its messages stay where they are.",
            *self._notes,
        ]
        comment = "\n".join(f"  {_comment(line)}" for line in head)
        body = "\n".join(f"      {line}" for line in lines)
        return MKahaDB(
            f"<!--\n{comment}\n-->\n"
            f"<persistenceAdapter xmlns={quoteattr(NAMESPACE)}>\n"
            f"  <mKahaDB directory={quoteattr(directory)}>\n"
            f"    <filteredPersistenceAdapters>\n{body}\n    </filteredPersistenceAdapters>\n"
            "  </mKahaDB>\n</persistenceAdapter>\n",
            tuple(self._notes),
        )

    def _doubts(self, filters: Mapping[str, list[Filter] | None]) -> None:
        """Note where ActiveMQ may choose another filter than ours."""
        written = [name for name in filters if filters[name] is not None]
        for name, found in filters.items():
            for filter_ in filter(is_compacted, found or ()):
                self._notes.append(f"store {name}: ActiveMQ may take {ours(filter_)} for the same without its `*`")
        for place, mine, other, theirs in unsure([filters[name] or [] for name in written]):
            self._notes.append(
                f"{ours(mine)} (store {written[place]}) and {ours(theirs)} (store {written[other]}) may match the same "
                f"destination; which of them ActiveMQ takes is not sure, in Anabranch it is {ours(mine)}"
            )

    # Which destinations

    def _filters(self, store: StoreConfig) -> list[Filter] | None:
        """Return what a store's filter names; nothing: all destinations. None where ActiveMQ has no filter for any of
        it."""
        if any(Pattern.parse(text) == Pattern.parse(">") for text in store.match):
            others = [text for text in store.match if text != ">"]
            if others:
                self._notes.append(
                    f"store {store.name}: its filter takes all that no other does; {', '.join(others)} cannot be said "
                    "beside it, and count where no other filter matches"
                )
            return []
        found: list[Filter] = []
        for text in store.match:
            filters = _filters_of(text)
            if not filters:
                if Pattern.parse(text).kinds == {Kind.MAP}:
                    self._notes.append(f"store {store.name}: {text} has no counterpart: ActiveMQ has no maps")
                    continue
                self._notes.append(
                    f"store {store.name}: {text} has no counterpart, since in ActiveMQ a wildcard is a whole segment; "
                    "what it matches goes where other filters take it"
                )
            # What another store has for this kind alone is never this one's, and ActiveMQ would not know that.
            found += [one for one in filters if len(filters) == 1 or Pattern.parse(ours(one)) not in self._of_one_kind]
        return found or None

    # What each store is like

    def _store(self, store: StoreConfig, filters: list[Filter], directory: str) -> list[str]:
        attributes = {}
        if filters:
            kind = filters[0][0]
            names = [name if own is kind else own.scheme + name for own, name in filters]
            attributes["queue" if kind is Kind.QUEUE else "topic"] = ",".join(names)
        if store.per_destination and not filters:
            attributes["perDestination"] = "true"
        elif store.per_destination:
            self._notes.append(
                f"store {store.name}: per_destination works in ActiveMQ for all destinations alone; these share one"
            )
        if store.directory is not None:
            self._notes.append(
                f"store {store.name}: directory {store.directory} holds files of ours; ActiveMQ's are in "
                f"{directory}/{store.name}"
            )
        if store.create_directory is not None and store.create_directory != self._config.create_directory:
            self._notes.append(f"store {store.name}: create_directory: {_WHOLE_FILE['create_directory']}")
        options = store.options
        if not isinstance(options, JournalOptions):
            self._notes.append(f"store {store.name}: a store of kind {store.kind} becomes a KahaDB with defaults")
            options = JournalOptions()
        usage = []
        if options.max_bytes is not None:
            limit = quoteattr(str(options.max_bytes))
            usage = ["  <usage>", f"    <storeUsage limit={limit}/>", "  </usage>"]
            self._notes.append(f"store {store.name}: max_bytes counts bytes of messages, storeUsage the files'")
        return [
            _tag("filteredKahaDB", attributes, closed=False),
            *usage,
            "  <persistenceAdapter>",
            f"    {_tag('kahaDB', self._kahadb(store, options, directory), closed=True)}",
            "  </persistenceAdapter>",
            "</filteredKahaDB>",
        ]

    def _kahadb(self, store: StoreConfig, options: JournalOptions, directory: str) -> dict[str, str]:
        attributes = {
            # Of its own: below the mKahaDB's, ActiveMQ cuts long names to their last 64 characters, so that two filters
            # may meet, and takes every directory that it finds for one of a filter with perDestination.
            "directory": f"{directory}/{store.name}",
            "journalMaxFileLength": _size(options.segment_size),
            "journalDiskSyncStrategy": options.sync.value,
        }
        if options.sync is Sync.PERIODIC:
            attributes["journalDiskSyncInterval"] = _milliseconds(options.sync_interval)
        changed = _changed(options)
        if "checkpoint_interval" in changed:
            attributes["checkpointInterval"] = _milliseconds(options.checkpoint_interval)
        if "batch_bytes_max" in changed:
            attributes["journalMaxWriteBatchSize"] = _size(options.batch_bytes_max)
        if options.archive_directory is not None:
            attributes["archiveDataLogs"] = "true"
            attributes["directoryArchive"] = str(options.archive_directory / store.name)
        if store.index_directory is not None:
            attributes["indexDirectory"] = str(store.index_directory / store.name)
        carried = {
            "sync", "sync_interval", "segment_size", "checkpoint_interval", "batch_bytes_max", "archive_directory",
            "max_bytes",
        }  # fmt: skip
        left = sorted(changed - carried)
        if left:
            self._notes.append(
                f"store {store.name}: {', '.join(left)}: no attribute of <kahaDB>; policies of destinations "
                "(<policyEntry>) have priorities, dead letters and expiry"
            )
        return attributes


def _filters_of(text: str) -> list[Filter]:
    """Return a pattern as ActiveMQ's filters, for each kind that it matches; nothing if it has none."""
    scheme, separator, rest = text.partition("://")
    name = rest if separator else text
    if Pattern.parse(text).kinds == {Kind.MAP}:
        return []
    segments = []
    for segment in name.split("."):
        literal = _ESCAPED.sub("", segment)
        if segment in ("*", ">"):
            segments.append(segment)
        elif _GLOB.search(literal):
            return []
        else:
            segments.append(_ESCAPED.sub(r"\1", segment))
            if segments[-1] in ("*", ">") or "," in segments[-1]:
                return []  # a name that ActiveMQ takes for a wildcard, or for several
    kinds = [Kind.QUEUE, Kind.TOPIC] if not separator else [kind for kind in Kind if kind.scheme == f"{scheme}://"]
    return [(kind, ".".join(segments)) for kind in kinds]


def _changed(options: Options) -> set[str]:
    """Return the names of the options that are not as by default."""
    return set(options.model_dump(exclude_defaults=True))


def _size(count: int) -> str:
    for unit, factor in (("mb", KIB**2), ("kb", KIB)):
        if count % factor == 0:
            return f"{count // factor}{unit}"
    return str(count)


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _tag(name: str, attributes: dict[str, str], closed: bool) -> str:
    given = "".join(f" {key}={quoteattr(value)}" for key, value in attributes.items())
    return f"<{name}{given}{'/' if closed else ''}>"


def _comment(text: str) -> str:
    """Return a text as XML takes it in a comment."""
    return re.sub("-(?=-)", "- ", text)
