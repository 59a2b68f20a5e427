"""A run directory that is resumed with another loss, optimizer, data or settings of JAX than it began with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tpuswarm import InputError, StreamSource, Trainer, supervised
from tpuswarm.train.program.digest import is_other_program, step_digest
from tpuswarm.train.program.request import Request
from tpuswarm.train.run.directory import EVENTS, METRICS, read_config, read_rows

pytestmark = pytest.mark.slow


def recipe(scale=1.0, power=2, optimizer=None, schedule=None, data=None, held=None):
    def loss(params, batch, key):
        error = scale * jnp.abs(params["w"] - batch["x"].mean()) ** power
        return error if held is None else error + (jnp.asarray(held) * params["w"]).sum()

    data = {"x": np.linspace(0, 1, 16, dtype=np.float32)} if data is None else data
    optimizer = optimizer or (optax.adam(0.1) if schedule is None else lambda rate, mask: optax.sgd(rate))
    return supervised(lambda key: {"w": jnp.full((), 2.0)}, loss, optimizer, data, schedule=schedule)


def fit(folder, recipe, steps=2, **options):
    return Trainer(devices=1, seed=0, **options).fit(recipe, steps=steps, batch=8, run=folder)


@pytest.fixture(scope="module")
def begun_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "run"
    fit(folder, recipe(), 2)
    return folder


@pytest.fixture
def begun(begun_once, tmp_path):
    """A run of two steps."""
    return Path(shutil.copytree(begun_once, tmp_path / "run"))


CHANGES = {
    "loss": (recipe(), recipe(power=4)),
    "constant": (recipe(scale=1.0), recipe(scale=1.5)),
    "array": (recipe(held=np.arange(3.0, dtype=np.float32)), recipe(held=np.ones(3, np.float32))),
    "optimizer": (recipe(), recipe(optimizer=optax.adam(0.1, b2=0.99))),
    "learning rate": (recipe(), recipe(optimizer=optax.adam(0.2))),
    "schedule": (recipe(schedule=lambda step: 0.1), recipe(schedule=lambda step: 0.1 / (1 + step))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_loss_optimizer_or_schedule_is_another_program(change):
    before, after = (step_digest(program, Request(8), "cpu") for program in CHANGES[change])
    assert is_other_program(before, after) and not is_other_program(before, before)


@pytest.mark.parametrize("ended", [False, True], ids=["resumed", "finished"])
def test_another_program_is_refused_until_it_is_accepted(tmp_path, ended):
    before, after = CHANGES["constant"]
    loop = Trainer(devices=1, seed=0).steps(before, steps=4, batch=8, run=tmp_path / "run")
    for _ in range(4 if ended else 2):
        next(loop)
    list(loop) if ended else loop.close()
    with pytest.raises(InputError, match="began with a different loss, optimizer or schedule"):
        fit(tmp_path / "run", after, 4)
    if ended:
        with pytest.raises(InputError, match="is finished: begin another run, with --init-from"):
            fit(tmp_path / "run", after, 4, accept_code=True)
    else:
        assert fit(tmp_path / "run", after, 4, accept_code=True).ended == "finished"
        notes = [row["message"] for row in read_rows(tmp_path / "run" / EVENTS) if row["event"] == "note"]
        assert any("has changed since this run began, which was accepted" in note for note in notes)
        fit(tmp_path / "run", after, 4)
        with pytest.raises(InputError, match="began with a different"):
            fit(tmp_path / "run", before, 4)


def test_same_program_of_another_file_resumes_the_run(tmp_path):
    before, after, other = recipe(), recipe(), recipe(power=4)
    after.name = other.name = "renamed"
    fit(tmp_path / "run", before)
    assert fit(tmp_path / "run", after, 4).ended == "finished"
    assert read_config(tmp_path / "run")["recipe"]["name"] == "renamed"
    with pytest.raises(InputError, match="recipe was renamed, now other"):
        other.name = "other"
        fit(tmp_path / "run", other, 6)


def test_evaluation_says_that_its_loss_is_not_the_one_that_trained(tmp_path, capsys):
    before, after = CHANGES["loss"]
    fit(tmp_path / "run", before)
    capsys.readouterr()
    for tried, said in ((before, False), (after, True)):
        Trainer(devices=1).evaluate(tried, run=tmp_path / "run", split="train")
        assert ("has changed since" in capsys.readouterr().err) is said


def test_program_of_other_code_and_form_is_the_same():
    @jax.jit
    def squared(x):
        return jax.checkpoint(jnp.square)(x)

    def loss(params, batch, key):
        return squared(params["w"] - batch["x"]).mean()

    @jax.jit
    def error(y):
        return jax.checkpoint(jnp.square)(y)

    def objective(weights, rows, key):
        first = weights["w"]
        jax.debug.callback(lambda number: None, first)
        return error(first - rows["x"]).mean(), {"seen": jnp.abs(first)}

    def digest(function, **request):
        data = {"x": np.linspace(0, 1, 16, dtype=np.float32)}
        made = supervised(lambda key: {"w": jnp.full((), 2.0)}, function, optax.adam(0.1), data)
        return step_digest(made, Request(8, **request), "cpu")

    assert digest(loss) == digest(objective) == digest(objective, shard="fsdp", accumulate=2) != {}


DIGESTS = """
import jax.numpy as jnp, numpy as np, optax
import flax.linen as nn
from tpuswarm import supervised
from tpuswarm.train.program.digest import step_digest
from tpuswarm.train.program.request import Request

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.1, deterministic=not train)(nn.gelu(nn.LayerNorm()(nn.Dense(8)(x))))
        return nn.MultiHeadDotProductAttention(2)(x[:, None])[:, 0].sum(-1)

def loss(params, batch, key):
    out = Net().apply(params, batch["x"], key is not None, rngs={} if key is None else {"dropout": key})
    return optax.huber_loss(out).mean(), {"largest": jnp.abs(out).max()}

data = {"x": np.ones((16, 4), np.float32)}
made = supervised(lambda key: Net().init(key, data["x"], False), loss, optax.adamw(1e-3), data, float32="LayerNorm")
digest = step_digest(made, Request(8), "cpu")["step"]
"""


def test_digest_is_the_same_in_every_process_and_on_a_terminal():
    here = {"__name__": __name__}
    exec(DIGESTS, here)
    end, terminal = os.openpty()
    environment = {"PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu", "PATH": "/usr/bin"}
    command = [sys.executable, "-c", f"{DIGESTS}print(digest)"]
    subprocess.run(command, env=environment, stdout=terminal, check=True, timeout=240)
    assert os.read(end, 1000).decode().split() == [here["digest"]]
    os.close(end), os.close(terminal)


def test_programs_are_compared_under_the_same_settings_of_jax_alone():
    now = step_digest(recipe(), Request(8), "cpu")
    with jax.default_matmul_precision("highest"):
        assert step_digest(recipe(), Request(8), "cpu")["under"] != now["under"]
    assert step_digest(recipe(), Request(8), "tpu")["under"] != now["under"]


def test_keys_depend_on_the_step_alone_and_not_on_jaxs_settings(tmp_path):
    def init(key):
        return {"w": jax.random.normal(key, (4,))}

    def loss(params, batch, key):
        drawn = jnp.zeros(()) if key is None else jax.random.uniform(key)
        return jnp.square(params["w"]).mean() + 0 * batch["x"].sum(), {"drawn": drawn}

    def figures(folder, steps=4):
        fit(tmp_path / folder, supervised(init, loss, optax.sgd(0.1), {"x": np.zeros(8, np.float32)}), steps)
        return [(row["loss"], row["drawn"]) for row in read_rows(tmp_path / folder / METRICS)]

    expected = figures("plain")
    assert len({drawn for _, drawn in expected}) == 4
    figures("resumed", 2)
    jax.config.update("jax_random_seed_offset", 5)
    try:
        with jax.default_prng_impl("rbg"):
            assert figures("whole") == figures("resumed") == expected
    finally:
        jax.config.update("jax_random_seed_offset", 0)


def test_resuming_under_other_settings_is_reported(begun):
    recorded = read_config(begun)["numerics"]
    with jax.default_matmul_precision("highest"):
        fit(begun, recipe(), 4)
    sentence = "jax_default_matmul_precision was None when this run began and is highest"
    assert (begun / EVENTS).read_text().count(sentence) == 1 and read_config(begun)["numerics"] == recorded


@pytest.mark.parametrize("finished", [False, True])
def test_run_of_other_types_is_refused_with_the_way_out(begun, finished):
    with jax.enable_x64(True), pytest.raises(InputError, match=r"JAX_ENABLE_X64 was False .* set JAX_ENABLE_X64=False"):
        fit(begun, recipe(), 2 if finished else 4)
    with jax.enable_x64(True), pytest.raises(InputError, match="set JAX_ENABLE_X64=False"):
        Trainer(devices=1).evaluate(recipe(), run=begun, split="train")
    assert fit(begun, recipe(), 4).step == 4


def test_run_without_compilation_is_refused(begun, tmp_path):
    for steps, folder in (4, begun), (2, tmp_path / "other"):
        with jax.disable_jit(), pytest.raises(InputError, match="JAX_DISABLE_JIT is on, but programs"):
            fit(folder, recipe(), steps)


def losses(folder):
    return [row["loss"] for row in read_rows(folder / METRICS)]


@pytest.fixture(scope="module")
def whole_losses(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    fit(folder, recipe(), 4)
    return losses(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_default_prng_impl", "rbg"), ("jax_random_seed_offset", 3), ("jax_optimization_level", "O1"),
        ("jax_numpy_dtype_promotion", "strict"), ("jax_threefry_partitionable", None), ("eager_constant_folding", None),
        ("jax_use_direct_linearize", None), ("jax_softmax_custom_jvp", None), ("jax_disable_most_optimizations", None),
    ],
)  # fmt: skip
def test_resumed_run_under_each_setting_continues_or_says_so(whole_losses, begun, name, value):
    """value: None for the other of two."""
    before = jax.config.values[name]
    jax.config.update(name, not before if value is None else value)
    try:
        fit(begun, recipe(), 4)
    finally:
        jax.config.update(name, before)
    says_so = f"{name} was {before} when this run began" in (begun / EVENTS).read_text()
    assert says_so or (losses(begun) == whole_losses and name == "jax_numpy_dtype_promotion")


def test_first_row_of_a_stream_is_compared(tmp_path):
    def stream(first):
        rows = [{"x": np.float32(first + number)} for number in range(16)]
        return recipe(data=StreamSource(lambda: iter(rows), batched=False))

    fit(tmp_path / "run", stream(0), 2)
    fit(tmp_path / "run", stream(0), 3)
    said = "the first row of the data is not the one"
    assert said not in (tmp_path / "run" / EVENTS).read_text()
    fit(tmp_path / "run", stream(1), 4)
    assert (tmp_path / "run" / EVENTS).read_text().count(said) == 1
    assert set(read_config(tmp_path / "run")["data"]) == {"first_row"}
