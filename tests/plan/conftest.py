"""Programs for TPUs are compiled with all optimisations, as a user's are."""

import pytest


@pytest.fixture(autouse=True)
def _optimised(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
