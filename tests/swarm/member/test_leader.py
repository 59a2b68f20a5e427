"""A member of two hosts, each a real process of four virtual devices, in a swarm with a ledger."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.hosts import finished, start_hosts
from tests.swarm.chains import problems_of
from tests.train import host, wide
from tpuswarm import Trainer
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store

pytestmark = pytest.mark.slow
PROGRAM = str(Path(__file__).parents[1] / "host.py")


@pytest.mark.parametrize(
    ("form", "shard"), [pytest.param("plain", "fsdp", marks=pytest.mark.long), ("int8", "replicate")]
)
def test_two_hosts_train_as_one_member(tmp_path, form, shard):
    """Each host also checks at its end that it holds the bits of the last version (tests/swarm/host.py)."""
    finished(start_hosts(PROGRAM, tmp_path, form=form, shard=shard, steps=host.STEPS), tmp_path)
    store = Store(str(tmp_path / "swarm"))
    view = Ledger(store).view()
    assert len(view.counted) == host.STEPS * host.BATCH and view.version >= 3
    assert not problems_of(store)
    losses = json.loads((tmp_path / "found.json").read_text())  # the same version, then small steps from it
    assert losses["first"][0] == losses["second"][0] and losses["first"][1] != losses["second"][1]
    layout = Layout.pack({"in": ((host.WIDTH, host.WIDTH), "float32"), "out": ((host.WIDTH,), "float32")}, 2)
    params = layout.join([Objects(store).get_array(digest) for digest in view.newest.state])
    held_out = host.recipe().data("validation").rows(0, 64)
    assert losses["evaluation"]["eval_rows"] == 64
    assert losses["evaluation"]["eval_loss"] == pytest.approx(float(wide.loss(params, held_out, None)), rel=1e-4)
    if form == "plain":  # invariant 1, up to the order in which gradients are summed
        trainer = Trainer(devices=1, seed=0)
        plain = trainer.fit(host.recipe(), steps=host.STEPS, batch=host.BATCH, run=tmp_path / "plain")
        for name, leaf in plain.state.params.items():
            np.testing.assert_allclose(params[name], leaf, rtol=1e-4, atol=1e-5)
