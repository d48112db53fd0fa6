"""The writing of a plan to the tables, in one database transaction and with as few statements as may be.

Q1  Statements for single rows are gathered and run together (`flush`); a change that concerns many rows flushes what
    came before it, and is then run at once.
Q2  Sends and acks of a plan do not meet: nothing is acked that was not received, hence committed, before.
Q3  `effects` says what becomes of the counts in memory. Where the tables did not hold what was to go, because an
    interrupted caller had it removed before, the destination is counted anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy.engine import Connection

from ..core.backend import NotTakenError
from ..core.operations.branches import Branch
from ..core.operations.changes import Ack, Postponed, Send
from ..core.operations.plan import Plan
from ..core.operations.table import AT_ONCE, apply_all
from ..core.record.encoding import REMOVAL
from ..core.record.place import ORDER, OWN, Place, order_of
from ..core.state.leases import DestinationState, SubscriptionState
from .database.columns import ID, chunk_rows, escaped, message_row, place_of
from .database.statements import Statements
from .duplicates import DuplicateRows
from .effects import Effects

LAST: Final = (1 << 63) - 1
"""The highest seq there is."""

_ORDER: Final = (
    "insert.destination", "insert.message", "insert.chunk", "insert.xalog", "delete.xalog", "delete.chunks",
    "update.delivered", "delete.redelivery", "insert.redelivery", "insert.committed", "delete.committed",
)  # fmt: skip
"""The statements that are gathered, in the order in which they are run."""
KEYS_AT_ONCE: Final = 500
"""The number of keys of a map that one query asks for."""
GAP: Final = 1000
"""Acks of a topic's messages that lie closer together than this are counted by one query."""


class Write:
    """A Table (core/operations/table.py) over the tables of a store. Used by the thread that writes, once."""

    def __init__(
        self,
        connection: Connection,
        statements: Statements,
        chunk_size: int,
        priorities: bool,
        branches: Mapping[bytes, int],
        branch_rows: Iterator[int],
    ) -> None:
        """Make the writer of one plan. `branches` has the IDs in XALOG of what is prepared; `branch_rows` gives new
        ones."""
        self._connection, self._statements = connection, statements
        self._chunk_size, self._priorities = chunk_size, priorities
        self._branches, self._branch_rows = branches, branch_rows
        self.effects: Final = Effects()
        self._rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self._acks: dict[tuple[int, int], tuple[DestinationState, Place | None]] = {}
        """Acks by subscription's number (0: for all) and seq."""
        self._subscribed: dict[DestinationState, dict[int, SubscriptionState]] = {}
        """The subscriptions of topics by number, as far as the plan is written."""
        self._recount: dict[DestinationState, None] = {}
        self._recount_waits: dict[DestinationState | SubscriptionState, None] = {}
        self._postponed: dict[DestinationState, list[Postponed]] = {}

    def run_plan(self, plan: Plan, ids: DuplicateRows) -> None:
        """Run all of a plan but the row of STORE. Raises SQLAlchemyError, NotTakenError."""
        apply_all(plan.changes, self)
        self.flush()
        for state in self._recount:
            self._count(state)
        for counted in self._recount_waits:
            self._count_waits(counted)
        self._write_ids(plan, ids)
        self.effects.last_seq = plan.last_seq

    # Messages

    def put(self, sends: Sequence[Send]) -> None:
        state = sends[0].state
        number, queue_name = state.number, str(state.destination)
        rows, effects, size = self._rows["insert.message"], self.effects, self._chunk_size
        if state.is_map:
            sends = self._replace(state, sends)
        for send in sends:
            if state.is_topic and not send.recipients:
                continue
            row, body = message_row(send, number, queue_name, size)
            rows.append(row)
            if body:
                self._rows["insert.chunk"] += chunk_rows(send.seq, body, size)
            effects.sent(send)

    def _replace(self, state: DestinationState, sends: Sequence[Send]) -> Sequence[Send]:
        """Remove what a map has under the keys of these. Return those that stay: the last of each key, unless it is a
        removal."""
        self.flush()
        latest = {send.name: send for send in sends}
        there: list[Any] = []
        names = list(latest)
        for first in range(0, len(names), KEYS_AT_ONCE):
            some = names[first : first + KEYS_AT_ONCE]
            there += self._query("select.keyed", destination=state.number, keys=some)
        self._delete({row[ID]: (state, place_of(row, self._priorities)) for row in there})
        return [send for send in sends if latest[send.name] is send and send.expires_at_ms != REMOVAL]

    def ack(self, acks: Sequence[Ack]) -> None:
        for ack in acks:
            if not ack.state.removed and ack.state not in self.effects.removed:  # else it goes with the others
                self._acks[ack.number, ack.seq] = (ack.state, ack.place)

    def returned(self, state: DestinationState, seq: int, number: int, count: int, place: Place | None) -> None:
        if not state.is_topic:
            self._rows["update.delivered"].append({"message": seq, "count": count})
        else:
            subscriber = self._subscriptions(state).get(number)
            if subscriber is None:
                return
            self._rows["delete.redelivery"].append({"subscription": number, "message": seq})
            self._rows["insert.redelivery"].append({"subscription": number, "message": seq, "count": count})
            self.effects.redelivered.add(subscriber)
        self.effects.returned[number, seq] = count

    def postpone(self, state: DestinationState, seq: int, number: int, due: int, place: Place | None) -> None:
        self._postponed.setdefault(state, []).append(Postponed(state, seq, number, due, place))

    def _flush_postponed(self) -> None:
        postponed, self._postponed = self._postponed, {}
        for state, some in postponed.items():
            whole: dict[bool, list[Postponed]] = {True: [], False: []}
            for one in some:
                if state.is_topic and one.number:
                    self._postpone_for(state, one)
                elif state.is_topic:
                    self._count_for_topic(one, self._postpone_whole(state, [one], bool(one.due)))
                else:
                    whole[bool(one.due)].append(one)
            for waits, those in whole.items():
                if those:
                    self._postpone_whole(state, those, waits)

    def _postpone_whole(self, state: DestinationState, postponed: Sequence[Postponed], waits: bool) -> int:
        """Let messages wait for all, or no longer. Return how many did not wait before, or do not any more."""
        number, effects = state.number, self.effects
        rows = [{"message": one.seq, "number": number, "apart": -number, "until": one.due} for one in postponed]
        if waits:
            changed = self._run("update.wait", rows)
            if changed != len(rows):
                self._run("update.wait.longer", [_without(row, "number") for row in rows])
            effects.due = min(filter(None, [effects.due, *(one.due for one in postponed)]))
        else:
            changed = self._run("update.wait.over", [_without(row, "until") for row in rows])
            for one in postponed:
                place = one.place or self._place(one.seq)
                if place is not None:
                    effects.free(state, place[ORDER], one.seq)
        if changed < 0:  # the driver does not tell
            self._recount_waits[state] = None
        else:
            effects.more_waits(state, changed if waits else -changed)
        return changed

    def _count_for_topic(self, one: Postponed, changed: int) -> None:
        if not changed:
            return
        acked = {row[0] for row in self._query("select.acked", message=one.seq)}
        for number, subscriber in self._subscriptions(one.state).items():
            if subscriber.start < one.seq and number not in acked:
                self.effects.more_waits(subscriber, 1 if one.due else -1)

    def _postpone_for(self, state: DestinationState, one: Postponed) -> None:
        """Let a message wait for a subscription, or no longer."""
        subscriber = self._subscriptions(state).get(one.number)
        if subscriber is None:
            return
        key = {"subscription": one.number, "message": one.seq}
        if not self._run("update.wait.durable", {**key, "until": one.due or None}) and one.due:
            self._run("insert.redelivery", {**key, "count": 0})
            self._run("update.wait.durable", {**key, "until": one.due})
        self.effects.redelivered.add(subscriber)
        self._recount_waits[subscriber] = None
        if one.due:
            self.effects.due = min(filter(None, (self.effects.due, one.due)))
        else:
            place = one.place or self._place(one.seq)
            if place is not None:
                self.effects.free(state, place[ORDER], one.seq)

    def _count_waits(self, counted: DestinationState | SubscriptionState) -> None:
        """Count anew what waits there, as the tables say in this transaction."""
        if isinstance(counted, DestinationState):
            count = self._query("select.count.waiting", destination=counted.number)[0][0]
            for subscriber in self._subscriptions(counted).values():
                self._count_waits(subscriber)
        else:
            count = self._query(
                "select.count.waiting.durable", destination=counted.topic.number, durable=counted.number,
                start=counted.start + 1,
            )[0][0] + self._query("select.count.waits", durable=counted.number)[0][0]  # fmt: skip
        self.effects.waiting[counted] = count

    def ack_range(self, state: DestinationState, first: int, last: int, number: int) -> None:
        self.flush()
        limits = {"topic": state.number, "first": first, "last": min(last, LAST)}
        self.effects.many = True
        if state.removed or state in self.effects.removed:
            self._drop_removed(state, limits, number)
            return
        if state.delayed or state in self.effects.waits:
            self._recount_waits[state] = None
        if not number:
            for row in self._query("select.counts.range", **limits):
                self._gone(state, row)
            self._delete_range(state, limits)
            if state.is_topic:
                self._recount[state] = None
            return
        subscriber = self._subscriptions(state).get(number)
        if subscriber is not None:
            # Messages before its start are not the subscription's to ack (S2): its rows in ACKS would outlive them.
            limits["first"] = max(first, subscriber.start + 1)
            acked = self._run("insert.acks.range", {**limits, "subscription": number})
            if acked < 0:  # the driver does not tell
                self._recount[state] = None
            else:
                self.effects.acks(subscriber, acked)
            if subscriber.delayed or subscriber in self.effects.waits:
                which = {"subscription": number, "first": limits["first"], "last": limits["last"]}
                self._run("update.waits.durable", which)
                self._recount_waits[subscriber] = None
            self._finish(state, limits)
        else:
            self._drop_ended(state, limits, number)

    def _drop_removed(self, state: DestinationState, limits: dict[str, int], number: int) -> None:
        """Remove messages of a destination that is no more, and with the last of them its row."""
        if not number:
            self._delete_range(state, limits)
            if limits["last"] == LAST:
                for name in ("delete.ended.acks", "delete.ended.redeliveries", "delete.ended"):
                    self._run(name, {"destination": -state.number})
                self._run("delete.destination", {"destination": state.number})
                self.effects.left.append((state, 0))

    def _drop_ended(self, state: DestinationState, limits: dict[str, int], number: int) -> None:
        """Remove messages that only an ended subscription was to ack, and with the last of them its row."""
        for name in ("delete.durable.acks", "delete.durable.redeliveries"):
            self._run(name, {"subscription": number, "first": limits["first"], "last": limits["last"]})
        self._finish(state, limits)
        if limits["last"] == LAST:
            self._run("delete.durable", {"subscription": number})
            self.effects.left.append((state, number))

    def _delete_range(self, state: DestinationState, limits: dict[str, int]) -> None:
        for what in ("chunks", "acks", "redeliveries", "messages"):
            if state.is_topic or what in ("chunks", "messages"):
                self._run(f"delete.range.{what}", limits)

    def _finish(self, state: DestinationState, limits: dict[str, int]) -> None:
        """Remove messages between two seqs that each of their subscriptions has acked."""
        rows = self._query("select.counts.finished", **limits)
        for row in rows:
            self._gone(state, row)
        if rows:
            self._run("delete.finished.chunks", limits)
            self._run("delete.finished.messages", limits)
        self._run("delete.finished.acks", limits)
        self._run("delete.finished.redeliveries", limits)
        self.effects.many = True

    def _gone(self, state: DestinationState, row: Sequence[Any]) -> None:
        priority, count, size, _ = row
        self.effects.gone(state, order_of(priority, self._priorities), count, int(size))

    # Acks of single messages

    def _flush_acks(self) -> None:
        """Run the acks of single messages. Each subscription acks for itself; a message is dead that all of its
        subscriptions have acked."""
        acks, self._acks = self._acks, {}
        dead: dict[int, tuple[DestinationState, Place]] = {}
        wait: dict[int, tuple[DestinationState, Place, int]] = {}
        shared: list[dict[str, int]] = []
        for (number, seq), (state, given) in acks.items():
            place = given or self._place(seq)
            if place is None:
                continue
            subscriber = self._subscriptions(state).get(number) if number else None
            if number and subscriber is None:
                continue
            self.effects.acked.append((number, seq))
            if subscriber is not None and (subscriber.delayed or subscriber in self.effects.waits):
                self._run("update.waits.durable", {"subscription": number, "first": seq, "last": seq})
                self._recount_waits[subscriber] = None
            if subscriber is None:
                dead[seq] = (state, place)
                if state.is_topic:
                    self._acked_for_all(state, seq)
                continue
            recipients = sum(other.start < seq for other in self._subscriptions(state).values())
            self.effects.acks(subscriber, 1)
            if recipients == 1:
                dead[seq] = (state, place)
            else:
                shared.append({"subscription": number, "message": seq})
                wait[seq] = (state, place, recipients)
        if shared:
            if self._run("insert.ack", shared) != len(shared):  # some were acked already
                self._recount.update((state, None) for state, _, _ in wait.values())
            for seq, count in self._count_acks(sorted(wait)):
                if seq in wait and count >= wait[seq][2]:
                    dead[seq] = wait[seq][:2]
        self._delete(dead)

    def _place(self, seq: int) -> Place | None:
        rows = self._query("select.place", message=seq)
        return place_of(rows[0], self._priorities) if rows else None

    def _acked_for_all(self, state: DestinationState, seq: int) -> None:
        acked = {row[0] for row in self._query("select.acked", message=seq)}
        for number, subscriber in self._subscriptions(state).items():
            if subscriber.start < seq and number not in acked:
                self.effects.acks(subscriber, 1)
                self.effects.acked.append((number, seq))
                if subscriber.delayed or subscriber in self.effects.waits:
                    self._recount_waits[subscriber] = None

    def _delete(self, dead: dict[int, tuple[DestinationState, Place]]) -> None:
        if not dead:
            return
        acked: list[dict[str, int]] = []
        redelivered: list[dict[str, int]] = []
        apart: dict[DestinationState, list[dict[str, int]]] = {}
        for seq, (state, place) in dead.items():
            self.effects.gone(state, place[ORDER], 1, place[OWN][0])
            if state.delayed or state in self.effects.waits:
                apart.setdefault(state, []).append({"message": seq, "apart": -state.number})
            if state.is_topic:
                there = self._subscriptions(state).values()
                if len(there) > 1:
                    acked.append({"message": seq})
                if any(subscriber.own or subscriber in self.effects.redelivered for subscriber in there):
                    redelivered.append({"message": seq})
        deleted = sum([self._delete_waiting(state, rows) for state, rows in apart.items()])
        deleted += self._run("delete.message", [{"message": seq} for seq in dead])
        if deleted != len(dead):
            self._recount.update((state, None) for state, _ in dead.values())
        self._run("delete.chunks", [{"message": seq} for seq, (_, place) in dead.items() if place[OWN][1] > 0])
        self._run("delete.acks", acked)
        self._run("delete.redeliveries", redelivered)
        self.effects.dead += dead

    def _delete_waiting(self, state: DestinationState, rows: list[dict[str, int]]) -> int:
        """Delete those of these messages that wait for all; return how many."""
        deleted = self._run("delete.message.waiting", rows)
        if deleted < 0 or (deleted and state.is_topic):
            self._recount_waits[state] = None
        elif deleted:
            self.effects.more_waits(state, -deleted)
        return deleted

    def _count_acks(self, seqs: list[int]) -> Iterable[tuple[int, int]]:
        first = 0
        for place in range(1, len(seqs) + 1):
            if place == len(seqs) or seqs[place] - seqs[place - 1] > GAP:
                yield from self._query("select.acks", first=seqs[first], last=seqs[place - 1])
                first = place

    # Destinations and subscriptions

    def _subscriptions(self, state: DestinationState) -> dict[int, SubscriptionState]:
        by_number = self._subscribed.get(state)
        if by_number is None:
            by_number = self._subscribed[state] = {one.number: one for one in state.subscriptions.values()}
        return by_number

    def declare(self, state: DestinationState) -> None:
        destination = state.destination
        self._rows["insert.destination"].append(
            {"number": state.number, "kind": destination.kind.value, "name": destination.name}
        )

    def remove(self, state: DestinationState) -> None:
        self.flush()
        self._run("update.durables.ended", {"topic": state.number})
        self._subscribed[state] = {}
        self._run("delete.duplicates.destination", {"topic": state.number})
        self._recount.pop(state, None)
        self.effects.count_anew(state, (), {})
        self.effects.removed.append(state)
        self.effects.many = True
        if state.count > AT_ONCE:
            self._run("update.destination.removed", {"destination": state.number})
            self.effects.leaving.append(state.channel)
        else:
            self.ack_range(state, 0, LAST, 0)

    def subscribe(self, subscriber: SubscriptionState) -> None:
        self.flush()
        _, name, client_id, selector, no_local = subscriber.subscription
        topic, start = subscriber.topic, subscriber.start + 1
        if not subscriber.start:
            # Messages that only ended subscriptions were to ack are not for this one. They still go a page at a time:
            # until then this one counts as having acked them.
            self._run("insert.acks.unwanted", {"subscription": subscriber.number, "topic": topic.number})
        self._run(
            "insert.durable",
            {
                "number": subscriber.number,
                "clientid": escaped(client_id),
                "durablename": escaped(name),
                "topicname": topic.destination.name,
                "selector": None if selector is None else escaped(selector),
                "nolocal": int(no_local),
                "destination": topic.number,
                "startid": start,
            },
        )
        self._subscriptions(topic)[subscriber.number] = subscriber
        counts = self._query("select.count.durable", destination=topic.number, durable=subscriber.number, start=start)
        self.effects.acks(subscriber, -counts[0][0])
        if topic.delayed:
            self._recount_waits[subscriber] = None

    def unsubscribe(self, subscriber: SubscriptionState) -> None:
        self.flush()
        self._subscriptions(subscriber.topic).pop(subscriber.number, None)
        self._run("update.durable.ended", {"subscription": subscriber.number})
        if subscriber.topic.count > AT_ONCE:
            self.effects.leaving.append(subscriber.channel)
        else:
            self.ack_range(subscriber.topic, 0, LAST, subscriber.number)

    # Branches

    def prepare(self, branch: Branch) -> None:
        row, payload, size = next(self._branch_rows), branch.payload, self._chunk_size
        if len(payload) > size:
            self._rows["insert.chunk"] += chunk_rows(row, payload, size)
        content = None if len(payload) > size else payload
        self._rows["insert.xalog"].append({"id": row, "xid": branch.transaction.hex(), "content": content})
        self.effects.prepared[branch.transaction] = row

    def settled(self, branch: Branch, committed: bool) -> None:
        transaction = branch.transaction
        row = self.effects.prepared.get(transaction) or self._branches[transaction]
        self._rows["delete.xalog"].append({"prepared": row})
        self._rows["delete.chunks"].append({"message": row})
        if committed:
            self._rows["insert.committed"].append({"xid": transaction.hex()})
        self.effects.settled.append(transaction)

    def _require_branches(self, deleted: int) -> None:
        """Check that each branch that has its outcome had its row. There is one, or it is done (rule T6). Raises
        NotTakenError."""
        if deleted != len(self._rows["delete.xalog"]):
            names = ", ".join(transaction.hex() for transaction in self.effects.settled)
            raise NotTakenError(
                f"the row of XALOG that holds the prepared transaction {names} is gone: somebody else has changed the "
                "store's tables; close the store and open it again"
            )

    def forget(self, transactions: Sequence[bytes]) -> None:
        self._rows["delete.committed"] += [{"transaction": transaction.hex()} for transaction in transactions]

    def entries_done(self, numbers: Sequence[int], rows: int) -> None:
        """Remove from OUTBOX what this plan does of callers' transactions. Raises NotTakenError."""
        gone = self._run("delete.outbox", [{"number": number} for number in numbers])
        if gone not in (rows, -1):  # -1: the driver does not tell
            raise NotTakenError(
                f"OUTBOX holds {gone} of {rows} rows with sends and acks that were about to be done: they were done "
                "before, or somebody else has changed the store's tables. Nothing was changed"
            )

    # Running statements

    def flush(self) -> None:
        """Run the gathered statements."""
        for name in _ORDER:
            rows = self._rows.get(name)
            if rows:
                changed = self._run(name, rows)
                if name == "delete.xalog":
                    self._require_branches(changed)
                rows.clear()
        if self._postponed:
            self._flush_postponed()
        if self._acks:
            self._flush_acks()

    def _write_ids(self, plan: Plan, ids: DuplicateRows) -> None:
        """Write the latest ids of the duplicate window; remove the oldest."""
        if not plan.ids or not ids.limit:
            return
        rows = [
            {"number": number, "destination": key[0], "messageid": escaped(key[1].decode()), "id": seq}
            for number, (key, seq) in enumerate(plan.ids.items(), ids.last_number + 1)
        ]
        self._run("insert.duplicate", rows)
        self.effects.ids += plan.ids
        first = ids.first_kept(len(rows))
        if first:
            self._run("delete.duplicates", {"upto": first - 1})

    def _count(self, state: DestinationState) -> None:
        """Count a destination anew, as the tables say in this transaction."""
        rows = self._query("select.counts.destination", destination=state.number)
        to_ack = {}
        for number, subscriber in self._subscriptions(state).items():
            counts = self._query(
                "select.count.durable", destination=state.number, durable=number, start=subscriber.start + 1
            )
            to_ack[subscriber] = counts[0][0]
        self.effects.count_anew(state, rows, to_ack)

    def _run(self, name: str, parameters: Any) -> int:
        """Run a statement, for one row or for many; return how many rows it has changed."""
        if isinstance(parameters, list):
            if not parameters:
                return 0
            if len(parameters) == 1:
                parameters = parameters[0]
        return self._connection.execute(self._statements[name], parameters).rowcount

    def _query(self, name: str, **parameters: Any) -> Sequence[Any]:
        """Return the rows that a statement finds."""
        return self._connection.execute(self._statements[name], parameters).all()


def _without(row: dict[str, int], name: str) -> dict[str, int]:
    return {key: value for key, value in row.items() if key != name}
