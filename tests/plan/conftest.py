"""What is compiled for a TPU is compiled as a user's program is."""

import pytest


@pytest.fixture(autouse=True)
def _optimised(monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")
