"""A member's traces; its training continues after any failure."""

import jax.numpy as jnp
import pytest

from tpuswarm.swarm.member import trace as module
from tpuswarm.swarm.member.trace import Tracer
from tpuswarm.train.look import profile

FILES = {"plugins/profile/now/a.trace.json.gz": b"json", "plugins/profile/now/a.xplane.pb": b"plane" * 3}


@pytest.fixture
def profiler(monkeypatch):
    """A fake of JAX's profiler: what its start and its stop report, and how often it was started."""

    class Profiler:
        start_problem = stop_problem = ""
        starts = 0

        def start(self, folder):
            self.starts += 1
            return self.start_problem

        def stop(self, folder):
            for name, data in FILES.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_bytes(data)
            return self.stop_problem

    fake = Profiler()
    monkeypatch.setattr(profile, "start_trace", fake.start)
    monkeypatch.setattr(profile, "stop_trace", fake.stop)
    return fake


def train(tracer, steps):
    for _ in range(steps):
        tracer.after_step({"loss": jnp.float32(1.0)})


def collect(tracer):
    files, sizes = {}, []
    while part := tracer.next_part():
        if part.last:
            assert tracer.next_part() is None
            return part.steps, part.problem, files, sizes
        files[part.file] = files.get(part.file, b"") + part.data
        sizes.append(len(part.data))
    raise AssertionError("there is no trace, or it has no end")


def trace(tracer, steps):
    tracer.start(steps)
    train(tracer, steps + 1)  # it starts after the first
    return collect(tracer)


def test_requested_steps_are_traced_once_in_parts(profiler, monkeypatch):
    monkeypatch.setattr(module, "PART_BYTES", 4)  # a slow link has to carry a part in time
    tracer = Tracer()
    train(tracer, 3)
    tracer.start(2)
    train(tracer, 2)
    assert tracer.next_part() is None
    train(tracer, 1)
    assert collect(tracer) == (2, "", FILES, [4, 4, 4, 4, 3])
    train(tracer, 9)
    assert tracer.next_part() is None and profiler.starts == 1


def test_trace_that_cannot_start_or_stop_is_reported(profiler):
    tracer = Tracer()
    profiler.start_problem = "somebody else traces"
    assert trace(tracer, 2) == (0, "could not start: somebody else traces", {}, [])
    profiler.start_problem, profiler.stop_problem = "", "the disk is full"
    assert trace(tracer, 2) == (2, "could not be written: the disk is full", {}, [])


@pytest.mark.parametrize(
    ("call", "files", "problem"),
    [
        ("pathlib.Path.read_bytes", {}, "could not be read: Input/output error"),
        ("pathlib.Path.is_file", {}, "could not be read: Input/output error"),
        ("os.rmdir", FILES, ""),
    ],
)
def test_training_continues_if_the_traces_folder_fails(profiler, monkeypatch, call, files, problem):
    tracer = Tracer()
    tracer.start(1)
    train(tracer, 1)

    def fail(*arguments, **options):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(call, fail)
        train(tracer, 1)
    assert collect(tracer)[:3] == (1, problem, files)
    assert trace(tracer, 1)[2] == FILES
