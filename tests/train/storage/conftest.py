"""A bucket on loopback, computers that each have their own disk, and a run that lives in the bucket."""

import pytest

from tests.swarm.bucket import bucket
from tpuswarm.train.run.directory import Run, read_rows
from tpuswarm.train.storage import record, sync
from tpuswarm.train.storage.folders import ROWS, copy_folder

URL = "gs://bucket/runs/a"
CONFIG = {
    "recipe": {"name": "r", "target": "x:y", "options": {}},
    "train": {"steps": 10, "batch": 2, "seed": 0},
    "chosen": {"tokens_per_row": 1},
}


def start_run(steps: int = 3) -> Run:
    run = Run(copy_folder(URL))
    run.write_config(CONFIG)
    run.write_event("started")
    for step in range(1, steps + 1):
        run.write_metrics({"step": step, "tokens": 2 * step, "loss": 1.0 / step})
    return run


def read_steps(folder) -> list[int]:
    return [row["step"] for row in read_rows(folder / ROWS)]


def crash(run: Run) -> None:
    """End a process as SIGKILL does: nothing more is uploaded, and the run is not released."""
    sync_ = run._sync
    sync_._end.set()
    sync_._wake.set()
    for thread in sync_._threads:
        thread.join()
    run._lock.close()


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with bucket("bucket", tmp_path / "cloud") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        yield server


@pytest.fixture
def use_disk(server, tmp_path, monkeypatch):
    """Continue as a computer with another disk."""

    def use(name: str) -> None:
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / name))

    use("one")
    return use


@pytest.fixture
def short_lease(monkeypatch):
    monkeypatch.setattr(record, "POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(record, "OWNER_TIMEOUT_S", 0.2)


@pytest.fixture
def frequent_renewals(monkeypatch):
    monkeypatch.setattr(sync, "RENEW_INTERVAL_S", 0.05)
