"""`train --dry-run` describes what would be trained and where, and leaves no trace."""

import json
import shutil
from pathlib import Path

import pytest

from tests.recipes.chats import CHATS, write_chats, write_model

MODEL = ["gpt2-tiny", "--data", "fake", "--layers", "1", "--heads", "2", "--width", "32", "--context", "16"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_new_run_is_described(typed, here):
    code, out, err = typed("train", *MODEL, "--steps", "50", "--batch", "4", "--run", "runs/new", "--dry-run")
    assert (code, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert lines["recipe"] == "gpt2-tiny" and lines["data"] == "fake"
    assert lines["length"] == "50 steps" and lines["batch"] == "4 rows per step" and lines["run"] == "runs/new, new"
    assert not list(here.iterdir())


def test_defaults_and_members_are_described(typed, here):
    code, out, _ = typed("train", "gpt2-tiny", "--members", "3", "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0 and found["swarm"] == "3 members" and found["length"].startswith("2,000 steps")
    assert found["run"] == "a new folder in ./runs, gpt2-tiny-N"


def test_existing_run_is_left_alone(typed, here, text_file, finished_run):
    shutil.copytree(finished_run.run, "runs/a")
    before = {path: path.stat().st_mtime_ns for path in here.rglob("*")}
    words = ["--data", str(text_file), "--layers", "1", "--steps", "60", "--lr", "3e-3", "--run", "runs/a"]
    _, out, _ = typed("train", "gpt2-tiny", *words, "--dry-run")
    assert "runs/a, finished at step 60 of 60" in out
    assert {path: path.stat().st_mtime_ns for path in here.rglob("*")} == before


def test_first_conversation_is_shown_as_the_model_sees_it(typed, here):
    words = write_model(here / "model"), "--data", write_chats(here / "chat.jsonl", *CHATS)
    code, out, _ = typed("train", *words, "--dry-run")
    assert code == 0 and "\n  <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n[[" in out
    _, out, _ = typed("train", *words, "--dry-run", "--json")
    assert json.loads(out)["preview"][0][1] == ["<think>\n\n</think>\n\nHello, you!<|im_end|>", True]
    (here / "chat.jsonl").write_text('{"messages": [], "completion": "x"}')
    code, _, err = typed("train", *words, "--dry-run")
    assert code == 2 and "chat.jsonl:1 has messages and a completion; keep one of them" in err
    assert {path.name for path in here.iterdir()} == {"model", "chat.jsonl"}
