"""One directory, many processes: workers that share a queue, and a parent that sends to it and looks in.

    python examples/many_processes.py [DIRECTORY]

Each process opens the directory with `shared=True`. The first one starts the owner, a process that ends by itself
after the last one has gone. A worker that is killed gives its job back at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile

import anabranch

JOBS = 200
WORKERS = 4


def work(directory: str) -> None:
    """Do jobs until none has come for a second; the job and its result change together."""
    with anabranch.open(directory, shared=True) as router:
        for message in router.queue("jobs").consume(timeout=1.0):
            if message.body == b"a bad day":
                os.kill(os.getpid(), signal.SIGKILL)
            with router.transaction() as tx:
                tx.ack(message)
                tx.send("results", message.body.upper())


def main(directory: str) -> None:
    context = multiprocessing.get_context("spawn")
    with anabranch.open(directory, shared=True) as router:
        jobs, results = router.queue("jobs"), router.queue("results")
        jobs.send(b"a bad day")
        killed = context.Process(target=work, args=(directory,))
        killed.start()
        killed.join()
        job = jobs.receive(timeout=30.0)
        assert job is not None
        print(f"a worker was killed; its job is free again: {job.body.decode()}")
        job.ack()
        jobs.send_many([b"job %d" % number for number in range(JOBS)])
        workers = [context.Process(target=work, args=(directory,)) for _ in range(WORKERS)]
        for worker in workers:
            worker.start()
        done: set[bytes] = set()
        while len(done) < JOBS:
            message = results.receive(timeout=30.0)
            assert message is not None
            done.add(message.body)
            message.ack()
        for worker in workers:
            worker.join()
        print(f"{len(done)} jobs done by {WORKERS} processes; left: {jobs.depth()}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(scratch)
