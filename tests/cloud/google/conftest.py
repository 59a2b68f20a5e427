import pytest

from tests.local_cloud import local_cloud
from tests.waiting import until
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.protocol import Machine, TpuSpec, VmSpec
from tpuswarm.cloud.rehearsal.connect import connect, send_command

AVAILABLE, STOCKOUT, NO_QUOTA = "europe-west4-a", "us-central1-b", "us-central1-c"
HEAD = VmSpec("head", AVAILABLE, "n2-highmem-2", "f1e2", "head", "ubuntu-os-cloud/ubuntu-2404-lts-amd64", 20)
HIDDEN, UNREACHABLE = "us-central1-f", "asia-east1-c"


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """The local cloud of all tests here, with zones that fail in different ways."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        send_command(place, "stockout", zone=STOCKOUT)
        send_command(place, "quota", zone=NO_QUOTA, generation="v2", limit=0)
        send_command(place, "break", name=HIDDEN, fault="hidden")
        send_command(place, "break", name=UNREACHABLE, fault="unreachable")
        yield place


@pytest.fixture(scope="session")
def endpoints(place):
    return connect(place.path)


@pytest.fixture
def google(endpoints):
    """A provider without machines; deletes the test's machines."""
    google = GoogleProvider(Access("my-project", endpoints))
    yield google
    for machine in google.machines([AVAILABLE, STOCKOUT]).machines:
        if machine.state != "deleting":
            google.delete(machine)
    until(lambda: not google.machines([AVAILABLE, STOCKOUT]).machines)


def spec(name: str, zone: str = AVAILABLE, type_: str = "v2-8", how="on-demand", **fields) -> TpuSpec:
    return TpuSpec(name, zone, type_, how, "f1e2", "small", "tpu-ubuntu2204-base", **fields)


def only_machine(google: GoogleProvider, zone: str = AVAILABLE) -> Machine | None:
    machines = google.machines([zone]).machines
    assert len(machines) <= 1
    return machines[0] if machines else None


def in_state(google: GoogleProvider, state: str, zone: str = AVAILABLE) -> Machine:
    return until(lambda: (machine := only_machine(google, zone)) and machine.state == state and machine)
