"""Places to store in: a folder, memory, a bucket on loopback."""

import uuid

import pytest

from tests.swarm.bucket import bucket
from tpuswarm.swarm.storage.store import Store


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    with bucket("bucket", tmp_path_factory.mktemp("bucket")) as made:
        yield made


@pytest.fixture
def loopback(served, monkeypatch):
    """A bucket of the name `bucket`."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", served.endpoint)
    return served


@pytest.fixture(params=["folder", "memory", "bucket"])
def store(request, tmp_path):
    """An empty store in each kind of place."""
    if request.param == "folder":
        return Store(tmp_path / "run")
    if request.param == "memory":
        return Store(f"memory://{uuid.uuid4()}/run")
    request.getfixturevalue("loopback")
    return Store(f"gs://bucket/{uuid.uuid4()}")
