import time

import pytest

from tests.local_cloud import local_cloud
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.provider import Google
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect

FINE, FULL, FORBIDDEN, HIDDEN, DARK = (
    "europe-west4-a",
    "us-central1-b",
    "us-central1-c",
    "us-central1-f",
    "asia-east1-c",
)
"""Zones: with capacity, without, without quota, not to be seen, not answering."""


@pytest.fixture(scope="package")
def endpoints(tmp_path_factory):
    """A local cloud with weather, a few hundred times as fast as the real one."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        ask(place, "stockout", zone=FULL)
        ask(place, "quota", zone=FORBIDDEN, generation="v2", limit=0)
        ask(place, "break", name=HIDDEN, fault="hidden")
        ask(place, "break", name=DARK, fault="unreachable")
        yield connect(place.folder)


@pytest.fixture
def google(endpoints):
    """A provider without machines; what a test makes is deleted."""
    google = Google(Access("my-project", endpoints))
    yield google
    for each in google.machines([FINE, FULL]).machines:
        if each.state != "deleting":
            google.delete(each)
    until(lambda: not google.machines([FINE, FULL]).machines)


def until(happens, seconds: float = 60.0):
    """What `happens` returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found
