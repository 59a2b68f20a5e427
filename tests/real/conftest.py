"""One network with a local cloud and a machine that is set up, for all tests."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from tests.processes import ROOT
from tests.real.cloud import RealCloud, make_template, why_not

SETUP = """
[setup]
python = "3.11"
apt = ["jq"]
pip = ["tpuswarm[gcloud]"]
env = { GREETING = "hello" }
"""


@pytest.fixture(scope="session")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCloud]:
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no real machines: {reason}")
    made_from = [Path(__file__).with_name(name) for name in ("cloud.py", "guest_agent.py")]
    made_from += [ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in made_from)).hexdigest()[:12]
    cache = Path(os.environ["TPUSWARM_CACHE"]) / f"real-{digest}"
    with FileLock(cache.with_suffix(".lock")):
        cache.mkdir(exist_ok=True)
        template, files = make_template(cache)
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
