import pytest

from tests.router.lab import Lab


@pytest.fixture
def lab():
    lab = Lab()
    yield lab
    lab.close()
