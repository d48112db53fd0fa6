from __future__ import annotations

import os
from pathlib import Path
from tempfile import mkdtemp

import django

os.environ.setdefault("ANABRANCH_TASKS", mkdtemp(prefix="django-"))
Path(os.environ["ANABRANCH_TASKS"], "tasks").mkdir(exist_ok=True)
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.hosts.django.settings")
django.setup()
