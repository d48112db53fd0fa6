"""A worker of several queues: values as JSON, one loop, what fails is tried again, what never works is set apart.

    python examples/worker.py [DIRECTORY]

Each queue has its turn. `with message:` acks it at the end of the block, and gives it back if an error is raised,
which counts as a delivery: after three of them it goes to the dead letters, and says why. A body that is no JSON does
the same, since it is decoded where `message.body` is asked for.
"""

from __future__ import annotations

import sys
import tempfile

import anabranch
from anabranch import Config, JournalOptions, StoreConfig


def work(router: anabranch.Router) -> None:
    """Until nothing has come for a tenth of a second; a real one goes on for ever, with `timeout=None`."""
    for message in router.consume("mail.>", timeout=0.1, codec="json"):
        try:
            with message:
                mail = message.body
                print(f"to {mail['to']}: {mail['text']}")
        except (anabranch.DecodeError, KeyError) as error:
            print(f"delivery {message.deliveries} of {message.message_id}: {type(error).__name__}")


def main(directory: str) -> None:
    options = JournalOptions(max_deliveries=3, dead_letter="dead")
    config = Config(directory, [StoreConfig("mail", ["mail.>"], journal=options), StoreConfig("rest", [">"])])
    with anabranch.open(config) as router:
        for number, name in enumerate(["alice", "bob", "carol"]):
            queue = router.queue(f"mail.{name}", codec="json")
            queue.send({"to": name, "text": "welcome"}, message_id=f"mail-{number}")
        queue.send({"to": "carol"}, message_id="mail-without-text")
        router.queue("mail.bob").send(b"welcome, too", message_id="mail-as-text")  # from a program that knows no JSON
        work(router)
        router.sweep()  # which happens by itself each second
        letters = [*router.queue("mail.bob").dead_letters(), *router.queue("mail.carol").dead_letters()]
        for letter in letters:
            print(f"dead: {letter.message_id} of {letter.source}, {letter.reason} after {letter.deliveries} deliveries")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
