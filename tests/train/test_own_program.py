"""A program with two losses and an average, in public names only, and mistakes in such programs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuswarm
from tpuswarm.train.recipe import supports
from tpuswarm.train.user_code import build_recipe


class Game(tpuswarm.Program):
    def init(self, key, shared=None):
        return {"shared": shared or {"mean": jnp.zeros(()), "critic": jnp.ones(())}, "average": jnp.zeros(())}

    def step(self, state, batch, clock):
        noise = jax.random.normal(clock.key, batch["x"].shape)

        def critic_loss(critic, mean):
            return jax.nn.softplus((mean + noise) * critic).mean() + jax.nn.softplus(-batch["x"] * critic).mean()

        def maker_loss(mean, critic):
            return jax.nn.softplus(-(mean + noise) * critic).mean()

        mean, critic = state["shared"]["mean"], state["shared"]["critic"]
        critic_value, gradient = jax.value_and_grad(critic_loss)(critic, mean)
        critic = critic - 0.1 * gradient
        value, gradient = jax.value_and_grad(maker_loss)(mean, critic)
        mean = mean - 0.1 * gradient
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


def fit(recipe, folder, devices=1, steps=1):
    return tpuswarm.Trainer(devices=devices).fit(recipe, steps=steps, batch=16, run=folder)


def test_program_with_two_losses_trains_the_same_on_any_number_of_devices(tmp_path):
    result = fit(Recipe(), tmp_path / "run", devices=8, steps=40)
    assert result.state["average"] > 0.1 and result.metrics["critic_loss"] > 0
    alone = fit(Recipe(), tmp_path / "alone", steps=40)
    np.testing.assert_allclose(result.state["average"], alone.state["average"], rtol=1e-4)
    assert result.metrics["eval_loss"] < 9  # its value while the average is 0


def stepping(change):
    return lambda self, state, batch, clock: change(*Game.step(self, state, batch, clock))


def source(rows):
    return SimpleNamespace(rows_per_epoch=64, rows=rows)


LINE = r".* \(.*test_own_program\.py:\d+\)(\n|$)"  # JAX adds a note to errors while it traces
NONE = lambda self, *_: None  # noqa: E731


@pytest.mark.parametrize(
    ("method", "wrong", "sentence"),
    [
        ("step", stepping(lambda state, metrics: state), r"step of game returns a dict, not \(state, dict of"),
        ("step", stepping(lambda state, metrics: (state, metrics | {"a": "x"})), "metric a of game is a str, it must"),
        ("step", stepping(lambda state, metrics: (state, metrics | {"each": jnp.zeros(3)})),
         r"metric each of game has shape \(3,\), it must be a scalar: give its mean"),
        ("step", stepping(lambda state, metrics: (state | {"average": 1}, metrics)),
         r"step of game was given float32\[\] average in its state, and returns int32\[\]: a state keeps its keys"),
        ("step", stepping(lambda state, metrics: ({"shared": state["shared"]}, metrics)),
         r"was given float32\[\] average in its state, and returns none"),
        ("step", stepping(lambda state, metrics: (state.update(more=jnp.zeros(2)) or state, metrics)),
         r"was given no more in its state, and returns float32\[2\]"),
        ("step", stepping(lambda state, metrics: state["x"]), "^step of game fails: KeyError: 'x'"),
        ("step", lambda self, state, batch: None, r"called as Program.step\(state, batch, clock\), .*"),
        ("init", lambda self, key: None, r"Program.init is called as Program.init\(key, shared\), but takes \(key\)"),
        ("init", lambda self, key, shared=None: Game.init(self, key, shared) | {"text": "a"},
         "text of the state that init of game returns is a str: a state holds arrays"),
        ("evaluate", NONE, "evaluate of game returns a NoneType, not a dict of metrics"),
        ("evaluate", lambda *_: {"right": jnp.ones(())}, "evaluate of game returns no metric `loss`, only right"),
        ("exchange", NONE, "exchange of game returns a NoneType, not a tpuswarm.Exchange"),
        ("parameters", NONE, "parameters of game returns a NoneType, not a list of tpuswarm.Parameter"),
        ("parameters", lambda *_: [], r"returns 0 entries, and the leaves of .* are 2 \(critic, mean\)"),
        ("parameters", lambda *_: ["mean"], "parameters of game returns 'mean' among others, not a tpuswarm"),
        ("batch_spec", NONE, "batch_spec of game returns NoneType None, not a dict of jax.ShapeDtypeStruct"),
        ("batch_spec", lambda self, size: {"x": size}, r"batch_spec\(16\) of game has 16 for x, not a jax.Shape"),
    ],
)  # fmt: skip
def test_wrong_method_of_a_program_is_found_before_the_first_step(tmp_path, method, wrong, sentence):
    program = type("Wrong", (Game,), {method: wrong})
    own = type("Own", (Recipe,), {"program": lambda self, options: program()})
    with pytest.raises(tpuswarm.InputError, match=sentence + LINE):
        fit(own(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("attribute", "wrong", "sentence"),
    [
        ("program", NONE, "program of game returns a NoneType, not a tpuswarm.Program"),
        ("program", lambda self: Game(), r"Recipe.program is called as Recipe.program\(options\), but takes \(\)"),
        ("data", NONE, r"the train data of game is a NoneType: give a Source, an object with rows\(start, count\)"),
        ("data", lambda self: None, r"Recipe.data is called as Recipe.data\(split\), but takes \(\)"),
        ("data", lambda *_: source(lambda: {}), r"rows is called as rows\(start, count\), but takes \(\)"),
        ("data", lambda *_: source(lambda start, count: [1]), r"rows\(0, 1\) of the data returns a list, not a dict"),
        ("keep", lambda self: None, r"Recipe.keep is called as Recipe.keep\(folder\), but takes \(\)"),
        ("keep", lambda self, folder: [][0], "keep of game fails: IndexError"),
        ("sample", lambda self, state, prompt: "",
         r"called as Recipe.sample\(state, prompt, tokens=…, temperature=…, seed=…\), but takes \(state, prompt\)"),
        ("forms", ("remats",), r"Own.forms takes no remats; did you mean remat\?"),
        ("forms", "remat", "Own.forms is a str, not a tuple of names"),
        ("compiling", {"xla_fast": 1}, "Own.compiling, a dict by platform, takes no xla_fast; known: cpu, gpu, tpu"),
        ("compiling", {"tpu": 1}, "Own.compiling has a int for tpu, not {option: value}"),
        ("compiling", ["tpu"], "Own.compiling is a list, not a dict by platform"),
        ("defaults", None, 'Own.defaults is a NoneType, not a dict such as {"steps": 400}'),
        ("name", None, "Own.name is a NoneType, not a text"),
    ],
)  # fmt: skip
def test_wrong_attribute_of_a_recipe_is_refused(tmp_path, attribute, wrong, sentence):
    own = type("Own", (Recipe,), {attribute: wrong})
    with pytest.raises(tpuswarm.InputError, match=sentence + LINE if callable(wrong) else sentence):
        fit(own(), tmp_path / "run")


def test_recipe_supports_only_the_optional_methods_that_it_defines(tmp_path):
    class Keeps(Recipe):
        def keep(self, folder):
            (folder / "kept").write_text("kept")

    fit(Keeps(), tmp_path / "run")
    assert (tmp_path / "run" / "kept").exists()
    for recipe in (Keeps, Keeps()):
        assert supports(recipe, "keep") and not supports(recipe, "sample")


def test_recipe_of_a_file_needs_its_methods_and_knows_its_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from tests.train.test_own_program import Recipe as Game\n"
        "from tpuswarm import Recipe\n"
        "class Bare(Recipe): pass\n"
        "class Whole(Game):\n"
        "    identity = ('widht',)\n"
        "    def __init__(self, width: int = 3): pass\n"
    )
    for name, words in (
        ("Bare", "mine.py:Bare has no data and no program: a Recipe needs them"),
        ("Whole", r"Whole.identity, .*, takes no widht; did you mean width\?"),
    ):
        with pytest.raises(tpuswarm.InputError, match=words):
            build_recipe(f"{file}:{name}", {})
