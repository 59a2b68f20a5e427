"""A member of two hosts, each a real process of four virtual devices, in a swarm with a ledger."""

import json
import signal

import numpy as np
import pytest

from tests.hosts import finished, sentence_after, start_hosts
from tests.train import host
from tpuswarm import Trainer
from tpuswarm.swarm.core.arithmetic.fragments import Layout
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

MODULE = "tests.swarm.host"


@pytest.mark.parametrize(
    ("form", "shard", "lives"),
    [
        ("plain", "fsdp", 1),
        pytest.param("plain", "fsdp", 2, marks=pytest.mark.slow),
        pytest.param("int8", "replicate", 2, marks=pytest.mark.slow),
    ],
)
def test_a_member_of_two_hosts(tmp_path, form, shard, lives):
    """Each host also checks at its end that it holds the bits of the last version (tests/swarm/host.py)."""
    finished(start_hosts(MODULE, tmp_path, form=form, shard=shard, lives=lives, steps=host.STEPS), tmp_path)
    store = Store(str(tmp_path / "swarm"))
    view = Ledger(store).view()
    assert len(view.counted) == host.STEPS * host.BATCH and view.version >= 3
    assert not verify(store, lambda sentence: None).problems
    layout = Layout.of({"in": ((host.WIDTH, host.WIDTH), "float32"), "out": ((host.WIDTH,), "float32")}, 2)
    params = layout.join([Objects(store).get_array(digest) for digest in view.newest.state])
    found = json.loads((tmp_path / "found.json").read_text())
    if lives == 2:  # the same version, then small steps from it
        assert found["first"][0] == found["second"][0] and found["first"][1] != found["second"][1]
    if form == "plain":  # invariant 1, up to the order in which gradients are summed
        folder = tmp_path / "plain"
        plain = Trainer(devices=8, seed=0).fit(host.recipe(), steps=host.STEPS, batch=host.BATCH, run=folder)
        for name, leaf in plain.state.params.items():
            np.testing.assert_allclose(params[name], leaf, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_member_that_loses_a_host_is_lost_and_its_ledger_is_sound(tmp_path, victim):
    started = start_hosts(MODULE, tmp_path, form="int8", shard="fsdp", steps=10**6)
    said = sentence_after(started, tmp_path, (tmp_path / "swarm/commits/000003.json").exists, victim, signal.SIGKILL)
    assert said.startswith(f"host {victim} is gone (connection closed), so this host stops too")
    assert said.count("\n") == 1
    assert not verify(Store(str(tmp_path / "swarm")), lambda sentence: None).problems
