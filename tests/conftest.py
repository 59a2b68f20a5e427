"""Every test runs on 8 virtual CPU devices, under strict rank promotion, with caches of its own."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# Few cores must not look like dead devices: collectives of 8 virtual devices may wait long for a thread.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
)
if "TPUSWARM_CACHE" not in os.environ:  # parallel workers inherit the one of the process that starts them
    os.environ["TPUSWARM_CACHE"] = tempfile.mkdtemp(prefix="tpuswarm-tests-")
    atexit.register(shutil.rmtree, os.environ["TPUSWARM_CACHE"], ignore_errors=True)

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory):
    """A small text with a structure that can be learnt."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs.\n" for n in range(400)))
    return path


@pytest.fixture
def devices():
    """The 8 virtual devices."""
    return jax.devices()
