"""Django's tasks (django.tasks, Django 6) over Anabranch.

    # settings.py
    INSTALLED_APPS = [..., "anabranch.hosts.django"]
    TASKS = {
        "default": {
            "BACKEND": "anabranch.hosts.django.AnabranchBackend",
            "OPTIONS": {"directory": "/srv/tasks"},
        }
    }

`resize.enqueue("cat.jpg")` in any number of web processes, `manage.py anabranch_worker` in any number of others: the
directory is shared. A task is leased while it is executed: one whose worker is killed is executed again.

    backend      the backend: from a call to a message and back, one attempt of a task
    options      OPTIONS of the settings, and the router that they name
    orm          a send in the ORM's own transaction
    worker       threads that execute tasks until they are told to end; `manage.py anabranch_worker`
"""

from .backend import AnabranchBackend
from .worker import work

__all__ = ["AnabranchBackend", "work"]
