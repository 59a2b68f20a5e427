"""Real gcloud, if installed, takes the local cloud for Google's."""

import os
import shutil
import subprocess

import pytest

from tpuswarm.cloud.rehearsal.connect import gcloud_variables

needs_gcloud = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed")
pytestmark = [pytest.mark.long, needs_gcloud]
ZONE = "--zone=us-central1-f"


@pytest.fixture
def gcloud(place, endpoints):
    def run(*words: str) -> list[str]:
        variables = {**os.environ, **gcloud_variables(place, endpoints), "CLOUDSDK_CORE_PROJECT": "by-gcloud"}
        words = ("gcloud", "compute", *words, "--quiet")
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    return run


def test_gcloud_manages_tpus(gcloud, tpu):
    kind = ["--accelerator-type=v2-8", "--version=tpu-ubuntu2204-base"]
    gcloud("tpus", "tpu-vm", "create", "one", ZONE, *kind, "--labels=a=b")
    assert gcloud("tpus", "tpu-vm", "list", "--zone=-", "--format=value(name,state)") == ["one", "READY"]
    gcloud("tpus", "tpu-vm", "delete", "one", ZONE)
    kind[1] = "--runtime-version=tpu-ubuntu2204-base"
    spot = ["--node-id=two-n", "--spot", "--valid-until-duration=1h"]
    gcloud("tpus", "queued-resources", "create", "two", ZONE, *kind, *spot)
    assert gcloud("tpus", "queued-resources", "list", ZONE, "--format=value(name.basename())") == ["two"]
    gcloud("tpus", "queued-resources", "delete", "two", ZONE, "--force")
    assert not list(tpu.list_nodes(parent="projects/by-gcloud/locations/-"))


def test_gcloud_manages_vms(gcloud):
    """The test of init goes through networks, rules, buckets and services."""
    image = ["--image-family=ubuntu-2204-lts", "--image-project=ubuntu-os-cloud"]
    gcloud("instances", "create", "head", ZONE, "--machine-type=n2-standard-8", *image, "--tags=a")
    assert gcloud("instances", "list", "--format=value(name,status)") == ["head", "RUNNING"]
    gcloud("instances", "delete", "head", ZONE)
