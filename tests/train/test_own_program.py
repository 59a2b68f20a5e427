"""A program of one's own, with two losses and an average, from the public names alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuswarm
from tpuswarm.train.user_code import build_recipe

RATE = 0.1


def critic_loss(critic: Any, fake: Any, real: Any) -> Any:
    return jnp.mean(jax.nn.softplus(fake * critic)) + jnp.mean(jax.nn.softplus(-real * critic))


def maker_loss(mean: Any, critic: Any, noise: Any) -> Any:
    return jnp.mean(jax.nn.softplus(-(mean + noise) * critic))


class Game(tpuswarm.Program):
    """The critic moves first, the maker answers it; the average of the maker is what is evaluated."""

    def init(self, key, shared=None):
        return {"shared": shared or {"mean": jnp.zeros(()), "critic": jnp.ones(())}, "average": jnp.zeros(())}

    def step(self, state, batch, clock):
        noise = jax.random.normal(jax.random.fold_in(clock.key, clock.step), batch["x"].shape)
        mean, critic = state["shared"]["mean"], state["shared"]["critic"]
        critic_value, gradient = jax.value_and_grad(critic_loss)(critic, mean + noise, batch["x"])
        critic = critic - RATE * gradient
        value, gradient = jax.value_and_grad(maker_loss)(mean, critic, noise)
        mean = mean - RATE * gradient
        after = {"shared": {"mean": mean, "critic": critic}, "average": 0.9 * state["average"] + 0.1 * mean}
        return after, {"loss": value, "critic_loss": critic_value}

    def evaluate(self, state, batch):
        return {"loss": jnp.square(batch["x"].mean() - state["average"])}

    def batch_spec(self, size):
        return {"x": jax.ShapeDtypeStruct((size,), np.float32)}

    def exchange(self):
        return tpuswarm.Exchange(lambda state: state["shared"], lambda state, shared: {**state, "shared": shared})

    def parameters(self, state):
        return [tpuswarm.Parameter(name, frozen=False, decayed=False, tied="") for name in ("critic", "mean")]


class Recipe(tpuswarm.Recipe):
    name = "game"

    def program(self, options):
        options.require_only(by=self.name)
        return Game()

    def data(self, split):
        return tpuswarm.ArraySource({"x": np.linspace(2, 4, 64, dtype=np.float32)})


def test_two_losses_and_an_average_train_on_several_devices(devices, tmp_path):
    result = tpuswarm.Trainer(devices=len(devices)).fit(Recipe(), steps=40, batch=16, run=tmp_path / "run")
    assert result.state["average"] > 0.1 and result.metrics["critic_loss"] > 0
    alone = tpuswarm.Trainer(devices=1).fit(Recipe(), steps=40, batch=16, run=tmp_path / "alone")
    np.testing.assert_allclose(result.state["average"], alone.state["average"], rtol=1e-4)
    assert result.metrics["eval_loss"] < 9  # which it is where the average stays at 0


def stepping(change):
    """A step whose result is changed by change(state, metrics)."""
    return lambda self, state, batch, clock: change(*Game.step(self, state, batch, clock))


def in_place(state, metrics):
    state["more"] = jnp.zeros(2)
    return state, metrics


def begun(**more):
    return lambda self, key, shared=None: Game.init(self, key, shared) | more


class Rows:
    rows_per_epoch = 64

    def __init__(self, rows):
        self.rows = rows


LINE = r".* \(.*test_own_program\.py:\d+\)(\n|$)"  # JAX adds a note of its own to what is raised while it traces
NONE = lambda self, *_: None  # noqa: E731


@pytest.mark.parametrize(
    ("method", "wrong", "sentence"),
    [
        ("step", stepping(lambda state, metrics: (state, {})), "step of game returns no metric `loss`, none at all"),
        ("step", stepping(lambda state, metrics: state), r"step of game returns a dict, not \(state, dict of"),
        ("step", stepping(lambda state, metrics: (state, None)), "step of game returns a NoneType, not a dict"),
        ("step", stepping(lambda state, metrics: (state, metrics | {"a": "x"})), "metric a of game is a str, it must"),
        ("step", stepping(lambda state, metrics: (state | {"average": 1}, metrics)),
         r"step of game was given float32\[\] average in its state, and returns int32\[\]: a state keeps its keys"),
        ("step", stepping(lambda state, metrics: (state | {"average": jnp.zeros(2)}, metrics)),
         r"was given float32\[\] average in its state, and returns float32\[2\]"),
        ("step", stepping(lambda state, metrics: ({"shared": state["shared"]}, metrics)),
         r"was given float32\[\] average in its state, and returns none"),
        ("step", stepping(in_place), r"was given no more in its state, and returns float32\[2\]"),
        ("step", stepping(lambda state, metrics: (state | {"shared": [*state["shared"].values()]}, metrics)),
         r"was given no shared/0 in its state, and returns float32\[\]"),
        ("step", stepping(lambda state, metrics: state["x"]), "^step of game fails: KeyError: 'x'"),
        ("step", lambda self, state, batch: None, r"called as Program.step\(state, batch, clock\), .*"),
        ("init", lambda self, key: None, r"Program.init is called as Program.init\(key, shared\), but takes \(key\)"),
        ("init", begun(text="a"), "text of the state that init of game returns is a str: a state holds arrays"),
        ("evaluate", NONE, "evaluate of game returns a NoneType, not a dict of metrics"),
        ("evaluate", lambda *_: {"right": jnp.ones(())}, "evaluate of game returns no metric `loss`, only right"),
        ("evaluate", lambda self, state, batch: state["x"], "^evaluate of game fails: KeyError: 'x'"),
        ("exchange", NONE, "exchange of game returns a NoneType, not a tpuswarm.Exchange"),
        ("parameters", NONE, "parameters of game returns a NoneType, not a list of tpuswarm.Parameter"),
        ("parameters", lambda *_: [], r"returns 0 entries, and the leaves of .* are 2 \(critic, mean\)"),
        ("parameters", lambda *_: ["mean"], "parameters of game returns 'mean' among others, not a tpuswarm"),
        ("batch_spec", NONE, "batch_spec of game returns NoneType None, not a dict of jax.ShapeDtypeStruct"),
        ("batch_spec", lambda self, size: {"x": size}, r"batch_spec\(8\) of game has 8 for x, not a jax.Shape"),
    ],
)  # fmt: skip
def test_what_a_program_cannot_be_is_found_before_the_first_step(tmp_path, method, wrong, sentence):
    program = type("Wrong", (Game,), {method: wrong})
    own = type("Own", (Recipe,), {"program": lambda self, options: program()})
    with pytest.raises(tpuswarm.InputError, match=sentence + LINE):
        tpuswarm.Trainer().fit(own(), steps=1, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("method", "wrong", "sentence"),
    [
        ("program", NONE, "program of game returns a NoneType, not a tpuswarm.Program"),
        ("program", lambda self: Game(), r"Recipe.program is called as Recipe.program\(options\), but takes \(\)"),
        ("data", NONE, r"the train data of game is a NoneType: give a Source, an object with rows\(start, count\)"),
        ("data", lambda self: None, r"Recipe.data is called as Recipe.data\(split\), but takes \(\)"),
        ("data", lambda *_: Rows(lambda: {}), r"rows is called as rows\(start, count\), but takes \(\)"),
        (
            "data",
            lambda *_: Rows(lambda start, count: [1]),
            r"rows\(0, 1\) of the data returns a list, not a dict of array",
        ),
        ("keep", lambda self: None, r"Recipe.keep is called as Recipe.keep\(folder\), but takes \(\)"),
        ("pictured", lambda self: None, r"Recipe.pictured is called as Recipe.pictured\(state\), but takes \(\)"),
        ("export", lambda self, state: None, r"called as Recipe.export\(state, folder\), but takes \(state\)"),
        (
            "sample",
            lambda self, state, prompt: "",
            r"called as Recipe.sample\(state, prompt, tokens=…, temperature=…, seed=…\), but takes \(state, prompt\)",
        ),
        ("measures", lambda self, state: {}, r"called as Recipe.measures\(state, features, far\), but takes"),
        ("keep", lambda self, folder: [][0], "keep of game fails: IndexError"),
    ],
)
def test_what_a_recipe_cannot_return(tmp_path, method, wrong, sentence):
    own = type("Own", (Recipe,), {"home": None, method: wrong})
    with pytest.raises(tpuswarm.InputError, match=sentence + LINE):
        tpuswarm.Trainer().fit(own(), steps=1, batch=8, run=tmp_path / "run")


@pytest.mark.parametrize(
    ("attribute", "wrong", "sentence"),
    [
        ("forms", ("remats",), r"Own.forms takes no remats; did you mean remat\?"),
        ("forms", "remat", "Own.forms is a str, not a tuple of names"),
        ("forms", None, "Own.forms is a NoneType, not a tuple of names"),
        ("compiling", {"tpuu": {}}, r"Own.compiling, a dict by platform, takes no tpuu; did you mean tpu\?"),
        ("compiling", {"xla_fast": 1}, "Own.compiling, a dict by platform, takes no xla_fast; known: cpu, gpu, tpu"),
        ("compiling", {"tpu": 1}, "Own.compiling has a int for tpu, not {option: value}"),
        ("compiling", ["tpu"], "Own.compiling is a list, not a dict by platform"),
        ("identity", 3, "Own.identity is a int, not a tuple of names"),
        ("defaults", {"stepss": 5}, r"Own.defaults takes no stepss; did you mean steps\?"),
        ("defaults", None, 'Own.defaults is a NoneType, not a dict such as {"steps": 400}'),
        ("name", None, "Own.name is a NoneType, not a text"),
    ],
)
def test_what_a_recipe_has_names_what_there_is(attribute, wrong, sentence):
    with pytest.raises(tpuswarm.InputError, match=sentence):
        tpuswarm.Trainer().fit(type("Own", (Recipe,), {attribute: wrong})(), steps=1, batch=8)


def test_a_recipe_in_a_file_is_whole_and_names_its_own_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from tpuswarm import Recipe\n"
        "class Bare(Recipe): pass\n"
        "class Whole(Recipe):\n"
        "    identity = ('widht',)\n"
        "    def __init__(self, width: int = 3): pass\n"
        "    def program(self, options): pass\n"
        "    def data(self, split): pass\n"
    )
    with pytest.raises(tpuswarm.InputError, match=r"mine.py:Bare has no data and no program: a Recipe needs them"):
        build_recipe(f"{file}:Bare", {})
    with pytest.raises(tpuswarm.InputError, match=r"Whole.identity, .*, takes no widht; did you mean width\?"):
        build_recipe(f"{file}:Whole", {})
