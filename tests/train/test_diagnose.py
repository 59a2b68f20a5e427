"""Every diagnostic with its fault planted, and without it.

That a shipped recipe raises none is asserted where one is trained: journeys/test_commands.py and test_examples.py.
"""

import importlib.util
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import ArraySource, Trainer, recipes, supervised
from tpuswarm.train.diagnose import times
from tpuswarm.train.diagnose.cpu_fallback import Machine, cpu_fallback, holders
from tpuswarm.train.diagnose.environment import DEAD, dead_variables
from tpuswarm.train.diagnose.matrix_unit import half_empty
from tpuswarm.train.diagnose.summary import Summary, rows
from tpuswarm.train.diagnose.tied_weights import tied_weights
from tpuswarm.train.diagnose.times import Times
from tpuswarm.train.flops import model_flops
from tpuswarm.train.recipe import Options
from tpuswarm.train.run import EVENTS, METRICS, read_rows
from tpuswarm.train.user_code import build_recipe

STEPS = 30


def loop(folder, recipe=None, **options):
    return Trainer(**{"devices": 1, "save_every": 10, **options}).steps(
        recipe or toy.recipe(), steps=STEPS, batch=8, run=folder
    )


def said(folder, kind=None):
    """What was said on the way, each with its numbers."""
    found = [row for row in read_rows(folder / EVENTS) if row["event"] == "diagnostic"]
    return [row for row in found if kind in (None, row["kind"])]


def summary(folder):
    [row] = [row for row in read_rows(folder / EVENTS) if row["event"] == "summary"]
    return row


def line_of(text):
    """The first line of this file that holds `text`."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


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
        f"test_diagnose.py:{line_of('# the changing shape')}"
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
    assert {"test_diagnose.py" in found["place"] for found in said(tmp_path, "recompilation")} == {True}


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
    assert found["place"].endswith(f"test_diagnose.py:{line_of(f'def {read.__name__}') + 1}")
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

    before = [vars(owner)[name] for owner, name in HOOKS]
    first, second = loop(tmp_path / "a"), loop(tmp_path / "b")
    next(first), next(second)
    assert vars(ArrayImpl)["item"] is not before[1]
    first.close()
    assert vars(ArrayImpl)["item"] is not before[1]
    second.close()
    assert [vars(owner)[name] for owner, name in HOOKS] == before


def test_a_step_that_calls_back_to_python_is_named_with_its_line(tmp_path):
    def loss(params, batch, key):
        mean, metrics = toy.loss(params, batch, key)
        jax.debug.print("loss {}", mean)  # the planted call
        return mean, metrics

    list(loop(tmp_path, supervised(toy.init, loss, optax.sgd(0.01), toy.data())))
    [found] = said(tmp_path)
    assert (found["kind"], found["call"]) == ("host-callback", "jax.debug.print")
    assert found["place"] == f"{__file__}:{line_of('# the planted call')}"


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


def program(init):
    data = {"x": np.zeros((8, 2), np.float32)}
    return supervised(init, lambda params, batch, key: 0.0, optax.sgd(0.1), data).program(Options())


LOADED = np.arange(12, dtype=np.float32).reshape(3, 4)


def twice(key):
    table = jax.random.normal(key, (3, 4))
    return {"embed": table, "head": table, "other": jax.random.normal(key, (3, 4))}


@pytest.mark.parametrize(
    "init",
    [
        twice,
        lambda key: {"embed": LOADED, "head": LOADED, "other": LOADED + 1},
        lambda key: {"embed": jnp.asarray(LOADED), "head": jnp.asarray(LOADED.copy()), "other": LOADED * 2},
    ],
    ids=["made", "one loaded array", "two loaded copies"],
)
def test_weights_that_begin_as_one_array_are_named(init):
    [found] = tied_weights(program(init))
    assert found.numbers == {"parameters": ["embed", "head"], "shape": [3, 4]}


def test_equal_vectors_and_matrices_of_zeros_are_usual():
    def init(key):
        zeros, ones = jnp.zeros((3, 4)), jnp.ones(4)
        return {"a": zeros, "b": zeros, "c": ones, "d": ones, "e": np.zeros((3, 4)), "f": np.zeros((3, 4))}

    assert tied_weights(program(init)) == []


def test_the_run_says_so_before_its_first_step(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XRT_TPU_CONFIG", "localservice;0;localhost:51011")

    def init(key):
        return twice(key) | toy.init(key)

    def loss(params, batch, key):
        return toy.loss(params, batch, key)

    list(loop(tmp_path, supervised(init, loss, optax.sgd(0.01), toy.data())))
    assert [(found["kind"], found["step"]) for found in said(tmp_path)] == [("environment", 0), ("tied-weights", 0)]
    page = (tmp_path / "report.html").read_text()
    for text in (capsys.readouterr().err, page):
        assert "embed and head begin as one 3x4 array" in text and "XRT_TPU_CONFIG does nothing" in text


def narrow(width):
    """The step of two layers, `width` between them."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 512), (512, width), (width, 512))]
    return model_flops(jax.jit(lambda x, down, up: x @ down @ up).trace(*shapes).jaxpr)


def test_a_width_that_fills_half_a_matrix_unit_is_named_where_there_is_one():
    [found] = half_empty(narrow(64), "TPU v3", 1024, 1)
    assert found.numbers["fill"] == 0.5 and found.numbers["size"] == 64
    assert found.message.startswith(f"{__file__}:{line_of('x @ down @ up')}: a dimension of 64 fills 50%")
    assert half_empty(narrow(128), "TPU v3", 1024, 1) == []
    assert half_empty(narrow(128), "TPU v6 lite", 1024, 1)[0].numbers["unit"] == 256
    assert half_empty(narrow(64), "cpu", 1024, 1) == []


TPU_VM = Machine(chips=["/dev/accel0", "/dev/accel1"], environ={}, asked="", libtpu=True, error="", holders=[])


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(TPU_VM, libtpu=False), r"pip install 'tpuswarm\[tpu\]'"),
        (replace(TPU_VM, holders=[4711]), "held by process 4711"),
        (replace(TPU_VM, error="ABORTED: The TPU is already in use"), "ABORTED.*libtpu_lockfile"),
        (replace(TPU_VM, asked="cpu"), "JAX_PLATFORMS=cpu keeps JAX away from /dev/accel0"),
        (replace(TPU_VM, asked="cpu,tpu", chips=[]), "JAX_PLATFORMS=cpu,tpu puts another platform first"),
        (replace(TPU_VM, chips=[], environ={"TPU_WORKER_ID": "0"}), "TPU_WORKER_ID=0 says TPU.*--privileged"),
    ],
)
def test_a_tpu_machine_that_trains_on_its_cpu_is_told_why(machine, words):
    found = cpu_fallback("cpu", machine)
    assert found is not None
    assert re.search(words, found.message)
    assert cpu_fallback("tpu", machine) is None


def test_a_machine_without_a_tpu_trains_on_its_cpu_in_silence():
    nothing = Machine(chips=[], environ={"TPU_NAME": "node-1"}, asked="", libtpu=True, error="", holders=[])
    assert cpu_fallback("cpu", nothing) is None
    assert cpu_fallback("cpu", replace(nothing, asked="cpu", environ={"TPU_WORKER_ID": "0"})) is None


def test_who_holds_a_device_file_is_found(tmp_path):
    file = tmp_path / "accel0"
    file.touch()
    assert holders([file]) == []
    program = f"import sys; file = open({str(file)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert holders([file]) == [process.pid]
        process.stdin.close()


def test_dead_variables_are_grouped_by_what_replaces_them():
    found = dead_variables({"XRT_WORKERS": "x", "XRT_TPU_CONFIG": "y", "XLA_USE_BF16": "1", "XLA_FLAGS": ""})
    assert [each.numbers["variables"] for each in found] == [["XLA_USE_BF16"], ["XRT_TPU_CONFIG", "XRT_WORKERS"]]
    assert "--precision bf16" in found[0].message


def test_nothing_that_is_installed_reads_them():
    """Oracle: the bytes of libtpu, of jaxlib and of jax's own source."""
    patterns = [part for name in (*DEAD, "XRT_TPU_CONFIG", "XRT_WORKERS") for part in ("-e", name)]
    files = [Path(jax.__file__).parent / "_src" / name for name in ("cloud_tpu_init.py", "xla_bridge.py", "config.py")]
    for package in ("libtpu", "jaxlib"):
        if spec := importlib.util.find_spec(package):
            files += Path(spec.origin).parent.glob("lib*.so")
    assert len(files) > 3
    done = subprocess.run(["grep", "-aoF", *patterns, *files], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


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
    started = time.perf_counter()
    for _ in loop(tmp_path, toy.recipe(), eval_every=10):
        time.sleep(0.01)
    whole = time.perf_counter() - started
    facts = summary(tmp_path)
    seconds = facts["seconds"]
    assert 0.5 * whole < sum(seconds.values()) <= whole
    assert seconds[times.USER] >= STEPS * 0.01
    assert all(seconds[place] > 0 for place in (times.COMPILING, times.STEPS, times.EVALUATION, times.CHECKPOINTS))
    training = sum(seconds[place] for place in times.TRAINING)
    assert facts["tokens_per_s"] == pytest.approx(STEPS * 8 / training)
    for text in (capsys.readouterr().err, (tmp_path / "report.html").read_text()):
        assert "your code between steps" in text and "MFU" in text


def test_mfu_is_the_models_flops_over_the_peak_of_all_devices():
    seconds = dict.fromkeys(times.PLACES, 0.0) | {times.STEPS: 6.0, times.WAITING: 2.0, times.COMPILING: 100.0}
    made = Summary(seconds, steps=10, tokens=4_000, flops_per_step=10**12, peak=0.5e12, devices=5)
    assert made.facts()["tokens_per_s"] == 500 and made.facts()["mfu"] == 0.5  # 10 TFLOP in 8 s, of 2.5 TFLOP/s
    assert ("MFU (model FLOPs utilisation)", "50.0%", "") in rows(made.facts())
    assert replace(made, peak=None).mfu is None and replace(made, flops_per_step=None).mfu is None


def test_a_diagnostic_that_fails_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.train.diagnose.watch.tied_weights", lambda program: 1 / 0)
    list(loop(tmp_path))
    [found] = said(tmp_path)
    assert "a diagnostic failed, and training goes on: ZeroDivisionError" in found["message"]


@pytest.mark.parametrize("name", ["gpt2-tiny", "gpt2-124m", "gpt2-1558m"])
def test_no_shipped_recipe_is_blamed_for_its_weights(name):
    target, preset = recipes.find(name)
    assert tied_weights(build_recipe(target, {**preset, "data": "fake"}).program(Options())) == []
