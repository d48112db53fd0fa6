from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import django
import django_tasks_db  # noqa: F401  it is there, or Django is left out
from django.core.management import call_command

from .working import send_and_work

BACKENDS = {"anabranch": 500, "django-tasks-db on SQLite, fsync": 200}

if "BENCH_BACKEND" in os.environ:  # this module is the settings, too
    ours, directory = os.environ["BENCH_BACKEND"] == "anabranch", Path(os.environ["BENCH_DIRECTORY"])
    os.environ["DJANGO_SETTINGS_MODULE"] = __name__
    USE_TZ, SECRET_KEY = True, "secret"
    INSTALLED_APPS = ["anabranch.hosts.django" if ours else "django_tasks_db"]
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.sqlite3", "NAME": directory / "pages.db",
            "OPTIONS": {"init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL"},
        }
    }  # fmt: skip
    OPTIONS = {"directory": directory / "data"} if ours else {}
    BACKEND = "anabranch.hosts.django.AnabranchBackend" if ours else "django_tasks_db.DatabaseBackend"
    TASKS = {"default": {"BACKEND": BACKEND, "OPTIONS": OPTIONS}}


def run(backend: str, directory: Path, count: int) -> Iterator[tuple[str, float]]:
    (directory / "data").mkdir()
    django.setup()
    call_command("migrate", verbosity=0)
    from . import django_tasks

    worker = ["anabranch_worker"] if backend == "anabranch" else ["db_worker", "-v", "0", "--no-startup-delay"]
    yield from send_and_work("django", lambda: django_tasks.add.enqueue(1, 2), ["-m", "django", *worker], count)
