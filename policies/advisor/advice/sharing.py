"""The destinations that nodes have to share, and what that costs: of a trace of several nodes.

A destination needs a store that its nodes share where a message of it was sent on one node and acked on another. All
others lie in each node's own stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...text import count_of, human_bytes, listed
from ..model.engine import Engine
from ..search.current import CurrentConfig
from ..trace.events import NodeLog

NAMES_MAX: Final = 6
URL_VARIABLE: Final = "ANABRANCH_SHARED_URL"
"""The variable of the environment that has the database's URL, where no store in force is shared."""
SHARED_STORE: Final[dict[str, dict[str, Any]]] = {"sql": {"url_env": URL_VARIABLE, "shared": True}}
"""The kind and the options of a new store that nodes share."""


@dataclass(frozen=True, slots=True)
class Flow:
    """Messages that were sent on one node and acked on another."""

    source: str
    target: str
    messages: int


@dataclass(frozen=True, slots=True)
class NodesOfDestination:
    """One destination of several nodes."""

    name: str
    nodes: tuple[str, ...]
    """The nodes that sent to it, or acked."""
    needs_shared_store: bool
    shared_store: str | None
    """The store in force that has it now, if several nodes share that."""
    messages: int
    crossed_messages: int
    """Those acked on another node than that of their send."""
    flows: tuple[Flow, ...]
    messages_per_second: float | None
    """Sends, on average over the trace; None where the clock says nothing of seconds."""
    operations_per_second: float | None
    """Sends and acks: a shared store's database has to do so many."""
    bytes_per_second: float | None
    """The bytes of these, as a local journal would write them."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The nodes of a trace, and what they share."""

    nodes: tuple[str, ...]
    clocks: tuple[NodeLog, ...]
    """How their clocks compare; empty where the trace gives the order."""
    destinations: tuple[NodesOfDestination, ...]

    @property
    def needed(self) -> tuple[NodesOfDestination, ...]:
        """Return those that need a store that the nodes share."""
        return tuple(one for one in self.destinations if one.needs_shared_store)

    @property
    def missing(self) -> tuple[NodesOfDestination, ...]:
        """Return those of them that are in no such store now, as far as is known."""
        return tuple(one for one in self.needed if one.shared_store is None)

    def is_shared(self, destinations: Sequence[str]) -> bool:
        """Tell whether a store of these has to be one for all nodes."""
        return any(one.name in destinations for one in self.needed)

    def to_json(self) -> dict[str, Any]:
        clocks = [log._asdict() for log in self.clocks]
        return {"nodes": [*self.nodes], "clocks": clocks, "destinations": [asdict(one) for one in self.destinations]}

    def sentences(self, most: int = NAMES_MAX) -> list[str]:
        """Say what crossed, what that costs, and how the clocks compare. At most so many destinations are named."""
        needed, total = self.needed, count_of(len(self.destinations), "destination")
        rest = [one for one in self.destinations if not one.needs_shared_store]
        nodes = f"{', '.join(self.nodes[:-1])} and {self.nodes[-1]}"
        if not needed:
            found = [f"No message crossed between {nodes}: no destination needs a store that they share."]
        else:
            others = f"; {listed([one.name for one in rest], most)} {_needs(rest)} none" if rest else ""
            found = [f"{len(needed)} of {total} {_needs(needed)} a store that {nodes} share{others}."]
        found += [_crossed(one) for one in needed[:most]]
        if len(needed) > most:
            found.append(f"And {len(needed) - most} more, in recommendation.json.")
        if needed and needed[0].operations_per_second is not None:
            found.append(f"Sharing puts {_load(needed)} through the database, and not through local journals.")
        freed = [one for one in rest if one.shared_store is not None]
        if freed:
            load = "" if freed[0].operations_per_second is None else f": {_load(freed)} less for the database"
            names = listed([one.name for one in freed], most)
            found.append(f"In a shared store now, for no message that crossed: {names}{load}.")
        found.append("Disk is that of the journals of all nodes together. What crossed is in none of them.")
        return [*found, *(clock_sentence(log) for log in self.clocks[1:])]


def sharing_of(engine: Engine, current: CurrentConfig | None, logs: Sequence[NodeLog], timed: bool) -> Sharing | None:
    """Tell what the nodes share; None where the trace is of one. `timed`: seconds of its clock are seconds."""
    use = engine.use
    if use is None:
        return None
    seconds = engine.finish - engine.begin
    # Where a part of the messages was recorded their sizes are scaled up already, not their number.
    counted = seconds * min([log.sampled for log in logs], default=1.0)
    return Sharing(
        use.nodes,
        tuple(logs),
        tuple(
            NodesOfDestination(
                name=total.name,
                nodes=tuple(use.nodes[node] for node in use.used[d]),
                needs_shared_store=d in use.crossed,
                shared_store=current.name_of(total.name) if current and current.is_shared(total.name) else None,
                messages=total.sends,
                crossed_messages=use.crossed.get(d, 0),
                flows=tuple(
                    Flow(use.nodes[source], use.nodes[target], count)
                    for (of, source, target), count in use.flows.items()
                    if of == d
                ),
                messages_per_second=total.sends / counted if timed else None,
                operations_per_second=total.operations / counted if timed else None,
                bytes_per_second=total.bytes / seconds if timed else None,
            )
            for d, total in enumerate(engine.totals)
        ),
    )


def _needs(destinations: Sequence[NodesOfDestination]) -> str:
    return "needs" if len(destinations) == 1 else "need"


def _crossed(one: NodesOfDestination) -> str:
    flows = ", ".join(f"{flow.source} to {flow.target} {flow.messages:,}" for flow in one.flows)
    percent = 100 * one.crossed_messages / max(one.messages, 1)
    share = "over 99 %" if 99.5 <= percent < 100 else f"{percent:.0f} %"
    return f"{one.name}: {one.crossed_messages:,} of {count_of(one.messages, 'message')} crossed, {share} ({flows})."


def _load(destinations: Sequence[NodesOfDestination]) -> str:
    messages = _figure(sum(one.messages_per_second or 0.0 for one in destinations))
    operations = _figure(sum(one.operations_per_second or 0.0 for one in destinations))
    written = human_bytes(sum(one.bytes_per_second or 0.0 for one in destinations))
    return f"{messages} messages a second ({operations} sends and acks), {written} a second"


def clock_sentence(log: NodeLog) -> str:
    """Say how a clock compares."""
    whose, other = f"The clock of {log.node}", f"that of {log.reference}"
    low, high, moved = log.low_seconds, log.high_seconds, log.moved_seconds
    if log.reference == log.node:
        return f"{whose} is taken as it is: no message says how it compares."
    if not moved:
        sides = [
            f"{_figure(abs(low))} s behind" if low is not None else "",
            f"{_figure(high)} s ahead" if high is not None else "",
        ]
        return f"{whose} is taken as it is: it is at most {' or '.join(filter(None, sides))} of {other}."
    way = "ahead of" if moved > 0 else "behind"
    if low is None or high is None:
        return f"{whose} is at least {_figure(abs(moved))} s {way} {other}, and its times are moved by that."
    known = f"known to within {_figure((high - low) / 2)} s"
    return f"{whose} is {_figure(abs(moved))} s {way} {other}, {known}; its times are moved by that."


def _figure(number: float) -> str:
    return f"{number:,.1f}" if number >= 10 else f"{number:.2g}"
