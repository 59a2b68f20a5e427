"""Service accounts have only the permissions that policies give them, and refusals read as Google's."""

import pytest
from google.api_core.exceptions import Forbidden, PermissionDenied
from google.cloud import tpu_v2

from tests.cloud.rehearsal.conftest import PARENT, TPU, storage_client, tpu_client
from tpuswarm.cloud.errors import CloudError, Denied
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.accounts import Accounts, Grantee
from tpuswarm.cloud.google.endpoints import Endpoints

EMAIL = "tester@p.iam.gserviceaccount.com"


@pytest.fixture(scope="module")
def grantee(endpoints):
    storage_client(endpoints).create_bucket("of-accounts", location="us-central1")
    Accounts(Access("p", endpoints)).make(EMAIL)
    return Grantee(EMAIL, "p", "of-accounts")


@pytest.fixture(scope="module")
def tester(endpoints):
    return Endpoints(endpoints.rpc, endpoints.http, f"{endpoints.token}~{EMAIL}")


def test_account_without_roles_is_refused_by_every_api(endpoints, tester, grantee):
    with pytest.raises(Forbidden, match=r"tester@p\S+ does not have storage\.objects\.get access to the Google Cloud"):
        storage_client(tester).bucket("of-accounts").blob("x").download_as_bytes()
    with pytest.raises(Forbidden, match=r"Permission 'storage\.objects\.create' denied on resource \(or it may"):
        storage_client(tester).bucket("of-accounts").blob("x").upload_from_string(b"x")
    with pytest.raises(
        PermissionDenied, match=r"Permission 'tpu\.nodes\.create' denied on resource '//tpu\.goog"
    ) as refused:
        tpu_client(tester).create_node(parent=PARENT, node_id="denied", node=TPU)
    assert refused.value.metadata["permission"] == "tpu.nodes.create"
    with pytest.raises(Denied, match=r"Required 'compute\.instances\.list' permission for 'projects/p'"):
        Access("p", tester).get("listing", f"{tester.http}/compute/v1/projects/p/zones/us-central1-b/instances")
    with pytest.raises(CloudError, match=r"iam\.serviceAccounts\.getAccessToken"):
        Access("p", endpoints).impersonate(EMAIL)


def test_granted_roles_count_after_a_while_and_include_no_more(endpoints, tester, grantee, tpu):
    accounts = Accounts(Access("p", endpoints))
    bindings = [one for one in grantee.bindings(["bucket", "project"], "you@example.com") if "compute" not in one.role]
    accounts.grant(grantee, bindings)
    accounts.wait_for_roles(grantee, ["bucket"])
    storage_client(tester).bucket("of-accounts").blob("x").upload_from_string(b"x")
    (lack, user) = accounts.missing(grantee, ["project", "account"])
    assert lack.binding.role == "roles/compute.instanceAdmin.v1" and user.permissions == ("iam.serviceAccounts.actAs",)
    with pytest.raises(PermissionDenied, match=r"Permission 'iam\.serviceAccounts\.actAs' denied"):
        own = tpu_v2.Node(TPU, service_account={"email": EMAIL})
        tpu_client(tester).create_node(parent=PARENT, node_id="denied", node=own)
    accounts.grant(grantee, grantee.bindings(["account"], "you@example.com"))
    accounts.wait_for_roles(grantee, ["account"])
    tpu_client(tester).create_node(parent=PARENT, node_id="allowed", node=own)
    tpu.delete_node(name=f"{PARENT}/nodes/allowed")
