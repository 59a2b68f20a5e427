"""Rows in W&B's offline file, and errors without its package or key."""

import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from unittest import mock

import psutil
import pytest
from wandb.proto import wandb_internal_pb2 as messages

from tests.processes import ROOT, finish, start
from tests.train import toy
from tests.waiting import until
from tpuswarm import Every, InputError, Trainer
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


class Server(BaseHTTPRequestHandler):
    """As much of W&B as its client needs for a run; with a status it refuses, and it hangs once `hangs` is set."""

    status, hangs = 200, threading.Event()

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.hangs.is_set():
            time.sleep(600)
        answer = {"errors": [{"message": "permission denied"}]} if self.status != 200 else {}
        if self.status == 200 and self.path == "/graphql":
            name = json.loads(body)["variables"].get("name")
            project = {"id": "p", "name": "project", "entity": {"id": "e", "name": "me"}}
            bucket = {"id": "b", "name": name, "displayName": "r", "config": "{}", "project": project}
            files = {"runID": "b", "uploadHeaders": [], "files": []}
            viewer = {"id": "u", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}
            answer["data"] = {
                "viewer": viewer, "upsertBucket": {"bucket": bucket, "inserted": True}, "createRunFiles": files
            }  # fmt: skip
        text = json.dumps(answer).encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST  # noqa: N815

    def log_message(self, *given):
        pass


@contextmanager
def serving(status=200):
    handler = type("Handler", (Server,), {"status": status, "hangs": threading.Event()})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler.hangs
        server.shutdown()


@pytest.fixture
def online(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("WANDB_SERVICE", raising=False)  # of this process

    def train(url, program="hooks = []"):
        """Start a new process, because W&B reads its settings once. It is patient, for a busy machine."""
        monkeypatch.setenv("WANDB_BASE_URL", url)
        text = (
            "import sys\nfrom tests.train import toy\nfrom tpuswarm import Every, Trainer\n"
            "from tpuswarm.train.look import guarded_logger, wandb_log\n"
            "guarded_logger.TIMEOUT_S = guarded_logger.RECOVERY_TIMEOUT_S = wandb_log.REPLY_TIMEOUT_S = 240.0\n"
            f"{program}\n"
            "Trainer(devices=1, wandb='project', hooks=hooks).fit(toy.recipe(), steps=8, batch=8, run='run')\n"
        )
        return start(["-c", text], tmp_path, [sys.executable], stdin=subprocess.PIPE)

    return train


def logged_steps(folder):
    return {row["step"] for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")) for row in logged_rows(file)}


def notes(folder):
    return [row["message"] for row in read_rows(folder / EVENTS) if row["event"] == "note"]


@pytest.mark.parametrize("kills", [[3], range(1, 9)], ids=["once", "at each step"])
def test_killed_helper_process_ends_nothing(tmp_path, kills):
    """An out-of-memory killer does that. Its file lacks its last rows, so the next one repeats them."""

    def kill(step):
        if step.row["step"] in kills:
            for process in psutil.Process().children():
                if process.name().startswith("wandb"):
                    process.kill()

    trainer = Trainer(devices=1, wandb="project", hooks=[Every(1, kill)])
    assert trainer.fit(toy.recipe(), steps=8, batch=8, run=tmp_path / "run").ended == "finished"
    assert [row["step"] for row in read_rows(tmp_path / "run" / METRICS) if "loss" in row] == list(range(1, 9))
    first, *others = [note for note in notes(tmp_path / "run") if "W&B" in note]
    assert "training continues" in first and f"`wandb sync {tmp_path}/run/wandb/*run-*`" in first
    if len(kills) == 1:
        assert not others
        newest = files(tmp_path / "run")[-1]
        assert {row["step"] for row in logged_rows(newest)} == set(range(1, 9))


def test_unreachable_server_costs_no_run(tmp_path, online):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    _, err = finish(online(url, "wandb_log.REPLY_TIMEOUT_S, hooks = 3.0, []"))
    assert "training continues" in err and "wandb sync" in err
    assert logged_steps(tmp_path / "run") == set(range(1, 9))


@pytest.mark.parametrize("status", [401, 404])
def test_refused_key_or_project_is_wrong_input(tmp_path, online, status):
    with serving(status) as (url, _):
        _, err = finish(online(url), 1)
    assert "InputError: W&B rejected this run: " in err and f"error {status}" in err


def test_network_lost_in_the_middle_does_not_keep_a_finished_run(tmp_path, online):
    program = (
        "def cut(step):\n"
        "    if step.row['step'] == 4:\n"
        "        print('cut', flush=True), sys.stdin.readline()\n"
        "        guarded_logger.TIMEOUT_S = 5.0\n"
        "hooks = [Every(1, cut)]"
    )
    with serving() as (url, hangs):
        process = online(url, program)
        assert process.stdout.readline() == "cut\n"
        hangs.set()
        _, err = finish(process)
    assert "it hung for 5 s" in err and "wandb sync" in err
    assert logged_steps(tmp_path / "run") == set(range(1, 9))


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'tpuswarm\[wandb\]'"):
        Trainer(devices=1, wandb="project").fit(toy.recipe(), steps=2, batch=8, run=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("online", ["No API key", "WANDB_MODE=offline"]),
        ("bogus", ["W&B does not take WANDB_MODE: must be 'online', 'offline',", "not 'bogus'; correct or unset"]),
    ],
)
def test_missing_key_and_wrong_mode_are_named(tmp_path, monkeypatch, mode, words):
    """In a new process, because W&B reads its settings once."""
    monkeypatch.setenv("WANDB_MODE", mode)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.py").write_text("from tests.train.toy import toy\n")
    _, err = finish(start(["train", "mine.py:toy", "--steps", "2", "--batch", "8", "--wandb", "project"], tmp_path), 2)
    assert all(part in err for part in words) and "Traceback" not in err


def test_rows_of_a_swarm_are_drawn_by_member_and_evaluations_by_version(tmp_path):
    (tmp_path / "config.toml").write_text(
        '[recipe]\nname = "x"\ntarget = "x:X"\n[recipe.options]\n[train]\nsteps = 9\nbatch = 1\nseed = 0\n'
        "[chosen]\ntokens_per_row = 1\n[swarm]\nmembers = 2\n"
    )
    log = WandbLog(tmp_path, "project")
    log.open()
    row = {"step": 1, "tokens": 8, "loss": 2.5, "version": 3}
    log.write({**row, "member": "m0"})
    log.write({**row, "loss": 3.5, "member": "m1"})
    log.write({"step": 1, "tokens": 16, "eval_loss": 2.75, "member": "m0", "version": 3})
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
