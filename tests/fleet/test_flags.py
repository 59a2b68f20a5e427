"""XLA and libtpu flags: which layer wins, what swarm.toml accepts, and members that restart one at a time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.loop import EUROPE, FLEET, machine, pool
from tests.fleet.test_file import NOW, WHOLE
from tpuswarm.cli.machine.flags import update_pods
from tpuswarm.cloud.protocol import ENV_VARS, ENV_VARS_NEW, TpuSpec
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flag_restarts import FLAG_RESTART_INTERVAL_S, restart_for_flags
from tpuswarm.fleet.decide.flags import (
    LAYERS,
    Flag,
    resolve_flags,
    set_flag,
    unset_flag,
)
from tpuswarm.fleet.decide.jobs import (
    Assignment,
    Job,
    RunReport,
    StartRun,
    update_job,
)
from tpuswarm.fleet.spec.checks import check_file
from tpuswarm.fleet.spec.file import read_swarm
from tpuswarm.fleet.spec.flags import flags_from_file
from tpuswarm.fleet.store.document import Document
from tpuswarm.fleet.store.machine_flags import add_flag_metadata, check_tf_pods, merge_env_vars, outdated_pods
from tpuswarm.plan.flags import CheckedFlags

TARGETS = {"all": ["all"], "generation": ["v2", "v3"], "pool": ["small", "large"], "machine": ["a", "b"]}
PRECISION = "xla_jf_conv_full_precision"
V3_PRECISION = Flag(PRECISION, "true", "LIBTPU_INIT_ARGS", "generation", "v3")


@st.composite
def flags(draw) -> Flag:
    layer, name = draw(st.sampled_from(LAYERS)), draw(st.sampled_from(["x", "y"]))
    target, job = draw(st.sampled_from(TARGETS[layer])), draw(st.sampled_from([None, "train", "other"]))
    return Flag(name, str(draw(st.integers(0, 9))), "XLA_FLAGS", layer, target, job)


@given(st.lists(flags()))
def test_nearest_layer_wins_and_a_jobs_own_flag_above_all(given_flags):
    expected = {}
    for job in (None, "train"):
        for target in (("all", "all"), ("generation", "v2"), ("pool", "small"), ("machine", "a")):
            matching = [flag for flag in given_flags if (flag.layer, flag.where, flag.job) == (*target, job)]
            expected |= {flag.name: flag.value for flag in matching}
    found = resolve_flags(given_flags, "a", "small", "v2", "train")
    assert {name: flag.value for name, flag in found.items()} == expected


@given(st.lists(flags()), flags())
def test_flag_set_twice_is_stored_once_and_removed_when_unset(before, new):
    stored: tuple[Flag, ...] = ()
    for flag in before:
        stored = set_flag(stored, flag)
    assert len({flag.place for flag in stored}) == len(stored)
    assert [flag for flag in set_flag(stored, new) if flag.place == new.place] == [new]
    assert unset_flag(set_flag(stored, new), new) == unset_flag(stored, new)


def read(tmp_path: Path, extra: str, in_pool: str = ""):
    path = tmp_path / "swarm.toml"
    path.write_text(WHOLE.replace('tags = ["tpu"]', f'tags = ["tpu"]\n{in_pool}') + extra)
    file = read_swarm(path)
    check_file(path, file, NOW)
    return file


@pytest.fixture
def known_flags(monkeypatch):
    """Know two flags without asking XLA and libtpu, which takes seconds; tests/plan/test_flags.py asks them."""

    def check_flags(*tables):
        for name, value in (item for flags in tables for item in flags.items()):
            if value == "perhaps":
                raise InputError(f"{name} does not take 'perhaps'")
        return CheckedFlags({PRECISION: "LIBTPU_INIT_ARGS", "xla_dump_to": "XLA_FLAGS"})

    monkeypatch.setattr("tpuswarm.plan.flags.check_flags", check_flags)


@pytest.mark.usefixtures("known_flags")
def test_file_sets_flags_by_generation_and_pool(tmp_path):
    extra = f"\n[flags.v3]\n{PRECISION} = true\nxla_dump_to = '/x'\n[flags.v2]\n{PRECISION} = false\n"
    file = read(tmp_path, extra, 'flags = { xla_dump_to = "/tmp/a b" }')
    assert flags_from_file(file) == (
        V3_PRECISION,
        Flag("xla_dump_to", "/x", "XLA_FLAGS", "generation", "v3"),
        replace(V3_PRECISION, value="false", where="v2"),
        Flag("xla_dump_to", "/tmp/a b", "XLA_FLAGS", "pool", "small"),
    )


@pytest.mark.parametrize(
    ("extra", "in_pool", "line", "message"),
    [
        (f"\n[flags.v33]\n{PRECISION} = true\n", "", PRECISION, "there is no generation 'v33'; did you mean v3?"),
        ("", 'flags = { xla_dump_hlo_as_text = "perhaps" }', "flags", "does not take 'perhaps'"),
        ("\n[flags.v3]\nXLA = true\n", "", "XLA", "the name of a flag without dashes"),
        ("", f"flags = {{ {PRECISION} = [1] }}", "flags", "text"),
    ],
)
@pytest.mark.usefixtures("known_flags")
def test_mistake_in_a_file_is_reported_with_its_line(tmp_path, extra, in_pool, line, message):
    with pytest.raises(InputError) as error:
        read(tmp_path, extra, in_pool)
    lines = (tmp_path / "swarm.toml").read_text().splitlines()
    numbers = [number for number, text in enumerate(lines, 1) if text.startswith((line, "[flags"))]
    assert message in str(error.value)
    assert any(f", line {number}: " in str(error.value) for number in numbers), error.value


def document(*flags: Flag, runtime: str = "tpu-vm-tf-2.18.0-pod-pjrt", env_vars: str | None = None) -> Document:
    """A fleet with a pod of a TensorFlow runtime."""
    metadata = {} if env_vars is None else {ENV_VARS: env_vars}
    spec = TpuSpec("", EUROPE, "v3-32", "spot", FLEET, "old", runtime, metadata=metadata)
    desired = Desired(FLEET, (replace(pool(), name="old", spec=spec),))
    return Document("fleet", "rehearsal", "p", desired, (), flags=flags)


@pytest.mark.parametrize(
    ("runtime", "metadata"),
    [
        ("tpu-vm-tf-2.18.0-pod-pjrt", {"tensorflow-env-vars": f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true"}),
        ("tpu-ubuntu2204-base", {}),
    ],
)
def test_only_a_tensorflow_pod_gets_flags_in_its_metadata(runtime, metadata):
    found = document(V3_PRECISION, runtime=runtime)
    assert add_flag_metadata(found.desired.pools[0].spec, found.all_flags).metadata == metadata


def docker_environment(options: str) -> dict[str, str]:
    """The variables that `docker run` sets if a script splits its options at blanks and knows no quotes."""
    words = options.split(" ")
    assert words[::2] == ["-e"] * (len(words) // 2)
    return dict(word.split("=", 1) for word in words[1::2])


LIBTPU_FLAGS = st.dictionaries(
    st.sampled_from(["a_a", "b_b", "c_c", "d_d"]), st.sampled_from(["true", "7", "/x=y"]), max_size=4
)


@given(LIBTPU_FLAGS, LIBTPU_FLAGS, st.booleans(), st.sampled_from(["-e ", "-e", "-e=", "--env ", "--env="]))
def test_pod_has_the_flags_of_its_metadata_and_of_the_fleet_however_its_script_splits_them(own, ours, has_other, env):
    own = {name: value for name, value in own.items() if ours.get(name, value) == value}
    words = [f"--{name}={value}" for name, value in own.items()]
    given_text = " ".join([*["-e TF_X=1"] * has_other, *[f"{env}LIBTPU_INIT_ARGS={' '.join(words)}"] * bool(own)])
    fleet_flags = [Flag(name, value, "LIBTPU_INIT_ARGS", "all", "all") for name, value in ours.items()]
    merged = merge_env_vars(given_text, fleet_flags)
    variables = docker_environment(merged) if merged else {}
    assert variables.pop("TF_X", None) == ("1" if has_other else None)
    arguments = [word.removeprefix("--").split("=", 1) for word in variables.get("LIBTPU_INIT_ARGS", "").split()]
    if arguments[:1] and arguments[0][0] == "fromenv":
        ((_, names),) = arguments
        arguments = [[name, variables[f"FLAGS_{name}"]] for name in names.split(",")]
    assert dict(map(tuple, arguments)) == own | ours


@pytest.mark.parametrize(
    "env_vars",
    [
        "-e LIBTPU_INIT_ARGS=--a_a=1 --privileged",
        "-e LIBTPU_INIT_ARGS=--a_a=1 --cap-add SYS_NICE",
        "-e 'LIBTPU_INIT_ARGS=--a_a 1'",
        "-e LIBTPU_INIT_ARGS",
        "-iteLIBTPU_INIT_ARGS=--a_a=1",
        "LIBTPU_INIT_ARGS=--a_a=1",
    ],
)
def test_metadata_that_may_mean_two_things_is_refused_with_the_way_to_write_it(env_vars):
    with pytest.raises(InputError, match=r"unclear what .* write -e 'LIBTPU_INIT_ARGS=.*' once, after all other"):
        check_tf_pods(document(env_vars=env_vars))
    check_tf_pods(document(env_vars="--privileged --cap-add SYS_NICE -e 'LIBTPU_INIT_ARGS=--a_a=1'"))


def test_own_metadata_of_a_pod_stays_and_is_never_contradicted():
    own = f"-e LIBTPU_INIT_ARGS=--{PRECISION}=false"
    found = document(env_vars=own)
    pod = replace(machine("a", pool="old", type_="v3-32"), runtime_env=own)
    assert outdated_pods(found, [pod]) == {}
    assert add_flag_metadata(found.desired.pools[0].spec, ()).metadata[ENV_VARS] == own
    with pytest.raises(InputError, match=r"false in metadata .* true for generation v3"):
        check_tf_pods(document(V3_PRECISION, env_vars=own))
    check_tf_pods(document(V3_PRECISION, env_vars=own, runtime="tpu-ubuntu2204-base"))


def test_pod_that_refuses_its_flags_does_not_stop_the_others(monkeypatch):
    done, flags = [], f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true"

    class Cloud:
        def set_metadata(self, pod, metadata):
            if pod.name == "refuses":
                raise RunFailed("it is not itself today")
            done.append((pod.name, metadata))

    monkeypatch.setattr(
        "tpuswarm.cli.machine.flags._restart_runtime", lambda routes, name: done.append((name, "restarts"))
    )
    states = {"refuses": "", "lacks-them": None, "has-them": flags}
    pods = [replace(machine(name, pool="old", type_="v3-32"), runtime_env=found) for name, found in states.items()]
    assert update_pods(Cloud(), document(V3_PRECISION), pods) == ["it is not itself today"]
    assert {name for name, _ in done} == {"lacks-them"}
    assert [what for _, what in done] == [{ENV_VARS: flags, ENV_VARS_NEW: "TRUE"}, "restarts", {ENV_VARS_NEW: "FALSE"}]


def assigned(names: str) -> tuple[Assignment, ...]:
    return tuple(Assignment("small", name, 1.0, "running", 1, flags="old") for name in names)


def test_members_restart_with_new_flags_one_at_a_time_and_other_jobs_do_not():
    hosts = [machine(name, workers=1) for name in "abc"]
    jobs = tuple(Job(name, "small", "run", "preempted", assigned("abc")) for name in ("members", "other"))
    wanted = dict.fromkeys("abc", "new")
    runs = {(job.name, name): RunReport(1, "running") for job in jobs for name in "abc"}
    ended: list[tuple[float, str]] = []
    started: dict[str, str] = {}
    for now in range(0, 600, 5):
        found = []
        for job in restart_for_flags(jobs, {"members": wanted}, now):
            reports = {(name, 0): runs[job.name, name] for name in "abc"}
            step = update_job(job, hosts, (), reports, now, None, wanted)
            found.append(step.job)
            for act in step.actions:
                if isinstance(act, StartRun):
                    runs[job.name, act.machine] = RunReport(act.run, "running")
                    started[act.machine] = act.flags
                else:
                    ended.append((now, act.machine))
                    runs[job.name, act.machine] = RunReport(act.run, "asked", 130)
        jobs = tuple(found)
        assert sum(report.state != "running" for report in runs.values()) <= 1
    assert [name for _, name in ended] == ["a", "b", "c"] and started == wanted
    assert all(later - earlier >= FLAG_RESTART_INTERVAL_S for (earlier, _), (later, _) in pairwise(ended))
    members, other = jobs
    assert [(it.flags, it.run, it.lost, it.failed) for it in members.assignments] == [("new", 2, 0, 0)] * 3
    assert [(it.flags, it.run) for it in other.assignments] == [("old", 1)] * 3


def test_unreachable_member_delays_the_restart_of_the_others():
    hosts, wanted = [machine(name, workers=1) for name in "ab"], {"a": "new", "b": "new"}
    jobs = (Job("members", "small", "join", "preempted", assigned("ab")),)
    for now in range(1_000, 1_300, 10):
        (job,) = restart_for_flags(jobs, {"members": wanted}, now)
        step = update_job(job, hosts, (), {("b", 0): RunReport(1, "running")}, now, None, wanted)
        assert step.actions == ()
        jobs = (step.job,)
    assert [it.phase for it in jobs[0].assignments] == ["running", "running"]
