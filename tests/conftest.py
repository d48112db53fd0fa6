"""For all tests."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Ctrl-C is part of what is tested; a shell starts its background jobs without it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
