"""`tpuswarm demo` from its start to its end, and a second one that is refused meanwhile."""

import json
import os

import numpy as np
import psutil
import pytest

from tests import processes
from tests.terminal import terminal
from tpuswarm.cli.demo.demo_cloud import commit_epoch
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.run.directory import append_event


def bigram_loss() -> float:
    """Return the held-out loss of a bigram model of the demo's text.

    The demo reaches 2.16 to 2.20, depending on how many rows each member trains.
    """
    recipe = GPT2(size="tiny")
    pairs, held_out = (recipe.data(split).rows(0, 5_000)["tokens"] for split in ("train", "validation"))
    counts = np.full((recipe.config.vocab, recipe.config.vocab), 0.01)
    np.add.at(counts, (pairs[:, :-1], pairs[:, 1:]), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    return -np.log(shares[held_out[:, :-1], held_out[:, 1:]]).mean()


@pytest.mark.long
def test_demo_trains_through_a_kill(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")  # without them it trains for minutes
    with terminal(["demo"], tmp_path, new=True) as opened:
        opened.wait("(m1)")
        _, err = processes.finish(processes.start(["demo"], tmp_path, new=True), 2)
        assert f"in use by process {opened.process.pid}" in err
        for line in ("m1 killed", "m1 rejoined"):  # they stay in the text; a state on the screen may be drawn over
            opened.wait(lambda shown, line=line: line in shown.text)
        opened.finish()
    assert "runs/demo finished at commit" in opened.sentences and "none twice" in opened.sentences
    assert "finished" in opened.screen and "a sample of its text" in opened.screen, "the end fits on a screen"
    folder = tmp_path / "runs" / "demo"
    page = (folder / "report.html").read_text()
    assert "data:image/png;base64," in page and "kill" in page
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert rows[-1]["eval_loss"] < bigram_loss() < 4.0 < losses[0]


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="it makes networks")
def test_demo_of_members_behind_a_nat_ends_with_a_sound_ledger(tmp_path):
    out, err = processes.run(["demo", "--anywhere"], tmp_path)
    for line in (
        "ada: ada-home is admitted", "bob: bob-home is admitted", "the head cannot connect to 192.168.2.2",
        "head: bob-home killed", "head: ada-home left cleanly", "contributed: ada", "run is sound",
    ):  # fmt: skip
        assert line in out, out + err
    left = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in left if "198.51.100.1:8443" in words]


def test_demo_that_cannot_make_networks_says_why(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, _, err = typed("demo", "--anywhere")
    assert code == 2 and "sudo make demo-anywhere" in err
    monkeypatch.setenv("PATH", "")
    code, _, err = typed("demo", "--anywhere")
    assert code == 2 and "install iproute2, nftables and util-linux" in " ".join(err.split())
    assert not list(tmp_path.iterdir())


def test_demo_of_a_cloud_counts_a_new_head_once_it_has_committed(tmp_path):
    assert commit_epoch(tmp_path) == 0
    for version in (1, 2):
        append_event(tmp_path, "commit", version=version, epoch=1)
    append_event(tmp_path, "started", message="commit by another head")
    append_event(tmp_path, "coordinator", name="coordinator", message="leads", epoch=2)
    assert commit_epoch(tmp_path) == 1
    append_event(tmp_path, "commit", version=3, epoch=2)
    assert commit_epoch(tmp_path) == 2
