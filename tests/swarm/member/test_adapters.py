"""A swarm that trains adapters exchanges them alone; every process reads the base model itself."""

from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from tests.recipes.test_decoder import publish
from tests.recipes.test_lora import other_norm
from tests.swarm.chains import problems_of
from tests.swarm.member.test_member_process import Run, plan_of
from tpuswarm import InputError, Trainer
from tpuswarm.recipes.decoder import lora
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage
from tpuswarm.swarm.storage.founding import read_founding
from tpuswarm.swarm.storage.load import load_swarm
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.local_devices import sizes
from tpuswarm.train.paths import by_path
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.supervised_program import inference_params

pytestmark = pytest.mark.slow


ADAPTERS = {"lora": 2, "lora_targets": "q_proj,down_proj"}


def recipe_of(base: Path, lr=0.1) -> Decoder:
    return Decoder(architecture=f"hf:{base}", data="fake", **ADAPTERS, lr=lr)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """A finished run of two members that keeps a moving average, its folder, and its base model."""
    base, _ = publish(tmp_path_factory.mktemp("base") / "model")
    recipe = recipe_of(base)
    folder = tmp_path_factory.mktemp("swarm") / "run"
    Trainer(devices=1, ema=0.9).fit(recipe, steps=1, batch=8, run=folder)
    digest = recipe.shared_digest(recipe.base_model)
    plan = plan_of(
        Decoder.target, recipe.options(), members=2, base=digest, init_from=recipe.base_model, ema=0.9,
        average=MovingAverage(100.0),
    )  # fmt: skip
    run = Run(folder, plan)
    assert run.finish() == "ended"
    table = {name: value for name, value in asdict(plan.swarm).items() if value is not None}
    with (folder / "config.toml").open("a") as config:
        config.write(f"\n{tomli_w.dumps({'swarm': table})}")
    return run, folder, base


def test_members_send_adapters_alone_and_the_ledger_verifies(swarm):
    run, folder, base = swarm
    newest = run.ledger.view().newest
    assert {decision.identity.incarnation.member for decision in newest.decisions} <= {"m0", "m1"}
    leaves = read_founding(Store(folder)).layout.leaves
    assert len(leaves) == 4 and all(map(lora.is_adapter, leaves))
    recipe = recipe_of(base)
    adapter_bytes = 4 * sum(Objects(Store(folder)).get_array(digest).size for digest in newest.state)
    assert sizes(recipe, None).exchanged == adapter_bytes < sizes(recipe, None).parameters
    assert not problems_of(Store(folder))


def test_run_is_its_adapters_on_the_base_model(swarm, tmp_path):
    _, folder, base = swarm
    loaded = load_swarm(folder, jax.devices()[:1])
    published = recipe_of(base)
    read = by_path(published.load_shared(f"hf:{base}", loaded.placed.program.exchange().get(loaded.placed.state)))
    for path, found in by_path(loaded.state.params).items():
        if lora.is_adapter(path):
            assert np.any(np.asarray(found)), path
        else:
            np.testing.assert_array_equal(found, read[path], err_msg=path)
    loaded.recipe.export(loaded.state, tmp_path)
    q = inference_params(loaded.state)["blocks"]["attention"]["q"]
    exported = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    np.testing.assert_array_equal(exported[name], np.asarray(q["lora_a"][1]).T)
    again = recipe_of(base, lr=1e-30)
    assert np.any(q["lora_a"] != loaded.state.params["blocks"]["attention"]["q"]["lora_a"])
    child = Trainer(devices=1).fit(again, steps=1, batch=8, run=tmp_path / "run", init_from=folder)
    jax.tree.map(np.testing.assert_array_equal, child.state.params, loaded.state.params)


def test_one_member_is_the_plain_trainer_bit_for_bit(swarm, tmp_path):
    _, _, base = swarm
    recipe = recipe_of(base)
    plain = Trainer(devices="all").fit(recipe, steps=8, batch=8, run=tmp_path / "plain").state.params
    digest = recipe.shared_digest(recipe.base_model)
    settings = read_config(tmp_path / "plain")["train"]
    plan = plan_of(Decoder.target, recipe.options(), base=digest, **settings)
    run = Run(tmp_path / "swarm", plan)
    assert run.finish() == "ended"
    store = Store(tmp_path / "swarm")
    fragments = [Objects(store).get_array(digest) for digest in run.ledger.view().newest.state]
    expected = by_path(plain)
    for path, array in read_founding(store).layout.join(fragments).items():
        np.testing.assert_array_equal(array, expected[path], err_msg=path)


def test_changed_base_model_is_refused(swarm, tmp_path):
    run, folder, base = swarm
    with other_norm(base):
        with pytest.raises(InputError, match=r"the files of hf:.*model have changed or differ on this machine: SHA"):
            load_swarm(folder, jax.devices()[:1])
        with pytest.raises(InputError, match="have changed or differ on this machine"):
            Trainer(devices=1).fit(recipe_of(base), steps=1, batch=8, run=tmp_path / "run", init_from=folder)
        with pytest.raises(InputError, match="have changed or differ on this machine"):
            Run(folder, run.member.spec.plan).finish()


def test_swarm_of_adapters_without_a_base_model_is_refused(swarm):
    _, _, base = swarm
    recipe = Decoder(architecture=(base / "config.json").read_text(), data="fake", lora=2)
    with pytest.raises(InputError, match="needs the model that its adapters belong to: train hf:"):
        sizes(recipe, None)
