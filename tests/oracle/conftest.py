"""Exported modules that the oracle tests share."""

import pytest


@pytest.fixture(scope="session")
def traced(request):
    """A module of the zoo and its export; session scope groups the tests of each module."""
    from tests.oracle.zoo import trace  # needs torch

    return trace(request.param)
