"""A run that takes some of its parameters from another one, and makes the others itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.swarm.storage.test_load import recipe as swarm_recipe
from tests.swarm.storage.test_load import swarm_of
from tpuswarm import InputError, Trainer, supervised
from tpuswarm.train.run.trust import remember
from tpuswarm.train.user_code import build_recipe

pytestmark = pytest.mark.slow

DATA = {"x": np.ones((16, 4), np.float32)}


def recipe(classes: int = 2, rate: float = 0.0):
    """A body, and a head of as many classes."""

    def init(key):
        body, head = jax.random.split(key)
        return {"body": {"w": jax.random.normal(body, (4, 3))}, "head": {"w": jax.random.normal(head, (3, classes))}}

    def loss(params, batch, key):
        return jnp.square(batch["x"] @ params["body"]["w"] @ params["head"]["w"]).mean()

    return supervised(init, loss, optax.sgd(rate), DATA)


def fit(made, folder, **options):
    return Trainer(devices=options.pop("devices", 1), **options.pop("trainer", {})).fit(
        made, steps=1, batch=8, run=folder, **options
    )


@pytest.mark.parametrize("of_a_file", [True, False])
def test_new_head_stands_on_the_body_of_another_run(tmp_path, monkeypatch, of_a_file):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "made.py").write_text("from tests.train.test_init_only import recipe\n")
    made = build_recipe(f"{tmp_path / 'made.py'}:recipe", {"rate": 0.1}) if of_a_file else recipe(rate=0.1)
    remember(made.target)
    parent = fit(made, tmp_path / "parent").state.params
    fresh = fit(recipe(5), tmp_path / "fresh", trainer={"seed": 3}).state.params
    arguments = {"init_from": tmp_path / "parent", "init_only": "^body/", "devices": 8}
    child = fit(recipe(5), tmp_path / "child", trainer={"seed": 3}, **arguments).state.params
    np.testing.assert_array_equal(child["body"]["w"], parent["body"]["w"])
    np.testing.assert_array_equal(child["head"]["w"], fresh["head"]["w"])
    assert (fresh["body"]["w"] != parent["body"]["w"]).any()
    with pytest.raises(InputError, match=r"init_only was \^body/, now w"):
        fit(recipe(5), tmp_path / "child", init_from=tmp_path / "parent", init_only="w")


def test_parameters_of_a_swarm_are_chosen_by_their_paths_too(tmp_path):
    shared, _ = swarm_of(swarm_recipe(), tmp_path / "swarm")
    for folder, only in ("of all", "^extra/"), ("of a layer", "^seen"):
        made = swarm_recipe(7, rate=0.0)
        child = fit(made, tmp_path / folder, init_from=tmp_path / "swarm", init_only=only).state
        np.testing.assert_array_equal(child.extra["seen"], shared["extra"]["seen"] + 1)
        np.testing.assert_array_equal(child.params["w"], np.ones(7))


def test_wrong_choice_is_refused(tmp_path):
    parent = tmp_path / "parent"
    fit(recipe(), parent)
    for options, words in (
        ({"init_from": parent, "init_only": "nothing"}, "'nothing' matches none of the parameters: body/w, head/w"),
        ({"init_from": parent, "init_only": "head"}, r"the first head/w \(\(3, 2\) there, \(3, 5\)"),
        ({"init_from": parent, "init_only": 3}, "init_only is a int: give a regular expression"),
        ({"init_only": "body"}, "init_only 'body' says which parameters of init_from are taken"),
    ):
        with pytest.raises(InputError, match=words):
            fit(recipe(5), tmp_path / "child", **options)
        assert not (tmp_path / "child").exists()


def test_run_goes_on_though_the_one_that_it_began_with_is_gone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(recipe(), "runs/parent")
    arguments = {"init_from": "runs/parent", "init_only": "^body/"}
    first = fit(recipe(5), "runs/child", **arguments)
    (tmp_path / "runs/parent").rename(tmp_path / "runs/moved")
    again = Trainer(devices=1).fit(recipe(5), steps=3, batch=8, run="runs/child", **arguments)
    assert (first.step, again.step) == (1, 3)
