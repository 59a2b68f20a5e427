"""Flags as values: which one wins, what swarm.toml may say, and members that begin again, one at a time."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.loop import FLEET, pool
from tests.fleet.test_file import NOW, WHOLE
from tests.fleet.test_jobs import machine
from tpuswarm.cloud.protocol import TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet import flags as of_fleet
from tpuswarm.fleet.checks import check
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.flags import LAYERS, Flag, resolved, with_flag, without_flag
from tpuswarm.fleet.core.jobs import RENEWED_S, Job, Report, Seat, Start, next_of, renewed
from tpuswarm.fleet.file import read_swarm
from tpuswarm.fleet.keeping.document import Document
from tpuswarm.plan import flags as asked

PLACES = {"all": ["all"], "generation": ["v2", "v3"], "pool": ["small", "large"], "machine": ["a", "b"]}
PRECISION = "xla_jf_conv_full_precision"


@st.composite
def flags(draw) -> Flag:
    layer = draw(st.sampled_from(LAYERS))
    return Flag(
        draw(st.sampled_from(["x", "y"])), str(draw(st.integers(0, 9))), "XLA_FLAGS", layer,
        draw(st.sampled_from(PLACES[layer])), draw(st.sampled_from([None, "train", "other"])),
    )  # fmt: skip


@given(st.lists(flags()))
def test_the_nearest_layer_wins_and_a_jobs_own_above_all(given_):
    expected = {}
    for job in (None, "train"):
        for layer, where in (("all", "all"), ("generation", "v2"), ("pool", "small"), ("machine", "a")):
            for each in given_:
                if (each.layer, each.where, each.job) == (layer, where, job):
                    expected[each.name] = each.value
    found = resolved(given_, "a", "small", "v2", "train")
    assert {name: each.value for name, each in found.items()} == expected


@given(st.lists(flags()), flags())
def test_what_is_set_twice_is_there_once_and_gone_when_it_is_taken_back(before, new):
    kept: tuple[Flag, ...] = ()
    for each in before:
        kept = with_flag(kept, each)
    assert len({each.place for each in kept}) == len(kept)
    assert [each for each in with_flag(kept, new) if each.place == new.place] == [new]
    assert without_flag(with_flag(kept, new), new) == without_flag(kept, new)


# swarm.toml.


def read(tmp_path: Path, extra: str, in_pool: str = ""):
    file = tmp_path / "swarm.toml"
    file.write_text(WHOLE.replace('tags = ["tpu"]', f'tags = ["tpu"]\n{in_pool}') + extra)
    found = read_swarm(file)
    check(file, found, NOW)
    return found


def test_a_file_names_them_by_generation_and_pool(tmp_path):
    found = read(tmp_path, f"\n[flags.v3]\n{PRECISION} = true\n", 'flags = { xla_dump_to = "/tmp/a b" }')
    assert of_fleet.of_file(found) == (
        Flag(PRECISION, "true", "LIBTPU_INIT_ARGS", "generation", "v3"),
        Flag("xla_dump_to", "/tmp/a b", "XLA_FLAGS", "pool", "small"),
    )


def test_the_libraries_are_asked_once_for_all_flags_of_a_file(tmp_path, monkeypatch):
    """The same name in two tables, with two values, among them."""
    pytest.importorskip("libtpu")
    started, ask = [], asked._ask
    monkeypatch.setattr(asked, "_ask", lambda variable, flags: started.append(variable) or ask(variable, flags))
    asked._check.cache_clear()
    extra = f"\n[flags.v3]\n{PRECISION} = true\nxla_dump_to = '/x'\n[flags.v2]\n{PRECISION} = false\n"
    found = of_fleet.of_file(read(tmp_path, extra, 'flags = { xla_dump_to = "/tmp/a b", xla_dump_hlo_as_text = true }'))
    assert len(found) == 5 and started == ["XLA_FLAGS", "LIBTPU_INIT_ARGS"]


@pytest.mark.parametrize(
    ("extra", "in_pool", "line", "said"),
    [
        (f"\n[flags.v33]\n{PRECISION} = true\n", "", PRECISION, "there is no generation 'v33'; did you mean v3?"),
        ("\n[flags.v3]\nxla_jf_conv = true\n", "", "xla_jf_conv", "neither XLA nor libtpu has a flag xla_jf_conv"),
        ("\n[flags.v3]\nXLA = true\n", "", "XLA", "the name of a flag without dashes"),
        ("", f'flags = {{ {PRECISION} = "perhaps" }}', "flags", f"{PRECISION} does not take 'perhaps'"),
        ("", f"flags = {{ {PRECISION} = [1] }}", "flags", "text"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(tmp_path, extra, in_pool, line, said):
    pytest.importorskip("libtpu")
    with pytest.raises(InputError) as error:
        read(tmp_path, extra, in_pool)
    lines = (tmp_path / "swarm.toml").read_text().splitlines()
    near = [number for number, each in enumerate(lines, 1) if each.startswith((line, "[flags"))]
    assert said in str(error.value) and any(f", line {number}: " in str(error.value) for number in near), error.value


# Pods with a TensorFlow runtime.


def document(*given_: Flag, runtime: str = "tpu-vm-tf-2.18.0-pod") -> Document:
    spec = TpuSpec("", "europe-west4-a", "v3-32", "spot", FLEET, "old", runtime)
    wanted = replace(pool(), name="old", spec=spec)
    return Document("fleet", "rehearsal", "p", Desired(FLEET, (wanted,)), (), flags=given_)


def test_a_pod_is_made_with_them_in_its_metadata_and_other_machines_are_not():
    flag = Flag(PRECISION, "true", "LIBTPU_INIT_ARGS", "generation", "v3")
    for runtime, expected in (
        ("tpu-vm-tf-2.18.0-pod", {"tensorflow-env-vars": f"-e LIBTPU_INIT_ARGS=--{PRECISION}=true"}),
        ("tpu-ubuntu2204-base", {}),
    ):
        found = document(flag, runtime=runtime)
        assert of_fleet.made_with(found.desired.pools[0].spec, found).metadata == expected


def test_a_pod_takes_one_of_libtpu():
    first = Flag(PRECISION, "true", "LIBTPU_INIT_ARGS", "generation", "v3")
    second = Flag("xla_tpu_scoped_vmem_limit_kib", "1", "LIBTPU_INIT_ARGS", "machine", "a")
    of_fleet.check_pods(document(first, replace(first, layer="pool", where="old")))
    of_fleet.check_pods(document(first, second, runtime="tpu-ubuntu2204-base"))
    with pytest.raises(InputError, match=r"takes one flag of libtpu .* and these are 2"):
        of_fleet.check_pods(document(first, second))


# Members begin again.


def test_members_begin_again_in_turn_and_others_go_on():
    """Three members and a program of somebody's, looked at every 5 s: never two of them on their way at once."""
    names = ["a", "b", "c"]
    hosts = [machine(each, workers=1) for each in names]
    seats = tuple(Seat("small", each, 1.0, "running", 1, flags="old") for each in names)
    jobs = (
        Job("members", "small", "join", "preempted", seats),
        Job("theirs", "small", "python", "preempted", seats),
    )
    wanted = {each.name: dict.fromkeys(names, "new") for each in jobs}
    runs = {(job.name, each): Report(1, "running") for job in jobs for each in names}
    ended: list[tuple[float, str]] = []
    began: dict[str, str] = {}
    for now in range(0, 600, 5):
        jobs = renewed(jobs, {"members": wanted["members"]}, now)
        found = []
        for job in jobs:
            reports = {(each, 0): runs[job.name, each] for each in names}
            step = next_of(job, hosts, (), reports, now, None, wanted[job.name])
            found.append(step.job)
            for act in step.acts:
                if isinstance(act, Start):
                    runs[job.name, act.machine] = Report(act.run, "running")
                    began[act.machine] = act.flags
                else:
                    ended.append((now, act.machine))
                    runs[job.name, act.machine] = Report(act.run, "asked", 130)
        jobs = tuple(found)
        assert sum(each.state != "running" for each in runs.values()) <= 1
    assert [each for _, each in ended] == names and began == dict.fromkeys(names, "new")
    assert all(later - before >= RENEWED_S for (before, _), (later, _) in pairwise(ended))
    members, theirs = jobs
    assert [(each.flags, each.run, each.lost, each.failed) for each in members.seats] == [("new", 2, 0, 0)] * 3
    assert [(each.flags, each.run) for each in theirs.seats] == [("old", 1)] * 3


def test_one_that_cannot_be_reached_is_not_hurried_and_holds_the_others_back():
    hosts = [machine(each, workers=1) for each in ("a", "b")]
    seats = tuple(Seat("small", each, 1.0, "running", 1, flags="old") for each in ("a", "b"))
    wanted = {"a": "new", "b": "new"}
    jobs = (Job("members", "small", "join", "preempted", seats),)
    for now in range(1_000, 1_300, 10):
        (job,) = renewed(jobs, {"members": wanted}, now)
        step = next_of(job, hosts, (), {("b", 0): Report(1, "running")}, now, None, wanted)
        assert step.acts == ()
        jobs = (step.job,)
    assert [each.phase for each in jobs[0].seats] == ["running", "running"]
