"""Wrong input to `train --members` and `join`: one sentence, before anything is started."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.journeys.documents import ROOT
from tpuswarm.swarm.storage.retention import disk
from tpuswarm.swarm.supervision import local_devices as machine
from tpuswarm.swarm.supervision import needs, start

MODEL = ROOT / "tests" / "recipes" / "golden" / "model"
TRAIN = "train gpt2-tiny --data fake --layers 1 --width 16 --heads 1 --context 8 --steps 4"

NORMED = """
import jax.numpy as jnp, numpy as np, optax
from tpuswarm import supervised
def loss(params, extra, batch, key):
    return (batch["x"] * params["w"]).mean(), ({}, {"mean": batch["x"].mean()})
def recipe():
    return supervised(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(0.1), {"x": np.ones(8, np.float32)},
                      extra=lambda key: {"mean": jnp.zeros(())})
"""


@pytest.fixture
def call(monkeypatch, typed, tmp_path):
    """Run a command in this process, in an empty directory, without a cluster; (code, out, err)."""
    monkeypatch.chdir(tmp_path)

    def none(*arguments, **options):
        raise AssertionError("a cluster was about to be started")

    monkeypatch.setattr(start, "Cluster", none)

    return lambda line: typed(*line.split())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--members -1", "members must be at least 0, not -1"),
        ("--members 2 --cycle 0", "cycle must be at least 1, not 0"),
        ("--members 2 --devices-per-member 0", "devices-per-member must be at least 1, not 0"),
        ("--members 2 --outer nesterof", "outer is average or nesterov, not 'nesterof'"),
        ("--members 2 --outer average --outer-lr 0.5", "--outer average takes no --outer-lr (0.5)"),
        ("--members 2 --outer nesterov --outer-lr -1", "outer-lr must be above 0, not -1"),
        ("--members 2 --quantize int9", "quantize is int8 or int4, not 'int9'"),
        ("--members 2 --overlap 3", "overlap is auto or 0, not '3'"),
        ("--members 2 --devices 4", "this machine has no TPU or GPU to share out"),
        ("--members 2 --batch 12 --devices-per-member 5", "a batch of 12 rows does not divide evenly over devices (5)"),
        ("--members 2 --eval-every 5m", "in a swarm --eval-every counts steps"),
        (
            f"--members 2 --init-from hf:{MODEL}",
            "is a different GPT-2: it has layers 2, heads 2, this one has layers 1, heads 1",
        ),
        ("--members 10000", "members need about"),
        (
            "--members 2 --profile",
            "--profile is for one process; to trace a member: `tpuswarm profile RUN",
        ),
        ("--cycle 20", "--cycle needs --members"),
        ("--accept-code", "--accept-code needs --members"),
    ],
)
def test_wrong_options(call, tmp_path, options, sentence):
    code, out, err = call(f"{TRAIN} --run new {options}")
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_running_statistics_are_not_quantized(call, tmp_path):
    (tmp_path / "normed.py").write_text(NORMED)
    code, out, err = call("train normed.py:recipe --steps 4 --batch 4 --run new --members 2 --quantize int8")
    assert (code, out) == (2, "") and err.endswith("a variance below 0; leave it out\n")
    assert "running statistics (extra/mean)" in err and not (tmp_path / "new").exists()


def test_memory_names_what_fits(monkeypatch):
    monkeypatch.setattr(needs, "available_memory", lambda: 8 * 2**30)
    with pytest.raises(needs.InputError, match=r"9 members need about [\d.]+ GiB .* has 8.0 GiB free; use --members 2"):
        needs.check_memory(9, exchanged=2**28, largest=2**20, state=3 * 2**28, kind="cpu")
    needs.check_memory(2, exchanged=2**28, largest=2**20, state=3 * 2**28, kind="cpu")


def test_memory_counts_all_that_serves_members(monkeypatch):
    """Each aggregator, the payloads that all take at a time, and Ray's store, twice the largest one sent at once."""

    def needed(others, aggregators, largest):
        with pytest.raises(needs.InputError, match="--expect" if others else "smaller model") as found:
            needs.check_memory(2, 2**31, largest, 2**20, "cpu", others, aggregators)
        return float(re.search(r"need about ([\d.]+) GiB", str(found.value))[1])

    monkeypatch.setattr(needs, "available_memory", lambda: 0)
    one = needed(0, 1, 2**20)
    more = 10 * (needs.AGGREGATOR_BYTES / 2**30 + 2 / 16)
    assert needed(0, 11, 2**20) - one == pytest.approx(more, abs=0.1), "small arrays go together, 64 MiB at a time"
    more = 2 * (1 - 1 / 16) + 2 - 0.25
    assert needed(0, 1, 2**30) - one == pytest.approx(more, abs=0.1), "two members' payloads, and the store"
    assert needed(98, 7, 2**28) - needed(0, 7, 2**28) == pytest.approx(7 * (16 - 2) / 4, abs=0.1), "16 at a time"
    assert needed(98, 11, 2**28) - needed(0, 11, 2**28) == pytest.approx((16 - 2) * 2, abs=0.1), "16 whole ones at most"


def test_a_disk_that_is_too_small_is_found_before_anything_starts(call, tmp_path, monkeypatch):
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    code, out, err = call(f"{TRAIN} --members 4 --run new --width 128")
    assert (code, out) == (2, "") and not (tmp_path / "new").exists()
    assert re.search(r"new will hold up to 0\.\d GiB, .* use --run on a larger disk or gs://BUCKET/FOLDER", err)


def test_what_a_run_keeps_is_what_an_audit_saw():
    """124M, 4 members, Nesterov in f32: about 70 GB were seen: versions, momenta and buffers, pushes."""
    kept = disk(124_000_000, "plain", "nesterov", 4)
    assert kept.held == pytest.approx(21 * 124e6 * 4 * (3 + 4)) and 60e9 < kept.held < 75e9
    assert kept.version == 4 * 124e6
    assert disk(124_000_000, "int8", "average", 4).held < kept.held / 2


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "a").write_bytes(bytes(500))
    needs.check_disk(tmp_path, 1500)
    with pytest.raises(needs.InputError, match="will hold up to"):
        needs.check_disk(tmp_path, 1501)


@pytest.mark.parametrize(
    ("kind", "devices", "members", "asked", "each"),
    [("cpu", [], 4, None, 1), ("cpu", [], 4, 2, 2), ("tpu", [0, 1, 2, 3], 2, None, 2), ("gpu", [1, 3], 2, 1, 1)],
)
def test_devices_are_shared_out(kind, devices, members, asked, each):
    assert machine.share_out(kind, devices, members, asked) == each
    made = machine.environments(kind, devices, each)
    if kind == "cpu":
        assert made(0) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(each)}
    else:
        name = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}[kind]
        shares = [[int(index) for index in made(number)[name].split(",")] for number in range(members)]
        assert [index for share in shares for index in share] == devices and all(len(share) == each for share in shares)
    assert made(None) == {}  # a machine that joins has devices of its own


def test_a_member_has_its_share_whatever_the_shell_had_set():
    eight = {"JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    environment = {**os.environ, **eight, **machine.environments("cpu", [], 2)(0)}
    command = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "2\n"


def test_too_few_devices_are_refused():
    with pytest.raises(machine.InputError, match=r"3 members with 2 devices each need 6, .* has 4 "):
        machine.share_out("tpu", [0, 1, 2, 3], 3, 2)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("nowhere --token-file token", "prints is HOST:PORT, with a port up to 65535, not 'nowhere'"),
        ("127.0.0.1:1 --token-file missing", "missing cannot be read"),
        ("127.0.0.1:1 --token-file empty", "empty is empty"),
        ("127.0.0.1:1 --token-file token", "nothing answers at 127.0.0.1:1"),
    ],
)
def test_joining_nowhere(call, tmp_path, line, sentence):
    (tmp_path / "token").write_text("0" * 64)
    (tmp_path / "empty").write_text("")
    code, out, err = call(f"join {line}")
    assert (code, out) == (2, "") and sentence in err and err.count("\n") == 1
