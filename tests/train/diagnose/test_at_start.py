"""What is found before the first step, with its fault planted and without it."""

import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tests.train.findings import line_of, loop, said
from tpuswarm import recipes, supervised
from tpuswarm.train.diagnose.cpu_fallback import Machine, cpu_fallback, holders
from tpuswarm.train.diagnose.environment import DEAD, dead_variables
from tpuswarm.train.diagnose.products import half_empty
from tpuswarm.train.diagnose.tied_weights import tied_weights
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.recipe import Options
from tpuswarm.train.user_code import build_recipe


def test_a_step_that_calls_back_to_python_is_named_with_its_line(tmp_path):
    def loss(params, batch, key):
        mean, metrics = toy.loss(params, batch, key)
        jax.debug.print("loss {}", mean)  # the planted call
        return mean, metrics

    list(loop(tmp_path, supervised(toy.init, loss, optax.sgd(0.01), toy.data())))
    [found] = said(tmp_path)
    assert (found["kind"], found["call"]) == ("host-callback", "jax.debug.print")
    assert found["place"] == f"{__file__}:{line_of(__file__, '# the planted call')}"


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
        assert "embed and head start as one 3x4 array" in text and "XRT_TPU_CONFIG has no effect" in text


def square(key):
    return {"up": jnp.ones((16, 16)), "down": jnp.ones((16, 16))}


def keeps_float32(params, batch, key):
    """As flax.nnx.Embed does: what follows it computes in float32, whatever the weights are."""
    h = jnp.tanh(batch["x"].astype(jnp.float32) @ params["up"].astype(jnp.float32))  # the planted cast
    return jnp.square(h.astype(batch["x"].dtype) @ params["down"]).astype(jnp.float32).mean()


def in_bf16(params, batch, key):
    return jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]).astype(jnp.float32).mean()


@pytest.mark.parametrize(
    ("loss", "precision", "share"),
    [(keeps_float32, "bf16", 0.4), (keeps_float32, "f32", None), (in_bf16, "bf16", None)],
)
def test_float32_products_where_bf16_was_asked_are_named(tmp_path, loss, precision, share):
    """Of five products of the same size two are float32: forward, and the weight's gradient."""
    data = {"x": np.ones((64, 16), np.float32)}
    list(loop(tmp_path, supervised(square, loss, optax.sgd(0.01), data, cast="x"), precision=precision))
    found = said(tmp_path)
    assert [each["kind"] for each in found] == ["precision"] * (share is not None)
    for each in found:
        assert each["place"] == f"{__file__}:{line_of(__file__, '# the planted cast')}" and each["share"] == share
        assert "40% of all FLOPs, although bf16 was requested: twice the bytes" in each["message"]


def looped(params, batch, key):
    """The input is carried through a loop and a branch."""
    h, _ = jax.lax.scan(lambda h, w: (h @ w, None), batch["x"], params["up"][None])  # the planted loop
    h = jax.lax.cond(batch["n"].sum() >= 0, jnp.tanh, lambda h: h, h)
    return jnp.mean(jnp.square(h @ params["down"] - batch["y"]))


def straight(params, batch, key):
    h = jnp.tanh(batch["x"] @ params["up"])  # the planted line
    guess = jnp.dot(h, params["down"], preferred_element_type=jnp.float32)
    return jnp.mean(jnp.square(guess - batch["y"]))  # the target is not the reason for any float32 product


@pytest.mark.parametrize("loss", [straight, looped])
@pytest.mark.parametrize("cast", [[], ["x"]])
def test_an_input_that_keeps_products_float32_is_named_with_the_way_out(tmp_path, loss, cast):
    wide = np.ones((64, 16), np.float32)
    data = {"n": np.ones(64, np.int32), "x": wide, "y": wide}
    list(loop(tmp_path, supervised(square, loss, optax.sgd(0.01), data, cast=cast), precision="bf16"))
    because = [each["message"].partition("because ")[2] for each in said(tmp_path)]
    assert set(because) == (set() if cast else {'of float32 x in the batch; give supervised cast=["x"]'})


def narrow(width):
    """The step of two layers, `width` between them."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 512), (512, width), (width, 512))]
    return model_flops(jax.jit(lambda x, down, up: x @ down @ up).trace(*shapes).jaxpr)


def test_a_width_that_fills_half_a_matrix_unit_is_named_where_there_is_one():
    [found] = half_empty(narrow(64), "TPU v3", 1024, 1)
    assert found.numbers["fill"] == 0.5 and found.numbers["size"] == 64
    assert found.message.startswith(
        f"{__file__}:{line_of(__file__, 'x @ down @ up')}: a dimension of 64 fills only 50%"
    )
    assert half_empty(narrow(128), "TPU v3", 1024, 1) == []
    assert half_empty(narrow(128), "TPU v6 lite", 1024, 1)[0].numbers["unit"] == 256
    assert half_empty(narrow(64), "cpu", 1024, 1) == []


TPU_VM = Machine(chips=["/dev/accel0", "/dev/accel1"], environ={}, asked="", libtpu=True, error="", holders=[])


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (replace(TPU_VM, libtpu=False), r"pip install 'tpuswarm\[tpu\]'"),
        (replace(TPU_VM, holders=[4711]), "used by process 4711"),
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


def test_a_run_on_the_cpu_of_a_tpu_machine_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setattr("tpuswarm.train.diagnose.cpu_fallback.tpu_chips", lambda: [])
    list(loop(tmp_path))
    assert [found["kind"] for found in said(tmp_path)] == ["cpu-fallback"]


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


@pytest.mark.parametrize("name", ["gpt2-tiny", "gpt2-124m", "gpt2-1558m"])
def test_no_shipped_recipe_is_blamed_for_its_weights(name):
    target, preset = recipes.find(name)
    assert tied_weights(build_recipe(target, {**preset, "data": "fake"}).program(Options())) == []
