"""Traces of steps, read back with JAX's own reader; what happens where there is no room for them."""

import gzip
import json
import time
from dataclasses import replace

import jax
import optax
import pytest

from tests.processes import finish, start, updates, wait_for
from tests.swarm.views.test_status import M0, M1, M2, composed
from tests.train import toy
from tpuswarm import ArraySource, InputError, Trainer, supervised
from tpuswarm.cli.profile import _training as training
from tpuswarm.cli.profile import profile as command
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.views.status import write_status
from tpuswarm.train.look import profile
from tpuswarm.train.run.directory import EVENTS, read_rows


def steps_in(folder):
    """The steps that a trace holds, and whether XLA's work is in it."""
    [path] = folder.glob("*.xplane.pb")
    events = [
        event
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]
    [packed] = folder.glob("*.trace.json.gz")
    for_perfetto = [each.get("name") for each in json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]]
    assert for_perfetto.count("train") == [event.name for event in events].count("train")
    assert any("ExecuteHelper" in event.name or "Execute" in event.name for event in events)
    return [dict(event.stats)["step_num"] for event in events if event.name == "train"]


def told(folder):
    return [row["message"] for row in read_rows(folder / EVENTS) if row["event"] == profile.TRACE]


@pytest.mark.parametrize(("steps", "traced"), [(30, [11, 12, 13, 14, 15]), (3, [1, 2, 3])])
def test_a_profiled_run_leaves_a_trace_of_its_middle(tmp_path, steps, traced):
    Trainer(devices=1, profile=True).fit(toy.recipe(), steps=steps, batch=8, run=tmp_path)
    [folder] = profile.traces(tmp_path)
    assert folder.is_relative_to(tmp_path / "tensorboard/plugins/profile")  # where TensorBoard looks
    assert steps_in(folder) == traced
    [message] = told(tmp_path)
    assert f"trace of steps {traced[0]} to {traced[-1]}" in message and str(tmp_path / "tensorboard") in message


def test_without_being_asked_nothing_is_traced(tmp_path):
    Trainer(devices=1).fit(toy.recipe(), steps=20, batch=8, run=tmp_path)
    assert profile.traces(tmp_path) == [] and told(tmp_path) == []


def test_a_loop_left_in_a_trace_leaves_the_steps_so_far_and_no_trace_under_way(tmp_path):
    loop = Trainer(devices=1, profile=True).steps(toy.recipe(), steps=30, batch=8, run=tmp_path / "run")
    for _ in range(12):
        next(loop)
    loop.close()
    [folder] = profile.traces(tmp_path / "run")
    assert steps_in(folder) == [11, 12, 13]
    with jax.profiler.trace(tmp_path / "mine"):
        pass


def test_another_trace_under_way_is_left_alone(tmp_path):
    with jax.profiler.trace(tmp_path / "mine"):
        Trainer(devices=1, profile=True).fit(toy.recipe(), steps=20, batch=8, run=tmp_path / "run")
    [message] = told(tmp_path / "run")
    assert "no trace was taken" in message and "already" in message
    assert list((tmp_path / "mine").rglob("*.xplane.pb"))


FULL = """
import sys
import time
from itertools import islice
from pathlib import Path
import jax
from tests.train import toy
from tpuswarm import Trainer
from tpuswarm.train.look.profile import traces
from tpuswarm.train.run.directory import EVENTS, read_rows
disk = Path(sys.argv[1])
run, filler = disk / "run", disk / "filler"
loop = Trainer(devices=1, profile=True, save_every=10**9).steps(toy.recipe(), steps=40, batch=8, run=run)
list(islice(loop, 12))
while not (run / "checkpoints/00000000/manifest.json").exists():  # the first save needs its room
    time.sleep(0.01)
with filler.open("wb", buffering=0) as file:  # all but four pages, for the rows
    try:
        while True:
            file.write(b"x" * 4096)
    except OSError:
        file.truncate(file.tell() - 4 * 4096)
list(islice(loop, 10))
print(next(row["message"] for row in read_rows(run / EVENTS) if row["event"] == "profile"))
print(traces(run))
filler.unlink()
print(sum(1 for _ in loop), traces(run))
jax.profiler.start_trace(disk / "again")
jax.profiler.stop_trace()
"""


def test_a_full_disk_costs_the_trace_and_not_the_run(on_small_disk):
    message, traces, rest = on_small_disk(FULL, 4)
    assert (
        message == "the trace of steps 11 to 15 could not be written: the disk is full; training continues without it"
    )
    assert traces == "[]" and rest.endswith(" []")


def slow(delay=0.05):
    """A maker for `file.py:slow`: a run that lasts until somebody stops it."""

    class Slow(ArraySource):
        def rows(self, start, count):
            time.sleep(delay)
            return super().rows(start, count)

    return supervised(toy.init, toy.loss, optax.sgd(0.01), Slow(toy.data()))


def test_a_living_run_is_traced_when_asked(tmp_path):
    (tmp_path / "slow.py").write_text("from tests.train.look.test_profile import slow\n")
    run = start(["train", "slow.py:slow", "--steps", "100000", "--batch", "8", "--run", "run"], tmp_path)
    folder = tmp_path / "run"
    wait_for(lambda: updates(folder) >= 3, run)
    out, err = finish(start(["profile", "run", "--steps", "3"], tmp_path))
    assert f"asked process {run.pid} to trace 3 steps" in err and "pip install xprof, then xprof run/tensorboard" in out
    [trace] = profile.traces(folder)
    traced = steps_in(trace)
    assert len(traced) == 3 and f"steps {traced[0]} to {traced[-1]}" in out
    assert not (folder / profile.REQUEST).exists()
    finish(start(["stop", "run"], tmp_path))
    run.communicate(timeout=60)
    out, _ = finish(start(["profile", "run"], tmp_path))
    assert str(trace.name) in out
    _, err = finish(start(["profile", "run", "--steps", "3"], tmp_path), 2)
    assert "is not running" in err


@pytest.mark.parametrize(
    "text",
    [
        *(f'{{"steps": {steps}, "member": null, "id": "a"}}' for steps in ("-1", "0", "1.5", "Infinity", '"2"')),
        '{"steps": 2, "member": ["m1"], "id": "a"}',
        '{"steps": 2, "member": null}',
        "[2]",
        "2",
        "no JSON",
    ],
)
def test_a_request_that_is_none_is_taken_away(tmp_path, text):
    (tmp_path / profile.REQUEST).write_text(text)
    assert profile.take_request(tmp_path) is None and not (tmp_path / profile.REQUEST).exists()
    asked = profile.request(tmp_path, 2)
    assert profile.take_request(tmp_path) == (2, None, asked)


def test_a_run_without_members_and_no_steps_are_refused(tmp_path):
    run = tmp_path / "run"
    Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=run)
    with pytest.raises(InputError, match="--steps must be at least 1, not 0"):
        command(str(run), 0)
    with pytest.raises(InputError, match="is not a swarm: leave --member out"):
        command(str(run), member="m0")


def test_a_member_without_steps_is_named_with_those_that_have(tmp_path):
    lost = replace(M2, state="lost")
    members = (M0, lost, replace(M1, state="left"), *(replace(M0, id=f"j-{each}") for each in range(9)))
    write_status(tmp_path, composed(members=members))
    assert training(tmp_path, None) == "m0" and training(tmp_path, "j-8") == "j-8"
    now = "training now: m0, j-0, j-1, j-2, j-3 and 5 more"
    for member, why in (("m2", "m2 is lost, so"), ("m1", "m1 has left, so"), ("m9", "has no member m9;")):
        with pytest.raises(InputError) as refused:
            training(tmp_path, member)
        assert why in str(refused.value) and str(refused.value).endswith(now)
    write_status(tmp_path, composed(members=(lost,)))
    with pytest.raises(InputError, match="has no steps to trace: nobody trains yet; try again once one does"):
        training(tmp_path, None)


@pytest.mark.parametrize("asked", ["m2", None])
def test_a_member_that_is_starting_is_waited_for(tmp_path, monkeypatch, asked):
    write_status(tmp_path, composed(members=(M2,)))

    def holder(folder):
        write_status(folder, composed(members=(replace(M2, state="alive"),)))
        return 1

    with monkeypatch.context() as held:
        held.setattr("tpuswarm.train.run.directory.holder", holder)
        assert training(tmp_path, asked) == "m2"
    write_status(tmp_path, composed(members=(M2,)))
    with pytest.raises(RunFailed, match=f"ended before {asked or 'a member'} trained"):
        training(tmp_path, asked)


def test_an_ended_run_without_a_trace_says_what_to_do(tmp_path):
    Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run")
    _, err = finish(start(["profile", "run"], tmp_path), 2)
    assert "no trace" in err and "--profile" in err
