"""`tpuswarm init` against the local cloud: it creates what is missing, nothing twice, and explains failures.

The default service account of project bare-1 has no role, as in organisations made since May 2024.
"""

import os
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fleet.conftest import NO_QUOTA
from tpuswarm.cloud.errors import Denied, Invalid, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.accounts import Accounts, Grantee, account_address
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.firewall import Rule
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import GoogleProvider
from tpuswarm.cloud.protocol import FLEET_LABEL
from tpuswarm.cloud.rehearsal.connect import CloudFolder, connect, gcloud_variables, send_command

OWN = account_address("swarm", "bare-1")


def done_steps(out: str) -> list[str]:
    return [line.split(".")[0] for line in out.splitlines() if ". done: " in line]


@pytest.fixture
def access(cloud_folder):
    return lambda project: Access(project, connect(cloud_folder))


def test_missing_parts_are_created_once(init, access):
    code, out, err = init("--yes", "mine-1")
    assert (code, err) == (0, "") and done_steps(out) == ["4", "5", "6", "7", "8", "9", "10", "11"]
    assert "next: `tpuswarm up`" in out and "no: " not in out
    text, key = Path("swarm.toml").read_text(), Path(".ssh/tpuswarm").read_bytes()
    assert Path(".ssh/tpuswarm").stat().st_mode & 0o777 == 0o600
    project = Project(access("mine-1"))
    assert project.find_bucket("mine-1-swarm").region == "us-central1" and project.has_network("tpuswarm-swarm")
    code, out, err = init("")
    assert (code, err, done_steps(out)) == (0, "", []) and out.count(" – already done") == 11
    assert (Path("swarm.toml").read_text(), Path(".ssh/tpuswarm").read_bytes()) == (text, key)


def test_bucket_that_exists_keeps_its_region(init, access):
    Project(access("distant-1")).make_bucket("distant-1-swarm", "europe-west4", {})
    code, _, err = init("--yes", "distant-1")
    assert code == 2 and "us-central1" in err and "europe-west4" in err, "machines lie in another region: refused"
    code, out, _ = init("--yes --allow-cross-region", "distant-1")
    assert code == 0 and "bucket distant-1-swarm in europe-west4" in out
    assert 'region = "europe-west4"' in Path("swarm.toml").read_text()


def test_os_login_policy_is_reported_before_any_machine_exists(init, typed, access):
    _, out, _ = init("--yes", "login-1")
    assert "no: an organisation's policy turns OS Login on for all machines of project login-1" in " ".join(out.split())
    code, out, err = typed("up", "--yes")
    assert code == 2 and "org-policies disable-enforce compute.requireOsLogin --project=login-1" in out
    assert "nothing was created" in err
    assert GoogleProvider(access("login-1")).machines(["us-central1-b"]) == ((), frozenset())


def test_bucket_is_labelled_with_its_fleet(init, typed, access):
    init("--yes", "whole-1")
    code, _, err = typed("up", "--yes")
    assert (code, err) == (0, "")
    (machine,) = GoogleProvider(access("whole-1")).machines(["us-central1-b"]).machines
    bucket = access("whole-1").get("looking", bucket_url(access("whole-1"), "whole-1-swarm"))
    assert machine.state == "ready" and bucket["labels"] == {"tpuswarm": "swarm", FLEET_LABEL: machine.fleet}
    assert typed("down", "--yes")[0] == 0
    assert GoogleProvider(access("whole-1")).machines(["us-central1-b"]).machines == ()


def test_down_all_deletes_the_network_and_account_that_init_made_and_names_the_bucket(init, typed, access):
    init("--yes", "ended-1")
    project, account = Project(access("ended-1")), account_address("swarm", "ended-1")
    url = bucket_url(access("ended-1"), "ended-1-swarm")
    of_project = access("ended-1").url("", "v1/projects/ended-1:getIamPolicy")

    def policies() -> list[str]:
        return [str(access("ended-1").get("", f"{url}/iam")), str(access("ended-1").post("", of_project, {}))]

    assert typed("up", "--yes")[0] == 0 and all(account in policy for policy in policies())
    with pytest.raises(Invalid, match=f"service account {account} stays, because 1 machine uses it: v2-usc1b-0"):
        project.remove_account(Grantee(account, "ended-1", "ended-1-swarm"))
    assert "bucket gs://ended-1-swarm stays" in typed("down", "--all", "--dry-run")[1]
    code, out, _ = typed("down", "--yes", "--all")
    assert code == 0 and f"deleted tpuswarm-swarm-inside, tpuswarm-swarm-ssh, tpuswarm-swarm, {account}\n" in out
    assert "`gcloud storage rm --recursive gs://ended-1-swarm` deletes it" in out and "`tpuswarm init`, then" in out
    assert not project.accounts.exists(account) and not any(account in policy for policy in policies())
    assert project.find_bucket("ended-1-swarm") is not None
    code, out, _ = init("--yes")
    assert code == 0 and done_steps(out) == ["5", "6", "7", "8", "9"] and "no: " not in out, "it can begin again"


def test_down_all_leaves_an_account_that_it_has_not_made(init, typed, access):
    accounts = Accounts(access("kept-1"))
    url = access("kept-1").url("", "v1/projects/kept-1/serviceAccounts")
    access("kept-1").post("making", url, {"accountId": "tpuswarm-swarm", "serviceAccount": {"displayName": "mine"}})
    init("--yes", "kept-1")
    code, out, _ = typed("down", "--yes", "--all")
    assert code == 0 and "deleted tpuswarm-swarm-inside, tpuswarm-swarm-ssh, tpuswarm-swarm\n" in out
    assert accounts.exists("tpuswarm-swarm@kept-1.iam.gserviceaccount.com")


def test_pod_without_a_file_gets_a_network_that_admits_no_strangers(
    typed, access, cloud_folder, signed_out, monkeypatch
):
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(cloud_folder))
    words = "up --yes --paid --type v3-32 --zone europe-west4-a --provider rehearsal --project slice-1 --name pod"
    assert typed("init", *shlex.split("--yes --provider rehearsal --project slice-1 --type v2-8 --zone us-central1-b"))
    code, out, err = typed(*words.split())
    assert code == 0, out + err
    assert "firewall" not in err and out.index("first: make the network") < out.index("1. create v3-32")
    project = Project(access("slice-1"))
    assert project.has_network("tpuswarm-pod")
    assert [rule.name for rule in project.rules() if rule.network == "tpuswarm-pod"] == [
        "tpuswarm-pod-inside", "tpuswarm-pod-ssh",
    ]  # fmt: skip
    assert "first:" not in typed(*words.split())[1]
    code, out, _ = typed("down", "--fleet", "slice-1/pod", "--yes", "--all")
    assert code == 0 and "deleted tpuswarm-pod-inside, tpuswarm-pod-ssh, tpuswarm-pod" in out
    assert not project.has_network("tpuswarm-pod") and project.has_network("tpuswarm-swarm")
    assert not [rule for rule in project.rules() if rule.network == "tpuswarm-pod"]


def test_interrupted_init_continues_with_the_same_command(init, access, monkeypatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Project, "make_network", interrupt)
        code, out, _ = init("--yes", "half-1")
    assert code == 130 and done_steps(out) == ["4"]
    assert "5. not finished: make the network tpuswarm-swarm" in out and "the same command continues" in out
    Project(access("half-1")).make_network("tpuswarm-swarm", "tpuswarm swarm")
    code, out, _ = init("--yes", "half-1")
    assert code == 0 and done_steps(out) == ["6", "7", "8", "9", "10", "11"]
    Path(".ssh/tpuswarm.pub").unlink()
    code, out, _ = init("--yes")
    assert code == 0 and done_steps(out) == ["10"] and Path(".ssh/tpuswarm.pub").read_text().startswith("ssh-ed25519 ")


def test_damaged_key_is_reported_before_anything_is_created(init, access):
    Path(".ssh").mkdir()
    Path(".ssh/tpuswarm").touch()  # a full disk left it
    code, out, err = init("--yes", "empty-1")
    assert code == 2 and done_steps(out) == [] and "tpuswarm is not a whole private key: delete it and" in err
    assert not Project(access("empty-1")).has_network("tpuswarm-swarm")
    Path(".ssh/tpuswarm").unlink()
    assert init("--yes", "empty-1")[0] == 0


def test_apis_of_a_new_project_are_enabled_with_progress(init, monkeypatch):
    progress = []

    @contextmanager
    def waiting(what):
        yield progress.append

    monkeypatch.setattr("tpuswarm.cli.fleet.init.waiting", waiting)
    code, out, _ = init("--yes", "fresh-1")
    assert code == 0 and done_steps(out) == ["3", "4", "5", "6", "7", "8", "9", "10", "11"]
    assert {"turning on Cloud Quotas (1 of 6)", "turning on Cloud TPU (6 of 6)"} <= set(progress)


def test_project_without_billing_gets_nothing(init):
    code, out, err = init("--yes", "unpaid-1")
    assert code == 2 and done_steps(out) == []
    assert "no billing account is linked to project unpaid-1" in err
    assert "gcloud billing projects link unpaid-1 --billing-account=ACCOUNT" in err and err.count("\n") == 1
    assert not Path("swarm.toml").exists()


@pytest.mark.parametrize(
    ("zone", "found", "way_out"),
    [
        (NO_QUOTA, f"{NO_QUOTA}: 0 (TPUV2sPreemptiblePerProjectPerZoneForTPUAPI)", "fix: ask for more at"),
        ("asia-east1-c", "Permission denied on 'locations/asia-east1-c'", "fix: use a zone and a type that project"),
    ],
)
def test_zone_that_gives_no_tpu_is_reported_at_the_end(init, zone, found, way_out):
    code, out, _ = init(f"--yes --project {zone}-1 --provider rehearsal --type v2-8 --zone {zone}")
    assert code == 0 and all(words in out for words in (found, way_out, "fix this, then `tpuswarm up`"))


def test_bucket_name_of_somebody_else_is_refused(init, access, monkeypatch):
    """Whoever writes a fleet's document decides what runs on its machines, and bucket names can be guessed."""
    Project(access("stranger-1")).make_bucket("victim-1-swarm", "us-central1", {})
    code, _, err = init("--yes", "victim-1")
    assert code != 0 and "bucket victim-1-swarm is not in project victim-1" in err
    assert "another name, or name its project" in err and not Path("swarm.toml").exists()
    victim = Project(access("victim-1"))
    assert victim.find_bucket("victim-1-swarm", "stranger-1").region == "us-central1", "the file may name that project"

    def deny(self: Access, action: str, question: object) -> None:
        raise Denied(f"{action}: you have no storage.buckets.get access")

    monkeypatch.setattr(Access, "call_with_retries", deny)
    with pytest.raises(Taken, match="choose another name"):
        Project(Access("p", Endpoints("127.0.0.1:1", "http://127.0.0.1:1", "token"))).find_bucket("b")


def test_firewall_rule_of_the_right_name_and_wrong_content_is_refused(init, access):
    project, tags = Project(access("rules-1")), ("tpuswarm-swarm",)
    project.make_network("tpuswarm-swarm", "tpuswarm swarm")
    project.make_rule(Rule("tpuswarm-swarm-inside", "tpuswarm-swarm", (("tcp", ("80",)),), (), tags, tags))
    project.make_rule(Rule("doors", "tpuswarm-swarm", (("tcp", ("22",)),), ("0.0.0.0/0",), (), tags))
    code, _, err = init("--yes", "rules-1")
    assert code == 1
    assert "there is a firewall rule tpuswarm-swarm-inside, and it does not let its machines reach each other" in err
    assert "gcloud compute firewall-rules delete tpuswarm-swarm-inside --project=rules-1" in err
    names = {rule.name for rule in project.rules() if rule.network == "tpuswarm-swarm"}
    assert names == {"tpuswarm-swarm-inside", "doors"}


HEAD = """
[head]
type = "n1-standard-8"
zone = "us-central1-b"
network = "tpuswarm-swarm"
listen = true
"""


def test_port_of_a_head_that_listens_is_opened_after_asking_and_closed_with_the_network(init, typed, access):
    init("--yes", "open-1")
    project, file = Project(access("open-1")), Path("swarm.toml")
    file.write_text(file.read_text() + HEAD)
    out = typed("up", "--dry-run")[1]
    assert "first: let everybody reach port 8443 of the head, which asks for an invite" in out
    code, out, _ = typed("up")
    assert code != 0 and "tcp:8443" in out and "tpuswarm-swarm-listen" not in {rule.name for rule in project.rules()}
    assert typed("up", "--yes")[0] == 0
    (rule,) = [rule for rule in project.rules() if rule.name == "tpuswarm-swarm-listen"]
    assert (rule.allowed, rule.target_tags) == ((("tcp", ("8443",)),), ("head-tpuswarm-swarm",))
    machines = GoogleProvider(access("open-1")).machines(["us-central1-b"]).machines
    assert len(machines) == 2 and all(machine.state == "ready" for machine in machines)
    assert "first:" not in typed("up", "--yes")[1]
    assert "deleted tpuswarm-swarm-inside, tpuswarm-swarm-listen, " in typed("down", "--yes", "--all")[1]


@pytest.fixture
def bare(init) -> Path:
    """Swarm.toml of a prepared fleet with machines of its own account."""
    code, _, err = init("--yes", "bare-1")
    assert (code, err) == (0, "")
    return Path("swarm.toml")


def call_as_machine(cloud_folder: Path) -> tuple[Access, str]:
    """Return access as the only machine of project bare-1, and its bucket's URL."""
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


def test_account_of_another_project_is_refused(init):
    code, _, err = init("--yes --service-account x@other-1.iam.gserviceaccount.com", "lone-1")
    assert code == 1 and "project lone-1 has no service account x@other-1.iam.gserviceaccount.com" in err


def test_account_of_somebody_else_is_used_and_given_roles(init, access):
    Accounts(access("bare-1")).make("shared@bare-1.iam.gserviceaccount.com")
    line = "--yes --service-account shared@bare-1.iam.gserviceaccount.com --bucket bare-1-shared"
    code, out, err = init(line, "bare-1")
    assert (code, err) == (0, "") and "8. make the service account shared@bare-1.iam" in out and "8. done" not in out
    assert 'service_account = "shared@bare-1.iam.gserviceaccount.com"' in Path("swarm.toml").read_text()


def test_project_without_a_default_account_is_told_to_name_one(bare, typed, monkeypatch):
    monkeypatch.setattr(Project, "default_account", lambda project: None)
    bare.write_text(bare.read_text().replace(f'service_account = "{OWN}"\n', ""))
    code, _, err = typed("init", "--yes")
    assert code == 2 and f'has no default service account: add service_account = "{OWN}" to every machine' in err


@pytest.mark.long
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_printed_gcloud_commands_do_what_the_steps_do(init, cloud_folder):
    local = {**gcloud_variables(CloudFolder(cloud_folder), connect(cloud_folder)), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    _, out, _ = init("--dry-run", "typed-1")
    lines = [line.strip() for line in out.splitlines() if line.strip().startswith("gcloud ")]
    assert len(lines) == 14
    for line in lines:
        ran = subprocess.run(shlex.split(line), env=os.environ | local, capture_output=True, text=True, timeout=240)
        assert ran.returncode == 0, f"{line}\n{ran.stderr}"
    code, out, _ = init("--yes", "typed-1")
    assert code == 0 and done_steps(out) == ["10", "11"], "the steps that have a gcloud command are done already"
