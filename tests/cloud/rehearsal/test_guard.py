"""Who may ask: start-up scripts are code, so nobody without the token."""

import stat

import grpc
import pytest
import requests
from google.api_core import exceptions
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.rehearsal.place import Place
from tpuswarm.errors import RunFailed

PATHS = [
    "/v2/projects/p/locations/-/nodes",
    "/storage/v1/b?project=p",
    "/compute/v1/projects/p/zones",
    "/rehearsal/status",
]


@pytest.mark.parametrize("path", PATHS)
def test_rest_asks_for_the_token_and_refuses_other_hosts_and_origins(endpoints, path):
    url, good = endpoints.http + path, {"Authorization": f"Bearer {endpoints.token}"}

    def status(**headers):
        return requests.get(url, headers={name: value for name, value in headers.items() if value}).status_code

    assert status(**good) == 200
    assert status() == 401
    assert status(Authorization=f"Bearer {endpoints.token}x") == 401
    assert status(**good, Host="attacker.example") == 403
    assert status(**good, Host=f"attacker.example:{endpoints.http.rsplit(':')[-1]}") == 403
    assert status(**good, Origin="http://attacker.example") == 403
    assert status(**good, Origin="null") == 403


def test_a_batch_needs_the_token_as_well(endpoints):
    assert requests.post(f"{endpoints.http}/batch/storage/v1", data=b"").status_code == 401


def test_grpc_asks_for_the_token(endpoints):
    for channel in (
        grpc.insecure_channel(endpoints.rpc),
        Endpoints(endpoints.rpc, endpoints.http, endpoints.token + "x").channel(),
    ):
        client = tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))
        with pytest.raises(exceptions.Unauthenticated, match="token"):
            client.list_nodes(parent="projects/p/locations/-")


def test_only_the_owner_may_read_what_the_cloud_keeps(place, tmp_path):
    assert stat.S_IMODE(place.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.state.stat().st_mode) == 0o600
    other = Place(tmp_path / "other")
    other.make()
    other.token_file.chmod(0o644)
    with pytest.raises(RunFailed, match="chmod 600"):
        other.token()


def test_the_token_does_not_show(endpoints):
    assert endpoints.token not in repr(endpoints)
