"""Exported modules that all oracle tests share."""

import pytest


@pytest.fixture(scope="session")
def traced(request):
    """A module of the zoo and its export; session scope puts the tests of one module one after the other."""
    from tests.oracle.zoo import trace  # torch is there only in .venv-oracle

    return trace(request.param)
