"""Memory settings and priority of a training process on Linux."""

import os
import subprocess
import sys
import tempfile

import pytest

from tpuswarm.train.process import platform
from tpuswarm.train.process.platform import count_tpu_chips

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc and /proc")

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

NICENESS = """
import os, threading
from pathlib import Path
from tpuswarm.train.process.platform import lower_priority

def threads():
    return {os.getpriority(os.PRIO_PROCESS, int(thread.name)) for thread in Path("/proc/self/task").iterdir()}

wait = threading.Event()
threading.Thread(target=wait.wait, daemon=True).start()
lower_priority()
threading.Thread(target=wait.wait, daemon=True).start()
group = Path("/proc/self/autogroup")
print(threads(), group.read_text().split()[-1] if group.exists() else 0)
os.setpriority(os.PRIO_PROCESS, 0, 19)
lower_priority()
print(os.getpriority(os.PRIO_PROCESS, 0))
"""


def run(program: str, **options: str) -> list[str]:
    env = os.environ | options
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, start_new_session=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_temporaries_of_a_step_stay_with_the_process():
    """A 64 MiB temporary is 16,384 pages; given back at every step they would fault in again."""
    [faults] = run(FAULTS, JAX_PLATFORMS="cpu", XLA_FLAGS="")
    assert float(faults) < 1_000


def test_training_on_processors_has_low_priority_in_all_threads_but_not_in_its_session():
    """A session of low priority starves beside busy ones: a killed member of a swarm did not come back."""
    lowered, nicer = run(NICENESS)
    assert lowered == f"{ {max(10, os.getpriority(os.PRIO_PROCESS, 0))} } 0"
    assert nicer == "19"


@pytest.mark.parametrize(
    ("files", "groups", "count"),
    [
        (["accel0", "accel1", "vfio/vfio"], {}, 2),
        (["vfio/vfio"], {}, 0),
        (["vfio/vfio", "vfio/0", "vfio/1"], {"0": "0000:00:04.0", "1": "0000:00:05.0"}, 2),
        (["vfio/vfio", "vfio/0", "vfio/1"], {"0": "0000:00:04.0", "1": "0000:00:04.1"}, 1),
        (["vfio/vfio", "vfio/10", "vfio/2"], {}, 2),
    ],
)
def test_chips_are_counted_by_their_device_files(tmp_path, files, groups, count):
    for name in files:
        (tmp_path / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "dev" / name).touch()
    for group, address in groups.items():
        (tmp_path / f"sys/kernel/iommu_groups/{group}/devices/{address}").mkdir(parents=True)
    assert count_tpu_chips(tmp_path) == count


def test_cache_moves_to_a_private_temporary_folder_if_home_cannot_be_written(tmp_path, monkeypatch, capfd):
    home = tmp_path / "home"
    home.touch()  # root may write into every folder, but not into a file
    for name in ("TPUSWARM_CACHE", "XDG_CACHE_HOME", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = platform.cache_folder("tokens")
    assert folder.is_relative_to(tmp_path) and folder.parent.stat().st_mode & 0o777 == 0o700
    assert platform.cache_folder("tokens") == folder
    err = " ".join(capfd.readouterr().err.split())
    assert err.count("cannot be written, so the cache is") == 1 and "TPUSWARM_CACHE names another" in err
    monkeypatch.setenv("TPUSWARM_CACHE", "")
    folder.parent.chmod(0o777)
    assert platform.cache_folder("tokens").parent != folder.parent, "somebody else may write there"
