"""Every command that draws, in a terminal of each size."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.terminal import CTRL_C, LARGE, SMALL, terminal
from tpuswarm.train.run.directory import Run, append_event

pytestmark = pytest.mark.slow
SIMULATED = """
hours = 0.1

[model]
parameters = "10M"
batch = 64
tokens_per_row = 1024

[exchange]
cycle = 100

[[members]]
name = "a name of a pool of machines"
count = 2
tokens_per_s = 110_000
mbit_up = 1_000
mbit_down = 1_000
latency_ms = 2
"""
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--context", "32"]
EXAMPLES = Path(__file__).parents[2] / "examples"


def train(text_file, *words):
    return ["train", "gpt2-tiny", "--data", str(text_file), *TINY, *words]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, finished_run, watched_swarm):
    """A folder with two finished runs, a plain one and a swarm's, and a swarm to simulate."""
    folder = tmp_path_factory.mktemp("screens")
    (folder / "small.toml").write_text(SIMULATED)
    shutil.copytree(finished_run.run, folder / "runs" / "plain")
    shutil.copytree(watched_swarm.run, folder / "runs" / "swarm")
    return folder


def test_swarm_view(watched_swarm):
    run, small, large, shown = watched_swarm
    for screen in (small, large):
        view = screen.index("gpt2-tiny, 2 members: runs/swarm")
        assert 0 <= screen.index("commit ") < view  # the newest event stands above the view
        assert screen.index("of 57,600 tokens counted") > view
        assert re.search(r"\d:\d\d:\d\d elapsed +\S+ left +\S+ steps/s +[\d,]+ tokens/s", screen)
        assert len(re.findall(r"\nm[01] +(?:alive|joining)", screen)) == 2
    printed = " ".join(shown.split())
    assert "to add a machine: `tpuswarm join" in printed and "100%" in shown
    status = json.loads((run / "status.json").read_text())
    view = r"training loss (\S+) \(last 20 steps of each\) +held-out loss (\S+) \(commit (\d+)\)"
    training, held_out, version = re.findall(view, shown)[-1]
    assert f"runs/swarm finished at commit {version}: 57,600 tokens, training loss {training}, held-out" in printed
    assert f"held-out loss {held_out}; runs/swarm/report.html" in printed
    assert float(training) == pytest.approx(status["loss"], rel=1e-3)


def test_training_view(tmp_path, text_file):
    name = "runs/a-name-that-nobody-would-want-to-type-twice-and-that-no-screen-of-eighty-columns-has-room-for"
    words = train(text_file, "--steps", "4000", "--eval-every", "200", "--run", name)
    with terminal(words, tmp_path, SMALL, new=True) as opened:
        opened.wait(lambda shown: "loading JAX … 0:00:0".encode() in shown.written)
        screens = [opened.wait(lambda shown: re.search(r"held-out loss \d", shown.screen))]
        assert "loading JAX" not in opened.text and "compiling" not in opened.text
        opened.resize(LARGE)
        screens.append(opened.wait(lambda shown: max(map(len, shown.lines)) > 100))
        opened.send(CTRL_C)
        shown = opened.finish(130)
    for screen in screens:
        assert re.search(r"\d+% ━", screen) and " of 4,000 steps" in screen and name in screen.replace("\n", "")
        assert re.search(r"0:0\d:\d\d elapsed +0:\d\d:\d\d left +\S+ steps/s +[\d,]+ tokens/s", screen)
    printed = re.search(
        r"interrupted: saved at step (\d+)\. To resume: the same `tpuswarm train` command with ", opened.sentences
    )
    assert printed and (tmp_path / name / "checkpoints" / f"{int(printed[1]):08}").exists()
    assert "\nmodel: " in shown and "\nsettings: " in shown and "…" not in shown


def test_list_of_runs_begins_with_the_one_used_last_and_leaves_columns_out(runs):
    with terminal(["status"], runs, SMALL) as opened:
        head, swarm, plain = (line.split() for line in opened.finish().splitlines() if line)
    assert head[:3] == ["run", "recipe", "state"] and "age" in head and "speed" not in head
    assert (swarm[0], plain[0]) == ("runs/swarm", "runs/plain")


def test_watching_a_run_until_it_ends(runs, tmp_path):
    shutil.copytree(runs / "runs" / "swarm", tmp_path / "runs" / "swarm")
    held = Run(tmp_path / "runs" / "swarm")
    with (
        terminal(["status", "--watch"], tmp_path, SMALL) as everything,
        terminal(["status", "swarm", "--watch"], tmp_path, SMALL) as one,
    ):
        everything.wait(lambda shown: re.search(r"runs/swarm .* running +(\d+ +)?now", shown.screen))
        one.wait(lambda shown: "does not respond; this status is" in shown.screen and "\nm1 " in shown.screen)
        assert one.screen.count("m1 ") == 1 and one.screen.count("100%") == 1
        held.close()
        assert "running" not in everything.finish() and "does not respond" not in one.finish()


def test_tables_fit_the_screen(runs):
    for words, expected in (
        (["catalog"], ["v6e", "europe-west4-b"]),
        (["catalog", "v4-8"], ["also called", "us-central2-b"]),
        (["ledger", "show", "runs/swarm", "-n", "3"], ["commit", "m0", "average"]),
        (["ledger", "verify", "runs/swarm"], ["runs/swarm is sound"]),
        (["simulate", "small.toml"], ["goodput", "preemptions"]),
        (["router", "show", str(EXAMPLES / "router-ssh.toml")], ["22000-22031", "dnat"]),
        (["logs", "runs/swarm"], ["commit 4"]),
        (["status", "runs/swarm"], ["100%", "m1 ", "finished ", "ago"]),
        (["status", "plain"], ["60 of 60 steps", "held-out loss"]),
    ):
        with terminal(words, runs, SMALL) as opened:
            shown = opened.finish()
        assert all(item in shown for item in expected), shown
        assert not re.search(r"\S…", shown), shown
        assert words[0] != "logs" or not re.search(r"\d{4}-\d\d-\d\d \S", shown), "a date stands once over its lines"


def test_more_runs_than_a_screen_has_rows(runs, tmp_path):
    for number in range(40):
        shutil.copytree(runs / "runs" / "plain", tmp_path / "runs" / f"run-{number}", symlinks=True)
    held = Run(tmp_path / "runs" / "run-7")
    with terminal(["status", "--watch"], tmp_path, SMALL) as opened:
        opened.wait("older runs")
        assert opened.lines[1].startswith("runs/run-7 ") and "and 19 older runs" in opened.screen
        held.close()
        opened.finish()


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": "1"}], ids=["colour", "NO_COLOR"])
def test_colours_are_used_unless_no_color_is_set(runs, tmp_path, text_file, env):
    """A colour is a Select Graphic Rendition with 30 to 49 or 90 to 107 among its figures."""
    shutil.copytree(runs / "runs" / "swarm", tmp_path / "runs" / "swarm")
    append_event(tmp_path / "runs" / "swarm", "failed", message="a disk was full")
    for words, code in (
        (["status", "nowhere"], 2),
        (["status"], 0),
        (["status", "swarm"], 0),
        (train(text_file, "--steps", "30", "--run", "runs/plain"), 0),
    ):
        with terminal(words, tmp_path, SMALL, env) as opened:
            shown = opened.finish(code)
        figures = re.findall(rb"\x1b\[([\d;]+)m", opened.written)
        colours = [figure for figure in figures if re.search(rb"(^|;)(3|4|9|10)\d(;|$)", figure)]
        assert bool(colours) == (not env), f"{words}: {colours}\n{shown}"


PRINTS = """
import time, numpy as np, optax, jax.numpy as jnp
from tpuswarm import Every, Trainer, supervised

def loss(params, batch, key): return jnp.mean(batch["x"] @ params["w"])

def hook(step):
    print("printed at", step.row["step"])
    time.sleep(0.6)  # the view is drawn meanwhile

recipe = supervised(lambda key: {"w": jnp.zeros(3)}, loss, optax.sgd(0.1), {"x": np.ones((8, 3), np.float32)})
Trainer(devices=1, hooks=[Every(5, hook)]).fit(recipe, steps=20, batch=8)
"""


def test_what_a_program_prints_is_not_drawn_over(tmp_path):
    (tmp_path / "program.py").write_text(PRINTS)
    with terminal([sys.executable, "program.py"], tmp_path, SMALL) as opened:
        text = opened.finish()
    assert [f"printed at {step}" in text for step in (5, 10, 15, 20)] == [True] * 4
    assert "20 of 20 steps" in opened.screen
