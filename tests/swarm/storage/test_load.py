"""The parameters of a swarm's run, without its recipe and as the beginning of another run."""

import json
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import tomli_w

from tests.train import test_mutable_state as mutable
from tests.train import toy
from tpuswarm import InputError, RunFailed, Trainer, load, supervised
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.core.values import Digests, Record
from tpuswarm.swarm.storage.founding import FOUNDING
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects, object_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.recipe import Options


def swarm_of(recipe, folder):
    """A run of a swarm that made one version; what its members share."""
    Trainer(devices=1).fit(recipe, steps=1, batch=8, run=folder)
    config = (folder / "config.toml").read_text()
    table = {"members": 2, "run": "run", "cycle": 5, "outer": "average", "quantize": "plain", "code": "code"}
    (folder / "config.toml").write_text(f"{config}\n{tomli_w.dumps({'swarm': table})}")
    program, store = recipe.program(Options()), Store(folder)
    shared = program.exchange().get(jax.jit(program.init)(jax.random.key(3)))
    arrays = dict(zip(leaf_paths(shared), map(np.asarray, jax.tree.leaves(shared)), strict=True))
    layout = Layout.of({path: (array.shape, array.dtype.name) for path, array in arrays.items()}, 2)
    state = tuple(Objects(store).put_array(fragment) for fragment in layout.split(arrays))
    record = Record(
        run="run", version=0, epoch=1, parent="", state=state, outer=(), decisions=(), rule="average", rate=0.0,
        momentum=0.9, share=0.0, gathered=0.0, tokens=0, changes=0, processed=(),
        digests=Digests(layout.digest, "config", "data", "code"), time=1.7e9,
    )  # fmt: skip
    Ledger(store).append(record)
    Path(store.root, FOUNDING).write_text(json.dumps({"fragments": layout.fragments, "chosen": {}}))
    return shared, state


def test_the_parameters_of_a_swarm_are_the_beginning_of_a_run(tmp_path):
    shared, _ = swarm_of(toy.recipe(), tmp_path / "swarm")
    loaded = load(tmp_path / "swarm")
    assert loaded.keys() == {"params"}
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], shared)
    still = supervised(toy.init, toy.loss, optax.sgd(0.0), toy.splits)
    child = Trainer().fit(still, steps=1, batch=8, run=tmp_path / "child", init_from=tmp_path / "swarm")
    jax.tree.map(np.testing.assert_array_equal, child.state.params, shared)

    def wider(key):
        return {"layer": {"w": jax.numpy.zeros(7), "b": jax.numpy.zeros(())}, "unused": jax.numpy.ones(3)}

    other = supervised(wider, lambda params, batch, key: params["layer"]["w"].sum(), optax.sgd(0.1), toy.data())
    with pytest.raises(InputError, match=r"swarm holds a different model: 1 parameters differ, the first layer/w"):
        Trainer().fit(other, steps=1, batch=8, run=tmp_path / "other", init_from=tmp_path / "swarm")


def test_statistics_come_with_them(tmp_path):
    made = mutable.recipe()
    shared, _ = swarm_of(made, tmp_path / "swarm")
    loaded = load(tmp_path / "swarm")
    jax.tree.map(np.testing.assert_array_equal, loaded["params"], shared["params"])
    np.testing.assert_array_equal(loaded["extra"]["mean"], shared["extra"]["mean"])


def test_a_swarm_without_a_whole_version_is_said_to_have_none(tmp_path):
    _, state = swarm_of(toy.recipe(), tmp_path / "swarm")
    Path(tmp_path / "swarm" / object_name(state[0])).write_bytes(b"torn")
    with pytest.raises(RunFailed, match=r"no commit in .*swarm is intact"):
        load(tmp_path / "swarm")
    (tmp_path / "swarm" / FOUNDING).unlink()
    with pytest.raises(InputError, match=r"swarm has no .*: its first commit has not been made yet"):
        load(tmp_path / "swarm")
