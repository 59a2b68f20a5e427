import pytest

from tests.router.lab import Lab


@pytest.fixture
def lab():
    """Client, router and targets in namespaces, new for every test."""
    made = Lab()
    yield made
    made.close()
