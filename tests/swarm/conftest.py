"""Places to store in: a folder, memory, a bucket on loopback."""

import uuid

import pytest

from tests.swarm.bucket import bucket
from tpuswarm.swarm.store import Store


@pytest.fixture(scope="session")
def loopback():
    """A bucket of the name `bucket`."""
    with bucket("bucket") as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", made.endpoint)
        yield made


@pytest.fixture(params=["folder", "memory", "bucket"])
def store(request, tmp_path):
    """An empty store in each kind of place."""
    if request.param == "folder":
        return Store(tmp_path / "run")
    if request.param == "memory":
        return Store(f"memory://{uuid.uuid4()}/run")
    request.getfixturevalue("loopback")
    return Store(f"gs://bucket/{uuid.uuid4()}")
