"""Machines of a project whose default service account has no role, as in organisations made since May 2024."""

from pathlib import Path

import pytest

from tests.waiting import until
from tpuswarm.cloud.errors import Denied
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.accounts import Accounts, Grantee, account_address
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.rehearsal.connect import CloudFolder, connect, send_command

OWN = account_address("swarm", "bare-1")


@pytest.fixture
def access(cloud_folder) -> Access:
    return Access("bare-1", connect(cloud_folder))


@pytest.fixture
def bare(init) -> Path:
    """Swarm.toml of a prepared fleet with machines of its own account."""
    code, _, err = init("--yes", "bare-1")
    assert (code, err) == (0, "")
    return Path("swarm.toml")


def call_as_machine(cloud_folder: Path) -> tuple[Access, str]:
    """Return access as the only machine of the project, and its bucket's URL."""
    status = send_command(CloudFolder(cloud_folder), "status")["machines"]
    (machine,) = [machine for machine in status if machine["project"] == "bare-1"]
    endpoints = connect(cloud_folder)
    token = f"{endpoints.token}~{machine['workers'][0]['id']}"
    access = Access("bare-1", Endpoints(endpoints.rpc, endpoints.http, token))
    return access, bucket_url(access, "bare-1-swarm")


def test_default_account_without_roles_is_refused_until_init_grants_them(bare, typed, cloud_folder):
    bare.write_text(bare.read_text().replace(f'service_account = "{OWN}"\n', ""))
    code, out, err = typed("up", "--yes")
    assert code == 0 and "acting as" in err and "roles/iam.serviceAccountTokenCreator" in err, "it cannot be tested yet"
    machine, url = call_as_machine(cloud_folder)
    with pytest.raises(Denied, match=r"compute@.* does not have storage\.buckets\.get access"):
        machine.get("looking", url)
    with pytest.raises(Denied, match=r"you need tpu\.nodes\.list, which the role roles/tpu\.admin has"):
        GoogleProvider(machine).machines(["us-central1-b"])
    code, out, _ = typed("init", "--yes")
    assert code == 0 and "8. done: let machines with it use the bucket\n" in out
    assert machine.get("looking", url)["name"] == "bare-1-swarm"
    assert "developer.gserviceaccount.com, which may do what they need" in out
    assert typed("down", "--yes")[0] == 0


def test_missing_permission_of_the_head_stops_up_and_names_the_command(bare, typed, access):
    head = f'[head]\ntype = "e2-small"\nzone = "us-central1-b"\nnetwork = "tpuswarm-swarm"\nservice_account = "{OWN}"\n'
    bare.write_text(bare.read_text() + head)
    url = f"{bucket_url(access, 'bare-1-swarm')}/iam"
    policy = access.get("reading", url)
    policy["bindings"] = [old for old in policy["bindings"] if old["role"] != "roles/storage.objectAdmin"]
    access.rest("PUT", url, {}, json=policy)
    grantee = Grantee(OWN, "bare-1", "bare-1-swarm")
    Accounts(access).wait_for_roles(grantee, ["project", "account"])
    until(lambda: Accounts(access).missing(grantee, ["bucket"]), 60)
    code, out, err = typed("up", "--yes")
    words = " ".join(out.split())
    assert code == 2 and "nothing was created" in err
    assert f"{OWN}, which lacks storage.objects.create, storage.objects.delete" in words
    assert "gs://bare-1-swarm --member=serviceAccount:" in words and "--role=roles/storage.objectAdmin" in words


def test_account_of_another_project_is_refused(init):
    code, _, err = init("--yes --service-account x@other-1.iam.gserviceaccount.com", "lone-1")
    assert code == 1 and "project lone-1 has no service account x@other-1.iam.gserviceaccount.com" in err


def test_account_of_somebody_else_is_used_and_given_roles(init, access):
    Accounts(access).make("shared@bare-1.iam.gserviceaccount.com")
    line = "--yes --service-account shared@bare-1.iam.gserviceaccount.com --bucket bare-1-shared"
    code, out, err = init(line, "bare-1")
    assert (code, err) == (0, "") and "8. make the service account shared@bare-1.iam" in out and "8. done" not in out
    assert 'service_account = "shared@bare-1.iam.gserviceaccount.com"' in Path("swarm.toml").read_text()


def test_project_without_a_default_account_is_told_to_name_one(bare, typed, monkeypatch):
    monkeypatch.setattr(Project, "default_account", lambda project: None)
    bare.write_text(bare.read_text().replace(f'service_account = "{OWN}"\n', ""))
    code, _, err = typed("init", "--yes")
    assert code == 2 and f'has no default service account: add service_account = "{OWN}" to every machine' in err
