"""The local cloud refuses calls without its token: start-up scripts are code."""

import stat

import grpc
import pytest
import requests
from google.api_core import exceptions
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport

from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.rehearsal.connect import CloudFolder
from tpuswarm.errors import RunFailed

PATHS = [
    "/v2/projects/p/locations/-/nodes",
    "/storage/v1/b?project=p",
    "/compute/v1/projects/p/zones",
    "/rehearsal/status",
]


@pytest.mark.parametrize("path", PATHS)
def test_rest_needs_the_token_and_refuses_other_hosts_and_origins(endpoints, path):
    good = {"Authorization": f"Bearer {endpoints.token}"}
    for headers, status in (
        (good, 200),
        ({}, 401),
        ({"Authorization": f"Bearer {endpoints.token}x"}, 401),
        (good | {"Host": "attacker.example"}, 403),
        (good | {"Host": f"attacker.example:{endpoints.http.rsplit(':')[-1]}"}, 403),
        (good | {"Origin": "http://attacker.example"}, 403),
        (good | {"Origin": "null"}, 403),
    ):
        assert requests.get(endpoints.http + path, headers=headers).status_code == status


def test_batches_and_grpc_need_the_token(endpoints):
    assert requests.post(f"{endpoints.http}/batch/storage/v1", data=b"").status_code == 401
    wrong = Endpoints(endpoints.rpc, endpoints.http, endpoints.token + "x")
    for channel in (grpc.insecure_channel(endpoints.rpc), wrong.channel()):
        client = tpu_v2.TpuClient(transport=TpuGrpcTransport(channel=channel))
        with pytest.raises(exceptions.Unauthenticated, match="token"):
            client.list_nodes(parent="projects/p/locations/-")


def test_only_the_owner_can_read_state_and_token(place, endpoints, tmp_path):
    assert endpoints.token not in repr(endpoints)
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(place.token_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.state.stat().st_mode) == 0o600
    other = CloudFolder(tmp_path / "other")
    other.make()
    other.token_file.chmod(0o644)
    with pytest.raises(RunFailed, match="chmod 600"):
        other.token()
