"""The things that users hold: the router, queues, topics, maps, consumers, messages' codecs, addresses and events.

    with anabranch.open("data") as router:
        router.queue("jobs").send(b"...")

It may import everything below it in this package; nothing but the command line imports it.
"""
