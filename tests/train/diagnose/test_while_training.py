"""Faults found during the steps of a run, and the table at its end.

journeys/test_commands.py and test_examples.py assert that shipped recipes raise no finding.
"""

import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.array import ArrayImpl

from tests.train import toy
from tests.train.findings import complaints, place, read_findings, run_steps
from tpuswarm import ArraySource, supervised
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Starvation
from tpuswarm.train.diagnose.host_sync import READ_METHODS
from tpuswarm.train.diagnose.phases import Stopwatch, summarize, summary_rows
from tpuswarm.train.process.stop import SIGNALS
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows
from tpuswarm.train.run.life import read_life


def read_summary(folder):
    [row] = [row for row in read_rows(folder / EVENTS) if row["event"] == "summary"]
    return row


@pytest.fixture
def total():
    @jax.jit
    def total(x, scale):
        return x.sum() * scale

    return total


def test_changing_shape_is_named_with_its_argument_and_line(tmp_path, capsys, total):
    for number, _ in enumerate(run_steps(tmp_path, steps=8)):
        total(np.ones(number % 5), 2.0)  # the changing shape
    [found] = read_findings(tmp_path, "recompilation")
    assert found["function"] == "total" and place(__file__, "# the changing shape").endswith(f"/{found['place']}")
    assert found["change"] == "its argument x was float64[1], now float64[2]"
    assert capsys.readouterr().err.count("total, called at") == 1
    [last] = [row for row in read_summary(tmp_path)["findings"] if row["kind"] == "recompilation"]
    assert last["count"] == 5 and "compiled 5 times in 5 steps" in last["message"]


def test_changing_dtype_static_value_and_jit_in_the_loop_are_told_apart(tmp_path, total):
    static = jax.jit(lambda x, power: x**power, static_argnames="power")
    dtypes = [np.float32, np.int32, np.uint8, np.float16]
    for number, _ in enumerate(run_steps(tmp_path, steps=5)):
        total(np.ones(3, dtypes[number % 4]), 3.0)
        static(np.ones(3, np.float32), power=number % 5)
        jax.jit(lambda x: x + 1)(np.ones(3, np.float32))
    changes = [found["change"] for found in read_findings(tmp_path, "recompilation")]
    assert changes == [
        "its argument x was int32[3], now uint8[3]",
        "its argument power was 1, now 2",
        "it is wrapped in jax.jit anew for each call",
    ]


def test_data_that_compiles_for_every_batch_is_found_in_the_feeds_thread(tmp_path):
    class Growing(ArraySource):
        def rows(self, start, count):
            jnp.ones(min(start // count, 8) + 1).sum()
            return super().rows(start, count)

    list(run_steps(tmp_path, supervised(toy.init, toy.loss, optax.sgd(0.01), Growing(toy.data()))))
    [found_at] = {found["place"] for found in read_findings(tmp_path, "recompilation")}
    assert place(__file__, "jnp.ones(min(start").endswith(f"/{found_at}")


READS = (
    lambda state: float(state.params["unused"].sum()),
    lambda state: state.params["layer"]["b"].item(),
    lambda state: str(state.params["layer"]["w"]),
    lambda state: jax.device_get(state.params),
    lambda state: jax.block_until_ready(state.params),
)


def test_reads_in_every_step_are_named_with_their_lines(tmp_path):
    for step in run_steps(tmp_path, steps=20):
        for read in READS:
            read(step.state)
    found = read_findings(tmp_path, "host-sync")
    for row, read in zip(found, READS, strict=True):
        assert f"{__file__}:{read.__code__.co_firstlineno}".endswith(f"/{row['place']}")
    assert all(row["steps"] == 10 and row["seconds"] > 0 for row in found)
    summary = read_summary(tmp_path)
    assert [row["steps"] for row in summary["findings"][-5:]] == [20] * 5
    assert summary["seconds"][phases.READING] > 0


def test_numpy_reads_of_arrays_on_several_devices_are_found(tmp_path):
    for step in run_steps(tmp_path, steps=12, devices=8):
        np.asarray(step.state.params["layer"]["w"])
    assert len(read_findings(tmp_path, "host-sync")) == 1


def test_usual_loops_raise_no_finding(tmp_path, total):
    for number, step in enumerate(run_steps(tmp_path)):
        assert "loss" in step.row or "eval_loss" in step.row
        if number % 10 == 0:
            float(step.state.params["layer"]["b"])
        total(np.ones(3 + number % 2), 1.0)  # a full batch and a last one
        if number == 5:
            for size in range(20, 30):  # one look at every layer
                total(np.ones(size), 1.0)
    assert complaints(tmp_path) == set()


def test_hooks_and_signal_handlers_are_restored_however_a_run_ends(tmp_path):
    before, handlers = (
        [vars(owner)[name] for owner, name in READ_METHODS],
        [signal.getsignal(number) for number in SIGNALS],
    )
    first, second = run_steps(tmp_path / "a"), run_steps(tmp_path / "b")
    next(first), next(second)
    assert vars(ArrayImpl)["item"] is not before[1]
    first.close()
    assert vars(ArrayImpl)["item"] is not before[1]
    signal.raise_signal(signal.SIGINT)
    list(second)
    assert read_life(tmp_path / "b").state == "stopped"
    assert [vars(owner)[name] for owner, name in READ_METHODS] == before
    assert [signal.getsignal(number) for number in SIGNALS] == handlers and signal.set_wakeup_fd(-1) == -1
    assert read_summary(tmp_path / "a")["steps"] == 2, "the devices are one step ahead"


def test_devices_that_wait_for_data_are_found_with_their_share(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.diagnose.diagnostics.STARVATION_WINDOW_S", 0.5)

    class Slow(ArraySource):
        def rows(self, start, count):
            time.sleep(0.05)
            return super().rows(start, count)

    list(run_steps(tmp_path, supervised(toy.init, toy.loss, optax.sgd(0.01), Slow(toy.data()))))
    [found] = read_findings(tmp_path, "starvation")
    assert found["wait_s"] / found["window_s"] > 0.5
    waited = sum(row["wait_s"] for row in read_rows(tmp_path / METRICS) if "wait_s" in row)
    assert read_summary(tmp_path)["seconds"][phases.WAITING] == pytest.approx(waited)


@pytest.mark.parametrize(("wait_s", "kinds"), [(0.021, ["starvation"]), (0.019, [])])
def test_starvation_is_reported_from_a_fifth_of_the_time(wait_s, kinds):
    starvation = Starvation()
    found = [starvation.after_step(step, step * wait_s, step * 0.1) for step in range(1, 101)]
    assert [finding.kind for finding in found if finding] == kinds


def test_seconds_of_all_phases_add_up_to_the_run(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(phases.time, "perf_counter", lambda: float(next(clock)))
    stopwatch = Stopwatch()
    with stopwatch.during(phases.STEPS):
        stopwatch.move(0.25, phases.WAITING)
        with stopwatch.during(phases.EVALUATION):
            pass
    monkeypatch.setattr(phases.time, "perf_counter", lambda: 10.0)
    seconds = stopwatch.by_phase()
    assert sum(seconds.values()) == 10.0
    assert (seconds[phases.STEPS], seconds[phases.WAITING], seconds[phases.EVALUATION]) == (1.75, 0.25, 1.0)


def test_run_ends_with_where_its_time_went(tmp_path, capsys):
    steps, started, seen = 30, time.perf_counter(), []
    for _ in run_steps(tmp_path, toy.recipe(), steps, eval_every=10):
        seen.append(time.perf_counter())
        time.sleep(0.01)
    elapsed = time.perf_counter() - started
    summary = read_summary(tmp_path)
    seconds = summary["seconds"]
    assert seen[-1] - seen[0] <= sum(seconds.values()) <= elapsed
    assert seconds[phases.USER] >= steps * 0.01
    assert all(seconds[name] > 0 for name in (phases.COMPILING, phases.STEPS, phases.EVALUATION, phases.CHECKPOINTS))
    training = sum(seconds[name] for name in phases.TRAINING)
    assert summary["tokens_per_s"] == pytest.approx(steps * 8 / training)
    for text in (capsys.readouterr().err, (tmp_path / "report.html").read_text()):
        assert "your code between steps" in text and "MFU" not in text, "the peak of a CPU is unknown"


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices():
    seconds = dict.fromkeys(phases.PHASES, 0.0) | {phases.STEPS: 6.0, phases.WAITING: 2.0, phases.COMPILING: 100.0}
    made = summarize(seconds, steps=10, tokens=4_000, flops=10**13, peak=2.5e12)
    assert made["tokens_per_s"] == 500 and made["mfu"] == 0.5  # 10 TFLOP in 8 s, of 2.5 TFLOP/s
    assert ("MFU (model FLOPs utilisation)", "50.0%", "") in summary_rows(made)
    assert not any(summarize(seconds, 10, 4_000, *unknown)["mfu"] for unknown in ((10**13, None), (None, 2.5e12)))


def test_failing_diagnostic_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.diagnose.diagnostics.tied_weights", lambda program: 1 / 0)
    list(run_steps(tmp_path, steps=2))
    [found] = read_findings(tmp_path)
    assert "a diagnostic failed; training continues: ZeroDivisionError" in found["message"]
