"""For all tests."""

from __future__ import annotations

import signal

from .sql.server import postgres, postgres_url  # noqa: F401  fixtures

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Ctrl-C is part of what is tested; a shell starts its background jobs without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
