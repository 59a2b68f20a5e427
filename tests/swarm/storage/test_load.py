"""Loading the parameters of a swarm's run, and starting another run from them."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tomli_w

from tests.swarm.exact import TERMS, genesis
from tests.train import toy
from tpuswarm import InputError, RunFailed, Trainer, load, supervised
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.values import Digests
from tpuswarm.swarm.storage.founding import FOUNDING
from tpuswarm.swarm.storage.ledger import Ledger, commit_name
from tpuswarm.swarm.storage.objects import Objects, object_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Options


def store_first_version(recipe, store):
    """Store a first version as a swarm does; return the shared parameters and their digests."""
    program = recipe.program(Options())
    shared = program.exchange().get(jax.jit(program.init)(jax.random.key(3)))
    arrays = dict(zip(leaf_paths(shared), map(np.asarray, jax.tree.leaves(shared)), strict=True))
    layout = Layout.pack({path: (array.shape, array.dtype.name) for path, array in arrays.items()}, 2)
    state = tuple(Objects(store).put_array(fragment) for fragment in layout.split(arrays))
    digests = Digests(layout.digest, "config", "data", "code")
    Ledger(store).append(genesis(TERMS, state=state, digests=digests))
    Path(store.root, FOUNDING).write_text(json.dumps({"fragments": layout.fragments, "chosen": {}}))
    return shared, state


def swarm_of(recipe, folder):
    """Make a swarm's run with one version; return the shared parameters and their digests."""
    Trainer(devices=1).fit(recipe, steps=1, batch=8, run=folder)
    table = {"members": 2, "run": "run", "cycle": 5, "outer": "average", "quantize": "plain", "code": "code"}
    with (folder / "config.toml").open("a") as config:
        config.write(f"\n{tomli_w.dumps({'swarm': table})}")
    return store_first_version(recipe, Store(folder))


def recipe(size=5, rate=0.1):
    def loss(params, statistics, batch, key):
        return params["w"].sum() + batch["y"].mean(), ({}, {"seen": statistics["seen"] + 1})

    optimizer = optax.sgd(rate)
    return supervised(
        lambda key: {"w": jnp.ones(size)}, loss, optimizer, toy.data(), extra=lambda key: {"seen": jnp.ones(2)}
    )


def test_parameters_of_a_swarm_start_another_run(tmp_path):
    shared, state = swarm_of(recipe(), tmp_path / "swarm")
    loaded = load(tmp_path / "swarm")
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], shared["params"])
    jax.tree.map(np.testing.assert_array_equal, loaded["extra"], shared["extra"])
    child = Trainer().fit(recipe(rate=0.0), steps=1, batch=8, run=tmp_path / "child", init_from=tmp_path / "swarm")
    jax.tree.map(np.testing.assert_array_equal, child.state.params, shared["params"])
    with pytest.raises(InputError, match=r"swarm holds a different model: 1 parameters differ, the first params/w"):
        Trainer().fit(recipe(7), steps=1, batch=8, run=tmp_path / "other", init_from=tmp_path / "swarm")

    store = Store(tmp_path / "swarm")
    ledger, nan = Ledger(store), Objects(store).put_array(np.full_like(Objects(store).get_array(state[0]), np.nan))
    first = ledger.record(0)
    store.delete(commit_name(0))
    ledger.append(replace(first, state=(nan, *state[1:])))
    with pytest.raises(RunFailed, match=r"no commit in .*swarm is intact"):
        load(tmp_path / "swarm")
    store.delete(commit_name(0))
    ledger.append(first)

    Path(tmp_path / "swarm" / object_name(state[0])).write_bytes(b"torn")
    with pytest.raises(RunFailed, match=r"no commit in .*swarm is intact"):
        load(tmp_path / "swarm")
    (tmp_path / "swarm" / FOUNDING).unlink()
    with pytest.raises(InputError, match=r"swarm has no .*: it has no commit yet"):
        load(tmp_path / "swarm")
