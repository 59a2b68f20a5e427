"""Every size of GPT-2 trains on every kind of TPU: the TPU compiler's word, on a machine that has none.

A change that breaks a step, makes it need other devices, or bursts its memory, fails here before anyone rents.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tpuswarm.plan.words import GIB

pytestmark = pytest.mark.tpu_compiler
TPUS = ("v2-8", "v3-8", "v4-8", "v5e-8", "v5p-8", "v6e-8")
BATCH = 64
SLACK = 1.05
"""Memory may grow by so much before somebody must look at it."""


def plan(*words: str) -> dict[str, dict]:
    """Rows by TPU, compiled by a command as a user types it."""
    pytest.importorskip("libtpu", reason="the plan extra is not installed")
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words, "--json"]
    command += [word for tpu in TPUS for word in ("--on", tpu)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return {row["accelerator"]: row for row in json.loads(done.stdout)["rows"]}


FITS = {
    "gpt2-124m": {},
    "gpt2-355m": {},
    "gpt2-774m": {},
    "gpt2-1558m": {},
}
"""Size → TPU → sharding, remat, micro-batches and GiB a device, as `tpuswarm plan SIZE --batch 64` gives them."""


@pytest.mark.parametrize("size", FITS)
def test_the_usual_step_fits_as_it_did(size):
    rows = plan(size, "--batch", str(BATCH))
    found = {
        name: (row["sharding"], row["remat"], row["micro_batches"], round(row["hbm_used_bytes"] / GIB, 2))
        for name, row in rows.items()
        if row["fits"] is True
    }
    print(size, found)
    assert list(found) == list(TPUS), {name: row["sentence"] for name, row in rows.items() if row["fits"] is not True}
    for name, (*form, used) in FITS[size].items():
        assert found[name][:3] == tuple(form)
        assert found[name][3] <= SLACK * used, f"{size} on {name} takes {found[name][3]} GiB a device, it took {used}"


def test_the_largest_replicated_does_not_fit_where_it_did_not():
    rows = plan("gpt2-1558m", "--batch", str(BATCH), "--shard", "replicate", "--accumulate", "1")
    assert [name for name, row in rows.items() if row["fits"] is False] == ["v2-8", "v3-8", "v5e-8"]
    assert all("GiB a device of" in rows[name]["problem"] for name in ("v2-8", "v3-8", "v5e-8"))
