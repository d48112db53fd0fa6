"""The programs of anabranch.hosts, over Anabranch and over what they bring themselves.

    python -m tests.bench.hosts --hosts celery,huey --rounds 3 --dir /var/tmp

In an environment with Anabranch and the programs: celery, django with django-tasks-db, huey, queuelib, redis. What is
not installed is left out, by name, and so is Redis where there is no redis-server. Within a round each backend runs
once, each run a process of its own in a fresh directory, and the order turns by one from round to round. The medians go
to stderr, with how many times a backend Anabranch is.

    celery-send     `delay` by one process
    celery-work     the same tasks, executed by `celery worker` with two forked processes and `acks_late`, no results
    kombu-publish   `Producer.publish` by one process
    kombu-consume   `drain_events` and `ack`, 50 prefetched, by the same
    huey-send       a call of a task by one process
    huey-work       the same tasks, executed by `huey_consumer` with four threads, which keeps their results
    django-send     `enqueue` by one process
    django-work     the same tasks, executed by one worker of one thread, which keeps their results
    scrapy-push, scrapy-pop     1 KiB, by one process

Work is timed from the first task executed to the last. What a power failure takes is said in each backend's name:
`always` and `fsync`, nothing; `everysec` and `periodic`, the last second; `no sync`, what the system has not written.
"""
