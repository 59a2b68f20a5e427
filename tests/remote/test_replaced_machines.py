"""Machines taken away, gone, made again, or in a zone that does not answer: what commands say, whom they trust."""

import subprocess

import pytest

from tests.remote.conftest import HOSTS, ONE, SLICE
from tests.waiting import until
from tpuswarm.cloud.protocol import FLEET_LABEL, POOL_LABEL, Listing, Machine, TpuSpec, Worker
from tpuswarm.cloud.rehearsal.connect import send_command
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired, PoolSpec
from tpuswarm.fleet.hosts.targets import find_targets, select_targets

ZONE = "us-central1-f"


def doctor(fleet, *words: str, code: int = 1) -> dict[str, tuple[str, str]]:
    found = fleet.run_json("doctor", *words, code=code)["found"]
    return {finding["host"]: (finding["check"], finding["what"]) for finding in found}


def ssh(fleet, *words: str) -> subprocess.CompletedProcess[str]:
    config = fleet.folder / ".ssh/tpuswarm.d/trio.config"
    command = ["ssh", "-F", config, *words]
    return subprocess.run(command, env=fleet.environment, capture_output=True, text=True, timeout=240)


def test_zone_that_does_not_answer_is_a_finding_and_other_machines_are_checked(fleet, monkeypatch):
    monkeypatch.setattr("tpuswarm.cloud.google.access.RETRY_WINDOW_S", 0.2)
    with fleet.broken(ZONE, "unreachable"):
        dark = "does not answer: its machines are unknown"
        assert doctor(fleet, "all") == {ZONE: ("reach", dark)}
        assert doctor(fleet, ONE) == {ONE: ("reach", f"is unknown: {ZONE} does not answer")}
    assert doctor(fleet, "all", code=0) == {}


def test_lost_machines_are_findings_and_new_ones_have_new_keys_that_openssh_knows(fleet, routes):
    fleet.run("ssh-config")
    assert ssh(fleet, ONE, "true").returncode == 0
    config = fleet.folder / ".ssh/tpuswarm.d/trio.config"
    config.write_text(config.read_text().replace(f"Host {HOSTS[0]} ", "Host v2-usc1f-9/0 "))  # an older machine
    (before,), _ = routes.hosts(ONE)
    old_folder = fleet.home(f"{ONE}-0").name
    preempted = ("reach", "is preempted, not ready")
    send_command(fleet.place, "preempt", name=ONE, ending="preempted")
    send_command(fleet.place, "preempt", name=SLICE, ending="gone")
    try:
        until(lambda: doctor(fleet, "all").keys() == {ONE, "slice"})  # before, their notices are found
        missing = ("reach", "1 v5e-16 missing: requested in us-central1-a")
        assert doctor(fleet, "all") == {ONE: preempted, "slice": missing}
        assert doctor(fleet, ONE) == {ONE: preempted}
        assert doctor(fleet, SLICE) == {SLICE: ("reach", "is gone: the cloud does not list it now")}
        error = fleet.run("exec", "all", "--", "true", code=2)[1]
        assert f"no machine of the fleet can be reached: {ONE} is preempted, not ready" in error
    finally:
        fleet.run("up", "--yes", "--paid")

    (after,), _ = routes.hosts(ONE)
    assert after.alias != before.alias and after.keys != before.keys
    assert before.alias not in after.known_hosts.read_text()
    done = ssh(fleet, ONE, "echo $TPUSWARM_REHEARSAL_MACHINE")
    assert done.returncode == 0 and done.stdout.strip() not in ("", old_folder), done.stderr
    assert "Host v2-usc1f-0/0 v2-usc1f-0.0 v2-usc1f-0\n" in config.read_text()
    assert "v2-usc1f-9" not in config.read_text()


def machine(name: str, pool: str) -> Machine:
    labels = {FLEET_LABEL: "f", POOL_LABEL: pool}
    return Machine(name, ZONE, "tpu", "v2-8", "ready", "READY", workers=(Worker("10.0.0.2", None),), labels=labels)


def test_machine_of_no_pool_or_of_a_dark_zone_hides_no_other():
    other = "v2-usc1f-1"
    spec = TpuSpec("", ZONE, "v2-8", "spot", "f", "one", "tpu-ubuntu2204-base")
    desired = Desired("f", (PoolSpec("one", spec, (ZONE, "us-west4-a"), 2),))
    listing = Listing((machine(ONE, "one"), machine(other, "old")), frozenset({"us-west4-a", "me-west1-a"}))
    for look in (select_targets, find_targets):
        found = look("all", desired, listing)
        assert [target.label for target in found.targets] == [HOSTS[0]]
        assert found.away == (
            f"{other} has no pool in the fleet now",
            "us-west4-a does not answer: its machines are unknown",
        )
    with pytest.raises(InputError, match=f"{other} has no pool in the fleet now: `tpuswarm list` shows it"):
        find_targets(other, desired, listing)
    assert select_targets("v2-usw4a-3", desired, listing).away == ("v2-usw4a-3 is unknown: us-west4-a does not answer",)
    with pytest.raises(InputError, match="there is no machine 'v9'"):
        select_targets("v9", desired, listing, past_names=["v2-usc1f-7"])
