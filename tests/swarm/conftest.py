"""Places to store in: a folder, memory, a bucket on loopback, a disk that is nearly full."""

import subprocess
import sys
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


@pytest.fixture
def on_small_disk(tmp_path):
    """Runs a script with a file system of 4 MiB, in a mount namespace of its own, as its argument; what it prints."""

    def run(script: str) -> list[str]:
        disk, file = tmp_path / "disk", tmp_path / "script.py"
        disk.mkdir()
        file.write_text(script)
        mount = f"mount -t tmpfs -o size=4m none {disk} && exec {sys.executable} {file} {disk}"
        done = subprocess.run(["unshare", "-r", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=120)
        if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
            pytest.skip(f"this machine does not allow mount namespaces: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run
