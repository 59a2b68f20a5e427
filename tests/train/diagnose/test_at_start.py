"""Faults found before the first step."""

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
from flax import nnx

from tests.train import toy
from tests.train.findings import place, read_findings, run_steps
from tests.train.program.test_flops import count
from tpuswarm import InputError, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.diagnose.machine_faults import DEAD_VARIABLES, Machine, cpu_fallback, dead_variables, holders
from tpuswarm.train.diagnose.program_faults import float32_in_bf16, half_empty, tied_weights
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.flops import model_flops
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Options


def same_twice(key):
    table = jax.random.normal(key, (3, 4))
    return {"embed": table, "head": table, "other": jax.random.normal(key, (3, 4))}


def test_run_reports_all_faults_before_its_first_step(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setattr("tpuswarm.train.diagnose.machine_faults.tpu_device_files", lambda: [])
    monkeypatch.setenv("XRT_TPU_CONFIG", "localservice;0;localhost:51011")

    def init(key):
        return same_twice(key) | toy.init(key)

    def loss(params, batch, key):
        mean, metrics = toy.loss(params, batch, key)
        jax.debug.print("loss {}", mean)  # the callback
        return mean, metrics

    recipe = supervised(init, loss, optax.sgd(0.01), toy.data())
    list(run_steps(tmp_path, recipe, steps=2, precision="bf16"))
    found = read_findings(tmp_path)
    kinds = ["cpu-fallback", "environment", "tied-weights", "no-gradient", "host-callback", "precision"]
    assert [(finding["kind"], finding["step"]) for finding in found] == [(kind, 0) for kind in kinds]
    assert (found[4]["call"], found[4]["place"]) == ("jax.debug.print", place(__file__, "# the callback"))
    page = (tmp_path / "report.html").read_text()
    for text in (capsys.readouterr().err, page):
        assert "embed and head start as one 3x4 array" in text and "XRT_TPU_CONFIG has no effect" in text


LOADED = np.arange(12, dtype=np.float32).reshape(3, 4)


def vectors_and_zeros(key):
    zeros, ones = jnp.zeros((3, 4)), jnp.ones(4)
    return {"a": zeros, "b": zeros, "c": ones, "d": ones, "e": np.zeros((3, 4)), "f": np.zeros((3, 4))}


@pytest.mark.parametrize(
    ("init", "pairs"),
    [
        (same_twice, [["embed", "head"]]),
        (lambda key: {"embed": LOADED, "head": LOADED, "other": LOADED + 1}, [["embed", "head"]]),
        (lambda key: {"embed": jnp.asarray(LOADED), "head": jnp.asarray(LOADED.copy())}, [["embed", "head"]]),
        (lambda key: {"embed": jnp.asarray(LOADED), "other": LOADED * 2}, []),
        (vectors_and_zeros, []),
    ],
    ids=["computed once", "one loaded array", "two loaded copies", "different arrays", "vectors and zeros"],
)
def test_weights_that_start_as_one_array_are_named(init, pairs):
    data = {"x": np.zeros((8, 2), np.float32)}
    recipe = supervised(init, lambda params, batch, key: 0.0, optax.sgd(0.1), data)
    found = [finding.numbers for finding in tied_weights(recipe.program(Options()))]
    assert found == [{"parameters": names, "shape": [3, 4]} for names in pairs]


def float32_findings(loss, precision="bf16", cast=()):
    params = {"up": jnp.ones((16, 16)), "down": jnp.ones((16, 16))}
    data = {"n": np.ones(8, np.int32), "x": np.ones((8, 16), np.float32), "y": np.ones((8, 16), np.float32)}
    recipe = supervised(lambda key: params, loss, optax.sgd(0.01), data, cast=list(cast))
    return float32_in_bf16(compile_step(recipe, Request(batch=8, precision=precision), jax.devices()[:1]))


def casts_to_float32(params, batch, key):
    """Like flax.nnx.Embed: later products compute in float32, whatever the dtype of the weights."""
    h = jnp.tanh(batch["x"].astype(jnp.float32) @ params["up"].astype(jnp.float32))  # the cast
    return jnp.square(h.astype(batch["x"].dtype) @ params["down"]).astype(jnp.float32).mean()


def stays_bf16(params, batch, key):
    return jnp.square(jnp.tanh(batch["x"] @ params["up"]) @ params["down"]).astype(jnp.float32).mean()


def test_float32_products_in_bf16_are_named_with_their_share():
    [found] = float32_findings(casts_to_float32, cast=["x"])
    assert found.numbers["place"] == place(__file__, "# the cast") and found.numbers["share"] == 0.4
    assert "40% of all FLOPs, although bf16 was requested: twice the bytes" in found.message
    assert float32_findings(casts_to_float32, "f32", cast=["x"]) == float32_findings(stays_bf16, cast=["x"]) == []


def looped(params, batch, key):
    h, _ = jax.lax.scan(lambda h, w: (h @ w, None), batch["x"], params["up"][None])
    h = jax.lax.cond(batch["n"].sum() >= 0, jnp.tanh, lambda h: h, h)
    return jnp.mean(jnp.square(h @ params["down"] - batch["y"]))


def straight(params, batch, key):
    h = jnp.tanh(batch["x"] @ params["up"])
    guess = jnp.dot(h, params["down"], preferred_element_type=jnp.float32)
    return jnp.mean(jnp.square(guess - batch["y"]))  # the target is not the reason for any float32 product


@pytest.mark.parametrize("loss", [straight, looped])
def test_input_that_keeps_products_float32_is_named_with_the_way_out(loss):
    causes = {finding.message.partition("because ")[2] for finding in float32_findings(loss)}
    assert causes == {'of float32 x in the batch; give supervised cast=["x"]'}
    assert float32_findings(loss, cast=["x"]) == []


def test_width_that_fills_half_a_matrix_unit_is_named():
    down, up = jnp.ones((512, 64)), jnp.ones((64, 512))
    flops = count(lambda x: x @ down @ up, jnp.ones((1024, 512)))
    [found] = half_empty(flops, "TPU v3", 1024, 1)
    assert (found.numbers["fill"], found.numbers["size"], found.numbers["unit"]) == (0.5, 64, 128)
    assert found.message.startswith(f"{place(__file__, 'x @ down @ up')}: a dimension of 64 fills only 50%")
    assert half_empty(flops, "TPU v6 lite", 1024, 1)[0].numbers["unit"] == 256
    assert half_empty(flops, "cpu", 1024, 1) == []


def test_products_of_our_own_recipe_are_one_finding_without_a_line():
    program = GPT2(size="tiny", data="fake").program(Options(precision="bf16"))
    state = jax.eval_shape(program.init, jax.random.key(0))
    flops = model_flops(jax.make_jaxpr(program.step)(state, program.batch_spec(12), toy.clock(0, 0.0)))
    [found] = half_empty(flops, "TPU v3", 12, 1)  # its heads are 32 wide, in two products of attention
    assert found.message.startswith(
        "the step: a dimension of 32 fills only 6% of the 128x128 matrix unit and wastes 53%"
    )


TPU_VM = Machine(
    chips=["/dev/accel0", "/dev/accel1"], environ={}, chosen_platforms="", has_libtpu=True, error="", holders=[]
)
NO_TPU = replace(TPU_VM, chips=[])


@pytest.mark.parametrize(
    ("machine", "cause"),
    [
        (replace(TPU_VM, has_libtpu=False), r"pip install 'tpuswarm\[tpu\]'"),
        (replace(TPU_VM, holders=[4711]), "used by process 4711"),
        (replace(TPU_VM, error="ABORTED: The TPU is already in use"), "ABORTED.*libtpu_lockfile"),
        (replace(TPU_VM, chosen_platforms="cpu"), "JAX_PLATFORMS=cpu keeps JAX away from /dev/accel0"),
        (replace(NO_TPU, chosen_platforms="cpu,tpu"), "JAX_PLATFORMS=cpu,tpu puts another platform first"),
        (replace(NO_TPU, environ={"TPU_WORKER_ID": "0"}), "TPU_WORKER_ID=0 says TPU.*--privileged"),
        (replace(NO_TPU, environ={"TPU_NAME": "node-1"}), None),
        (replace(NO_TPU, environ={"TPU_WORKER_ID": "0"}, chosen_platforms="cpu"), None),
    ],
)
def test_cpu_training_on_a_tpu_machine_is_explained(machine, cause):
    found = cpu_fallback("cpu", machine)
    assert [bool(re.search(cause, finding.message)) for finding in found] == ([True] if cause else [])
    assert cpu_fallback("tpu", machine) == []


def test_process_that_holds_a_device_file_is_found(tmp_path):
    file = tmp_path / "accel0"
    file.touch()
    assert holders([file]) == []
    program = f"import sys; file = open({str(file)!r}); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert holders([file]) == [process.pid]
        process.stdin.close()


def test_dead_variables_are_grouped_by_their_replacement():
    found = dead_variables({"XRT_WORKERS": "x", "XRT_TPU_CONFIG": "y", "XLA_USE_BF16": "1", "XLA_FLAGS": ""})
    assert [finding.numbers["variables"] for finding in found] == [["XLA_USE_BF16"], ["XRT_TPU_CONFIG", "XRT_WORKERS"]]
    assert "--precision bf16" in found[0].message


def test_nothing_installed_reads_the_dead_variables():
    """Compare with the bytes of libtpu, of jaxlib and of jax's own source."""
    patterns = [part for name in (*DEAD_VARIABLES, "XRT_TPU_CONFIG", "XRT_WORKERS") for part in ("-e", name)]
    files = [Path(jax.__file__).parent / "_src" / name for name in ("cloud_tpu_init.py", "xla_bridge.py", "config.py")]
    for package in ("libtpu", "jaxlib"):
        if spec := importlib.util.find_spec(package):
            files += Path(spec.origin).parent.glob("lib*.so")
    assert len(files) > 3
    done = subprocess.run(["grep", "-aoF", *patterns, *files], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")


def recurrent(inside):
    """A loss whose weight is cast inside or before a loop over the rows' times."""

    def loss(params, batch, key):
        def step(state, x):
            w = params["w"].astype(jnp.bfloat16) if inside else half
            return jnp.tanh(state @ w + x), None

        half, x_TxBxD = params["w"].astype(jnp.bfloat16), batch["x"].astype(jnp.bfloat16).swapaxes(0, 1)
        return jnp.square(jax.lax.scan(step, jnp.zeros_like(x_TxBxD[0]), x_TxBxD)[0]).mean()

    return loss


@pytest.mark.parametrize(("inside", "times", "found"), [(False, 300, [["w"]]), (False, 200, []), (True, 300, [])])
def test_gradient_that_a_loop_adds_up_in_bfloat16_is_named(tmp_path, inside, times, found):
    def init(key):
        return {"w": jnp.ones((5, 5))}

    rows = {"x": np.ones((8, times, 5), np.float32)}
    recipe = supervised(init, recurrent(inside), optax.sgd(0.1), rows)
    list(run_steps(tmp_path, recipe, steps=1))
    named = [finding["parameters"] for finding in read_findings(tmp_path) if finding["kind"] == "bfloat16-sum"]
    assert named == found


def test_parameter_that_the_loss_does_not_use_is_named(tmp_path):
    def init(key):
        return {"w": jnp.ones(5), "mean": jnp.zeros(5), "scale": jnp.ones(())}

    def loss(params, batch, key):
        return jnp.square(batch["x"] @ params["w"]).mean() + 0 * jax.lax.stop_gradient(params["scale"])

    list(run_steps(tmp_path, supervised(init, loss, optax.sgd(0.1), toy.data()), steps=1))
    (finding,) = [finding for finding in read_findings(tmp_path) if finding["kind"] == "no-gradient"]
    assert finding["parameters"] == ["mean", "scale"] and "no gradient reaches mean, scale" in finding["message"]


def flax_variables(key):
    return {"params": {"w": jnp.ones(5)}, "batch_stats": {"mean": jnp.zeros(5)}}


def nnx_state(key):
    return nnx.split(nnx.BatchNorm(5, rngs=nnx.Rngs(0)))[1]


@pytest.mark.parametrize(
    ("init", "words"),
    [
        (flax_variables, r"parameter batch_stats/mean is a running statistic.*make it in extra="),
        (nnx_state, r"nnx\.BatchStat among the parameters.*extra="),
    ],
)
def test_running_statistics_among_the_parameters_are_refused(tmp_path, init, words):
    with pytest.raises(InputError, match=words):
        list(run_steps(tmp_path, supervised(init, toy.loss, optax.sgd(0.1), toy.data()), steps=1))
