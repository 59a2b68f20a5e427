"""`tpuswarm train` over two hosts, processes of four virtual devices each: killed, stopped, resumed elsewhere."""

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.hosts import free_port
from tests.processes import PROGRAM, Forked, updates, wait_for
from tests.swarm.bucket import bucket
from tests.train import wide
from tpuswarm import Trainer
from tpuswarm.train.hosts.agreement import SECRET_FILE
from tpuswarm.train.run.directory import METRICS, read_rows
from tpuswarm.train.run.listing import read_status
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.user_code import build_recipe

pytestmark = pytest.mark.slow
STEPS, SAVE, EVAL = 50, 10, 20
TARGET = f"{wide.__file__}:wide"
FOUR_DEVICES = {"XLA_FLAGS": re.sub(r"device_count=\d+", "device_count=4", os.environ["XLA_FLAGS"])}


class Hosts:
    """Two processes of `tpuswarm train`."""

    def __init__(self, folder: Path, run: str | None = None, caches: Sequence[Path] = ()):
        """run: a URL, of which `folder` is host 0's copy; caches: of each host, where they share no disk."""
        self.folder = folder
        at = f"127.0.0.1:{free_port()}"
        line = [PROGRAM, "train", TARGET, "--steps", str(STEPS), "--batch", "16",
                "--shard", "fsdp", "--save-every", str(SAVE), "--eval-every", str(EVAL), "--run", run or str(folder),
                "--json", "--hosts", "2", "--hosts-at", at]  # fmt: skip
        own = [{"TPUSWARM_CACHE": str(cache)} for cache in caches] or [{}, {}]
        self.processes = [
            Forked(
                [*line, "--host", str(index)],
                env={**os.environ, **FOUR_DEVICES, **own[index]}, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
            for index in range(2)
        ]  # fmt: skip

    def reach(self, step: int) -> "Hosts":
        """Wait until the run has that many updates."""
        try:
            wait_for(lambda: updates(self.folder) >= step, self.processes[0])
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def end(self, *codes: int) -> list[tuple[str, str]]:
        """Wait until they end with these codes; return what each printed."""
        try:
            outputs = [process.communicate(timeout=240) for process in self.processes]
        finally:
            self.kill()
        assert [process.returncode for process in self.processes] == list(codes), outputs
        return outputs


def losses(folder: Path) -> dict[str, list[float]]:
    """Return the losses of a run, which has to have each step once."""
    found = list(read_rows(folder / METRICS))
    assert [row["step"] for row in found if "loss" in row] == list(range(1, STEPS + 1))
    return {name: [row[name] for row in found if name in row] for name in ("loss", "eval_loss")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return the losses of one undisturbed process with eight devices."""
    return losses(train_here(tmp_path_factory.mktemp("whole") / "run", shard="fsdp"))


def train_here(folder: Path | str, **options) -> Path:
    """Train to the end in this process."""
    trainer = Trainer(save_every=SAVE, eval_every=EVAL, **options)
    trainer.fit(build_recipe(TARGET, {}), steps=STEPS, batch=16, run=folder)
    return folder


def check(folder: Path, expected: dict[str, list[float]]) -> None:
    """Compare losses up to the order of sums, which differs within a process and between processes."""
    for name, values in losses(folder).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6)


def test_killed_host_ends_the_other_and_the_run_resumes_on_other_devices(tmp_path, expected):
    folder = tmp_path / "run"
    hosts = Hosts(folder).reach(SAVE + 5)
    hosts.processes[1].kill()
    (_, printed), _ = hosts.end(1, -signal.SIGKILL)
    sentence = "host 1 is gone (connection closed), so this host stops too; start all hosts again"
    assert printed.endswith(f"{sentence}\n") and "Traceback" not in printed
    assert (read_status(folder).state, read_status(folder).message) == ("failed", sentence)
    assert not (folder / SECRET_FILE).exists()
    files = [path.name for path in (folder / f"checkpoints/{SAVE:08d}").rglob("ocdbt.process_*")]
    assert sorted(files) == ["ocdbt.process_0", "ocdbt.process_1"], "each host writes its part"
    check(train_here(folder, devices=4), expected)
    assert expected["loss"][-1] < 0.5 * expected["loss"][0] and len(expected["eval_loss"]) == 3


def test_stop_at_any_host_stops_all_at_the_same_step(tmp_path, expected):
    folder = tmp_path / "run"
    hosts = Hosts(folder).reach(SAVE + 5)
    hosts.processes[1].send_signal(signal.SIGTERM)
    ends = hosts.end(128 + signal.SIGTERM, 128 + signal.SIGTERM)
    zero, one = (json.loads(out) for out, _ in ends)
    assert zero == one | {"metrics": zero["metrics"]}
    assert f"saved at step {zero['step']}" in zero["message"] and SAVE < zero["step"] < STEPS
    assert read_status(folder).state == "stopped"
    ends = Hosts(folder).end(0, 0)
    assert f"resumed from the checkpoint of step {zero['step']}" in ends[0][1]
    check(folder, expected)
    before = (folder / METRICS).read_bytes()
    Hosts(folder).end(0, 0)
    assert (folder / METRICS).read_bytes() == before, "a finished run is finished"


def test_hosts_without_a_shared_disk_train_one_run_in_a_bucket(tmp_path, monkeypatch, expected):
    """It goes on though the disk of host 0 is gone, then though its newest checkpoint is damaged, then on one host."""
    url, caches = "gs://bucket/runs/wide", [tmp_path / "zero", tmp_path / "one"]
    (tmp_path / "cloud").mkdir()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    copies = [cache / "runs/bucket/runs/wide" for cache in caches]
    with bucket("bucket", tmp_path / "cloud") as served:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", served.endpoint)
        hosts = Hosts(copies[0], url, caches).reach(SAVE + 5)
        hosts.processes[1].send_signal(signal.SIGINT)
        zero, _ = hosts.end(128 + signal.SIGINT, 128 + signal.SIGINT)
        step = json.loads(zero[0])["step"]
        files = [path.name for path in (copies[0] / f"checkpoints/{step:08d}").rglob("ocdbt.process_*")]
        assert files == ["ocdbt.process_0"] and not (copies[1] / "checkpoints").exists()
        assert SECRET_FILE not in {path.rpartition("/")[2] for path in Bucket(url).listed("")}
        shutil.rmtree(caches[0])
        hosts = Hosts(copies[0], url, caches).reach(2 * SAVE + 5)
        hosts.processes[0].send_signal(signal.SIGINT)
        (_, printed), _ = hosts.end(128 + signal.SIGINT, 128 + signal.SIGINT)
        assert f"resumed from the checkpoint of step {step}" in printed
        *_, older, newest = sorted((copies[0] / "checkpoints").glob("*/manifest.json"))
        newest.write_text("{}")
        hosts = Hosts(copies[0], url, caches).reach(3 * SAVE + 5)
        hosts.processes[0].send_signal(signal.SIGINT)
        (_, printed), _ = hosts.end(128 + signal.SIGINT, 128 + signal.SIGINT)
        assert f"resumed from the checkpoint of step {int(older.parent.name)}" in printed
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "alone"))
        train_here(url, devices=4)
    check(tmp_path / "alone/runs/bucket/runs/wide", expected)
