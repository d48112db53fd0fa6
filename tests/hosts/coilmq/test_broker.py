"""examples/coilmq, with clients of stomp.py: what has a receipt is delivered, and what is acked is gone, though the
broker is killed; transactions; durable topics; NACK."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import Queue
from typing import Any
from uuid import uuid4

import pytest
import stomp
from coilmq.auth.simple import SimpleAuthenticator
from examples.coilmq.broker import Server
from stomp.exception import StompException

import anabranch

MESSAGES, KILLS = 90, 2
PATIENCE = 300.0


class Broker:
    def __init__(self, directory: Path) -> None:
        self._command = [sys.executable, "-m", "examples.coilmq.broker", str(directory)]
        self.port = "0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen([*self._command, self.port], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        with self.process.stdout as output:
            self.port = output.readline().partition(",")[0].rpartition(":")[2]

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.wait()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    try:
        yield broker
    finally:
        broker.end(signal.SIGKILL)


class Client(stomp.ConnectionListener):
    """A connection of stomp.py, which asks a receipt for all that it says."""

    def __init__(self, broker: Broker) -> None:
        self.messages: Queue[Any] = Queue()
        self.answers: Queue[str] = Queue()
        self.connection = stomp.Connection11([("127.0.0.1", int(broker.port))], reconnect_attempts_max=1)
        self.connection.set_listener("", self)
        self.connection.connect(wait=True)

    def on_message(self, frame: Any) -> None:
        self.messages.put(frame)

    def on_receipt(self, frame: Any) -> None:
        self.answers.put(frame.headers["receipt-id"])

    def on_error(self, frame: Any) -> None:
        self.answers.put(f"ERROR {frame.body}")

    def on_disconnected(self) -> None:
        self.answers.put("disconnected")
        self.messages.put(None)

    def say(self, command: str, *given: Any, **headers: Any) -> str:
        """Return what the broker has answered: nothing, an error, or that it is gone."""
        receipt = str(uuid4())
        try:
            getattr(self.connection, command)(*given, receipt=receipt, **headers)
        except StompException:
            return "disconnected"
        answer = self.answers.get(timeout=PATIENCE)
        return "" if answer == receipt else answer

    def received(self) -> Any:
        return self.messages.get(timeout=PATIENCE)

    def ack(self, message: Any, **headers: Any) -> str:
        return self.say("ack", message.headers["message-id"], "1", **headers)

    def close(self) -> None:
        self.connection.disconnect()


def connected(broker: Broker) -> Client:
    """Return a client, once the broker is there again."""
    until = time.monotonic() + PATIENCE
    while True:
        with suppress(StompException):
            return Client(broker)
        assert time.monotonic() < until
        time.sleep(0.01)


def subscribed(broker: Broker, destination: str, **headers: Any) -> Client:
    client = connected(broker)
    assert client.say("subscribe", destination, "1", ack="client", **headers) == ""
    return client


def test_nothing_that_has_a_receipt_is_lost_and_nothing_that_is_acked_comes_again(
    broker: Broker, tmp_path: Path
) -> None:
    """What the kill has struck is unsure: sent once or twice, acked or not."""
    expected = {str(number) for number in range(MESSAGES)}
    acked, unsure = set[str](), set[str]()

    def send_all() -> None:
        client = connected(broker)
        for number in range(MESSAGES):
            while client.say("send", "/queue/q", str(number)):
                unsure.add(str(number))
                client = connected(broker)

    sender = threading.Thread(target=send_all)
    sender.start()
    receiver, kills = subscribed(broker, "/queue/q"), 0
    while acked | unsure < expected:
        if kills < KILLS and len(acked) > (kills + 1) * MESSAGES // (KILLS + 1):
            broker.end(signal.SIGKILL)
            broker.start()
            kills += 1
        message = receiver.received()
        if message is None:
            receiver = subscribed(broker, "/queue/q")
            continue
        assert message.body not in acked or message.body in unsure
        (unsure if receiver.ack(message) else acked).add(message.body)
    sender.join()
    assert kills == KILLS
    broker.end(signal.SIGTERM)
    with anabranch.open(tmp_path) as router:
        assert {message.body.decode() for message in router.queue("q").browse()} <= unsure


def test_a_transaction_is_done_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    """The directory is shared with this program, which sends the job and looks on."""
    stores = "directory: .\nshared: true\nstores: [{name: all, match: ['>']}]\n"
    (tmp_path / "stores.yaml").write_text(stores)
    broker = Broker(tmp_path)
    try:
        client = subscribed(broker, "/queue/in")
        with anabranch.open(tmp_path, shared=True) as router:
            router.queue("in").send(b"job")
            message = client.received()
            assert message.body == "job"
            for name in ("a", "b"):
                client.say("begin", name)
                client.say("send", "/queue/out", name, transaction=name)
            client.say("ack", message.headers["message-id"], "1", transaction="b")
            client.say("ack", "of no message", "1", transaction="a")
            assert "has no message of no message in hand" in client.say("commit", "a")
            assert "there is no transaction a" in client.say("commit", "a")
            assert (router.queue("in").depth(), router.queue("out").depth()) == (1, 0)
            assert client.say("commit", "b") == ""
            assert router.queue("in").depth() == 0
            assert [message.body for message in router.queue("out").browse()] == [b"b"]
        broker.end(signal.SIGTERM)
        assert broker.process.returncode == 0
    finally:
        broker.end(signal.SIGKILL)
        os.kill(int((tmp_path / "router.lock").read_text().split()[0]), signal.SIGTERM)


def test_a_durable_subscription_keeps_what_is_sent_while_its_client_is_away(broker: Broker, tmp_path: Path) -> None:
    live, sender = subscribed(broker, "/topic/news"), connected(broker)
    subscribed(broker, "/topic/news", durable="true").close()
    for body in ("first", "second"):
        assert sender.say("send", "/topic/news", body) == ""
        assert live.received().body == body
    broker.end(signal.SIGKILL)
    broker.start()
    client = subscribed(broker, "/topic/news", durable="true")
    for times in range(2):
        message = client.received()
        assert (message.body, message.headers["destination"]) == ("first", "/topic/news")
        if times == 0:
            assert client.say("nack", message.headers["message-id"], "1") == ""
    assert client.ack(message) == ""
    assert client.received().body == "second"
    assert client.say("unsubscribe", "1", destination="/topic/news", durable="true") == ""
    assert "durable:true is for" in client.say("subscribe", "/queue/q", "1", durable="true")
    broker.end(signal.SIGTERM)
    with anabranch.open(tmp_path) as router:
        assert not router.topic("news").subscriptions()


def test_nothing_is_done_for_a_client_that_has_not_said_who_it_is(tmp_path: Path) -> None:
    authenticator = SimpleAuthenticator(store={"user": "pass"})
    with anabranch.open(tmp_path) as router, Server(router, ("127.0.0.1", 0), authenticator=authenticator) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with socket.create_connection(server.server_address[:2]) as client:
            send = "SEND\ndestination:/queue/q\ntransaction:t"
            for command in ("STOMP\naccept-version:1.1", "BEGIN\ntransaction:t", send, "COMMIT\ntransaction:t"):
                client.sendall(f"{command}\n\n\0".encode())
            client.shutdown(socket.SHUT_WR)
            told = b"".join(iter(lambda: client.recv(4096), b""))
        server.shutdown()
        thread.join()
        assert b"Authentication failed" in told and b"CONNECTED" not in told
        assert not router.exists("q")
