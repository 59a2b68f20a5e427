"""Ctrl-C and closing terminals once a run or a swarm has begun save its work and leave no process."""

import signal
import subprocess
import sys

import pytest

from tests.cli.moments import TRAIN, has_child, processes_of, wait_until
from tests.terminal import CTRL_C, terminal
from tests.waiting import until
from tpuswarm.train.run.life import read_life

pytestmark = pytest.mark.slow
SWARM = [*TRAIN, "--members", "2"]


NEVER_ENDS = """
import ctypes
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
from tpuswarm import supervised

def hang(w):
    Path("hangs").touch()
    mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)  # blocks for ever; no signal wakes it

def loss(params, batch, key):
    held = jax.pure_callback(hang, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(params["w"]))
    return jnp.mean((batch["x"] * params["w"]) ** 2) + held

def recipe():
    return supervised(lambda key: {"w": jnp.ones(())}, loss, optax.sgd(0.1), {"x": np.ones(64, np.float32)})
"""
"""A recipe whose first step never ends; Python runs no signal handlers then, as while XLA computes."""


def test_second_ctrl_c_ends_a_run_whose_devices_hang(tmp_path):
    (tmp_path / "hangs.py").write_text(NEVER_ENDS)
    words = ["train", "hangs.py:recipe", "--steps", "9", "--batch", "8", "--run", "runs/a"]
    with terminal(words, tmp_path) as opened:
        opened.wait(lambda _: (tmp_path / "hangs").exists())
        opened.send(CTRL_C)
        opened.wait("Ctrl-C again stops without saving")
        opened.send(CTRL_C)
        assert "interrupted twice: the checkpoint of step 0 is safe" in " ".join(opened.finish(130).split())
    life = read_life(tmp_path / "runs/a")
    assert life.state == "stopped" and "the checkpoint of step 0 is safe" in life.message


@pytest.mark.parametrize("name", ["gcs_server", "ray::ServerActor"])
def test_ctrl_c_while_a_swarm_starts_does_not_wait_for_it(tmp_path, name):
    with terminal(SWARM, tmp_path) as opened:
        wait_until(has_child(name), opened, tmp_path / "runs/a")
        opened.send(CTRL_C)
        text = opened.finish(130)
        assert "runs/a was removed: it stopped before there was anything to keep" in opened.sentences
        assert text.rstrip().endswith("interrupted") and "their last work" not in text
        until(lambda: not processes_of(opened.process.pid))
    assert not list(tmp_path.glob("runs/*"))


def test_terminal_that_closes_while_a_swarm_starts_leaves_a_stopped_run(tmp_path):
    """Nobody would see a message, so the run itself records it."""
    with terminal(SWARM, tmp_path) as opened:
        wait_until(has_child("raylet/raylet"), opened, tmp_path)
        assert opened.hang_up() == 128 + signal.SIGHUP
    assert read_life(tmp_path / "runs/a").state == "stopped"


INTERRUPTED_BEFORE_IT_CONNECTS = """
import os, signal
from pathlib import Path
from tpuswarm.swarm.engines.variables import use_token
from tpuswarm.swarm.engines.opening import open_ray
import ray._private.state as state
from tpuswarm.train.process.stop import InterruptHandler
end, real = InterruptHandler(), state.GlobalStateAccessor

def accessor(options):
    made = real(options)
    print("made", flush=True)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        return made
    except KeyboardInterrupt:  # as where it comes while a call returns
        del made
        raise

state.GlobalStateAccessor = accessor
use_token(Path("token"))
try:
    open_ray(None, 80 * 2**20, None, False)
except KeyboardInterrupt:
    end.end(None)
"""


def test_ctrl_c_before_ray_reads_its_state_does_not_abort(tmp_path):
    """Ray aborts or hangs when its accessor is deleted unconnected: 4 of 400 starts interrupted there."""
    command = [sys.executable, "-c", INTERRUPTED_BEFORE_IT_CONNECTS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "made" in done.stdout
    assert (done.returncode, done.stderr.strip()) == (130, "interrupted")
