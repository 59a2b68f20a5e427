"""Places to store a run in: a folder, a bucket on loopback."""

import os
import uuid

import pytest

from tests.swarm.bucket import bucket
from tpuswarm.swarm.storage.store import Store


@pytest.fixture(scope="module", autouse=True)
def without_fsync():
    """Skip os.fsync: on a busy disk it takes most of the time of tests that store arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    with bucket("bucket", tmp_path_factory.mktemp("bucket")) as made:
        yield made


@pytest.fixture
def loopback(served, monkeypatch):
    """A bucket named `bucket`."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", served.endpoint)
    return served


@pytest.fixture
def names_read(monkeypatch) -> list[str]:
    read, inner = [], Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: read.append(name) or inner(self, name))
    return read


@pytest.fixture(params=["folder", "bucket"])
def store(request, tmp_path):
    if request.param == "folder":
        return Store(tmp_path / "run")
    request.getfixturevalue("loopback")
    return Store(f"gs://bucket/{uuid.uuid4()}")
