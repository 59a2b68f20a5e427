"""A member's traces of its own steps: whatever fails on the way, its training does not."""

import jax.numpy as jnp
import pytest

from tpuswarm.swarm.member import trace as module
from tpuswarm.swarm.member.trace import Tracer
from tpuswarm.train.look import profile

METRICS = {"loss": jnp.float32(1.0)}
TRACE = {"plugins/profile/now/a.trace.json.gz": b"json", "plugins/profile/now/a.xplane.pb": b"plane" * 3}


@pytest.fixture
def profiler(monkeypatch):
    """JAX's, played: what it is to answer at its begin and end, and how often it was begun."""

    class Played:
        begin = end = ""
        begun = 0

        def start(self, folder):
            self.begun += 1
            return self.begin

        def stop(self, folder):
            for name, data in TRACE.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            return self.end

    played = Played()
    monkeypatch.setattr(profile, "start", played.start)
    monkeypatch.setattr(profile, "stop", played.stop)
    return played


def steps(tracer, count):
    for _ in range(count):
        tracer.took(METRICS)


def handed_over(tracer):
    """Of a trace that was taken: its steps, what went wrong, its files, and of how many bytes each part was."""
    files, sizes = {}, []
    while part := tracer.taken():
        if part.last:
            assert tracer.taken() is None
            return part.steps, part.problem, files, sizes
        files[part.file] = files.get(part.file, b"") + part.data
        sizes.append(len(part.data))
    raise AssertionError("nothing was handed over, or no end")


def test_so_many_steps_are_traced_and_told_once(profiler):
    tracer = Tracer()
    steps(tracer, 3)
    tracer.ask(2)
    steps(tracer, 2)  # it begins after one, and holds the next two
    assert tracer.taken() is None
    steps(tracer, 1)
    assert handed_over(tracer)[:3] == (2, "", TRACE)
    steps(tracer, 9)
    assert tracer.taken() is None and profiler.begun == 1


def test_a_trace_that_cannot_begin_or_end_is_said(profiler):
    tracer = Tracer()
    profiler.begin = "somebody else traces"
    tracer.ask(2)
    steps(tracer, 3)
    assert handed_over(tracer) == (0, "could not begin: somebody else traces", {}, [])
    profiler.begin, profiler.end = "", "the disk is full"
    tracer.ask(2)
    steps(tracer, 3)
    assert handed_over(tracer) == (2, "could not be written: the disk is full", {}, [])


@pytest.mark.parametrize("call", ["read_bytes", "is_file"])
def test_files_that_cannot_be_read_cost_the_trace_and_not_the_member(profiler, monkeypatch, call):
    tracer = Tracer()
    tracer.ask(1)
    steps(tracer, 1)

    def fails(path):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(module.Path, call, fails)
        steps(tracer, 1)
    assert handed_over(tracer) == (1, "could not be read: Input/output error", {}, [])
    tracer.ask(1)
    steps(tracer, 2)
    assert handed_over(tracer)[2] == TRACE


def test_a_folder_that_cannot_be_removed_costs_nothing(profiler, monkeypatch):
    tracer = Tracer()
    tracer.ask(1)
    steps(tracer, 1)

    def fails(*arguments, **named):
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as broken:
        broken.setattr("os.rmdir", fails)
        steps(tracer, 1)
    assert handed_over(tracer)[2] == TRACE


def test_a_look_brings_no_more_than_a_slow_link_carries_before_its_member_counts_as_hung(profiler, monkeypatch):
    monkeypatch.setattr(module, "PART", 4)
    tracer = Tracer()
    tracer.ask(1)
    steps(tracer, 2)
    assert handed_over(tracer) == (1, "", TRACE, [4, 4, 4, 4, 3])
