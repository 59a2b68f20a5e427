"""Traces of steps, read with JAX's own reader, and the command that requests them."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from itertools import islice

import jax
import pytest

from tests.swarm.views.test_status import M0, M1, M2, composed
from tests.train import toy
from tpuswarm import InputError, Trainer
from tpuswarm.cli.train.profile import profile as command
from tpuswarm.cli.train.profile import wait_for_member
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.views.status import write_status
from tpuswarm.train.look import profile
from tpuswarm.train.run.directory import EVENTS, read_rows

pytestmark = pytest.mark.slow


def steps_in(folder):
    """Return the steps that a trace holds, which has to hold XLA's work."""
    [path] = folder.glob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events]
    [packed] = folder.glob("*.trace.json.gz")
    for_perfetto = [row.get("name") for row in json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]]
    assert for_perfetto.count("train") == [event.name for event in events].count("train")
    assert any("Execute" in event.name for event in events)
    return [dict(event.stats)["step_num"] for event in events if event.name == "train"]


def trace_messages(folder):
    return [row["message"] for row in read_rows(folder / EVENTS) if row["event"] == profile.TRACE_EVENT]


def test_profile_option_traces_a_short_run_to_its_end(tmp_path):
    """A long run of its steps 11 to 15: below."""
    Trainer(devices=1, profile=True).fit(toy.recipe(), steps=3, batch=8, run=tmp_path)
    [folder] = profile.trace_folders(tmp_path)
    assert folder.is_relative_to(tmp_path / "tensorboard/plugins/profile")  # TensorBoard finds it
    assert steps_in(folder) == [1, 2, 3]
    [message] = trace_messages(tmp_path)
    assert "trace of steps 1 to 3" in message and str(tmp_path / "tensorboard") in message


def test_loop_left_during_a_trace_writes_the_steps_so_far(tmp_path):
    with closing(Trainer(devices=1, profile=True).steps(toy.recipe(), steps=30, batch=8, run=tmp_path / "run")) as loop:
        list(islice(loop, 12))
    [folder] = profile.trace_folders(tmp_path / "run")
    assert steps_in(folder) == [11, 12, 13]
    with jax.profiler.trace(tmp_path / "mine"):  # needs that no trace is running
        pass


def test_trace_of_the_user_is_left_alone(tmp_path):
    with jax.profiler.trace(tmp_path / "mine"):
        Trainer(devices=1, profile=True).fit(toy.recipe(), steps=3, batch=8, run=tmp_path / "run")
    [message] = trace_messages(tmp_path / "run")
    assert "no trace was taken" in message and "already" in message
    assert list((tmp_path / "mine").rglob("*.xplane.pb"))


FULL_DISK = """
import shutil
import sys
from itertools import islice
from pathlib import Path
import jax
from tests.train import toy
from tests.waiting import until
from tpuswarm import Trainer
from tpuswarm.train.look.profile import trace_folders
from tpuswarm.train.run.directory import EVENTS, read_rows
disk = Path(sys.argv[1])
run, filler = disk / "run", disk / "filler"
loop = Trainer(devices=1, profile=True, save_every=10**9).steps(toy.recipe(), steps=40, batch=8, run=run)
list(islice(loop, 12))
until((run / "checkpoints/00000000/manifest.json").exists)  # the first save needs its room
filler.write_bytes(bytes(shutil.disk_usage(disk).free - 4 * 4096))  # all but four pages, for the rows
list(islice(loop, 10))
print(next(row["message"] for row in read_rows(run / EVENTS) if row["event"] == "profile"))
print(trace_folders(run))
filler.unlink()
print(sum(1 for _ in loop), trace_folders(run))
jax.profiler.start_trace(disk / "again")
jax.profiler.stop_trace()
"""


def test_full_disk_costs_the_trace_and_not_the_run(on_small_disk):
    message, traces, rest = on_small_disk(FULL_DISK, 4)
    assert message.startswith("the trace of steps 11 to 15 could not be written: the disk is full; training continues")
    assert traces == "[]" and rest.endswith(" []")


def test_running_run_is_traced_on_request(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(profile, "REQUEST_POLL_INTERVAL_S", 0.0)
    run = tmp_path / "run"
    loop = Trainer(devices=1).steps(toy.recipe(), steps=10**6, batch=8, run=run)
    next(loop)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(command, str(run), 3)
        for _ in loop:
            if asked.done():
                break
        asked.result()
    loop.close()
    [trace] = profile.trace_folders(run)
    traced = steps_in(trace)
    out, err = capsys.readouterr()
    assert len(traced) == 3 and f"steps {traced[0]} to {traced[-1]}" in out
    assert "a trace of 3 steps" in err and f"pip install xprof, then xprof {run}/tensorboard" in out
    assert not (run / profile.TRACE_REQUEST).exists()
    command(str(run))
    assert str(trace) in capsys.readouterr().out
    with pytest.raises(InputError, match="is not running"):
        command(str(run), 3)


def test_run_without_a_trace_says_what_to_do(tmp_path):
    run = tmp_path / "run"
    Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=run)
    assert profile.trace_folders(run) == trace_messages(run) == []
    for options, words in (
        ({}, "no trace. Train with --profile"),
        ({"steps": 0}, "--steps must be at least 1, not 0"),
        ({"member": "m0"}, "is not a swarm: leave --member out"),
    ):
        with pytest.raises(InputError, match=words):
            command(str(run), **options)


def test_invalid_request_is_removed(tmp_path):
    steps = (f'{{"steps": {number}, "member": null, "id": "a"}}' for number in ("-1", "0", "1.5", "Infinity", '"2"'))
    for text in (*steps, '{"steps": 2, "member": ["m1"], "id": "a"}', '{"steps": 2, "member": null}', "[2]", "no JSON"):
        (tmp_path / profile.TRACE_REQUEST).write_text(text)
        assert profile.take_request(tmp_path) is None and not (tmp_path / profile.TRACE_REQUEST).exists()
    request = profile.request_trace(tmp_path, 2)
    assert profile.take_request(tmp_path) == (2, None, request)


def test_member_that_does_not_train_is_named_with_those_that_do(tmp_path):
    lost = replace(M2, state="lost")
    members = (M0, lost, replace(M1, state="left"), *(replace(M0, id=f"j-{number}") for number in range(9)))
    write_status(tmp_path, composed(members=members))
    assert wait_for_member(tmp_path, None) == "m0" and wait_for_member(tmp_path, "j-8") == "j-8"
    for member, why in (("m2", "m2 is lost, so"), ("m1", "m1 has left, so"), ("m9", "has no member m9;")):
        with pytest.raises(InputError, match=f"{why}.*training now: m0, j-0, j-1, j-2, j-3 and 5 more$"):
            wait_for_member(tmp_path, member)
    write_status(tmp_path, composed(members=(lost,)))
    with pytest.raises(InputError, match="has no steps to trace: no member trains yet; try again later"):
        wait_for_member(tmp_path, None)


@pytest.mark.parametrize("member", ["m2", None])
def test_member_that_is_joining_is_waited_for(tmp_path, monkeypatch, member):
    write_status(tmp_path, composed(members=(M2,)))

    def holder(folder):
        write_status(folder, composed(members=(replace(M2, state="alive"),)))
        return 1

    with monkeypatch.context() as patch:
        patch.setattr("tpuswarm.cli.train.profile.holder_pid", holder)
        assert wait_for_member(tmp_path, member) == "m2"
    write_status(tmp_path, composed(members=(M2,)))
    with pytest.raises(RunFailed, match=f"ended before {member or 'a member'} trained"):
        wait_for_member(tmp_path, member)
