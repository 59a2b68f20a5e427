import urllib.request

import pytest
from google.cloud import storage, tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tests.local_cloud import local_cloud
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import connect, send_command

PROJECT = "projects/p"
PARENT = f"{PROJECT}/locations/us-central1-b"
TPU = tpu_v2.Node(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base")


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """The local cloud of all tests here. A test that makes weather does so in its own zone or project."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        yield place


@pytest.fixture(scope="session")
def endpoints(place):
    return connect(place.path)


@pytest.fixture
def weather(place):
    return lambda verb, **body: send_command(place, verb, **body)


@pytest.fixture(scope="session")
def tpu(endpoints):
    return tpu_client(endpoints)


@pytest.fixture(scope="session")
def tpu_by_rest(endpoints):
    where = {"api_endpoint": endpoints.http}
    return tpu_v2.TpuClient(transport="rest", credentials=endpoints.credentials(), client_options=where)


@pytest.fixture
def ready(tpu):

    def create(parent, name, node=TPU):
        wait_until_done(tpu, tpu.create_node(parent=parent, node_id=name, node=node))
        return tpu.get_node(name=f"{parent}/nodes/{name}")

    return create


def tpu_client(endpoints):
    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=endpoints.channel()))


def storage_client(endpoints):
    where = {"api_endpoint": endpoints.http}
    return storage.Client(project="p", credentials=endpoints.credentials(), client_options=where)


def wait_until_done(tpu, operation):
    """Return the operation when it is done: Google's own waiting polls too seldom for a fast clock."""

    def finished():
        current = tpu.get_operation({"name": operation.operation.name})
        return current if current.done else None

    return until(finished)


def metadata(worker, path, **headers):
    url = f"http://{worker['internal']}:2223/computeMetadata/v1/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google", **headers})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()
