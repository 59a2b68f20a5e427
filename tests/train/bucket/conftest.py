"""A bucket on loopback, and one disk after the other."""

import pytest

from tests.swarm.bucket import bucket


@pytest.fixture
def served(tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with bucket("bucket", tmp_path / "cloud") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.endpoint)
        yield made


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Takes another empty disk."""

    def take(name: str) -> None:
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / name))

    take("one")
    return take
