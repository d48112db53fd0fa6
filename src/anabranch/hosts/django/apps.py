"""The application of `manage.py anabranch_worker`."""

from django.apps import AppConfig


class AnabranchConfig(AppConfig):
    """Has a label of its own: the last part of its name is Django's."""

    name = "anabranch.hosts.django"
    label = "anabranch"
    verbose_name = "Anabranch"
