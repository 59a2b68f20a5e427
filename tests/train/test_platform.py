"""What is set before JAX starts."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
import jax, jax.numpy as jnp
from tpuswarm.train.platform import local_devices

local_devices()
step = jax.jit(lambda x: jnp.tanh(x @ x.T).sum())
x = jnp.ones((4096, 16))
for _ in range(3):
    step(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step(x).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_steps_temporaries_stay_with_the_process():
    """A 64 MiB temporary is 16,384 pages; given back at every step they would fault in again."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1_000
