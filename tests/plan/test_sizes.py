"""Every size of GPT-2 trains on every kind of TPU, says the TPU compiler."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.plan.test_fit import GPT2, check_gpt2, compile_all, request
from tpuswarm.cli.plan.plan import DEFAULT_TPUS
from tpuswarm.config.units import GIB
from tpuswarm.plan.compile.request import CompileResult

pytestmark = pytest.mark.tpu_compiler

BATCH = 64
MAX_MEMORY_GROWTH = 1.05


def plan(*words: str, on: Sequence[str]) -> dict[str, dict]:
    """Rows by TPU, compiled by a command as a user types it."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words, "--json"]
    command += [word for tpu in on for word in ("--on", tpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {row["accelerator"]: row for row in json.loads(done.stdout)["rows"]}


TPUS = ("v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8")
FITS = {
    "gpt2-124m": ("dots 4.30", "dots 4.30", "none 16.82", "none 9.39", "none 16.90", "none 9.37"),
    "gpt2-355m": ("full 7.13", "dots 10.77", "dots 15.10", "dots 10.48", "none 44.83", "none 25.26"),
    "gpt2-774m": ("fsdp full 3.67", "full 14.69", "dots 29.66", "full 13.96", "none 85.49", "dots 21.25"),
    "gpt2-1558m": ("fsdp full 6.24", "fsdp full 6.24", "full 29.39", "fsdp full 5.57", "dots 53.63", "full 28.57"),
}
"""Size → for each TPU: sharding if it is not replicate, remat and GiB a device, by `tpuswarm plan SIZE --batch 64`."""


@pytest.mark.parametrize("size", FITS)
def test_size_fits_as_before(size):
    rows = plan(size, "--batch", str(BATCH), on=TPUS)
    assert {name: row["sentence"] for name, row in rows.items() if row["fits"] is not True} == {}
    for name, row in rows.items():
        *sharding, remat, gib = FITS[size][TPUS.index(name)].split()
        assert ([row["sharding"]], row["remat"], row["micro_batches"]) == (sharding or ["replicate"], remat, 1)
        assert row["hbm_used_bytes"] / GIB <= MAX_MEMORY_GROWTH * float(gib), f"{size} needs more memory on {name}"


def test_largest_size_does_not_fit_replicated_on_small_devices():
    small = ("v2-8", "v3-8", "v5e-8")
    rows = plan("gpt2-1558m", "--batch", str(BATCH), "--shard", "replicate", "--accumulate", "1", on=small)
    assert [row["fits"] for row in rows.values()] == [False, False, False]
    assert all("GiB per device, of" in row["problem"] for row in rows.values())


def test_codes_of_a_picture_stay_on_its_device():
    rows = plan("stylegan2-32", "--data", "fake", "--latent", "512", "--batch", "256", on=("v5e-8",))
    assert "collective" not in {hazard["kind"] for hazard in rows["v5e-8"]["hazards"]}


def test_gpt2_trains_on_every_generation():
    requests = {name: request("gpt2-tiny", name, GPT2, batch=64) for name in DEFAULT_TPUS}
    found = compile_all(requests)
    check_gpt2({name: CompileResult.from_json(answer["result"]) for name, answer in found.items()})
