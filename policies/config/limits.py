"""Limits of a store: the options, and the options that contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Required, TypedDict, Unpack

from pydantic import AfterValidator, BaseModel

from ..names.pattern import Pattern, may_overlap
from .fields import AT_LEAST_ONE, Duration, Options, PatternText, Positive, Size, given, items, parsed
from .problems import Located
from .when_full import WhenFull
from .yaml_lines import Path as Place


def _some(patterns: tuple[str, ...]) -> tuple[str, ...]:
    if not patterns:
        raise ValueError("expected at least one pattern; `>` is all destinations")
    return patterns


SOME: Final = AfterValidator(_some)


Full = Literal["fail", "block", "drop_new", "drop_old"]


class LimitValues(TypedDict, total=False):
    """The values that `LimitOptions` takes, for type checkers."""

    match: Required[Iterable[str]]
    max_messages: int | None
    max_bytes: int | str | None
    when_full: WhenFull | Full | None
    block_timeout: float | str | None


class LimitOptions(Options):
    """A limit of each destination that matches: every one of them may hold so much."""

    match: Annotated[tuple[PatternText, ...], SOME, AT_LEAST_ONE]
    """Patterns of destinations. Where several limits match a destination the one holds that would win as a store."""
    max_messages: Positive | None = None
    """The most messages that one of them holds. None: no limit."""
    max_bytes: Annotated[int, Size(1)] | None = None
    """The most bytes of messages that one of them holds. None: no limit."""
    when_full: WhenFull | None = None
    """The end of a send that goes beyond. None: as the store says."""
    block_timeout: Annotated[float, Duration(0.0, 86400)] | None = None
    """The longest that a send waits under `block`. None: as the store says."""

    if TYPE_CHECKING:

        def __init__(self, **values: Unpack[LimitValues]) -> None: ...


OF_STORE: Final = (
    "max_messages", "max_bytes", "max_stored_bytes", "min_free_disk", "nonpersistent_max_messages",
    "nonpersistent_max_bytes",
)  # fmt: skip
"""The limits that a store's own `when_full` is about."""
OF_NONPERSISTENT: Final = ("nonpersistent_max_messages", "nonpersistent_max_bytes", "nonpersistent_memory")


def contradictions(at: Place, kind: str, match: Sequence[object], options: Mapping[str, Any]) -> Iterator[Located]:
    """Yield the options of one store that contradict each other; they stand at `at`. Options that are wrong in
    themselves are passed over."""
    limits = {
        place: given(limit)
        for place, limit in enumerate(items(options.get("limits")))
        if isinstance(limit, Mapping | BaseModel)
    }
    own = [key for key in OF_STORE if options.get(key) is not None and (key != "max_bytes" or kind != "memory")]
    for key in OF_NONPERSISTENT:
        if kind == "memory" and options.get(key) is not None:
            yield Located((*at, key), "a memory store keeps all messages alike; give limits of all, and leave this out")
    when_full, timeout = _when_full(options), options.get("block_timeout")
    choices = {when_full, *map(_when_full, limits.values())}
    inherits = any(_when_full(limit) is None for limit in limits.values())
    if when_full not in (None, WhenFull.FAIL) and not own and not inherits:
        yield Located(
            (*at, "when_full"),
            f"{when_full.value} means nothing without a limit; give {_names(kind)}, or `limits` of destinations",
        )
    if timeout is not None and WhenFull.BLOCK not in choices:
        yield Located((*at, "block_timeout"), _NOTHING_BLOCKS)
    for place, limit in limits.items():
        where: Place = (*at, "limits", place)
        if limit.get("max_messages") is None and limit.get("max_bytes") is None:
            yield Located(where, "limits nothing; give max_messages or max_bytes")
        if limit.get("block_timeout") is not None and (_when_full(limit) or when_full) is not WhenFull.BLOCK:
            yield Located((*where, "block_timeout"), _NOTHING_BLOCKS)
    yield from _idle_patterns((*at, "limits"), match, limits)


_NOTHING_BLOCKS: Final = "means nothing without `when_full: block`; give that too"


def _idle_patterns(at: Place, match: Sequence[object], limits: Mapping[int, Mapping[str, Any]]) -> Iterator[Located]:
    """Yield the patterns of limits that stand twice, or match no destination of the store."""
    seen: dict[Pattern, int] = {}
    patterns = [pattern for pattern in map(parsed, match) if pattern is not None]
    takes = f": it takes {', '.join(map(str, patterns))}" if patterns else ""
    for place, limit in limits.items():
        for number, text in enumerate(items(limit.get("match"))):
            pattern, where = parsed(text), (*at, place, "match", number)
            if pattern is None:
                continue
            if pattern in seen:
                first = "this limit" if seen[pattern] == place else f"limit number {seen[pattern] + 1}"
                yield Located(where, f"pattern {text!r} stands in {first} already; keep one of the two")
            elif not any(may_overlap(pattern, other) for other in patterns):
                yield Located(where, f"no destination of this store matches {text!r}{takes}")
            seen.setdefault(pattern, place)


def _names(kind: str) -> str:
    return f"max_messages, {'max_stored_bytes' if kind == 'memory' else 'max_bytes'} or min_free_disk"


def _when_full(options: Mapping[str, Any]) -> WhenFull | None:
    value = options.get("when_full")
    try:
        return value if value is None else WhenFull(value)
    except ValueError:
        return WhenFull.FAIL  # that is told where the option is read
