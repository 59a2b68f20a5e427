"""Real gcloud, where it is installed, takes the local cloud for Google's."""

import os
import shutil
import subprocess

import pytest

from tpuswarm.cloud.rehearsal.client import environment

pytestmark = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
ZONE = "--zone=us-central1-f"


@pytest.fixture
def gcloud(place, endpoints):
    def run(*words: str) -> list[str]:
        variables = {**os.environ, **environment(place, endpoints), "CLOUDSDK_CORE_PROJECT": "by-gcloud"}
        done = subprocess.run(["gcloud", *words, "--quiet"], env=variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_tpus(gcloud):
    kind = ["--accelerator-type=v2-8", "--version=tpu-ubuntu2204-base"]
    gcloud("compute", "tpus", "tpu-vm", "create", "one", ZONE, *kind, "--labels=a=b")
    gcloud("compute", "tpus", "tpu-vm", "stop", "one", ZONE)
    assert gcloud("compute", "tpus", "tpu-vm", "list", "--zone=-", "--format=value(name,state)") == ["one", "STOPPED"]
    gcloud("compute", "tpus", "tpu-vm", "delete", "one", ZONE)
    kind[1] = "--runtime-version=tpu-ubuntu2204-base"
    spot = ["--node-id=two-n", "--spot", "--valid-until-duration=1h"]
    gcloud("compute", "tpus", "queued-resources", "create", "two", ZONE, *kind, *spot)
    assert gcloud("compute", "tpus", "queued-resources", "list", ZONE, "--format=value(name.basename())") == ["two"]
    gcloud("compute", "tpus", "queued-resources", "delete", "two", ZONE, "--force")
    assert gcloud("compute", "tpus", "tpu-vm", "list", "--zone=-", "--format=value(name)") == []


def test_vms(gcloud):
    """Networks, rules, buckets and services are gone through by the test of init."""
    image = ["--image-family=ubuntu-2204-lts", "--image-project=ubuntu-os-cloud"]
    gcloud("compute", "instances", "create", "head", ZONE, "--machine-type=n2-standard-8", *image, "--tags=a")
    assert gcloud("compute", "instances", "list", "--format=value(name,status)") == ["head", "RUNNING"]
    gcloud("compute", "instances", "delete", "head", ZONE)
