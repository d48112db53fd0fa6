"""Anabranch for asyncio: see router/aio/."""

from .router.aio import *  # noqa: F403
from .router.aio import __all__ as __all__
