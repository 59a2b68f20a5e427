"""What is found in the steps of a run, with its fault planted and without it; the table at its end.

That a shipped recipe raises no finding is asserted where one is trained: journeys/test_commands.py and
test_examples.py.
"""

import signal
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.findings import STEPS, line_of, loop, said
from tpuswarm import ArraySource, supervised
from tpuswarm.train.diagnose import times
from tpuswarm.train.diagnose.starvation import Starvation
from tpuswarm.train.diagnose.summary import facts, rows
from tpuswarm.train.diagnose.times import Times
from tpuswarm.train.process.stop import SIGNALS
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows
from tpuswarm.train.run.life import read_life


def summary(folder):
    [row] = [row for row in read_rows(folder / EVENTS) if row["event"] == "summary"]
    return row


@pytest.fixture
def total():
    """A compiled function that no test before has called."""

    @jax.jit
    def total(x, scale):
        return x.sum() * scale

    return total


def test_a_changing_shape_is_named_with_its_argument_and_line(tmp_path, capsys, total):
    for number, _ in enumerate(loop(tmp_path)):
        total(np.ones(number % 7), 2.0)  # the changing shape
    [found] = said(tmp_path, "recompilation")
    assert found["function"] == "total" and found["place"].endswith(
        f"test_while_training.py:{line_of(__file__, '# the changing shape')}"
    )
    assert found["change"] == "its argument x was float64[1], now float64[2]"
    assert capsys.readouterr().err.count("total, called at") == 1
    [last] = [each for each in summary(tmp_path)["findings"] if each["kind"] == "recompilation"]
    assert last["count"] == 7 and "compiled 7 times in 7 steps" in last["message"]


def test_a_changing_dtype_a_static_value_and_a_jit_in_the_loop_are_told_apart(tmp_path, total):
    static = jax.jit(lambda x, power: x**power, static_argnames="power")
    dtypes = [np.float32, np.int32, np.uint8, np.float16]
    for number, _ in enumerate(loop(tmp_path)):
        total(np.ones(3, dtypes[number % 4]), 3.0)
        static(np.ones(3, np.float32), power=number % 5)
        jax.jit(lambda x: x + 1)(np.ones(3, np.float32))
    changes = [found["change"] for found in said(tmp_path, "recompilation")]
    assert changes == [
        "its argument x was int32[3], now uint8[3]",
        "its argument power was 1, now 2",
        "it is wrapped in jax.jit anew for each call",
    ]


def test_data_that_compiles_for_every_batch_is_found_in_the_feeds_thread(tmp_path):
    class Growing(ArraySource):
        def rows(self, start, count):
            jnp.ones(start // count + 1).sum()
            return super().rows(start, count)

    recipe = supervised(toy.init, toy.loss, optax.sgd(0.01), Growing(toy.data()))
    list(loop(tmp_path, recipe))
    assert {"test_while_training.py" in found["place"] for found in said(tmp_path, "recompilation")} == {True}


def test_compiling_twice_or_now_and_then_is_usual(tmp_path, total):
    for number, _ in enumerate(loop(tmp_path)):
        total(np.ones(3 + number % 2), 1.0)  # a whole and a last batch
        if number == 5:
            for size in range(20, 30):  # one look at every layer
                total(np.ones(size), 1.0)
    assert said(tmp_path) == []


def read_float(state):
    float(state.params["unused"].sum())


def read_item(state):
    state.params["layer"]["b"].item()


def read_print(state):
    str(state.params["layer"]["w"])


def read_tree(state):
    jax.device_get(state.params)


def read_wait(state):
    jax.block_until_ready(state.params)


@pytest.mark.parametrize("read", [read_float, read_item, read_print, read_tree, read_wait])
def test_a_read_in_every_step_is_named_with_its_line(tmp_path, read):
    for step in loop(tmp_path):
        read(step.state)
    [found] = said(tmp_path, "host-sync")
    assert found["place"].endswith(f"test_while_training.py:{line_of(__file__, f'def {read.__name__}') + 1}")
    assert found["steps"] == 10 and found["seconds"] > 0
    facts = summary(tmp_path)
    assert facts["findings"][-1]["steps"] >= STEPS and facts["seconds"][times.READING] > 0


def test_numpy_reads_what_lies_on_several_devices(tmp_path):
    for step in loop(tmp_path, devices=8):
        np.asarray(step.state.params["layer"]["w"])
    assert len(said(tmp_path, "host-sync")) == 1


def test_reading_rows_and_logging_now_and_then_are_usual(tmp_path):
    for step in loop(tmp_path):
        assert "loss" in step.row or "eval_loss" in step.row
        if step.row["step"] % 10 == 0:
            float(step.state.params["layer"]["b"])
    assert said(tmp_path) == []


def test_the_hooks_are_gone_after_a_run_however_it_ended(tmp_path):
    from jax._src.array import ArrayImpl

    from tpuswarm.train.diagnose.host_sync import HOOKS

    before, signals = [vars(owner)[name] for owner, name in HOOKS], [signal.getsignal(each) for each in SIGNALS]
    first, second = loop(tmp_path / "a"), loop(tmp_path / "b")
    next(first), next(second)
    assert vars(ArrayImpl)["item"] is not before[1]
    first.close()
    assert vars(ArrayImpl)["item"] is not before[1]
    signal.raise_signal(signal.SIGINT)
    list(second)
    assert read_life(tmp_path / "b").state == "stopped"
    assert [vars(owner)[name] for owner, name in HOOKS] == before
    assert [signal.getsignal(each) for each in SIGNALS] == signals and signal.set_wakeup_fd(-1) == -1


def test_devices_that_wait_for_data_are_found_with_their_share(tmp_path):
    class Slow(ArraySource):
        def rows(self, start, count):
            time.sleep(0.1)
            return super().rows(start, count)

    recipe = supervised(toy.init, toy.loss, optax.sgd(0.01), Slow(toy.data()))
    list(loop(tmp_path, recipe))
    [found] = said(tmp_path, "starvation")
    assert found["wait_s"] / found["window_s"] > 0.5
    waited = sum(row["wait_s"] for row in read_rows(tmp_path / METRICS) if "wait_s" in row)
    assert summary(tmp_path)["seconds"][times.WAITING] == pytest.approx(waited)


def test_a_batch_that_is_late_now_and_then_is_usual():
    """Ten seconds of steps of 0.1 s, a fifth of their time waited, and a little less."""
    for wait, says in ((0.021, True), (0.019, False)):
        starvation = Starvation()
        found = [starvation.look(step, step * wait, step * 0.1) for step in range(1, 101)]
        assert [each.kind for each in found if each] == ["starvation"] * says


def test_the_places_of_a_run_add_up_to_its_time(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(times.time, "perf_counter", lambda: float(next(clock)))
    watch = Times()
    with watch.during(times.STEPS):
        watch.move(0.25, times.WAITING)
        with watch.during(times.EVALUATION):
            pass
    monkeypatch.setattr(times.time, "perf_counter", lambda: 10.0)
    seconds = watch.all()
    assert sum(seconds.values()) == 10.0
    assert (seconds[times.STEPS], seconds[times.WAITING], seconds[times.EVALUATION]) == (1.75, 0.25, 1.0)


def test_a_run_ends_with_where_its_time_went(tmp_path, capsys):
    started, seen = time.perf_counter(), []
    for _ in loop(tmp_path, toy.recipe(), eval_every=10):
        seen.append(time.perf_counter())
        time.sleep(0.01)
    whole = time.perf_counter() - started
    facts = summary(tmp_path)
    seconds = facts["seconds"]
    assert seen[-1] - seen[0] <= sum(seconds.values()) <= whole
    assert seconds[times.USER] >= STEPS * 0.01
    assert all(seconds[place] > 0 for place in (times.COMPILING, times.STEPS, times.EVALUATION, times.CHECKPOINTS))
    training = sum(seconds[place] for place in times.TRAINING)
    assert facts["tokens_per_s"] == pytest.approx(STEPS * 8 / training)
    for text in (capsys.readouterr().err, (tmp_path / "report.html").read_text()):
        assert "your code between steps" in text and "MFU" in text


def test_a_loop_that_was_left_ends_with_it_too(tmp_path):
    for step in loop(tmp_path):
        if step.row["step"] == 5:
            break
    assert summary(tmp_path)["steps"] == 6, "the devices are one step ahead"


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices():
    seconds = dict.fromkeys(times.PLACES, 0.0) | {times.STEPS: 6.0, times.WAITING: 2.0, times.COMPILING: 100.0}
    made = facts(seconds, steps=10, tokens=4_000, flops=10**13, peak=2.5e12)
    assert made["tokens_per_s"] == 500 and made["mfu"] == 0.5  # 10 TFLOP in 8 s, of 2.5 TFLOP/s
    assert ("MFU (model FLOPs utilisation)", "50.0%", "") in rows(made)
    assert not any(facts(seconds, 10, 4_000, *unknown)["mfu"] for unknown in ((10**13, None), (None, 2.5e12)))


def test_a_diagnostic_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.diagnose.watch.tied_weights", lambda program: 1 / 0)
    list(loop(tmp_path))
    [found] = said(tmp_path)
    assert "a diagnostic failed; training continues: ZeroDivisionError" in found["message"]
