"""Flags on machines: new programs have them, members restart in turn, a TensorFlow pod's service reads them."""

import re

import pytest

from tests.remote.conftest import fleet_of, swarm_toml
from tests.waiting import until
from tpuswarm.errors import RunFailed
from tpuswarm.fleet.training import TOKEN_FILE

pytestmark = pytest.mark.slow

VMEM, PRECISION = "xla_tpu_scoped_vmem_limit_kib", "xla_jf_conv_full_precision"
POOLS = swarm_toml(
    "knob",
    "us-central1",
    'small v2-8 us-central1-f 2\nflags = { xla_dump_to = "/tmp/it\'s here" }',
    'old v3-32 europe-west4-a 1\nruntime = "tpu-vm-tf-2.18.0-pod-pjrt"',
)
FILE = f"allow_cross_region = true\nflags.v2.{VMEM} = 65536\n{POOLS}"
A, B, OLD = "v2-usc1f-0", "v2-usc1f-1", "v3-euw4a-0"
MEMBER = f"echo began with $LIBTPU_INIT_ARGS; sleep 1000; cat ~/{TOKEN_FILE}"
"""The token makes it a member of a swarm."""
METADATA = "curl -s -H Metadata-Flavor:Google http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/"
RESTARTED = f"{OLD}: tpu-runtime restarted on 4 workers"


@pytest.fixture(scope="module")
def knob(tmp_path_factory):
    with fleet_of(tmp_path_factory.mktemp("flags"), FILE) as found:
        yield found


@pytest.fixture
def fleet(knob, monkeypatch):
    return knob.enter(monkeypatch)


def variables(fleet, where: str) -> dict[str, tuple[str, str]]:
    """LIBTPU_INIT_ARGS and XLA_FLAGS of new programs, by host."""
    out = fleet.exec(where, 'echo "$LIBTPU_INIT_ARGS|$XLA_FLAGS"')
    lines = (line.partition(" │ ") for line in out.splitlines())
    return {host.strip(): tuple(text.split("|")) for host, _, text in lines}


def test_flags_of_the_file_apply_then_those_that_were_set(fleet):
    for libtpu, xla in variables(fleet, "small").values():
        assert libtpu == f"--{VMEM}=65536"
        assert xla.startswith("--xla_force_host_platform_device_count=8 "), "the machine's own flags stay"
        assert xla.endswith(' --xla_dump_to="/tmp/it\'s here"')
    out = fleet.run("flags", "set", A, f"--{VMEM}=1000", "xla_dump_hlo_as_text=true")[0]
    assert f"{VMEM}=1000 for machine {A}" in out
    assert re.search(r"xla_dump_hlo_as_text=true .*Dumps HLO .*; default false\)", out)
    found = variables(fleet, "small")
    assert found[f"{A}/0"][0] == f"--{VMEM}=1000" and found[f"{B}/0"][0] == f"--{VMEM}=65536"
    flags = fleet.run_json("flags", "show", A)["flags"]
    assert {flag["name"]: (flag["value"], flag["layer"], flag["where"], flag["by"]) for flag in flags} == {
        VMEM: ("1000", "machine", A, "flags set"),
        "xla_dump_hlo_as_text": ("true", "machine", A, "flags set"),
        "xla_dump_to": ("/tmp/it's here", "pool", "small", "swarm.toml"),
    }
    fleet.run("up", "--yes", "--paid")
    assert variables(fleet, A)[f"{A}/0"][0] == f"--{VMEM}=1000", "`up` keeps flags that a person set"
    fleet.run("flags", "unset", A, VMEM, "xla_dump_hlo_as_text")
    assert variables(fleet, A)[f"{A}/0"][0] == f"--{VMEM}=65536"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("set", "v2", f"{VMEM[:-1]}=1"), f"neither XLA nor libtpu has a flag {VMEM[:-1]}; did you mean {VMEM}?"),
        (("set", "v2", VMEM), f"a flag is KEY=VALUE, such as xla_tpu_scoped_vmem_limit_kib=65536, not '{VMEM}'"),
        (("set", f"{A}/0", f"{VMEM}=1"), f"{A}/0 is one worker; flags apply to a whole machine: {A}"),
        (("set", "v2", f"{VMEM}=1", "--job", "train"), "no job 'train' is running or waiting"),
        (("unset", "v2", VMEM), f"{VMEM} for generation v2 is in swarm.toml. Remove it there, then `tpuswarm up`"),
        (("unset", "v3", VMEM), f"{VMEM} is not set for generation v3"),
    ],
)
def test_wrong_words_set_nothing(fleet, words, sentence):
    before = fleet.run("flags", "show", "--json")[0]
    assert sentence in fleet.run("flags", *words, code=2)[1]
    assert fleet.run("flags", "show", "--json")[0] == before


@pytest.mark.long
def test_members_restart_with_new_flags_and_other_programs_go_on(fleet, monkeypatch):
    """Their order: fleet/test_flags.py."""
    monkeypatch.setattr("tpuswarm.fleet.decide.flag_restarts.FLAG_RESTART_INTERVAL_S", 0.1)
    members, began = "members-small", f"began with --{VMEM}=2000"
    with fleet.job("small", members, MEMBER), fleet.job(A, "mine", "sleep 1000"), fleet.flag("v2", VMEM, "2000") as out:
        assert "2 members of the swarm keep old flags, since no keeper runs" in out
        assert "job mine keeps its old flags until it restarts: `tpuswarm stop mine`" in out
        fleet.carry_jobs(
            lambda jobs: [seat.run for seat in jobs[members].assignments if seat.phase == "running"] == [2, 2]
        )
        until(lambda: fleet.run("logs", members)[0].count(began) == 2)
        seats = fleet.jobs()
        assert [(seat["run"], seat["failed"], seat["lost"]) for seat in seats[members]] == [(2, 0, 0)] * 2
        assert [seat["run"] for seat in seats["mine"]] == [1]
    assert variables(fleet, A)[f"{A}/0"][0] == f"--{VMEM}=65536", "the file's counts again"


def test_flags_of_one_job_reach_it_alone(fleet):
    with fleet.job(A, "first", "sleep 1000"):
        out = fleet.run("flags", "set", "all", f"{VMEM}=7", "--job", "first")[0]
        assert f"{VMEM}=7 for all, job first" in out and "job first keeps its old flags" in out
        assert variables(fleet, A)[f"{A}/0"][0] != f"--{VMEM}=7"
    fleet.detach(A, "first", "echo it is $LIBTPU_INIT_ARGS", "--restart", "never", prints=f"it is --{VMEM}=7")


def test_one_program_on_worker_0_has_the_chips_of_a_whole_tensorflow_pod(fleet, monkeypatch):
    """As https://github.com/google-research/swirl-lm/blob/main/docs/cloud_tpu.md sets TPU_LOAD_LIBRARY for Jupyter."""
    line = "echo load ${TPU_LOAD_LIBRARY-unset}"
    assert "load 0" in fleet.exec(f"{OLD}/0", line)
    assert fleet.exec(OLD, line).count("load unset") == 4 and "load unset" in fleet.exec(f"{OLD}/2", line)
    assert "load unset" in fleet.exec(A, line)
    fleet.detach(f"{OLD}/0", "alone", line, "--restart", "never", prints="load 0")
    hosts = []

    async def start(connections, given, *about):
        hosts.extend(given)
        raise RunFailed("enough")

    monkeypatch.setattr("tpuswarm.cli.look.notebook.start", start)
    fleet.run("notebook", OLD, code=1)
    assert [host.label for host in hosts] == [f"{OLD}/0"] and "TPU_LOAD_LIBRARY=0" in hosts[0].exports


@pytest.mark.long
def test_tensorflow_pod_has_flags_in_its_metadata_and_its_service_restarts_on_all_workers(fleet, monkeypatch):
    fleet.exec("old", "systemctl start tpu-runtime && rm $TPUSWARM_ROOT/run/units/tpu-runtime")
    assert RESTARTED in fleet.run("flags", "set", "old", f"{PRECISION}=true")[0]
    assert fleet.exec("old", "systemctl is-active tpu-runtime").count("│ active") == 4
    assert f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true" in fleet.exec(f"{OLD}/2", f"{METADATA}tensorflow-env-vars")
    with fleet.flag("v3", VMEM, "5"):
        told = fleet.exec(f"{OLD}/2", f"{METADATA}tensorflow-env-vars")
        assert f"--fromenv={VMEM},{PRECISION} -e FLAGS_{VMEM}=5 -e FLAGS_{PRECISION}=true" in told
    systemctl = fleet.place.stand_ins / "systemctl"
    systemctl.rename(systemctl.with_name("systemctl.real"))
    systemctl.write_text(
        f"#!/bin/bash\ncase $TPUSWARM_REHEARSAL_MACHINE in {OLD}-1-*) echo no bus >&2; exit 5;; esac\n"
        'exec "$0.real" "$@"\n'
    )
    systemctl.chmod(0o755)
    words, set_up = ("flags", "set", "old", f"{PRECISION}=false"), []
    file = fleet.folder / "swarm.toml"
    try:
        for again in (words, words):
            failed = fleet.run(*again, code=1)[1]
            assert (
                f"restarted on 3 of 4 workers, not on {OLD}/1: exit 5: no bus. The flags are in its metadata" in failed
            )
        file.write_text(FILE + "[setup]\n")
        monkeypatch.setattr("tpuswarm.cli.fleet.apply.set_up_machines", lambda *about: set_up.append(about))
        assert f"not on {OLD}/1: exit 5: no bus" in fleet.run("up", "--yes", "--paid", code=1)[1]
    finally:
        file.write_text(FILE)
        systemctl.with_name("systemctl.real").replace(systemctl)
    assert set_up, "the rest of `up` is done all the same"
    assert RESTARTED in fleet.run(*words)[0]
    assert "restarted" not in fleet.run(*words)[0]
    fleet.run("flags", "unset", "old", PRECISION)


@pytest.mark.long
def test_pod_gets_what_changed_in_the_file_and_what_the_cloud_refused_before(fleet, monkeypatch):
    def refuse(*about: object) -> None:
        raise RunFailed("the cloud is not itself today")

    words = ("flags", "set", OLD, f"{PRECISION}=true")
    with monkeypatch.context() as broken:
        broken.setattr("tpuswarm.fleet.hosts.routes.Routes.set_metadata", refuse)
        assert "not itself today" in fleet.run(*words, code=1)[1]
    assert RESTARTED in fleet.run(*words)[0]
    assert "restarted" not in fleet.run(*words)[0], "it has the flag already"
    fleet.run("flags", "unset", OLD, PRECISION)
    file = fleet.folder / "swarm.toml"
    file.write_text(FILE + f"flags = {{ {PRECISION} = true }}\n")
    try:
        out = fleet.run("up", "--yes", "--paid")[0]
    finally:
        file.write_text(FILE)
    assert f"{OLD} gets new flags: its tpu-runtime restarts" in out
    assert RESTARTED in out
    assert f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true" in fleet.exec(f"{OLD}/2", f"{METADATA}tensorflow-env-vars")
