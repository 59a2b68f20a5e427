"""A bucket on loopback, and computers that each have their own disk."""

import pytest

from tests.swarm.bucket import bucket
from tpuswarm.train.bucket import lease


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with bucket("bucket", tmp_path / "cloud") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def use_disk(server, tmp_path, monkeypatch):
    """Continue as a computer with another disk."""

    def use(name: str) -> None:
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / name))

    use("one")
    return use


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(lease, "LOOK", 0.05)
    monkeypatch.setattr(lease, "TERM", 0.2)


@pytest.fixture
def frequent_renewals(monkeypatch):
    monkeypatch.setattr("tpuswarm.train.bucket.tended.RENEWED", 0.05)
