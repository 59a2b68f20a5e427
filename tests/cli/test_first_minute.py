"""The first moments of a command: it shows something soon, and imports nothing that it does not need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import terminal

pytestmark = pytest.mark.slow

UNUSED_BY_HELP = (
    "asyncio", "pydantic", "rich", "numpy", "jax", "ray", "optax", "orbax", "matplotlib", "tpuswarm.cli.console",
)  # fmt: skip
"""Modules that take tenths of a second each on a slow machine, and one that all commands import."""
ANNOUNCES_JAX = """
import os, sys
class Announcer:
    def find_spec(self, name, path=None, target=None):
        if name == "jax": os.write(2, b"[jax is imported]")
sys.meta_path.insert(0, Announcer())
from tpuswarm.cli import main
main()
"""


def test_help_loads_only_what_it_needs(tmp_path):
    program = (
        "import sys; from tpuswarm.cli.app import run; sys.argv = ['tpuswarm']; run(); "
        f"print([name for name in {UNUSED_BY_HELP} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith("Usage: tpuswarm ") and done.stdout.endswith("\n[]\n"), done.stderr


@pytest.mark.parametrize("words", ["train gpt2-tiny --devices 99", "sample runs/a"])
def test_screen_shows_something_before_jax_is_loaded(tmp_path, words):
    Path(tmp_path, "runs/a").mkdir(parents=True)
    config = "[recipe]\nname = 'a'\ntarget = ''\n[recipe.options]\n[train]\nsteps = 1\nbatch = 1\nseed = 0\n"
    Path(tmp_path, "runs/a/config.toml").write_text(config)
    with terminal([sys.executable, "-c", ANNOUNCES_JAX, *words.split()], tmp_path) as opened:
        seen = opened.wait("[jax is imported]")
        assert seen.splitlines()[0].index("…") < seen.index("[jax is imported]")
        printed = opened.finish(2)
    assert printed.startswith("error: ") and "…" not in printed, "the error replaces the progress line"


def test_progress_of_loading_is_not_written_to_a_pipe(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ANNOUNCES_JAX, "train", "gpt2-tiny", "--devices", "99"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ, "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("[jax is imported]error: ") and done.stdout == ""
