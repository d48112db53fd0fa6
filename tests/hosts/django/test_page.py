"""The program of docs/hosts.md."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ...pages import of_host

PROGRAM = """
import django
django.setup()
from django.core.management import call_command
from tasks import resize
result = resize.enqueue("cat.jpg")
call_command("anabranch_worker", threads=4)
result.refresh()
print(result.status, result.return_value)
"""
TASKS = """
import os, signal
from django.tasks import task

@task
def resize(name):
    os.kill(os.getpid(), signal.SIGTERM)  # it is finished, and the worker ends
    return name
"""


def test_what_is_called_is_executed(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    settings = of_host("django", {"..., ": "", "/srv/tasks": str(tmp_path / "data")})
    database = 'DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "pages"}}'
    (tmp_path / "settings.py").write_text(f'{settings}SECRET_KEY = "secret"\n{database}\n')
    (tmp_path / "tasks.py").write_text(TASKS)
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "settings"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "SUCCESSFUL cat.jpg\n"), done.stderr
    os.kill(int((tmp_path / "data/router.lock").read_text().split()[0]), signal.SIGTERM)
