import time

import pytest
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tests.local_cloud import local_cloud
from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.cloud.rehearsal.connect import connect

PROJECT = "projects/p"
TPU = tpu_v2.Node(accelerator_type="v2-8", runtime_version="tpu-ubuntu2204-base")


@pytest.fixture(scope="package")
def place(tmp_path_factory):
    """The folder of a local cloud, for all tests here; each takes a zone or a project of its own for its weather."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        yield place


@pytest.fixture(scope="package")
def endpoints(place):
    return connect(place.folder)


@pytest.fixture
def weather(place):
    """Makes bad weather: weather("preempt", name=…)."""
    return lambda verb, **body: ask(place, verb, **body)


@pytest.fixture(scope="package")
def tpu(endpoints):
    return tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=endpoints.channel()))


@pytest.fixture(scope="package")
def tpu_by_rest(endpoints):
    where = {"api_endpoint": endpoints.http}
    return tpu_v2.TpuClient(transport="rest", credentials=endpoints.credentials(), client_options=where)


@pytest.fixture
def ready(tpu):
    """Makes a node and waits for it: ready(parent, name, node)."""

    def make(parent, name, node=TPU):
        done(tpu, tpu.create_node(parent=parent, node_id=name, node=node))
        return tpu.get_node(name=f"{parent}/nodes/{name}")

    return make


def until(happens, seconds=60.0):
    """What `happens` returns, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := happens()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def done(tpu, operation):
    """A finished operation, raw: Google's own waiting looks too seldom for a fast clock."""

    def over():
        found = tpu.get_operation({"name": operation.operation.name})
        return found if found.done else None

    return until(over)
