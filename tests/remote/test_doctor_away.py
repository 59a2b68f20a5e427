"""`doctor` about machines that it cannot look at: taken away, gone, in a zone that does not answer, wanted no more."""

import json
import time

import asyncssh
import pytest

from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, TpuSpec, Worker
from tpuswarm.errors import InputError
from tpuswarm.fleet.core.desired import Desired, Wanted
from tpuswarm.fleet.targets import find_meant, find_targets

FILE = """\
name = "taken"
provider = "rehearsal"

[storage]
bucket = "rehearsal-taken"
region = "us-central1"

[[pool]]
name = "one"
type = "v2-8"
zones = ["us-central1-f"]
count = 2
network = "tpuswarm-taken"
"""
A, B, ZONE = "v2-usc1f-0", "v2-usc1f-1", "us-central1-f"


def found(fleet: Fleet, *words: str, code: int = 1) -> dict[str, tuple[str, str]]:
    said = json.loads(fleet.run("doctor", *words, "--json", code=code)[0])["found"]
    return {each["host"]: (each["check"], each["what"]) for each in said}


def test_what_is_taken_away_gone_or_dark_is_a_finding_and_the_rest_is_looked_at(tmp_path):
    (tmp_path / "swarm.toml").write_text(FILE)
    with local_cloud(tmp_path / "cloud") as place:
        fleet = Fleet(tmp_path, place)
        fleet.run("init", "--yes")
        fleet.run("up", "--yes", "--paid")
        fleet.run("rehearsal", "break", ZONE, "unreachable")
        dark = "does not answer: which machines are there nobody knows"
        assert found(fleet, "all") == {ZONE: ("reach", dark)}
        assert found(fleet, A) == {A: ("reach", f"is not seen: {ZONE} does not answer")}
        fleet.run("rehearsal", "break", ZONE, "unreachable", "--mend")
        assert found(fleet, "all", code=0) == {}
        for name, how in ((A, "preempted"), (B, "gone")):
            fleet.run("rehearsal", "preempt", name, "--as", how)
        end = time.monotonic() + 60
        while (one := found(fleet, "all")).keys() != {A, "one"}:  # until then the notices are found
            assert time.monotonic() < end, one
        assert one[A] == ("reach", "is preempted, not ready")
        assert one["one"] == ("reach", f"1 v2-8 not there: asked for in {ZONE}")
        assert found(fleet, A) == {A: ("reach", "is preempted, not ready")}
        assert found(fleet, B) == {B: ("reach", "is gone: the cloud does not list it any more")}
        assert "there is no machine 'v2-usc1f-9'" in fleet.run("doctor", "v2-usc1f-9", code=2)[1]
        said = fleet.run("exec", "all", "--", "true", code=2)[1]
        assert f"no machine of the fleet can be reached: {A} is preempted, not ready" in said


def test_a_machine_that_refuses_the_key_is_a_finding(fleet, tmp_path, monkeypatch):
    stranger = tmp_path / "stranger"
    stranger.touch(0o600)
    stranger.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    monkeypatch.setattr("tpuswarm.fleet.reach.Reach.key", stranger)
    (check, what) = found(fleet, "v2")["v2-usc1f-0/0"]
    assert check == "reach" and f"does not take the key {stranger} for user" in what


def machine(name: str, pool: str, state: str = "ready") -> Machine:
    labels = {FLEET_LABEL: "f", POOL_LABEL: pool}
    return Machine(name, ZONE, "tpu", "v2-8", state, state.upper(), workers=(Worker("10.0.0.2", None),), labels=labels)


def test_a_machine_of_no_pool_or_of_a_dark_zone_keeps_nobody_from_the_others():
    spec = TpuSpec("", ZONE, "v2-8", "spot", "f", "one", "tpu-ubuntu2204-base")
    desired = Desired("f", (Wanted("one", spec, (ZONE, "us-west4-a"), 2),))
    listing = Listing((machine(A, "one"), machine(B, "old")), frozenset({"us-west4-a", "me-west1-a"}))
    for find in (find_meant, find_targets):
        of_all = find("all", desired, listing)
        assert [each.label for each in of_all.targets] == [f"{A}/0"]
        assert of_all.away == (
            f"{B} is of no pool of the fleet any more",
            "us-west4-a does not answer: which machines are there nobody knows",
        )
    with pytest.raises(InputError, match=f"{B} is of no pool of the fleet any more: `tpuswarm list` shows it"):
        find_targets(B, desired, listing)
    assert find_meant("v2-usw4a-3", desired, listing).away == ("v2-usw4a-3 is not seen: us-west4-a does not answer",)
    with pytest.raises(InputError, match="there is no machine 'v9'"):
        find_meant("v9", desired, listing, gone=["v2-usc1f-7"])
