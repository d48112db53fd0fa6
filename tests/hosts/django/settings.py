"""Of a project whose web process is the test, and whose workers are `manage.py anabranch_worker`."""

from __future__ import annotations

import os

SECRET_KEY = "secret"
USE_TZ = True
INSTALLED_APPS = ["anabranch.hosts.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["ANABRANCH_TASKS"] + "/pages"}}
TASKS = {
    "default": {
        "BACKEND": "anabranch.hosts.django.AnabranchBackend",
        "QUEUES": [],
        "OPTIONS": {"directory": os.environ["ANABRANCH_TASKS"] + "/tasks", "retries": 2, "retry_delay": 0.1},
    },
}
