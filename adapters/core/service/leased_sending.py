"""Sends whose messages are leased to their senders (operations/leased_sends.py)."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ....policies.errors import AnabranchError, DestinationError, OutcomeUnknownError
from ....policies.names.destination import Destination, Kind
from ..engine.engine import Engine
from ..messages import GROUP, Message, Outgoing, Receipt, note_received
from ..operations.changes import Send
from ..operations.leased_sends import LeasedSend
from ..state.decoding import decode
from .receiving import Receiving
from .sending import Sending

if TYPE_CHECKING:
    from ..messages import MessageStore


def require_leasable(destination: Destination, message: Outgoing) -> None:
    """Raise DestinationError for what is no queue, ValueError for a message that could not be leased at once."""
    if destination.kind is not Kind.QUEUE:
        raise DestinationError(f"{destination} is no queue: send_leased leases a message of a queue to its sender")
    why = None
    if message.deliver_at_ms:
        why = "waits for its time"
    elif message.group is not None or (message.headers and GROUP in message.headers):
        why = "has a group, of which an earlier one may be leased"
    elif not message.persistent:
        why = "is not persistent"
    if why is not None:
        raise ValueError(f"a message that {why} cannot be leased to its sender at once; use send(), and receive it")


def not_leased(destination: Destination, error: BaseException) -> OutcomeUnknownError:
    """Return the error of a message that is stored, and for this error is not held by its sender."""
    return OutcomeUnknownError(
        f"{destination}: the message is stored, and could not be leased to its sender: {error}; whoever receives has "
        "it, so send it again with the same message_id or not at all"
    )


def send_leased(
    store: MessageStore, engine: Engine, sending: Sending, receiving: Receiving, destination: Destination,
    message: Outgoing, seconds: float | None, sync: bool,
) -> Message | Receipt:  # fmt: skip
    """Send a message and hold it, as Store.send_leased."""
    require_leasable(destination, message)
    receiving.hand_out.check(seconds)
    (send,) = sending.sends([(destination, message)])
    assert type(send) is Send
    engine.asked(lambda: engine.delivery.require_room(send.state.channel))
    leased = LeasedSend(send)
    try:
        receipt = sending.send_as(leased, destination, sync)
        if receipt.seq != send.seq:
            return receipt
        try:
            return _handed_out(store, engine, receiving, leased, seconds)
        except AnabranchError as error:
            raise not_leased(destination, error) from error
    except BaseException:
        leased.given_up = True  # first: whoever applies it from now on sees that
        with suppress(RuntimeError):
            engine.look_soon()
        if leased.lease is not None:
            receiving.give_back(leased.lease)
        raise


def _handed_out(
    store: MessageStore, engine: Engine, receiving: Receiving, leased: LeasedSend, seconds: float | None
) -> Message:
    """Return the message of a send that has taken effect to its holder."""
    send = leased.send
    place = engine.asked(lambda: engine.rows.row(send.state, None, send.seq, send.order))
    lease = leased.lease
    assert lease is not None  # it is applied by now
    lease.place = place or lease.place
    message = decode(store, send.state.destination, lease.place, send.record, lease)
    receiving.hand_out((lease,), seconds)
    note_received(message)
    return message
