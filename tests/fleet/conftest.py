"""A cloud for each test."""

import pytest

from tests.fleet.cloud_model import Cloud


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()
