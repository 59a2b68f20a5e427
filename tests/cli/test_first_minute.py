"""The first moments of a command: it shows something soon, and imports nothing that it does not need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleet.conftest import GOLDEN
from tests.terminal import terminal
from tpuswarm.recipes import GPT2

pytestmark = pytest.mark.slow

UNUSED_BY_HELP = {
    "asyncio", "pydantic", "rich", "numpy", "jax", "ray", "optax", "orbax", "matplotlib", "tpuswarm.cli.console",
}  # fmt: skip
"""Modules that take tenths of a second each on a slow machine, and one that all commands import."""
UNUSED_BY_PREVIEWS = {"jax", "ray", "grpc", "google.cloud", "google.auth", "asyncssh"}
ANNOUNCES_JAX = """
import os, sys
class Announcer:
    def find_spec(self, name, path=None, target=None):
        if name == "jax": os.write(2, b"[jax is imported]")
sys.meta_path.insert(0, Announcer())
from tpuswarm.cli import main
main()
"""


COMPLETION = {"_TPUSWARM_COMPLETE": "complete_bash", "COMP_WORDS": "tpuswarm s", "COMP_CWORD": "1"}
COMPLETED = "simulate\nstatus\nstop\nsample\nssh\nsync\nsetup\nssh-config"


@pytest.mark.parametrize(
    ("line", "environment", "printed", "unused"),
    [
        pytest.param("", {}, "Usage: tpuswarm", UNUSED_BY_HELP, id="help"),
        pytest.param("", COMPLETION, COMPLETED, UNUSED_BY_HELP - {"pydantic"}, id="completion"),  # typer imports it
        ("status --help", {}, "", {"numpy"}),
        ("up --help", {}, "", {"numpy"}),
        ("list --help", {}, "", {"numpy", "tpuswarm.fleet.training", "tpuswarm.swarm.views.status"}),
        ("up --dry-run", {}, "", UNUSED_BY_PREVIEWS),
        ("catalog", {}, "", UNUSED_BY_PREVIEWS | {"numpy"}),
    ],
)
def test_command_imports_nothing_that_it_does_not_use(tmp_path, line, environment, printed, unused):
    shutil.copyfile(GOLDEN / "trc.toml", tmp_path / "swarm.toml")
    program = (
        f"import sys\nfrom tpuswarm.cli import main\nsys.argv = ['tpuswarm', *{line.split()}]\n"
        f"try: main()\nfinally: print([name for name in {sorted(unused)} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, **environment}, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    assert done.stdout.startswith(printed) and done.stdout.endswith("\n[]\n"), done


@pytest.mark.parametrize("words", ["train gpt2-tiny --devices 99", "sample runs/a"])
def test_screen_shows_something_before_jax_is_loaded(tmp_path, words):
    Path(tmp_path, "runs/a").mkdir(parents=True)
    recipe = f"[recipe]\nname = 'a'\ntarget = '{GPT2}'\n[recipe.options]\n"
    config = f"{recipe}[train]\nsteps = 1\nbatch = 1\nseed = 0\n"
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
