"""Flags on machines: what runs there has them, members begin again in turn, a TensorFlow pod's service reads them."""

import asyncio
import json
import re
from dataclasses import replace

import pytest

from tests.fleet.loop import FLEET
from tests.fleet.test_flags import document
from tests.fleet.test_jobs import machine
from tests.local_cloud import local_cloud
from tests.remote.conftest import Fleet
from tpuswarm.cli.flags import tell_pods
from tpuswarm.cloud.protocol import ENV_VARS, ENV_VARS_NEW, FLEET_LABEL, POOL_LABEL
from tpuswarm.cloud.rehearsal.place import VARIABLE
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.core.flags import Flag
from tpuswarm.fleet.core.jobs import RENEWED_S
from tpuswarm.fleet.keeping.fleets import find
from tpuswarm.fleet.keeping.jobs import Carrier
from tpuswarm.fleet.reach import find_reach
from tpuswarm.fleet.training import TOKEN
from tpuswarm.remote.connect import Connections

FILE = """\
name = "knob"
provider = "rehearsal"
allow_cross_region = true

[storage]
bucket = "rehearsal-knob"
region = "us-central1"

[flags.v2]
xla_tpu_scoped_vmem_limit_kib = 65536

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f"]
count = 2
network = "tpuswarm-knob"
flags = { xla_dump_to = "/tmp/it's here" }

[[pool]]
name = "old"
type = "v3-32"
zones = ["europe-west4-a"]
count = 1
network = "tpuswarm-knob"
runtime = "tpu-vm-tf-2.18.0-pod"
"""
VMEM, PRECISION = "xla_tpu_scoped_vmem_limit_kib", "xla_jf_conv_full_precision"
A, B, OLD = "v2-usc1f-0", "v2-usc1f-1", "v3-euw4a-0"
MEMBER = f"echo began with $LIBTPU_INIT_ARGS; sleep 1000; cat ~/{TOKEN}"
"""As a member of a swarm is known."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flags")
    (folder / "swarm.toml").write_text(FILE)
    with local_cloud(folder / "cloud") as place:
        found = Fleet(folder, place)
        found.run("init", "--yes")
        found.run("up", "--yes", "--paid")
        yield found


@pytest.fixture
def inside(fleet, monkeypatch):
    """For what runs in this process."""
    for name in (VARIABLE, "XDG_STATE_HOME", "HOME"):
        monkeypatch.setenv(name, fleet.environment[name])
    monkeypatch.chdir(fleet.folder)
    return fleet


def variables(fleet, where: str) -> dict[str, tuple[str, str]]:
    """LIBTPU_INIT_ARGS and XLA_FLAGS of what is started, by host."""
    out, _ = fleet.run("exec", where, "--", 'echo "$LIBTPU_INIT_ARGS|$XLA_FLAGS"')
    lines = (line.partition(" │ ") for line in out.splitlines())
    return {host.strip(): tuple(said.split("|")) for host, _, said in lines}


def test_what_is_started_has_those_of_the_file_and_then_those_that_were_set(fleet):
    for libtpu, xla in variables(fleet, "small").values():
        assert libtpu == f"--{VMEM}=65536"
        assert xla.startswith("--xla_force_host_platform_device_count=8 ")  # what the machine has itself stays
        assert xla.endswith(' --xla_dump_to="/tmp/it\'s here"')
    said = fleet.run("flags", "set", A, f"--{VMEM}=1000", "xla_dump_hlo_as_text=true")[0]
    assert f"{VMEM}=1000 for machine {A}" in said
    assert re.search(r"xla_dump_hlo_as_text=true .*Dumps HLO .*; default false\)", said)
    found = variables(fleet, "small")
    assert found[f"{A}/0"][0] == f"--{VMEM}=1000" and found[f"{B}/0"][0] == f"--{VMEM}=65536"
    shown = json.loads(fleet.run("flags", "show", A, "--json")[0])["flags"]
    assert {each["name"]: (each["value"], each["layer"], each["where"], each["by"]) for each in shown} == {
        VMEM: ("1000", "machine", A, "flags set"),
        "xla_dump_hlo_as_text": ("true", "machine", A, "flags set"),
        "xla_dump_to": ("/tmp/it's here", "pool", "small", "swarm.toml"),
    }
    fleet.run("up", "--yes", "--paid")  # what the file says is asked for again: what was set by hand stays
    assert variables(fleet, A)[f"{A}/0"][0] == f"--{VMEM}=1000"
    fleet.run("flags", "unset", A, VMEM, "xla_dump_hlo_as_text")
    assert variables(fleet, A)[f"{A}/0"][0] == f"--{VMEM}=65536"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("set", "smal", f"{VMEM}=1"), "there is no machine 'smal'; did you mean small?"),
        (("set", "v2", f"{VMEM[:-1]}=1"), f"neither XLA nor libtpu has a flag {VMEM[:-1]}; did you mean {VMEM}?"),
        (("set", "v2", VMEM), f"KEY=VALUE, such as xla_tpu_scoped_vmem_limit_kib=65536, not '{VMEM}'"),
        (("set", "v2", f"{VMEM}=a b"), "libtpu reads no value that is empty or has a blank"),
        (("set", f"{A}/0", f"{VMEM}=1"), f"{A}/0 is one worker, and flags are for a whole machine: {A}"),
        (("set", "v2", f"{VMEM}=1", "--job", "train"), "there is no job 'train' that is not over"),
        (("unset", "v2", VMEM), f"{VMEM} for generation v2 stands in swarm.toml: take it out, and `tpuswarm up`"),
        (("unset", "v3", VMEM), f"{VMEM} is not set for generation v3"),
    ],
)
def test_wrong_words_are_answered_and_nothing_is_set(fleet, words, said):
    before = fleet.run("flags", "show", "--json")[0]
    assert said in fleet.run("flags", *words, code=2)[1]
    assert fleet.run("flags", "show", "--json")[0] == before


def test_members_begin_again_one_after_the_other_and_a_program_of_ones_own_goes_on(inside):
    """With a keeper's own rounds, a minute apart by its clock."""
    inside.run("exec", "small", "--detach", "--name", "members-small", "--", MEMBER)
    inside.run("exec", A, "--detach", "--name", "mine", "--", "sleep 1000")
    said = inside.run("flags", "set", "v2", f"{VMEM}=2000")[0]
    assert "2 members of the swarm go on as they began: nobody keeps the fleet" in said
    assert "job mine goes on with the flags it began with: `tpuswarm stop mine` and begin it again" in said
    fleet, _ = find(None)
    cloud = fleet.provider()
    carrier = Carrier(find_reach(fleet), fleet.store(cloud))
    seen: list[tuple[str, ...]] = []

    async def carry() -> None:
        now = 1e9
        async with Connections(carrier.key) as connections:
            for _ in range(200):
                document, _ = await carrier.round(connections, cloud.machines(["us-central1-f"]), now)
                assert document is not None
                (members,) = (each for each in document.jobs if each.name == "members-small")
                flags = tuple("new" if "2000" in each.flags else "old" for each in members.seats)
                on_their_way = sum(each.phase != "running" or each.renewing for each in members.seats)
                assert on_their_way <= 1
                if not seen or seen[-1] != flags:
                    seen.append(flags)
                if flags == ("new", "new") and not on_their_way:
                    return
                now += RENEWED_S / 2 if not on_their_way else 0.1
                await asyncio.sleep(0.2)

    asyncio.run(carry())
    assert seen == [("old", "old"), ("new", "old"), ("new", "new")]
    seats = {each["name"]: each["seats"] for each in json.loads(inside.run("jobs", "--json")[0])["jobs"]}
    assert [(each["run"], each["failed"], each["lost"]) for each in seats["members-small"]] == [(2, 0, 0)] * 2
    assert [each["run"] for each in seats["mine"]] == [1]
    began = inside.run("logs", "members-small")[0]
    assert began.count(f"began with --{VMEM}=2000") == 2
    inside.run("flags", "unset", "v2", f"--{VMEM}")
    assert variables(inside, A)[f"{A}/0"][0] == f"--{VMEM}=65536"  # the file's counts again
    for job in ("members-small", "mine"):
        inside.run("stop", job)


def test_one_jobs_own_flags_reach_it_alone(fleet):
    fleet.run("exec", A, "--detach", "--name", "first", "--", "sleep 1000")
    said = fleet.run("flags", "set", "all", f"{VMEM}=7", "--job", "first")[0]
    assert f"{VMEM}=7 for all, job first" in said and "job first goes on with the flags it began with" in said
    assert variables(fleet, A)[f"{A}/0"][0] != f"--{VMEM}=7"
    fleet.run("stop", "first")
    fleet.run("exec", A, "--detach", "--name", "first", "--restart", "never", "--", "echo it is $LIBTPU_INIT_ARGS")
    assert f"it is --{VMEM}=7" in _logged(fleet, "first")


def _logged(fleet, job: str) -> str:
    for _ in range(100):
        if said := fleet.run("logs", job)[0]:
            return said
    raise AssertionError(f"{job} printed nothing")


def test_a_tensorflow_pod_has_them_in_its_metadata_and_its_service_begins_anew_on_every_worker(inside, monkeypatch):
    inside.run("exec", "old", "--", "systemctl start tpu-runtime && rm $TPUSWARM_ROOT/run/units/tpu-runtime")
    said = inside.run("flags", "set", "old", f"{PRECISION}=true")[0]
    assert f"{OLD}: tpu-runtime was begun anew on 4 workers" in said
    running = inside.run("exec", "old", "--", "systemctl is-active tpu-runtime")[0]
    assert running.count("│ active") == 4
    asked = "curl -s -H Metadata-Flavor:Google http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/"
    out = inside.run("exec", f"{OLD}/2", "--", f"{asked}tensorflow-env-vars")[0]
    assert f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true" in out
    refused = inside.run("flags", "set", "v3", f"{VMEM}=5", code=2)[1]
    assert "takes one flag of libtpu" in refused and "these are 2" in refused
    systemctl = inside.place.stand_ins / "systemctl"
    systemctl.rename(systemctl.with_name("systemctl.real"))
    systemctl.write_text(
        f"#!/bin/bash\ncase $TPUSWARM_REHEARSAL_MACHINE in {OLD}-1-*) echo no bus >&2; exit 5;; esac\n"
        'exec "$0.real" "$@"\n'
    )
    systemctl.chmod(0o755)
    words, set_up = ("flags", "set", "old", f"{PRECISION}=false"), []
    file = inside.folder / "swarm.toml"
    try:
        for again in (words, words):
            failed = inside.run(*again, code=1)[1]
            assert f"begun anew on 3 of 4 workers, not on {OLD}/1: exit 5: no bus: give the command again" in failed
        file.write_text(FILE + "\n[setup]\n")
        monkeypatch.setattr("tpuswarm.cli.setup.set_up_now", lambda *about: set_up.append(about))
        assert f"not on {OLD}/1: exit 5: no bus" in inside.run("up", "--yes", "--paid", code=1)[1]
    finally:
        file.write_text(FILE)
        systemctl.with_name("systemctl.real").replace(systemctl)
    assert set_up, "the rest of `up` is done all the same"
    assert f"{OLD}: tpu-runtime was begun anew on 4 workers" in inside.run(*words)[0]
    assert "begun anew" not in inside.run(*words)[0]


def test_a_pod_that_cannot_be_told_keeps_no_other_from_it(monkeypatch):
    told = []

    class Pods:
        def set_metadata(self, machine, metadata):
            if machine.name == "pod-0":
                raise RunFailed("pod-0 is not itself today")
            told.append((machine.name, metadata))

    env = {ENV_VARS: f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true"}
    has = {"pod-0": "", "pod-1": None, "pod-2": env[ENV_VARS]}
    labels = {FLEET_LABEL: FLEET, POOL_LABEL: "old"}
    pods = [replace(machine(name), labels=labels, runtime_env=value) for name, value in has.items()]
    monkeypatch.setattr("tpuswarm.cli.flags._restart", lambda reach, name: told.append((name, "begins anew")))
    flag = Flag(PRECISION, "true", "LIBTPU_INIT_ARGS", "all", "all")
    assert tell_pods(Pods(), document(flag), pods) == ["pod-0 is not itself today"]
    assert told == [
        ("pod-1", {**env, ENV_VARS_NEW: "TRUE"}), ("pod-1", "begins anew"), ("pod-1", {ENV_VARS_NEW: "FALSE"}),
    ]  # fmt: skip


def test_a_pod_gets_what_changed_in_the_file_and_what_the_cloud_refused_before(inside, monkeypatch):
    """By `up`, which says so first; and by the same command again where the cloud did not take it."""

    def refuse(*about: object) -> None:
        raise RunFailed("the cloud is not itself today")

    words = ("flags", "set", OLD, f"{PRECISION}=true")
    with monkeypatch.context() as broken:
        broken.setattr("tpuswarm.fleet.reach.Reach.set_metadata", refuse)
        assert "not itself today" in inside.run(*words, code=1)[1]
    assert f"{OLD}: tpu-runtime was begun anew on 4 workers" in inside.run(*words)[0]
    assert "begun anew" not in inside.run(*words)[0], "it has it, and what runs there goes on"
    inside.run("flags", "unset", OLD, PRECISION)
    if PRECISION in inside.run("flags", "show", "old")[0]:
        inside.run("flags", "unset", "old", PRECISION)
    file = inside.folder / "swarm.toml"
    file.write_text(FILE + f"\nflags = {{ {PRECISION} = true }}\n")
    try:
        said = inside.run("up", "--yes", "--paid")[0]
    finally:
        file.write_text(FILE)
    assert f"{OLD} gets other flags, and its tpu-runtime begins anew: what runs on it ends" in said
    assert f"{OLD}: tpu-runtime was begun anew on 4 workers" in said
    asked = "curl -s -H Metadata-Flavor:Google http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/"
    out = inside.run("exec", f"{OLD}/2", "--", f"{asked}tensorflow-env-vars")[0]
    assert f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true" in out
