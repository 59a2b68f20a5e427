"""`tpuswarm init` against the local cloud: what lacks is made, nothing twice, and bad luck is a sentence."""

import os
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.local_cloud import local_cloud
from tpuswarm.cloud.errors import Denied, Taken
from tpuswarm.cloud.google.access import Access
from tpuswarm.cloud.google.buckets import bucket_url
from tpuswarm.cloud.google.endpoints import Endpoints
from tpuswarm.cloud.google.project import Project
from tpuswarm.cloud.google.provider import Google
from tpuswarm.cloud.protocol import FLEET_LABEL
from tpuswarm.cloud.rehearsal.client import ask, environment
from tpuswarm.cloud.rehearsal.connect import connect
from tpuswarm.cloud.rehearsal.place import Place

ASKED = ["--provider", "rehearsal", "--type", "v2-8", "--zone", "us-central1-b"]
THERE = " – already done"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a fast local cloud, in which nobody pays for `unpaid`, and `fresh` has its APIs off."""
    with local_cloud(tmp_path_factory.mktemp("cloud")) as place:
        ask(place, "quota", zone="europe-west4-a", generation="v2", limit=0)
        ask(place, "break", name="unpaid-1", fault="no-billing")
        ask(place, "break", name="fresh-1", fault="no-apis")
        ask(place, "break", name="login-1", fault="os-login")
        ask(place, "break", name="asia-east1-c", fault="hidden")
        yield place.folder


@pytest.fixture
def call(typed, folder, tmp_path, monkeypatch):
    """Runs `init` in an empty folder and an empty home: (code, out, err)."""
    monkeypatch.setenv("TPUSWARM_REHEARSAL", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "swarm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tpuswarm.cloud.google.project.LOOK_S", 0.05)
    return lambda *words: typed("init", *words)


def done(out: str) -> list[str]:
    """Numbers of the steps that were done."""
    return [line.split(".")[0] for line in out.splitlines() if ". done: " in line]


def test_what_lacks_is_made_once(call, folder):
    code, out, err = call("--yes", "--project", "mine-1", *ASKED)
    assert (code, err) == (0, "") and done(out) == ["4", "5", "6", "7", "8", "9"]
    assert "next: `tpuswarm up`" in out and "no: " not in out
    text, key = Path("swarm.toml").read_text(), Path(".ssh/tpuswarm").read_bytes()
    assert Path(".ssh/tpuswarm").stat().st_mode & 0o777 == 0o600
    found = Project(Access("mine-1", connect(folder)))
    assert found.bucket_region("mine-1-swarm") == "us-central1" and found.has_network("tpuswarm-swarm")
    code, out, err = call()
    assert (code, err, done(out)) == (0, "", []) and out.count(THERE) == 9
    assert (Path("swarm.toml").read_text(), Path(".ssh/tpuswarm").read_bytes()) == (text, key)


def test_a_policy_that_would_keep_us_from_the_machines_is_found_before_there_are_any(call, typed, folder):
    _, out, _ = call("--yes", "--project", "login-1", *ASKED)
    assert "no: an organisation's policy turns OS Login on for all machines of project login-1" in " ".join(out.split())
    code, out, err = typed("up", "--yes")
    assert code == 2 and "org-policies disable-enforce compute.requireOsLogin --project=login-1" in out
    assert "nothing was created" in err and Google(Access("login-1", connect(folder))).machines(["us-central1-b"]) == (
        (),
        frozenset(),
    )


def test_the_bucket_carries_the_id_of_the_fleet_that_it_was_made_for(call, typed, folder):
    call("--yes", "--project", "whole-1", *ASKED)
    code, _, err = typed("up", "--yes")
    assert (code, err) == (0, "")
    access = Access("whole-1", connect(folder))
    (machine,) = Google(access).machines(["us-central1-b"]).machines
    bucket = access.get("looking", bucket_url(access, "whole-1-swarm"))
    assert machine.state == "ready" and bucket["labels"] == {"tpuswarm": "swarm", FLEET_LABEL: machine.fleet}
    assert typed("down", "--yes")[0] == 0
    assert Google(access).machines(["us-central1-b"]).machines == ()


def test_it_goes_on_where_it_was_stopped(call, folder):
    Project(Access("half-1", connect(folder))).make_network("tpuswarm-swarm", "tpuswarm swarm")
    code, out, _ = call("--yes", "--project", "half-1", *ASKED)
    assert code == 0 and done(out) == ["4", "6", "7", "8", "9"]
    Path(".ssh/tpuswarm.pub").unlink()
    code, out, _ = call("--yes")
    assert code == 0 and done(out) == ["8"] and Path(".ssh/tpuswarm.pub").read_text().startswith("ssh-ed25519 ")


def test_a_new_project_has_its_apis_turned_on_one_by_one(call, monkeypatch):
    told = []

    @contextmanager
    def waiting(what):
        yield told.append

    monkeypatch.setattr("tpuswarm.cli.init.waiting", waiting)
    code, out, _ = call("--yes", "--project", "fresh-1", *ASKED)
    assert code == 0 and done(out) == ["3", "4", "5", "6", "7", "8", "9"]
    assert {"turning on Cloud Quotas (1 of 3)", "turning on Cloud TPU (3 of 3)"} <= set(told)


def test_where_nobody_pays_it_ends_before_anything_is_made(call):
    code, out, err = call("--yes", "--project", "unpaid-1", *ASKED)
    assert code == 2 and done(out) == []
    assert "no billing account is linked to project unpaid-1" in err
    assert "gcloud billing projects link unpaid-1 --billing-account=ACCOUNT" in err and err.count("\n") == 1
    assert not Path("swarm.toml").exists()


def test_without_quota_it_says_so_at_the_end_and_how_to_mend_it(call):
    asked = ["--provider", "rehearsal", "--type", "v2-8", "--zone", "europe-west4-a", "--project", "poor-1"]
    code, out, _ = call("--yes", *asked)
    assert code == 0 and "europe-west4-a: 0 (TPUV2sPreemptiblePerProjectPerZoneForTPUAPI)" in out
    assert "mend: ask for more at" in out and "mend this, then `tpuswarm up`" in out


def test_a_zone_that_is_not_open_to_the_project_is_named_with_the_way_out(call):
    asked = ["--provider", "rehearsal", "--type", "v2-8", "--zone", "asia-east1-c", "--project", "asia-1"]
    code, out, _ = call("--yes", *asked)
    assert (
        code == 0 and "no: asking which TPUs asia-east1-c offers: Permission denied on 'locations/asia-east1-c'" in out
    )
    assert "mend: take a zone and a type that project asia-1 was granted" in out


def test_ctrl_c_says_where_the_same_command_goes_on(call, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Project, "make_network", interrupted)
    code, out, _ = call("--yes", "--project", "short-1", *ASKED)
    assert code == 130 and done(out) == ["4"]
    assert (
        "5. not finished: make the network tpuswarm-swarm, closed until a rule below opens it; the same command goes on"
        in out
    )


def test_a_bucket_of_somebody_else_is_left_alone(monkeypatch):
    def denied(self: Access, doing: str, question: object) -> None:
        raise Denied(f"{doing}: you have no storage.buckets.get access")

    monkeypatch.setattr(Access, "ask", denied)
    with pytest.raises(Taken, match="choose another name"):
        Project(Access("p", Endpoints("127.0.0.1:1", "http://127.0.0.1:1", "token"))).bucket_region("b")


def test_a_bucket_of_another_project_is_not_taken_for_ours_though_it_can_be_read(call, folder):
    """Whoever writes a fleet's document says what runs on its machines, and names of buckets can be guessed."""
    Project(Access("stranger-1", connect(folder))).make_bucket("victim-1-swarm", "us-central1", {})
    code, _, err = call("--yes", "--project", "victim-1", *ASKED)
    assert (
        code != 0
        and "bucket victim-1-swarm is not of project victim-1" in err
        and "another name, or name its project" in err
    )
    assert not Path("swarm.toml").exists()
    victim = Project(Access("victim-1", connect(folder)))
    assert victim.bucket_region("victim-1-swarm", "stranger-1") == "us-central1", "where the file names its project"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
def test_gcloud_lines_of_the_preview_do_what_the_steps_do(call, folder, tmp_path):
    local = {**environment(Place(folder), connect(folder)), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    _, out, _ = call("--dry-run", "--project", "typed-1", *ASKED)
    lines = [line.strip() for line in out.splitlines() if line.strip().startswith("gcloud ")]
    assert len(lines) == 7
    for line in lines:
        ran = subprocess.run(shlex.split(line), env=os.environ | local, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, f"{line}\n{ran.stderr}"
    code, out, _ = call("--yes", "--project", "typed-1", *ASKED)
    assert code == 0 and done(out) == ["8", "9"], "all that costs gcloud a line is there already"


def test_a_firewall_rule_counts_for_what_it_allows_and_not_for_its_name(call, folder):
    from tpuswarm.cloud.google.firewall import Rule

    project = Project(Access("rules-1", connect(folder)))
    project.make_network("tpuswarm-swarm", "tpuswarm swarm")
    mine = ("tpuswarm-swarm",)
    project.make_rule(Rule("tpuswarm-swarm-inside", "tpuswarm-swarm", (("tcp", ("80",)),), (), mine, mine))
    project.make_rule(Rule("doors", "tpuswarm-swarm", (("tcp", ("22",)),), ("0.0.0.0/0",), (), mine))
    code, _, err = call("--yes", "--project", "rules-1", *ASKED)
    assert code == 1
    assert "there is a firewall rule tpuswarm-swarm-inside, and it does not let its machines reach each other" in err
    assert "gcloud compute firewall-rules delete tpuswarm-swarm-inside --project=rules-1" in err
    ours = {each.name for each in project.rules() if each.network == "tpuswarm-swarm"}
    assert ours == {"tpuswarm-swarm-inside", "doors"}
