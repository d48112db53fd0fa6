from __future__ import annotations

import os
from tempfile import mkdtemp

import django

os.environ.setdefault("ANABRANCH_TASKS", mkdtemp(prefix="django-"))
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.hosts.django.settings")
django.setup()
