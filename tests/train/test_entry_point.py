"""A wrong call of the library shows one sentence under the user's own lines."""

import re
import signal
import subprocess
import sys
import traceback
from unittest import mock

import pytest

from tests.train import toy
from tests.waiting import until
from tpuswarm import EarlyStopping, InputError, Trainer, load, supervised
from tpuswarm.train.run.directory import METRICS, read_rows

pytestmark = pytest.mark.slow

PARTS = (toy.init, toy.loss, toy.sgd(0.1, False), toy.data())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: Trainer(max_epochs=3), "Trainer takes no max_epochs; give epochs to fit"),
        (lambda: Trainer(devises=1), r"Trainer takes no devises; did you mean devices\?"),
        (lambda: Trainer().fit(toy.recipe(), seed=3), "fit takes no seed; give seed to Trainer"),
        (lambda: Trainer().steps(toy.recipe(), gradient_clip_val=1), "steps takes no grad.*; give clip to Trainer"),
        (lambda: Trainer().fit(toy.init, toy.data()), r"called as fit\(recipe, .*: too many pos.* supervised\(init"),
        (lambda: Trainer().fit(toy.recipe(), run=5), "run is a int: give the path of a folder"),
        (lambda: Trainer().fit(), r"fit is called as .*missing a required argument: 'recipe'"),
        (lambda: supervised(*PARTS[:3]), r"supervised\(init, loss, optimizer, data, schedule=….*'data'"),
        (lambda: EarlyStopping(monitor="eval_loss"), r"EarlyStopping takes no monitor; did you mean metric\?"),
        (lambda: load("runs/x", bset=True), r"load takes no bset; did you mean best\?"),
    ],
)
def test_argument_under_another_name_or_in_another_place_is_answered_with_the_right_one(call, sentence):
    with pytest.raises(InputError, match=sentence):
        call()


LOSS = """
import jax.numpy as jnp, numpy as np, optax
from tpuswarm import StreamSource, Trainer, load, supervised

def helper(params): return params["w"] @ jnp.zeros((7, 2))
def wrong(params, batch, key): return helper(params)
def right(params, batch, key): return jnp.mean(batch["x"] @ params["w"])
def stream():
    for length in (3, 4): yield {"x": np.ones((8, length), np.float32)}

def fit(loss=right, data={"x": np.ones((64, 3), np.float32)}, optimizer=optax.adam(0.1), **options):
    recipe = supervised(lambda key: {"w": jnp.zeros(3)}, loss, optimizer, data)
    return Trainer(**({"devices": 1} | options)).fit(recipe, steps=4, batch=8)

def steps():
    for step in Trainer(devices=1).steps(supervised(lambda key: {"w": jnp.zeros(3)}, wrong, optax.adam(0.1), {})): pass
"""

CALLS = {
    'load("no-such-run")': ["is no run"],
    "fit(wrong)": ["return helper(params)", "@ jnp.zeros((7, 2))", "fails: TypeError"],
    "steps()": ["for step in Trainer", "data arrays need"],
    'fit(devices="many")': [").fit(recipe", "many"],
    "fit(data=StreamSource(stream))": ["pad or cut"],
    "fit(optimizer=optax.GradientTransformation(lambda params: {}['a'], None))": ["lambda params", "KeyError: 'a'"],
}
"""Calls, and words of the lines of the traceback, in order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("program")


def printed(folder, *words):
    """Return the output of a Python program in `folder`, without colours."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)


def assert_in_order(words, text):
    assert re.search(".*".join(map(re.escape, words)), text, re.DOTALL), f"{words} are not in {text}"


def test_traceback_of_a_program_has_the_users_lines_and_one_of_ours(folder):
    tried = "".join(
        f"try: {call}\nexcept Exception: traceback.print_exc(file=sys.stdout); print('=' * 9)\n" for call in CALLS
    )
    (folder / "mine.py").write_text(f"import sys, traceback\n{LOSS}\n{tried}\nfit(wrong)\n")
    *texts, last = printed(folder, "mine.py").split("=" * 9)
    assert len(texts) == len(CALLS)
    for (call, words), text in zip(CALLS.items(), texts, strict=True):
        assert_in_order([call, *words], text)
    for text in [*texts, last[last.index("Traceback") :]]:
        files = re.findall(r'File "(.+?)"', text)
        assert sum(file.endswith("tpuswarm/train/entry_point.py") for file in files) == 1, text
        assert all(file.endswith(("/mine.py", "/entry_point.py")) for file in files), text
        sentence = text.strip().splitlines()[-1]
        assert "InputError: " in sentence and text.count("Traceback") == 1, text


IN_IPYTHON = """
import sys
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="nocolor")
for cell in open("cells.txt").read().split("# cell"):
    shell.run_cell(cell)
    print("=" * 9)
"""


def test_traceback_in_ipython_has_the_users_lines_alone(folder):
    (folder / "ipython.py").write_text(IN_IPYTHON)
    (folder / "cells.txt").write_text("# cell".join([LOSS, *(f"\n{call}\n" for call in CALLS)]))
    first, *texts, _ = printed(folder, "ipython.py").split("=" * 9)
    assert first.strip() == "" and len(texts) == len(CALLS)
    for (call, words), text in zip(CALLS.items(), texts, strict=True):
        trace = text[text.index("InputError  ") :]
        assert_in_order([call, *words], trace)
        assert "tpuswarm/train/" not in trace and "site-packages" not in trace and "hidden" not in trace, trace
        assert len(trace.splitlines()) < 40, trace


ENDLESS = """
import time, numpy as np, optax, jax.numpy as jnp
from tpuswarm import Every, Trainer, supervised

def loss(params, batch, key): return jnp.mean(batch["x"] @ params["w"])

def hook(step): time.sleep(3600)

recipe = supervised(lambda key: {"w": jnp.zeros(3)}, loss, optax.adam(0.1), {"x": np.ones((64, 3), np.float32)})
Trainer(devices=1, hooks=[Every(2, hook)]).fit(recipe)
"""


def test_second_ctrl_c_ends_a_script_like_any_other_with_the_users_lines(tmp_path):
    (tmp_path / "mine.py").write_text(ENDLESS)
    script = subprocess.Popen([sys.executable, "mine.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    until(lambda: any(row["step"] == 2 for run in (tmp_path / "runs").glob("*") for row in read_rows(run / METRICS)))
    script.send_signal(signal.SIGINT)
    assert any("Ctrl-C again" in line for line in script.stderr), "it says that it waits for a step"
    script.send_signal(signal.SIGINT)
    _, err = script.communicate(timeout=240)
    assert script.returncode == -signal.SIGINT
    trace = err[err.index("Traceback") :]
    assert trace.count("File ") <= 3 and "mine.py" in trace and trace.rstrip().endswith("KeyboardInterrupt: SIGINT"), (
        trace
    )


def failing_frames(folder, error):
    """Return the functions in the traceback of a run in which `error` is raised."""
    with mock.patch("tpuswarm.train.trainer.prepare", side_effect=error), pytest.raises(type(error)) as caught:
        toy.trainer().fit(toy.recipe(), steps=2, run=folder / "run")
    return [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_whole_traceback_is_there_for_our_errors_and_for_debugging(tmp_path, monkeypatch):
    ours = {"fit", "steps", "_execute_mock_call"}
    assert ours <= set(failing_frames(tmp_path, KeyError("a bug of ours")))
    assert "steps" not in failing_frames(tmp_path, InputError("words"))
    monkeypatch.setenv("TPUSWARM_DEBUG", "1")
    assert ours <= set(failing_frames(tmp_path, InputError("words")))
