"""A STOMP broker: CoilMQ, whose queues and durable topics lie in a directory.

    python -m examples.coilmq.broker DIRECTORY [PORT]

What a client has a RECEIPT for is on disk. A message is leased while its subscriber has it: ACK settles it, NACK gives
it back, as does the end of the connection. BEGIN to COMMIT is one transaction. SUBSCRIBE to a topic with `durable:true`
begins a durable subscription, whose name is its `id`; UNSUBSCRIBE with `durable:true` ends it. A stores.yaml in the
directory says how durable, how often delivered again, and where to then. Programs that share the directory may send to
the queues and receive from them: `/queue/orders` is the queue `orders`.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

from coilmq.exception import ProtocolError
from coilmq.queue import QueueManager, lock
from coilmq.server.socket_server import StompRequestHandler, ThreadedStompServer
from coilmq.store import QueueStore
from coilmq.subscription import Subscription
from coilmq.topic import TopicManager
from coilmq.util.concurrency import synchronized
from coilmq.util.frames import CONNECTED, MESSAGE, SEND, ErrorFrame, Frame, ReceiptFrame

import anabranch
from anabranch import Destination

QUEUE, TOPIC = "/queue/", "/topic/"
NOT_STORED = ("subscription", "transaction", "receipt")
"""Headers that are between the broker and one client."""


class Storage(QueueStore):
    """The frames of queues, and of durable subscriptions, which are destinations `/queue/NAME\\n/topic/TOPIC` here. One
    that is dequeued is leased, and has its message as `frame.lease`."""

    def __init__(self, router: anabranch.Router) -> None:
        super().__init__()
        self.router = router
        self._sources: dict[str, Any] = {}
        self._newest: tuple[str, int, Any] = ("", 0, None)

    def target(self, destination: str) -> Any:
        if destination.startswith(QUEUE):
            return self.router.queue(Destination.queue(destination.removeprefix(QUEUE)))
        return self.router.topic(Destination.topic(destination.removeprefix(TOPIC)))

    def source(self, destination: str) -> Any:
        if destination not in self._sources:
            name, _, topic = destination.removeprefix(QUEUE).partition("\n")
            self._sources[destination] = self.target(topic).subscribe(name) if topic else self.target(destination)
        return self._sources[destination]

    def end(self, destination: str) -> None:
        """End a durable subscription."""
        self.source(destination).unsubscribe()
        del self._sources[destination]

    @staticmethod
    def stored(frame: Frame) -> tuple[bytes, dict[str, str]]:
        body = frame.body if isinstance(frame.body, bytes) else frame.body.encode()
        return body, {name: str(value) for name, value in frame.headers.items() if name not in NOT_STORED}

    def enqueue(self, destination: str, frame: Frame) -> None:
        receipt = self.target(destination).send(*self.stored(frame))
        self._newest = destination, receipt.seq, frame

    def dequeue(self, destination: str) -> Frame | None:
        message = self.source(destination).receive()
        if message is None:
            return None
        *place, frame = self._newest
        if place != [destination, message.seq]:
            frame = Frame(MESSAGE, dict(message.headers), message.body)
            if "message-id" not in frame.headers:  # another program has sent it
                frame.headers |= {"message-id": str(uuid4()), "destination": destination}
        self._newest = ("", 0, None)
        frame.lease = message
        return frame

    def requeue(self, destination: str, frame: Frame) -> None:
        with suppress(anabranch.UnknownMessageError):  # its time was over, or its subscription is
            frame.lease.release()

    def size(self, destination: str) -> int:
        return int(self.source(destination).counts().ready)

    def destinations(self) -> set[str]:
        return {QUEUE + destination.name for destination in self.router.destinations("queue://")}


class Topics(TopicManager):
    """What is sent goes through the queues' manager, which stores it."""

    def __init__(self, queues: Queues) -> None:
        super().__init__()
        self.send = queues.send
        self.send_to_live = super().send


class Queues(QueueManager):
    """Stores, then delivers; of a subscription one message is in hand at a time."""

    def __init__(self, router: anabranch.Router) -> None:
        super().__init__(Storage(router))
        self.topics = Topics(self)

    def send(self, message: Frame) -> None:
        message.cmd = MESSAGE
        message.headers.setdefault("message-id", str(uuid4()))
        self.store.enqueue(message.headers["destination"], message)
        self._sent(message)

    def _sent(self, message: Frame) -> None:
        destination = message.headers["destination"]
        if not destination.startswith(QUEUE):
            self.topics.send_to_live(message)
        self.deliver(destination)

    @synchronized(lock)
    def deliver(self, sent: str = "") -> None:
        """Give what is there to those who wait for it: of one destination, or of all."""
        for destination, subscribers in list(self._subscriptions.all_subscribers()):
            if not destination.endswith(sent):
                continue
            while free := [one for one in subscribers if one not in self._pending]:
                frame = self.store.dequeue(destination)
                if frame is None:
                    break
                chosen = self.subscriber_scheduler.choice(free, frame)
                try:
                    self._send_frame(chosen, frame)
                except Exception:
                    self.log.exception("%s is not reached, and taken for gone", chosen)
                    self.store.requeue(destination, frame)
                    self.unsubscribe(chosen.connection, destination, chosen.id)

    def _send_frame(self, subscription: Subscription, frame: Frame) -> None:
        try:
            super()._send_frame(subscription, frame)
        except Exception:
            if self._pending.get(subscription) is frame:
                del self._pending[subscription]
            frame.headers.pop("subscription", None)
            raise
        if not subscription.connection.reliable_subscriber:
            frame.lease.ack()

    def _in_hand(self, connection: Any, frame: Frame, id: Any) -> anabranch.Message:
        pending = self._pending.get(Subscription.factory(connection, id))
        if pending is None or pending.headers["message-id"] != frame.headers.get("message-id"):
            raise ProtocolError(f"subscription {id} has no message {frame.headers.get('message-id')} in hand")
        message: anabranch.Message = pending.lease
        return message

    def ack(self, connection: Any, frame: Frame, transaction: str | None = None, id: Any = None) -> None:
        message = self._in_hand(connection, frame, id)
        try:
            if transaction is None:
                message.ack()
        finally:
            super().ack(connection, frame, transaction, id)

    def commit(self, connection: Any, frames: list[Frame]) -> None:
        """Do what SEND, ACK and NACK say, all of it or nothing."""
        settled = []
        try:
            with self.store.router.transaction() as tx:
                for frame in frames:
                    if frame.cmd == SEND:
                        frame.headers.setdefault("message-id", str(uuid4()))
                        tx.send(self.store.target(frame.headers["destination"]), *self.store.stored(frame))
                    else:
                        id = frame.headers.get("subscription") or frame.headers.get("id")
                        (tx.release if frame.cmd == "NACK" else tx.ack)(self._in_hand(connection, frame, id))
                        settled.append((frame, id))
        finally:  # if it was rolled back, they are free again
            for frame, id in settled:
                super().ack(connection, frame, None, id)
        for frame in frames:
            if frame.cmd == SEND:
                self._sent(frame)

    @synchronized(lock)
    def resend_transaction_frames(self, connection: Any, transaction: str) -> None:
        for subscription, frames in self._transaction_frames.items():
            if subscription.connection == connection:
                for frame in frames.pop(transaction, ()):
                    self.store.requeue("", frame)
        self.deliver()

    @synchronized(lock)
    def disconnect(self, connection: Any) -> None:
        super().disconnect(connection)
        self.deliver()


class Handler(StompRequestHandler):
    """Keeps the frames of transactions, and hands them over at COMMIT."""

    is_connected = False

    def send_frame(self, frame: Frame) -> None:
        if frame.cmd == CONNECTED:  # before that nothing is taken: who is it?
            self.is_connected = True
        super().send_frame(frame)

    def iter_frames(self) -> Iterator[Frame]:
        begun: dict[str, list[Frame]] = {}
        for frame in super().iter_frames():
            self.is_connected &= frame.cmd != "DISCONNECT"
            try:
                is_done = self.is_connected and self._take(frame, begun)
            except Exception as error:
                self.send_frame(ErrorFrame(str(error), str(error)))
                continue
            if not is_done:
                yield frame
            elif "receipt" in frame.headers:
                self.send_frame(ReceiptFrame(frame.headers["receipt"]))

    def _take(self, frame: Frame, begun: dict[str, list[Frame]]) -> bool:
        """Return whether a frame is done with; CoilMQ does the others."""
        transaction, queues = frame.headers.get("transaction"), self.server.queue_manager
        if frame.cmd != "BEGIN" and transaction not in begun and (transaction or frame.cmd in ("COMMIT", "ABORT")):
            raise ProtocolError(f"there is no transaction {transaction}; BEGIN it")
        match frame.cmd:
            case "BEGIN":
                begun[transaction] = []
            case "COMMIT":
                queues.commit(self, begun.pop(transaction))
            case "ABORT":
                del begun[transaction]
            case "SEND" | "ACK" | "NACK" if transaction:
                begun[transaction].append(frame)
            case "NACK":
                queues.commit(self, [frame])
            case "SUBSCRIBE" | "UNSUBSCRIBE" if frame.headers.get("durable") == "true":
                topic, id = frame.headers.get("destination", ""), frame.headers.get("id")
                if not topic.startswith(TOPIC) or not id:
                    raise ProtocolError(f"durable:true is for a destination {TOPIC}..., and an id; not {topic}, {id}")
                frame.headers["destination"] = f"{QUEUE}{id}\n{topic}"
                if frame.cmd == "UNSUBSCRIBE":
                    queues.store.end(frame.headers["destination"])
                return False
            case _:
                return False
        return True


class Server(ThreadedStompServer):
    """A broker over an open router, which the caller closes behind it."""

    daemon_threads = True

    def __init__(self, router: anabranch.Router, address: tuple[str, int], **options: Any) -> None:
        queues = Queues(router)
        super().__init__(address, Handler, queue_manager=queues, topic_manager=queues.topics, **options)

    def service_actions(self) -> None:
        """Twice a second: what other programs have sent, and what is to be delivered again by now."""
        self.queue_manager.deliver()


def main(directory: str, port: str = "61613") -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with anabranch.open(directory) as router, Server(router, ("127.0.0.1", int(port))) as server:
        print(f"STOMP on 127.0.0.1:{server.server_address[1]}, queues and topics in {directory}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
