"""One model trained by all workers of a slice, whose processes JAX numbers by itself, by one line."""

import re

import numpy as np
import pytest

from tests.remote.conftest import SLICE
from tests.train import wide
from tpuswarm import Trainer
from tpuswarm.train.run.checkpoint import read_arrays, require_intact
from tpuswarm.train.user_code import build_recipe

pytestmark = pytest.mark.slow
COPY = ".cache/tpuswarm/runs/rehearsal-trio/runs/pod"
METADATA = "curl -s -H Metadata-Flavor:Google http://$GCE_METADATA_HOST/computeMetadata/v1/instance/attributes/"
TARGET = f"{wide.__file__}:wide"
TRAIN = f"$TPUSWARM_PYTHON -m tpuswarm train {TARGET} --batch 16 --steps 4 --shard fsdp"
PROGRAM = """\
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tpuswarm import Trainer, supervised

x = np.random.default_rng(0).normal(size=(1_000, 3)).astype(np.float32)
data = {"x": x, "y": x @ np.float32([1, -2, 3])}
init = lambda key: {"w": jnp.zeros(3), "b": jnp.zeros(())}
loss = lambda params, batch, key: jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)
result = Trainer().fit(supervised(init, loss, optax.adam(0.1), data), steps=5, run=RUN)
print(f"process {jax.process_index()} of {jax.process_count()}: step {result.step}")
"""


def test_worker_has_the_number_and_addresses_of_the_metadata_server(fleet):
    own, told = "$TPU_WORKER_ID $TPU_WORKER_HOSTNAMES", ("agent-worker-number", "worker-network-endpoints")
    line = f"echo {own} {' '.join(f'$({METADATA}{key})' for key in told)}"
    fleet.detach(SLICE, "numbers", line)
    for out in (fleet.exec(SLICE, line), fleet.run("logs", "numbers", "-f")[0]):
        found = {}
        for text in out.splitlines():
            number, names, told_number, endpoints = text.partition("│")[2].split()
            assert number == told_number and names == ",".join(re.findall(r"unknown:unknown:([\d.]+)", endpoints))
            found[number] = names
        assert sorted(found) == ["0", "1", "2", "3"] and len(set(found.values())) == 1
    assert fleet.exec("v2", "echo ${TPU_WORKER_ID-none}").endswith("│ none\n"), "a machine of one host is no slice"


def test_one_line_trains_one_model_on_all_workers(fleet, tmp_path):
    """The checkpoint has the same values as that of one process. On a shared disk: crash/test_several_hosts.py."""
    out, err = fleet.run("exec", SLICE, "--", f"{TRAIN} --run gs://rehearsal-trio/runs/pod")
    assert "4/4 ok" in err and "wide on 16 x cpu" in err, out + err
    assert err.count("of a slice of 4 workers, which train together") == 4 and out.count("finished at step 4 of 4") == 4
    zero, one = (fleet.user_home(f"{SLICE}-{worker}") / COPY for worker in (0, 1))
    assert not (one / "checkpoints").exists(), "each worker has its own disk"
    Trainer().fit(build_recipe(TARGET, {}), steps=4, batch=16, run=tmp_path / "alone")
    pod, alone = (read_arrays(require_intact(folder)[0]) for folder in (zero, tmp_path / "alone"))
    assert pod.keys() == alone.keys()
    for name, array in alone.items():
        np.testing.assert_allclose(pod[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


def test_program_that_was_told_nothing_joins_the_other_workers_or_says_that_it_trains_alone(fleet):
    """Without the variables of `exec`, as in a shell of one's own. JAX numbers the processes in reverse here."""
    line = f"unset TPU_WORKER_ID TPU_WORKER_HOSTNAMES; $TPUSWARM_PYTHON -c '{PROGRAM}'"
    out = fleet.exec(SLICE, line.replace("RUN", '"gs://rehearsal-trio/runs/line"'))
    expected = [f"{SLICE}/{worker} │ process {3 - worker} of 4: step 5" for worker in range(4)]
    assert sorted(text for text in out.splitlines() if "│ process" in text) == expected
    out, err = fleet.run("exec", SLICE, "--", line.replace("RUN", "None"))
    assert out.count("│ process 0 of 1: step 5") == 4
    assert err.count("of a slice of 4 workers; it trains alone: it needs a run") == 4
