"""A swarm checks memory, disk, devices, hooks and optimizer before it starts."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options

from tpuswarm.errors import InputError
from tpuswarm.swarm.storage.retention import estimate_disk
from tpuswarm.swarm.supervision import local_devices, needs, start

GIB = 2**30


def test_too_little_memory_names_the_members_that_fit(monkeypatch):
    monkeypatch.setattr(needs, "available_memory", lambda: 12 * GIB)
    with pytest.raises(InputError, match=r"9 members need about [\d.]+ GiB .* has 12.0 GiB free; use --members 3"):
        needs.check_memory(9, exchanged=2**28, fragment=2**20, state=3 * 2**28, kind="cpu")
    needs.check_memory(3, exchanged=2**28, fragment=2**20, state=3 * 2**28, kind="cpu")


def test_memory_of_aggregators_payloads_and_rays_store_counts(monkeypatch):
    def needed_gib(others, aggregators, fragment):
        with pytest.raises(InputError, match="--expect" if others else "smaller model") as found:
            needs.check_memory(2, 2 * GIB, fragment, 2**20, "cpu", others, aggregators)
        return float(re.search(r"need about ([\d.]+) GiB", str(found.value))[1])

    monkeypatch.setattr(needs, "available_memory", lambda: 0)
    one = needed_gib(0, 1, 2**27)
    small = 10 * (needs.AGGREGATOR_BYTES / GIB + 2 / 8)
    assert needed_gib(0, 11, 2**27) - one == pytest.approx(small, abs=0.1), "each takes 128 MiB at a time"
    store = 2 * (1 - 1 / 8) + 2 - 0.25
    assert needed_gib(0, 1, GIB) - one == pytest.approx(store, abs=0.1), "payloads of two members, and the store"
    waiting = needed_gib(98, 7, 2**28) - needed_gib(0, 7, 2**28)
    assert waiting == pytest.approx(7 * (16 - 2) / 4, abs=0.1), "16 payloads at a time"
    most = needed_gib(98, 11, 2**28) - needed_gib(0, 11, 2**28)
    assert most == pytest.approx((16 - 2) * 2, abs=0.1), "at most 16 whole ones"


def test_full_disk_is_found_before_anything_starts(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(start, "Cluster", lambda *arguments: pytest.fail("a cluster was about to be started"))
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**20))
    line = "train gpt2-tiny --data fake --layers 1 --width 128 --heads 1 --context 8 --steps 4 --members 4 --run new"
    code, out, err = typed(*line.split())
    assert (code, out) == (2, "") and not (tmp_path / "new").exists()
    assert re.search(r"new will hold up to 0\.\d GiB, .* use --run on a larger disk or gs://BUCKET/FOLDER", err)


def test_disk_estimate_matches_a_measured_run():
    """Measured: 124M parameters, 4 members, Nesterov in f32 held about 70 GB."""
    saved = estimate_disk(124_000_000, "plain", "nesterov", 4)
    assert saved.held == pytest.approx(21 * 124e6 * 4 * (3 + 4)) and 60e9 < saved.held < 75e9
    assert saved.version == 4 * 124e6
    assert estimate_disk(124_000_000, "int8", "average", 4).held < saved.held / 2


def test_files_of_the_run_count_as_room(tmp_path, monkeypatch):
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    (tmp_path / "objects").mkdir()
    (tmp_path / "objects" / "a").write_bytes(bytes(500))
    needs.check_disk(tmp_path, 1500)
    with pytest.raises(InputError, match="will hold up to"):
        needs.check_disk(tmp_path, 1501)


@pytest.mark.parametrize(
    ("kind", "devices", "members", "wanted", "per_member"),
    [("cpu", [], 4, None, 1), ("cpu", [], 4, 2, 2), ("tpu", list("0123"), 2, None, 2), ("gpu", ["1", "3"], 2, 1, 1)],
)
def test_devices_are_divided_among_members(kind, devices, members, wanted, per_member):
    assert local_devices.share_out(kind, devices, members, wanted) == per_member
    environment = local_devices.environments(kind, devices, per_member, members)
    if kind == "cpu":
        assert environment(0) == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(per_member)}
    else:
        name = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}[kind]
        shares = [environment(number)[name].split(",") for number in range(members)]
        assert [*itertools.chain(*shares)] == devices and {len(share) for share in shares} == {per_member}
    assert environment(None) == {}, "a joined machine uses its own devices"


@pytest.mark.parametrize(
    ("tpus", "gpus", "variables", "expected"),
    [
        (4, 0, {}, ("tpu", ["0", "1", "2", "3"])),
        (4, 0, {"JAX_PLATFORMS": "cpu"}, ("cpu", [])),
        (4, 0, {"JAX_PLATFORMS": "tpu,cpu", "TPU_VISIBLE_CHIPS": "1,3"}, ("tpu", ["1", "3"])),
        (4, 0, {"TPU_VISIBLE_CHIPS": "4"}, "TPU_VISIBLE_CHIPS=4: this machine has 4, numbered from 0, and no 4"),
        (0, 4, {"CUDA_VISIBLE_DEVICES": "2,3"}, ("gpu", ["2", "3"])),
        (0, 4, {"CUDA_VISIBLE_DEVICES": "GPU-8d1"}, ("gpu", ["GPU-8d1"])),
        (0, 4, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides all 4 GPUs of this machine: unset it, or"),
        (0, 4, {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cuda"}, "CUDA_VISIBLE_DEVICES=-1 hides all 4 GPUs"),
        (0, 4, {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}, ("cpu", [])),
        (4, 1, {"JAX_PLATFORMS": "cuda,tpu"}, ("gpu", ["0"])),
        (0, 0, {"JAX_PLATFORMS": "tpu"}, r"JAX finds no devices \(JAX_PLATFORMS=tpu\): that platform is not"),
        (0, 0, {"JAX_PLATFORMS": "bogus"}, r"JAX_PLATFORMS=bogus\): that platform is not"),
    ],
)
def test_swarm_obeys_the_variables_that_choose_devices(monkeypatch, tpus, gpus, variables, expected):
    monkeypatch.setattr(local_devices, "count_devices", {"tpu": tpus, "gpu": gpus}.__getitem__)
    for name in ("JAX_PLATFORMS", "TPU_VISIBLE_CHIPS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            local_devices.local_devices("all")
    else:
        assert local_devices.local_devices("all") == expected


def test_member_has_its_share_whatever_the_shell_had_set():
    eight = {"JAX_NUM_CPU_DEVICES": "8", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    environment = {**os.environ, **eight, **local_devices.environments("cpu", [], 2, 4)(0)}
    command = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout == "2\n"


LOAD_LIBTPU = """
import sys
from jax.experimental import topologies
topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
print("loaded", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the plan extra is missing")
@pytest.mark.parametrize("per_member", local_devices.TPU_BOUNDS)
def test_members_on_one_host_load_libtpu_at_the_same_time(per_member):
    environment = local_devices.environments("tpu", [str(index) for index in range(2 * per_member)], per_member, 2)
    members = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD_LIBTPU], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "TPU_SKIP_MDS_QUERY": "1", **environment(number)}, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        assert [member.stdout.readline() for member in members] == ["loaded\n"] * 2
    finally:
        for member in members:
            member.communicate()


@pytest.mark.parametrize(("kind", "members", "wanted"), [("tpu", 3, 2), ("gpu", 3, 2), ("tpu", 5, None)])
def test_too_few_devices_are_refused(kind, members, wanted):
    need = rf"{members} members with .* devices each need {members * (wanted or 1)}, .* has 4 "
    with pytest.raises(InputError, match=need):
        local_devices.share_out(kind, list("0123"), members, wanted)


@pytest.mark.parametrize(
    ("gpus", "members", "theirs", "whole", "shares", "note"),
    [
        (["0"], 2, {}, 0.75, [0.375, 0.375], "2 members share one GPU, each with 38% of its memory"),
        (["0"], 3, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}, 0.9, [0.3] * 3, "3 members share one GPU, each with 30%"),
        (["1", "3"], 3, {}, 0.75, [0.375, 0.75, 0.375], "3 members share 2 GPUs, up to 2 on each, each with at least"),
    ],
)
def test_members_share_gpus_if_there_are_more_members(monkeypatch, gpus, members, theirs, whole, shares, note):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in theirs.items():
        monkeypatch.setenv(name, value)
    assert local_devices.share_out("gpu", gpus, members, None) == local_devices.share_out("gpu", gpus, members, 1) == 1
    environment = local_devices.environments("gpu", gpus, 1, members)
    taken = dict.fromkeys(gpus, 0.0)
    for number, share in zip(range(members), shares, strict=True):
        mine = environment(number)
        with pytest.MonkeyPatch.context() as member:
            member.setattr(os, "environ", os.environ | mine)
            assert generate_pjrt_gpu_plugin_options()["memory_fraction"] == pytest.approx(share), "as JAX reads it"
        taken[mine["CUDA_VISIBLE_DEVICES"]] += share
    assert list(taken.values()) == pytest.approx([whole] * len(gpus))
    [said] = local_devices.sharing_note(gpus, members, 1)
    assert said.startswith(note)
    assert local_devices.sharing_note(gpus, len(gpus), 1) == []
    assert environment(None) == {}, "a joined machine uses its own devices"


@pytest.mark.parametrize(
    ("hooks", "named"),
    [
        ("[Every('evaluation', print), Every(5, max)]", "mine brings Every(5, max)"),
        ("[Every('evaluation', EarlyStopping())]", "mine brings Every('evaluation', EarlyStopping)"),
    ],
)
def test_hook_that_a_swarm_cannot_call_is_refused(typed, tmp_path, monkeypatch, hooks, named):
    more = f"    made.hooks = lambda: {hooks}\n    return made\n"
    err = train_two_members(typed, tmp_path, monkeypatch, "optax.sgd(0.1)", more)
    assert "a swarm calls hooks only at evaluations of its commits" in err and named in " ".join(err.split())


RECIPE = """
import jax.numpy as jnp, numpy as np, optax
from tpuswarm import EarlyStopping, Every, supervised


def loss(params, batch, key):
    return jnp.square(params["w"] - batch["x"]).mean()


def recipe():
    optimizer = {optimizer}
    made = supervised(lambda key: {{"w": jnp.ones(())}}, loss, optimizer, {{"x": np.ones(64, np.float32)}})
"""


def train_two_members(typed, folder, monkeypatch, optimizer, more="    return made\n"):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(start, "Cluster", lambda *arguments: pytest.fail("a cluster was about to be started"))
    (folder / "mine.py").write_text(RECIPE.format(optimizer=optimizer) + more)
    code, out, err = typed(
        *["train", "mine.py:recipe", "--steps", "24", "--batch", "8", "--members", "2", "--run", "new"]
    )
    assert (code, out) == (2, "") and not (folder / "new").exists()
    return err


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        ("optax.adam(optax.cosine_decay_schedule(1e-2, 24))", "has a schedule of its own"),
        ("optax.inject_hyperparams(optax.adamw)(optax.exponential_decay(1e-2, 5, 0.5))", "has a schedule of its own"),
        ("optax.chain(optax.sgd(0.1), optax.add_decayed_weights(optax.linear_schedule(0.1, 0.0, 24)))", "own steps"),
        ("optax.contrib.schedule_free_sgd(0.1, warmup_steps=None)", "keeps parameters of its own"),
        ("optax.lookahead(optax.sgd(0.1), 5, 0.5)", "keeps parameters of its own"),
        ("optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))", "--members 1 or another optimizer"),
    ],
)
def test_optimizer_for_one_member_alone_is_refused(typed, tmp_path, monkeypatch, optimizer, reason):
    """Each member would run through its schedule by its own steps, and keep or average its own parameters.

    Every optimizer of optax with a schedule: train/test_optimization.py.
    """
    err = train_two_members(typed, tmp_path, monkeypatch, optimizer)
    assert "error: the optimizer of mine " in err and reason in err
