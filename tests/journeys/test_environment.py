"""Environment variables and Ray clusters that cannot work: one sentence, before anything is written."""

import socket
import sys

import pytest

from tests.processes import finish, start

TRAIN = "train gpt2-tiny --data fake --layers 1 --heads 1 --width 8 --context 4 --steps 2 --batch 8 --run new"
NO_CLUSTER = "nothing answers at 127.0.0.1:9 (Connection refused); is that Ray cluster still"
NO_TOKEN = "needs a token; give it in RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
NO_NUMBER = 'Invalid value "abc" for JAX flag jax_num_cpu_devices; correct or unset it'


@pytest.mark.parametrize(
    ("line", "variable", "words"),
    [
        (TRAIN, "JAX_PLATFORMS=cuda", "JAX finds no devices (JAX_PLATFORMS=cuda): that platform is not installed here"),
        (TRAIN, "JAX_NUM_CPU_DEVICES=abc", NO_NUMBER),
        (f"{TRAIN} --members 2", "JAX_NUM_CPU_DEVICES=abc", NO_NUMBER),
        (TRAIN, "XLA_FLAGS=--xla_bogus=1", "Unknown flag in XLA_FLAGS: --xla_bogus=1; correct or unset it"),
    ],
)
def test_variables_of_jax(tmp_path, line, variable, words):
    """Of a swarm: test_swarm_input.py, and of its members: swarm/supervision/test_supervisor.py."""
    program = ["env", variable, sys.executable, "-m", "tpuswarm"]
    out, err = finish(start(line.split(), tmp_path, program), 2)
    assert out == "" and words in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("listens", "token"), [(False, ""), (False, "secret"), (True, "")])
def test_ray_cluster_that_does_not_answer_or_needs_a_token(typed, tmp_path, monkeypatch, listens, token):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if listens else 9}"
        code, out, err = typed(*TRAIN.split(), "--members", "2", "--ray-address", address)
    assert (code, out) == (2, "") and (NO_TOKEN if listens else NO_CLUSTER) in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
