"""One network with a local cloud and a machine that is set up, for all tests."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.cloud import RealCloud, make_files, make_template

NEEDED = ("mmdebstrap", "systemd-nspawn", "nft", "ip", "nsenter", "setpriv", "apt-get")
SETUP = """
[setup]
python = "3.11"
apt = ["jq"]
pip = ["tpuswarm[gcloud]"]
env = { GREETING = "hello" }
"""


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCloud]:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        reason = f"real machines need root and {', '.join(NEEDED)}; missing: {', '.join(missing) or 'root'}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    common = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    cache = Path(os.environ.get("TPUSWARM_REAL_CACHE") or common / "real")
    cache.mkdir(exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        template = make_template(cache)
        files = make_files(cache, template)
    cloud = RealCloud(tmp_path_factory.mktemp("cloud"), template, files)
    try:
        cloud.run("rehearsal", "start", "--speed", "60")
        yield cloud
    finally:
        cloud.close()


@pytest.fixture(scope="session")
def laptop(cloud: RealCloud) -> RealCloud:
    """A laptop whose fleet has one machine, which is set up."""
    words = ("--yes", "--provider", "rehearsal", "--project", "practice", "--type", "v2-8", "--zone", "us-central1-f")
    cloud.run("init", *words)
    with (cloud.project / "swarm.toml").open("a") as file:
        file.write(SETUP)
    shown = cloud.run("up", "--yes")
    assert "uv and Python sent" in shown and "v2-usc1f-0/0 is set up" in shown
    return cloud
