"""What every store must do: the sentences of adapters/core/store.py, each as a test. Third parties' stores inherit
it too.

    class TestMongoStore(StoreContract):
        @pytest.fixture
        def disk(self, tmp_path):
            with MongoDisk(tmp_path) as disk:      # a Disk: create, reopen, crash
                yield disk

A store of which nothing survives inherits VolatileStoreContract instead. `disk.py` is what a store's author writes;
`contract.py` collects the tests, which are grouped by what they ask of a store: sending, receiving, settling; ordering,
deliveries, expiring; topics; preparing (transactions over several stores) and changing (subscriptions in them);
hosting, limits, lifecycle, threads.
"""

from pathlib import Path

import pytest

for _module in Path(__file__).parent.glob("*.py"):
    pytest.register_assert_rewrite(f"{__name__}.{_module.stem}")
