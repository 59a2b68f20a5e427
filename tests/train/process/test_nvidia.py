"""GPUs that cannot train: one sentence before data is read, nothing left behind. The driver's tools are imitated."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace

import jax
import pytest

from tpuswarm.errors import InputError
from tpuswarm.train.process import nvidia, platform

TRAIN = "train gpt2-tiny --data absent.txt --run new"
T4 = "0, GPU-8d1, Tesla T4, 7.5, 15360, 15000"
P100 = "1, GPU-9e2, Tesla P100-PCIE-16GB, 6.0, 16384, 16000"
BUSY = "0, GPU-8d1, Tesla T4, 7.5, 15360, 3072"
ADVICE = " (set JAX_PLATFORMS='' to automatically choose an available backend)"
NO_MEMORY = "Unable to initialize backend 'cuda': INTERNAL: no supported devices found for platform CUDA"
"""XLA's text for a GPU whose memory is full (xla/service/platform_util.cc) in JAX's (jax/_src/xla_bridge.py)."""


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Return a function that makes this a machine with JAX's plugin for CUDA 13, a driver and GPUs."""

    def make(lines=(T4,), cuda=13000, has_driver=True, is_on_bus=True, smi="cat {0}"):
        (tmp_path / "site/jax_cuda13_plugin").mkdir(parents=True)
        (tmp_path / "site/jax_cuda13_plugin/__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path / "site")
        (tmp_path / "cards").write_text("".join(f"{line}\n" for line in lines))
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/nvidia-smi").write_text(f"#!/bin/sh\n{smi.format(tmp_path / 'cards')}\n")
        (tmp_path / "bin/nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        monkeypatch.setattr(nvidia, "has_driver", lambda: has_driver)
        monkeypatch.setattr(nvidia, "_has_gpu_on_bus", lambda: is_on_bus)
        monkeypatch.setattr(platform, "count_gpus", lambda: len(lines) if has_driver else 0)

        def driver_version(pointer):
            pointer._obj.value = cuda
            return 0

        libcuda, load = SimpleNamespace(cuDriverGetVersion=driver_version), ctypes.CDLL
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name, *more: libcuda if name == "libcuda.so.1" else load(name, *more)
        )
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        for name in (nvidia.VISIBLE, nvidia.MEMORY_SHARE, nvidia.OLD_MEMORY_SHARE):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(jax, "local_devices", lambda: pytest.fail("JAX opened the GPUs"))

    before = jax.config.values["jax_platforms"]
    jax.config.update("jax_platforms", "")
    yield make
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize("members", [[], ["--members", "2"]], ids=["alone", "swarm"])
@pytest.mark.parametrize(
    ("machine", "variables", "words"),
    [
        (
            {"has_driver": False},
            {},
            "has an NVIDIA GPU and no driver for it: install NVIDIA's driver 580 or later, start a",
        ),
        (
            {"has_driver": False, "is_on_bus": False},
            {"JAX_PLATFORMS": "cuda"},
            "JAX_PLATFORMS asks for a GPU and there is no NVIDIA driver here: install NVIDIA's driver 580 or later, or",
        ),
        (
            {"cuda": 12040},
            {},
            "plugin needs 13.0: install NVIDIA's driver 580 or later, pip uninstall jax-cuda13-plugin",
        ),
        ({"smi": "echo 'NVML: mismatch'; exit 18"}, {}, "NVIDIA's driver does not work: NVML: mismatch; correct that"),
        ({"lines": [T4, P100]}, {}, "GPU 1 (Tesla P100-PCIE-16GB) has compute capability 6.0, and CUDA 13 needs 7.5"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, "CUDA_VISIBLE_DEVICES= hides this machine's GPU: unset it, or train on"),
        ({"lines": [T4, T4]}, {"CUDA_VISIBLE_DEVICES": "-1"}, "CUDA_VISIBLE_DEVICES=-1 hides all 2 GPUs of this"),
        ({}, {"CUDA_VISIBLE_DEVICES": "7"}, "CUDA_VISIBLE_DEVICES=7: this machine has 1, numbered from 0, and no 7"),
    ],
)
def test_gpu_that_cannot_train(gpus, typed, tmp_path, monkeypatch, members, machine, variables, words):
    gpus(**machine)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    jax.config.update("jax_platforms", variables.get("JAX_PLATFORMS", ""))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("tpuswarm.recipes.gpt2.recipe.GPT2.require_data", lambda recipe: None)
    monkeypatch.setattr("tpuswarm.recipes.gpt2.recipe.GPT2.data", lambda *_: pytest.fail("data was read"))
    code, out, err = typed(*TRAIN.split(), *members)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not list((tmp_path / "work").iterdir())


def test_cards_of_a_driver_that_warns_are_used(gpus):
    gpus(smi=f"echo '{T4}'; echo 'WARNING: infoROM is corrupted'; exit 14")
    (card,) = nvidia.list_cards()
    assert card.name == "Tesla T4"


def fake_gpu(num_allocs=0):
    stats = {"num_allocs": num_allocs, "bytes_limit": 12 * 2**30}
    return SimpleNamespace(platform="gpu", local_hardware_id=0, memory_stats=lambda: stats)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, r"GPU 0 \(Tesla T4\) has 3.0 of 15.0 GiB free and JAX reserves 75% .* with XLA_CLIENT_MEM_FRACTION=0.18"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}, "reserves 50% .* less with XLA_PYTHON_CLIENT_MEM_FRACTION=0.18"),
        ({"XLA_CLIENT_MEM_FRACTION": "much"}, "XLA_CLIENT_MEM_FRACTION is a share of a GPU's memory .*, not 'much'"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.18"}, None),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "3.2"}, None),  # unified memory
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, None),  # reserves nothing
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, None),
    ],
)
def test_gpu_in_use_is_refused_if_jax_needs_more_than_is_free(gpus, monkeypatch, variables, words):
    gpus([BUSY])
    platform.require_free_memory([fake_gpu(num_allocs=1)])  # this process uses it
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=words) if words else nullcontext():
        platform.require_free_memory([fake_gpu()])


def test_swarm_looks_at_free_memory_before_its_members_do(gpus, typed, tmp_path, monkeypatch):
    gpus([BUSY])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    code, out, err = typed(*TRAIN.replace("absent.txt", "fake").split(), "--members", "2")
    assert (code, out) == (2, "") and "has 3.0 of 15.0 GiB free" in err and err.count("\n") == 1
    assert not list((tmp_path / "work").iterdir())


def test_gpu_that_jax_cannot_start(gpus, monkeypatch):
    def fail():
        raise RuntimeError(NO_MEMORY + ADVICE)

    gpus(smi="exit 127")  # a container without nvidia-smi would not find it; JAX's own error remains
    monkeypatch.setattr(nvidia, "list_cards", lambda: [])
    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(InputError) as caught:
        platform.local_devices()
    assert str(caught.value) == (
        f"JAX cannot start this machine's GPU ({NO_MEMORY}): see nvidia-smi for its state and its processes, or train "
        "on the CPU with JAX_PLATFORMS=cpu"
    )
    cpu = SimpleNamespace(platform="cpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [cpu])  # JAX logs why its plugin fails, and goes on
    with pytest.raises(InputError, match=r"\(its CUDA plugin does not load, for the reason .* above\): see nvidia-smi"):
        platform.local_devices()
    for name in ("jax_platforms", "jax_platform_name"):
        before = jax.config.values[name]
        jax.config.update(name, "cpu")
        assert platform.local_devices() == [cpu], "the user's choice"
        jax.config.update(name, before)


def test_gpu_without_a_driver_is_found_on_the_bus(tmp_path):
    assert not nvidia._has_gpu_on_bus(tmp_path)
    for address, vendor, kind in (("00", "0x10de", "0x040300"), ("01", "0x8086", "0x030000")):  # sound, Intel
        device = tmp_path / f"sys/bus/pci/devices/0000:{address}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    assert not nvidia._has_gpu_on_bus(tmp_path)
    (device / "vendor").write_text("0x10de\n")
    assert nvidia._has_gpu_on_bus(tmp_path)


def test_driver_is_found_where_linux_and_wsl_have_it(tmp_path):
    def has_driver_with(*files):
        root = tmp_path / str(len(list(tmp_path.iterdir())))
        root.mkdir()
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).touch()
        return nvidia.has_driver(root)

    assert has_driver_with("dev/nvidiactl")
    assert has_driver_with("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1")
    assert not has_driver_with("dev/dxg"), "another maker's GPU"


def test_gpus_of_wsl_are_counted_without_device_files(gpus, tmp_path):
    count = platform.count_gpus
    gpus([T4, T4])
    assert count(tmp_path) == 2
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert count(tmp_path) == 1


def test_unknown_memory_and_other_makers_are_no_obstacle(gpus):
    gpus(["0, GPU-1, NVIDIA GB10, 12.1, [N/A], [N/A]"])
    assert platform.require_gpus(["0"]) == [("0", "GPU-1", "NVIDIA GB10", (12, 1), None, None)]
    platform.require_free_memory([fake_gpu()])
    assert nvidia.parse_capability("gfx90a") is None
