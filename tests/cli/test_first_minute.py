"""What a person sees in the first moments: something at once, and wrong words answered before anything is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.terminal import terminal
from tpuswarm.train.run.directory import Run

HEAVY = ("jax", "ray", "optax", "orbax", "matplotlib")
"""What takes a second or more to import, the first two alone or together."""
WRONG = [
    "train gpt2-tny",
    "train gpt2-tiny --stepz 5",
    "train gpt2-tiny --steps many",
    "train gpt2-tiny --batch -3",
    "train gpt2-tiny --steps 5 --tokens 10K",
    "train gpt2-tiny --lr fast",
    "train gpt2-tiny --data nowhere.txt",
    "train gpt2-tiny --data nowhere.txt --dry-run",
    "train gpt2-tiny --data empty.txt",
    "train gpt2-tiny --lr nan",
    "train gpt2-tiny --heads 3",
    "train gpt2-tiny --precision fp61",
    "train gpt2-tiny --shard replikate",
    "train gpt2-tiny --devices some",
    "train gpt2-tiny --freeze (",
    "train gpt2-tiny --init-from nowhere",
    "train gpt2-tiny --run file.txt",
    "train gpt2-tiny --run .",
    "train gpt2-tiny --run runs/used",
    "train gpt2-tiny --cycle 20",
    "train gpt2-tiny --members 2 --outer avrage",
    "train gpt2-tiny --members 2 --profile",
    "train gpt2-tiny --hosts 2",
    "train nowhere.py:line",
    "train nowhere.toml",
    "train wrong.toml",
    "plan gpt2-tny",
    "plan gpt2-tiny --on v77-8",
    "plan gpt2-tiny --batch many",
    "plan gpt2-tiny --heads 3",
    "plan gpt2-tiny --hedas 2",
    "sample nowhere",
    "sample nowhere --temperature nan",
    "evaluate nowhere",
    "export nowhere out --format hf",
    "profile nowhere",
    "ledger verify nowhere",
    "status nowhere",
    "logs nowhere",
    "stop nowhere",
    "join nowhere --token-file file.txt",
    "join 127.0.0.1:1 --token-file nowhere",
    "simulate nowhere.toml",
]
SLOW = ("asyncio", "pydantic", "rich", "numpy", *HEAVY)
"""What help has no use for, tenths of a second each on a slow machine."""
ONE_AFTER_THE_OTHER = f"""
import contextlib, io, json, sys
from tpuswarm.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line.split()
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try: main()
        except SystemExit as end: code = end.code
    print(json.dumps([line, code, said.getvalue(), [name for name in {HEAVY} if name in sys.modules]]))
"""
TELLS_OF_JAX = """
import os, sys
class Teller:
    def find_spec(self, name, path=None, target=None):
        if name == "jax": os.write(2, b"[jax is imported]")
sys.meta_path.insert(0, Teller())
from tpuswarm.cli import main
main()
"""


def test_help_loads_nothing_that_it_does_not_need(tmp_path):
    program = (
        "import sys; from tpuswarm.cli.app import make_app; make_app(); "
        f"print([name for name in {SLOW} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.stdout == "[]\n", done.stderr


def test_wrong_words_are_answered_before_anything_heavy_is_loaded(tmp_path):
    (tmp_path / "file.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    held = Run(tmp_path / "runs/used")
    (tmp_path / "wrong.toml").write_text("[train]\nrecipe = 'gpt2-tiny'\nstepz = 5\n")
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_THE_OTHER, json.dumps(WRONG)], cwd=tmp_path, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    held.close()
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, *_ in answers] == WRONG, done.stderr
    for line, code, said, loaded in answers:
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, (line, code, said)
        assert loaded == [], line
    assert {path.name for path in tmp_path.iterdir()} == {"empty.txt", "file.txt", "runs", "wrong.toml"}


@pytest.mark.parametrize("words", ["train gpt2-tiny --devices 99", "sample runs/a"])
def test_something_is_on_the_screen_before_jax_is_loaded(tmp_path, words):
    Path(tmp_path, "runs/a").mkdir(parents=True)
    config = "[recipe]\nname = 'a'\ntarget = ''\n[recipe.options]\n[train]\nsteps = 1\nbatch = 1\nseed = 0\n"
    Path(tmp_path, "runs/a/config.toml").write_text(config)
    with terminal([sys.executable, "-c", TELLS_OF_JAX, *words.split()], tmp_path) as opened:
        seen = opened.wait("[jax is imported]")
        assert seen.splitlines()[0].index("…") < seen.index("[jax is imported]")
        said = opened.finish(2)
    assert said.startswith("error: ") and "…" not in said, "what was waited for gives way to what is said"


def test_a_pipe_gets_no_words_of_waiting(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", TELLS_OF_JAX, "train", "gpt2-tiny", "--devices", "99"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, env={**os.environ, "XLA_FLAGS": ""},
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.startswith("[jax is imported]error: ") and done.stdout == ""
