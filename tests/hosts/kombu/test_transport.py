"""What the transport does beyond kombu's own suite, each over a real owner process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
from kombu.exceptions import OperationalError

import anabranch
import anabranch.hosts.kombu

PATIENCE = 60.0


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it has not come"
        time.sleep(0.01)


@pytest.fixture
def connection(directory: Path) -> Iterator[kombu.Connection]:
    with kombu.Connection(f"anabranch://{directory}") as connection:
        yield connection


def test_a_channel_has_no_more_than_its_prefetch_over_all_its_queues(connection: kombu.Connection) -> None:
    queues, held = [connection.SimpleQueue(f"prefetch{n}") for n in range(3)], []
    for queue in queues:
        queue.put("1")
        queue.put("2")
    consumer = connection.Consumer([queue.queue for queue in queues], prefetch_count=2)
    consumer.register_callback(lambda body, message: held.append(message))
    with consumer, connection.clone() as other:
        connection.drain_events(timeout=PATIENCE)
        connection.drain_events(timeout=PATIENCE)
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.2)
        # What the channel may not have anybody else can: nothing is leased ahead.
        others = [other.SimpleQueue(f"prefetch{n}").get_nowait() for n in range(3)]
        held[0].ack()
        connection.drain_events(timeout=PATIENCE)
        assert len(held) == 3
        consumer.qos(prefetch_count=4)  # Celery does so for each task that waits for its time
        for message in others:
            message.requeue()
        connection.drain_events(timeout=PATIENCE)
        connection.drain_events(timeout=PATIENCE)
        assert len(held) == 5


def test_what_a_closed_channel_had_goes_back_to_its_old_place(connection: kombu.Connection) -> None:
    queue = connection.SimpleQueue("places")
    for body in ("first", "second"):
        queue.put(body)
    with connection.clone() as other:
        got = other.SimpleQueue("places").get_nowait()
        assert got.payload == "first"
    assert [queue.get_nowait().payload for _ in range(2)] == ["first", "second"]


def test_a_message_that_is_not_kombus_is_rejected_and_the_next_one_comes(
    connection: kombu.Connection, directory: Path
) -> None:
    queue = connection.SimpleQueue("foreign")
    with anabranch.open(directory, shared=True) as router:
        router.queue("kombu.foreign").send(b"\xff")
        queue.put("ours")
        assert queue.get(timeout=PATIENCE).payload == "ours"
        assert router.queue("kombu.foreign").depth() == 1


def test_a_get_passes_over_a_message_that_is_not_kombus(connection: kombu.Connection, directory: Path) -> None:
    with connection.SimpleQueue("got") as queue, anabranch.open(directory, shared=True) as router:
        router.queue("kombu.got").send(b"no message of kombu's")
        queue.put("x")
        assert queue.queue.get().payload == "x"
        assert queue.queue.get() is None


def test_an_expiring_queue_goes_with_its_consumer_and_stays_with_it(
    connection: kombu.Connection, directory: Path
) -> None:
    news = kombu.Exchange("news", type="fanout")
    program = (
        "import sys, time, kombu, anabranch.hosts.kombu\n"
        "c = kombu.Connection(sys.argv[1])\n"
        "q = kombu.Queue('reader', kombu.Exchange('news', type='fanout'), expires=4.0)\n"
        "with c.Consumer([q], callbacks=[print]):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(1000)\n"
    )
    reader = subprocess.Popen([sys.executable, "-c", program, f"anabranch://{directory}"], stdout=subprocess.PIPE)
    with anabranch.open(directory, shared=True) as router, reader:
        bindings = router.map("kombu.bindings")
        try:
            assert reader.stdout is not None and reader.stdout.readline() == b"ready\n"
            with connection.Consumer([kombu.Queue("writer", news, expires=4.0)], callbacks=[lambda *_: None]):
                began = time.monotonic()
                until(lambda: time.monotonic() - began > 6)  # both stand for longer than they may be unused
                assert {key.split("\x06")[2] for key, _ in bindings.items("news")} == {"reader", "writer"}
                reader.kill()
                connection.Producer(exchange=news).publish("nobody reads it", declare=[news])
                until(lambda: not router.exists("kombu.reader"))
                assert {key.split("\x06")[2] for key, _ in bindings.items("news")} == {"writer"}
        finally:
            reader.kill()


@pytest.mark.parametrize("error", [anabranch.StoreFailedError("stopped"), anabranch.ClosedError("another version")])
def test_an_expiring_queue_goes_though_its_first_deletion_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broker = anabranch.hosts.kombu.Broker(tmp_path / "data")
    delete, failed = broker.delete, list[str]()

    def fail_once(queue: str) -> None:
        if not failed:
            failed.append(queue)
            raise error
        delete(queue)

    monkeypatch.setattr(broker, "delete", fail_once)
    with broker.router:
        broker.declare("old", 0.2)
        until(lambda: failed)
        until(lambda: broker._is_kept is isinstance(error, anabranch.StoreFailedError))
        broker.declare("new", 60.0)
        until(lambda: not broker.router.exists(broker.queue("old")))
        until(lambda: [name for name, _ in broker._expiring.items()] == ["new"])


def test_a_consumer_that_stood_still_for_longer_than_its_expiring_queue_may_has_it_again(tmp_path: Path) -> None:
    broker = anabranch.hosts.kombu.Broker(tmp_path / "data")
    other = anabranch.hosts.kombu.Broker(tmp_path / "data")
    with broker.router, other.router:
        broker.declare("replies", 60.0)
        broker.bind("replies", "news\x06\x06replies", b"")
        broker.bind("replies", "news\x06undone\x06replies", b"")
        broker.unbind("replies", "news\x06undone\x06replies")
        broker.consume("replies", 1)
        other.delete("replies")  # as a look does that finds its entry unchanged for too long
        other.router.map("kombu.expiring").pop("replies")
        assert not other.router.exists(other.queue("replies"))
        broker.declare("shorter", 0.2)  # so that it looks soon
        until(lambda: other.router.exists(other.queue("replies")))
        assert [key for key, _ in other.bindings.items()] == ["news\x06\x06replies"]


def test_a_binding_that_is_undone_counts_for_every_process(connection: kombu.Connection) -> None:
    exchange = kombu.Exchange("sorting", type="topic")
    queue = kombu.Queue("sorted", exchange, routing_key="a.*")(connection.default_channel)
    queue.declare()
    with connection.clone() as other:
        producer = other.Producer(exchange=exchange(other.default_channel))
        producer.publish("1", routing_key="a.b")
        queue.unbind_from(exchange, routing_key="a.*")
        producer.publish("2", routing_key="a.b")
    assert queue.get().payload == "1" and queue.get() is None


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("anabranch://{0}/none", "none is not there; make the directory"),
        ("anabranch://", "names no directory; write the whole path behind three slashes"),
        ("anabranch://tasks/a", "anabranch://tasks/a names no directory"),
        ("anabranch://{0}/program.py", "was read as a configuration: give a data directory"),
        ("anabranch://{0}/photos", "holds cat.jpg, and no data of a router"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_clear_error(url: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print()")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with kombu.Connection(url.format(tmp_path)) as connection, pytest.raises(anabranch.ConfigError, match=says):
        connection.ensure_connection(max_retries=3)  # and is not tried again


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("", "is open already, by process {0}.*That process serves nobody"),
        ("protocol.VERSION += 1000", "served by process {0}, which speaks version 1\\d+ .*version \\d+:"),
    ],
)
def test_a_directory_that_another_process_does_not_share_is_one_clear_error(
    before: str, says: str, tmp_path: Path
) -> None:
    control = "True" if before else "False"
    program = (
        "import sys, anabranch\n"
        "from anabranch.router.sharing import protocol\n"
        f"{before}\n"
        "store = anabranch.StoreConfig('all', ['>'])\n"
        f"with anabranch.open(anabranch.Config(sys.argv[1], [store], control={control})):\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        connection = kombu.Connection(f"anabranch://{tmp_path}")
        with pytest.raises(OperationalError, match=says.format(other.pid)):
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
        other.communicate()


def test_a_child_of_fork_is_a_client_of_its_own(connection: kombu.Connection) -> None:
    """Also while its parent is in the middle of consuming."""
    queue, replies = connection.SimpleQueue("asked"), connection.SimpleQueue("answered")
    queue.put("held by the parent")
    held = queue.get(timeout=PATIENCE)
    child = os.fork()
    if child == 0:
        try:
            held.ack()  # not the child's to do
            replies.put("from the child")
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert replies.get(timeout=PATIENCE).payload == "from the child"
    held.requeue()
    assert queue.get(timeout=PATIENCE).payload == "held by the parent"


def test_an_owner_that_is_killed_is_not_noticed(connection: kombu.Connection, directory: Path) -> None:
    queue = connection.SimpleQueue("pauses")
    for number in range(3):
        queue.put(number)
        os.kill(int((directory / "router.lock").read_text().split()[0]), signal.SIGKILL)
        message = queue.get(timeout=PATIENCE)
        assert message.payload == number
        message.ack()
    assert queue.qsize() == 0
