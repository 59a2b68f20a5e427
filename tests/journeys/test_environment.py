"""What the shell has set, and cannot be: one sentence, before anything is written."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = "train gpt2-tiny --data fake --layers 1 --heads 1 --width 8 --context 4 --steps 2 --batch 8 --run new"
RAY = f"{TRAIN} --members 2 --ray-address"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"JAX_PLATFORMS": "cuda"}, "JAX finds no devices (JAX_PLATFORMS=cuda): that platform is not installed here"),
        ({"JAX_NUM_CPU_DEVICES": "abc"}, 'Invalid value "abc" for JAX flag jax_num_cpu_devices; correct or unset it'),
    ],
)
def test_variables_of_jax(tmp_path, variables, words):
    program = Path(sys.executable).with_name("tpuswarm")
    environment = {**os.environ, "JAX_PLATFORMS": "", **variables}
    done = subprocess.run(
        [program, *TRAIN.split()], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "") and words in done.stderr and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "token", "words"),
    [
        ("127.0.0.1:9", None, "nothing answers at 127.0.0.1:9 (Connection refused); is that Ray cluster still"),
        ("127.0.0.1:9", "secret", "nothing answers at 127.0.0.1:9 (Connection refused); is that Ray cluster still"),
        ("nowhere", "secret", "ray-address is HOST:PORT, with a port up to 65535, not 'nowhere'"),
        ("127.0.0.1:99999", "secret", "ray-address is HOST:PORT, with a port up to 65535, not '127.0.0.1:99999'"),
    ],
)
def test_a_ray_cluster_that_is_not_there(typed, tmp_path, monkeypatch, address, token, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token or "")
    code, out, err = typed(*RAY.split(), address)
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_ray_cluster_without_its_token(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        code, out, err = typed(*RAY.split(), address)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"the Ray cluster at {address} needs a token; give it in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH" in err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("", "--dashboard needs --members"),
        ("--members 2", "--dashboard needs what ray[default] brings"),
        ("--members 2 --ray-address auto", "--dashboard and --ray-address exclude each other"),
    ],
)
def test_a_dashboard_that_cannot_be(typed, tmp_path, monkeypatch, more, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray.dashboard.optional_deps", None)  # as where only `ray` is installed
    code, out, err = typed(*TRAIN.split(), "--dashboard", *more.split())
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
