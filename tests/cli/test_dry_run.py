"""`train --dry-run`: it says what would be trained and where, and leaves no trace."""

import json
from pathlib import Path

import pytest

MODEL = ["gpt2-tiny", "--data", "fake", "--layers", "1", "--heads", "2", "--width", "32", "--context", "16"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_run(typed, here):
    code, out, err = typed("train", *MODEL, "--steps", "50", "--batch", "4", "--run", "runs/new", "--dry-run")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["recipe"] == "gpt2-tiny" and lines["data"] == "fake"
    assert lines["length"] == "50 steps" and lines["batch"] == "4 rows per step" and lines["run"] == "runs/new, new"
    assert not list(here.iterdir())


def test_what_a_recipe_usually_has_and_a_swarm(typed, here):
    code, out, _ = typed("train", "gpt2-tiny", "--members", "3", "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0 and found["swarm"] == "3 members" and found["length"].startswith("2,000 steps")
    assert found["run"] == "a new folder in ./runs, gpt2-tiny-N"


def test_a_run_that_is_there(typed, here):
    assert typed("train", *MODEL, "--steps", "2", "--batch", "8", "--run", "runs/a")[0] == 0
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    _, out, _ = typed("train", *MODEL, "--run", "runs/a", "--dry-run")
    assert "runs/a, finished at step 2 of 2" in out
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


def test_wrong_words_are_wrong_in_a_dry_run_too(typed, here):
    code, _, err = typed("train", "gpt2-tiny", "--lr", "nan", "--dry-run")
    assert code == 2 and "lr" in err
