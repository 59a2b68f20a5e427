"""What global settings of JAX change in a run, and parameters that are no numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tpuswarm import InputError, Trainer, supervised
from tpuswarm.errors import RunFailed
from tpuswarm.train.run.directory import METRICS, read_config, read_rows


def recipe(w=1.0):
    def init(key):
        return {"w": w * jax.random.normal(key, (4,))}

    def loss(params, batch, key):
        noise = 0.0 if key is None else jax.random.normal(key, (4,))
        return jnp.square(params["w"] + noise).mean() + 0 * batch["x"].sum()

    return supervised(init, loss, optax.sgd(0.1), {"x": np.zeros(8, np.float32)})


def losses(folder, steps=4):
    Trainer(devices=1, seed=0).fit(recipe(), steps=steps, batch=8, run=folder)
    return [row["loss"] for row in read_rows(folder / METRICS)]


@pytest.mark.parametrize("resumes", [False, True])
def test_keys_do_not_depend_on_jaxs_default_implementation(tmp_path, resumes):
    expected = losses(tmp_path / "plain")
    if resumes:
        assert losses(tmp_path / "run", 2) == expected[:2]
    with jax.default_prng_impl("rbg"):
        assert losses(tmp_path / "run") == expected


def test_resuming_under_other_settings_is_reported(tmp_path):
    losses(tmp_path / "run", 2)
    recorded = read_config(tmp_path / "run")["numerics"]
    with jax.default_matmul_precision("highest"):
        losses(tmp_path / "run", 4)
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert events.count("jax_default_matmul_precision was None when this run began and is highest") == 1
    assert read_config(tmp_path / "run")["numerics"] == recorded, "those of its beginning"


def test_parameters_that_are_no_numbers_are_named_before_the_first_step(tmp_path):
    with pytest.raises(InputError, match=r"init of test_numerics gives NaN or infinity in w: check"):
        Trainer(devices=1).fit(recipe(np.nan), steps=2, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_imported_parameters_that_are_no_numbers_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "parent"
    Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=folder)
    from tpuswarm.train.loop import session

    load = session.initial_parameters
    broken = lambda *args: jax.tree.map(lambda leaf: leaf * jnp.nan, load(*args))  # noqa: E731
    monkeypatch.setattr(session, "initial_parameters", broken)
    with pytest.raises(InputError, match=r"parent gives NaN or infinity in layer/b, layer/w, unused: check"):
        Trainer(devices=1).fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run", init_from=folder)


LOWER = "a lower learning rate"


@pytest.mark.parametrize(("clip", "advice"), [(None, f"{LOWER} or --clip may help"), (1e9, f"{LOWER} may help")])
def test_advice_names_no_option_that_is_on(tmp_path, clip, advice):
    def loss(params, batch, key):
        return jnp.square(params["w"]).sum() + 0 * batch["x"].sum()

    data = {"x": np.zeros(8, np.float32)}
    diverges = supervised(lambda key: {"w": jnp.ones(2)}, loss, optax.sgd(float("inf")), data)
    with pytest.raises(RunFailed, match=advice):
        Trainer(devices=1, clip=clip).fit(diverges, steps=9, batch=8, run=tmp_path / "run")
