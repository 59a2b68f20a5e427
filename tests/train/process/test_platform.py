"""What is set before JAX starts."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource
import jax, jax.numpy as jnp
from tpuswarm.train.process.platform import local_devices

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


WAY = """
import os, sys, threading
from pathlib import Path
from tpuswarm.train.process.platform import make_way
wait = threading.Event()
threading.Thread(target=wait.wait, daemon=True).start()
if len(sys.argv) > 1:
    os.setpriority(os.PRIO_PROCESS, 0, int(sys.argv[1]))
make_way()
threading.Thread(target=wait.wait, daemon=True).start()
print(*[os.getpriority(os.PRIO_PROCESS, int(each.name)) for each in Path("/proc/self/task").iterdir()])
group = Path("/proc/self/autogroup")
print(group.read_text().strip() if group.exists() else "-")
"""


def test_what_trains_on_processors_makes_way_with_all_its_threads():
    """In a session of its own, without a terminal, also before other sessions."""

    def run(*words: str) -> list[str]:
        command = [sys.executable, "-c", WAY, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
        return done.stdout.splitlines()

    nice, group = run()
    least = max(10, os.getpriority(os.PRIO_PROCESS, 0))
    assert set(nice.split()) == {str(least)} and len(nice.split()) >= 3 and (group == "-" or group.endswith("nice 10"))
    assert "19" in run("19")[0].split()  # who is nicer already stays so
