"""Every size of GPT-2 trains on every kind of TPU: the TPU compiler's word, on a machine that has none.

A change that breaks a step, makes it need other devices, or bursts its memory, fails here before anyone rents.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tpuswarm.config.units import GIB

SMALL = ("v2-8", "v3-8", "v5e-8")
BATCH = 64
SLACK = 1.05
"""Memory may grow by so much before somebody must look at it."""


def plan(*words: str, on: Sequence[str]) -> dict[str, dict]:
    """Rows by TPU, compiled by a command as a user types it."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words, "--json"]
    command += [word for tpu in on for word in ("--on", tpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {row["accelerator"]: row for row in json.loads(done.stdout)["rows"]}


FITS = {
    "gpt2-124m": {
        "v2-8": ("replicate", "dots", 1, 4.30),
        "v3-8": ("replicate", "dots", 1, 4.30),
        "v4-8": ("replicate", "none", 1, 16.82),
        "v5e-8": ("replicate", "none", 1, 9.39),
        "v5p-8": ("replicate", "none", 1, 16.90),
        "v6e-8": ("replicate", "none", 1, 9.37),
    },
    "gpt2-355m": {
        "v2-8": ("replicate", "full", 1, 7.13),
        "v3-8": ("replicate", "dots", 1, 10.77),
        "v4-8": ("replicate", "dots", 1, 15.10),
        "v5e-8": ("replicate", "dots", 1, 10.48),
        "v5p-8": ("replicate", "none", 1, 44.83),
        "v6e-8": ("replicate", "none", 1, 25.26),
    },
    "gpt2-774m": {
        "v2-8": ("fsdp", "full", 1, 3.67),
        "v3-8": ("replicate", "full", 1, 14.69),
        "v4-8": ("replicate", "dots", 1, 29.66),
        "v5e-8": ("replicate", "full", 1, 13.96),
        "v5p-8": ("replicate", "none", 1, 85.49),
        "v6e-8": ("replicate", "dots", 1, 21.25),
    },
    "gpt2-1558m": {
        "v2-8": ("fsdp", "full", 1, 6.24),
        "v3-8": ("fsdp", "full", 1, 6.24),
        "v4-8": ("replicate", "full", 1, 29.39),
        "v5e-8": ("fsdp", "full", 1, 5.57),
        "v5p-8": ("replicate", "dots", 1, 53.63),
        "v6e-8": ("replicate", "full", 1, 28.57),
    },
}
"""Size → TPU → sharding, remat, micro-batches and GiB a device, as `tpuswarm plan SIZE --batch 64` gives them."""


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("size", FITS)
def test_the_usual_step_fits_as_it_did(size):
    fits_as_it_did(size, tuple(FITS[size]))


@pytest.mark.slow
def test_the_smallest_fits_as_it_did_on_two_generations():
    fits_as_it_did("gpt2-124m", ("v2-8", "v5e-8"))  # recomputed layers; splash attention


def fits_as_it_did(size: str, on: Sequence[str]) -> None:
    rows = plan(size, "--batch", str(BATCH), on=on)
    found = {
        name: (row["sharding"], row["remat"], row["micro_batches"], round(row["hbm_used_bytes"] / GIB, 2))
        for name, row in rows.items()
        if row["fits"] is True
    }
    assert list(found) == list(on), {name: row["sentence"] for name, row in rows.items() if row["fits"] is not True}
    for name in on:
        *form, used = FITS[size][name]
        assert found[name][:3] == tuple(form)
        assert found[name][3] <= SLACK * used, f"{size} on {name} takes {found[name][3]} GiB a device, it took {used}"


@pytest.mark.tpu_compiler
def test_the_largest_replicated_does_not_fit_where_it_did_not():
    rows = plan("gpt2-1558m", "--batch", str(BATCH), "--shard", "replicate", "--accumulate", "1", on=SMALL)
    assert [row["fits"] for row in rows.values()] == [False, False, False]
    assert all("GiB per device, of" in row["problem"] for row in rows.values())


@pytest.mark.tpu_compiler
def test_both_codes_of_a_picture_are_made_on_its_device():
    rows = plan("stylegan2-32", "--data", "fake", "--latent", "512", "--batch", "256", on=("v5e-8",))
    assert "collective" not in {each["kind"] for each in rows["v5e-8"]["hazards"]}
