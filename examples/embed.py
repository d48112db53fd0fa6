"""A producer and a consumer over three stores, each as durable as its messages deserve.

    python examples/embed.py [DIRECTORY]

Run it twice with the same directory: what one run did not ack, the next one finds.
"""

from __future__ import annotations

import sys
import tempfile
import threading

import anabranch
from anabranch import Config, JournalOptions, StoreConfig, Sync

READINGS = 1000


def configuration(directory: str) -> Config:
    return Config(
        directory,
        [
            StoreConfig("orders", ["queue://orders.>"], journal=JournalOptions(sync=Sync.ALWAYS)),
            StoreConfig("telemetry", ["queue://telemetry.>"], journal=JournalOptions(sync=Sync.NEVER)),
            StoreConfig("rest", [">"], journal=JournalOptions(sync=Sync.PERIODIC, sync_interval=1.0)),
        ],
    )


def produce(router: anabranch.Router) -> None:
    orders, press = router.queue("orders.custom"), router.queue("telemetry.press")
    orders.send(b"one toy train", headers={"sku": "T-1"})  # on disk when it returns
    press.send_many([b"%d rpm" % speed for speed in range(READINGS)])  # one batch, synced when the system likes
    router.queue("mail").send(b"your train is on its way")  # synced within a second
    press.send(b"stop")


def consume(router: anabranch.Router) -> int:
    """Takes readings until the one that says stop."""
    press, count = router.queue("telemetry.press"), 0
    while (message := press.receive(timeout=10)) is not None:
        message.ack()
        if message.body == b"stop":
            break
        count += 1
    return count


def main(directory: str) -> None:
    with anabranch.open(configuration(directory)) as router:
        producer = threading.Thread(target=produce, args=(router,))
        producer.start()
        print(f"{consume(router):,} readings consumed")
        producer.join()
        order = router.queue("orders.custom").receive()
        assert order is not None
        order.release()  # not done yet: whoever asks next gets it
        for name, store in router.stats().stores.items():
            print(f"{name}: {store.messages} pending")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
