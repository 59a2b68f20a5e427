"""Rows in W&B's offline file, and errors without its package or key."""

import importlib.util
import json
import os
import struct
from contextlib import closing
from itertools import islice
from unittest import mock

import pytest
from wandb.proto import wandb_internal_pb2 as messages

from tests.processes import finish, start
from tests.train import toy
from tests.waiting import until
from tpuswarm import InputError, Trainer
from tpuswarm.train.look.wandb_log import WandbLog
from tpuswarm.train.run.directory import EVENTS, METRICS, read_rows

pytestmark = pytest.mark.slow

BLOCK, HEADER = 32 * 1024, 7
"""Bytes in the log format that W&B shares with LevelDB: blocks of records, each with checksum, length and part."""


@pytest.fixture(autouse=True)
def offline(tmp_path):
    folders = {f"WANDB_{name}_DIR": str(tmp_path / name.lower()) for name in ("CONFIG", "CACHE", "DATA")}
    with mock.patch.dict(os.environ, {"WANDB_MODE": "offline", **folders}):  # W&B sets more
        yield


def records(path):
    data, place, parts = path.read_bytes(), HEADER, b""  # the file has its own header
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        if kind == 0 or place + HEADER + size > len(data):  # not written yet
            break
        parts += data[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield messages.Record.FromString(parts)
            parts = b""


def records_of_type(path, kind):
    """Return the records of one type, once W&B's own process has written the file to its end."""
    until(lambda: [record.WhichOneof("record_type") for record in records(path)][-1:] == ["exit"])
    return [getattr(record, kind) for record in records(path) if record.WhichOneof("record_type") == kind]


def logged_rows(path):
    """Return the rows of a .wandb file, without the columns that W&B adds."""
    rows = []
    for record in records_of_type(path, "history"):
        items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.item}
        rows.append({name: value for name, value in items.items() if not name.startswith("_")})
    return rows


def files(folder):
    return sorted(folder.glob("wandb/offline-run-*/*.wandb"))


def test_all_rows_are_logged_and_a_resumed_run_stays_the_same_run(tmp_path):
    folder = tmp_path / "mine"
    trainer = Trainer(devices=1, wandb="project", eval_every=10)
    with closing(trainer.steps(toy.recipe(), steps=30, batch=8, run=folder)) as loop:
        list(islice(loop, 12))
    trainer.fit(toy.recipe(), steps=30, batch=8, run=folder)
    first, second = files(folder)
    assert logged_rows(first) + logged_rows(second) == list(read_rows(folder / METRICS))
    assert first.name == second.name  # W&B's id is in the name
    run = records_of_type(first, "run")[0]
    assert (run.project, run.display_name) == ("project", "mine")
    [event, again] = [row for row in read_rows(folder / EVENTS) if row["event"] == "wandb"]
    assert event["id"] == again["id"] == run.run_id and "wandb sync" in event["message"]


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tpuswarm\[wandb\]'"):
        Trainer(devices=1, wandb="project").fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_key_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("from tests.train.toy import toy\n")
    # in a new process, because W&B reads its mode once
    words = ["train", "mine.py:toy", "--steps", "2", "--batch", "8", "--wandb", "project"]
    _, err = finish(start(words, tmp_path), 2)
    assert "No API key" in err and "WANDB_MODE=offline" in err and "Traceback" not in err


def test_rows_of_a_swarm_are_drawn_by_member_and_evaluations_by_version(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[recipe]\nname = "x"\ntarget = "x:X"\n[recipe.options]\n[train]\nsteps = 9\nbatch = 1\nseed = 0\n'
        "[chosen]\ntokens_per_row = 1\n[swarm]\nmembers = 2\n"
    )
    log = WandbLog(tmp_path, "project")
    row = {"step": 1, "tokens": 8, "loss": 2.5, "version": 3}
    log.write_member({**row, "member": "m0"})
    log.write_member({**row, "loss": 3.5, "member": "m1"})
    log.write_member({"step": 1, "tokens": 16, "eval_loss": 2.75, "member": "m0", "version": 3})
    log.close()
    (file,) = files(tmp_path)
    assert logged_rows(file) == [
        {"m0/step": 1, "m0/tokens": 8, "m0/loss": 2.5, "m0/version": 3},
        {"m1/step": 1, "m1/tokens": 8, "m1/loss": 3.5, "m1/version": 3},
        {"tokens": 16, "eval_loss": 2.75, "version": 3},
    ]
    metrics = records_of_type(file, "metric")
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in metrics}
    assert (axes["m0/*"], axes["m1/*"], axes["eval_*"]) == ("m0/step", "m1/step", "version")
