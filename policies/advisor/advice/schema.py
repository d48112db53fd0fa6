"""The JSON Schema of recommendation.json, for programs that read it. Imports none of the advisor's dependencies."""

from __future__ import annotations

from typing import Any

VERSION = 2
"""The version of the document, which rises when a field goes or means something else, not when one is added."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_COUNT = {"type": "integer", "minimum": 0}
_AMOUNT = {"type": "number", "minimum": 0}
_TEXTS = {"type": "array", "items": {"type": "string"}}


def _object(description: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Describe an object with all of these properties, and perhaps others that a later version has added."""
    return {"type": "object", "description": description, "properties": properties, "required": [*properties], **more}


def _with(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "description": description}


def _or_null(schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {**schema, "type": [schema["type"], "null"], "description": description}


def recommendation_schema() -> dict[str, Any]:
    """Return the schema, of the version above."""
    always = ["version", "recommended", "candidates", "destinations", "findings", "parameters"]
    return {
        "$schema": _DIALECT,
        "title": "Anabranch recommendation",
        **_object(
            "What `anabranch recommend` writes into recommendation.json.",
            {
                "version": {"const": VERSION, "description": "Rises when a field goes or changes its meaning."},
                "recommended": {"$ref": "#/$defs/candidate"},
                "candidates": {
                    "type": "array",
                    "items": {"$ref": "#/$defs/candidate"},
                    "minItems": 1,
                    "description": "All that are shown, the recommended one first.",
                },
                "destinations": {"type": "array", "items": {"$ref": "#/$defs/destination"}},
                "findings": {"type": "array", "items": {"$ref": "#/$defs/finding"}},
                "parameters": {"$ref": "#/$defs/parameters"},
                "sharing": {"$ref": "#/$defs/sharing"},
            },
            required=always,
        ),
        "$defs": _definitions(),
    }


def _definitions() -> dict[str, Any]:
    return {
        "candidate": _candidate(),
        "store": _store(),
        "broker_peak": _object(
            "Bytes at the peak: what is to be expected, and between which it lies.",
            {"bytes": _COUNT, "low_bytes": _COUNT, "high_bytes": _COUNT},
        ),
        "destination": _destination(),
        "finding": _object(
            "Facts that the trace lacks; docs/advisor.md lists the codes.",
            {"code": {"type": "string"}, "count": _COUNT, "message": {"type": "string"}},
        ),
        "tried_size": _object(
            "One size of a journal file, and what is recommended with it.",
            {
                "segment_bytes": {"type": "integer", "minimum": 1},
                "mean_bytes": _AMOUNT,
                "peak_bytes": _COUNT,
                "cost": _AMOUNT,
            },
        ),
        "parameters": _parameters(),
        "sharing": _sharing(),
    }


def _candidate() -> dict[str, Any]:
    return _object(
        "A partitioning, with the figures of an exact simulation.",
        {
            "name": _with({"type": "string"}, "recommended, all-together, all-separate, current, second, third, ..."),
            "segment_bytes": {"type": "integer", "minimum": 1, "description": "Size of one journal file."},
            "stores": {"type": "array", "items": {"$ref": "#/$defs/store"}},
            "mean_bytes": _with(_AMOUNT, "Journal bytes of all stores, averaged over the trace's time."),
            "peak_bytes": _with(_COUNT, "The most that all stores hold at one time."),
            "gib_hours": _with(_AMOUNT, "Journal bytes times time."),
            "spanning_transactions": _with(_COUNT, "Transactions over several stores."),
            "cost": _with(_AMOUNT, "J, in GiB-hours: what is minimised."),
            "written_bytes": _with(_COUNT, "What operations put into the journals, and compaction's own records."),
            "copied_bytes": _with(_COUNT, "What compaction copies; each byte is read once and written once."),
            "most_copied": _with(_COUNT, "How often the message is copied that is copied most often."),
            "broker_peak": {
                "description": "What ActiveMQ is to be expected to have at the peak; null under Anabranch's model.",
                "anyOf": [{"type": "null"}, {"$ref": "#/$defs/broker_peak"}],
            },
            "possible": _with(
                {"type": "boolean"},
                "Whether it could be recommended: it joins nothing that has to be apart, and keeps pins and the most "
                "stores.",
            ),
        },
    )


def _store() -> dict[str, Any]:
    return _object(
        "One store of a candidate.",
        {
            "name": {"type": "string"},
            "destinations": _TEXTS,
            "filters": _with(_TEXTS, "Patterns that route these destinations here."),
            "sync": {"enum": ["always", "periodic", "never"]},
            "gib_hours": _AMOUNT,
            "peak_bytes": _with(_COUNT, "The most that this store holds by itself."),
            "written_bytes": _COUNT,
            "copied_bytes": _with(_COUNT, "What compaction copies."),
            "saves_mean_bytes": _or_null(
                {"type": "number"}, "Disk on average, if of `current` this store alone were changed; null: it is not."
            ),
            "saves_peak_bytes": _or_null({"type": "integer"}, "The same at the peak."),
            "saves_copied_bytes": _or_null({"type": "integer"}, "The same of what compaction copies."),
        },
    )


def _destination() -> dict[str, Any]:
    seconds = {"type": "number", "minimum": 0}
    return _object(
        "One destination in the trace.",
        {
            "name": {"type": "string"},
            "messages": _with(_COUNT, "Sends."),
            "acks": _COUNT,
            "pending": _with(_COUNT, "Sends whose last ack the trace does not show."),
            "bytes": _with(_COUNT, "What its operations put into a journal."),
            "retention_p50_seconds": _or_null(seconds, "Half were acked within it; null: fewer than half were."),
            "retention_p95_seconds": _or_null(seconds, "95 of 100 were acked within it; null: fewer were."),
        },
    )


def _sharing() -> dict[str, Any]:
    name, seconds, array = {"type": "string"}, {"type": "number"}, {"type": "array"}
    clock = {
        "node": name,
        "reference": _with(name, "Whose clock it is compared with; its own where no message says how they compare."),
        "low_seconds": _or_null(seconds, "It is ahead of that by so much at least, below 0: behind; null: not known."),
        "high_seconds": _or_null(seconds, "It is ahead by so much at most; null: not known."),
        "moved_seconds": _with(seconds, "Its times were taken for so much earlier."),
        "sampled": _with(_AMOUNT, "The part of its messages that was recorded."),
    }
    flow = {"source": name, "target": name, "messages": _COUNT}
    destination = {
        "name": name,
        "nodes": _with(_TEXTS, "Those that sent to it, or acked."),
        "needs_shared_store": {"type": "boolean"},
        "shared_store": _or_null(name, "The store in force that has it, if nodes share that."),
        "messages": _with(_COUNT, "Sends."),
        "crossed_messages": _with(_COUNT, "Those acked on another node."),
        "flows": {**array, "items": _object("Messages sent on one node and acked on another.", flow)},
        "messages_per_second": _or_null(_AMOUNT, "Sends; null: the clock is order alone."),
        "operations_per_second": _or_null(_AMOUNT, "Sends and acks, likewise."),
        "bytes_per_second": _or_null(_AMOUNT, "Their bytes, as a local journal would write them."),
    }
    return _object(
        "What nodes have to share; of a trace of several nodes only.",
        {
            "nodes": _TEXTS,
            "clocks": {**array, "items": _object("A node's clock; none where the trace gives the order.", clock)},
            "destinations": {**array, "items": _object("One destination.", destination)},
        },
    )


def _parameters() -> dict[str, Any]:
    return _object(
        "What was asked for, and how long the trace is.",
        {
            "model": {"enum": ["anabranch", "kahadb"]},
            "segment_bytes": {"type": "integer", "minimum": 1},
            "clock": {"enum": ["ts", "seq"]},
            "operations_per_second": _AMOUNT,
            "disk_gib": _AMOUNT,
            "sync_rate": _AMOUNT,
            "overhead_segments": _AMOUNT,
            "copy_rate": _with(_AMOUNT, "MiB a second that the disk can copy."),
            "compact_live_percent": _with(
                {"type": "integer", "minimum": 0, "maximum": 95},
                "Under which share of live bytes a file is compacted; 0: none is, as under ActiveMQ's model.",
            ),
            "compact_min_segments": {"type": "integer", "minimum": 1},
            "stores_max": _or_null(_COUNT, "A limit on the stores; null: none."),
            "peak_bytes_max": _or_null(_COUNT, "A cap on the peak; null: none."),
            "durability": {"type": "object", "additionalProperties": {"enum": ["always", "periodic", "never"]}},
            "pinned": _with({"type": "array", "items": _TEXTS}, "Groups of patterns that stay together."),
            "current": _or_null(
                {"type": "object", "additionalProperties": _TEXTS}, "Patterns by store, as configured now."
            ),
            "sizes": {"type": "object"},
            "segment_sizes": {
                "type": "array",
                "items": {"$ref": "#/$defs/tried_size"},
                "minItems": 1,
                "description": "What the recommended partitioning of each size that was tried comes to.",
            },
            "engine": {"type": "string"},
            "master": _or_null({"type": "string"}, "Spark's master; null: this machine."),
            "operations": _COUNT,
            "duration_seconds": _AMOUNT,
        },
    )
