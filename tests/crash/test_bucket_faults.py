"""A bucket loses, refuses or damages one request in ten, machines are killed, and the run ends as it should."""

import random
import signal

import jax
import numpy as np
import pytest

import tpuswarm
from tests.crash.test_resume import STEPS, TRAIN
from tests.processes import finish, rows_without_times, run, start, updates, wait_for
from tests.swarm.bucket import bucket
from tpuswarm.train.storage.bucket import Bucket
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import copy_folder
from tpuswarm.train.storage.record import read_record

pytestmark = pytest.mark.long
URL = "gs://bucket/runs/a"
FAULTS = "408", "429", "503", "reset", "lose the answer", "corrupt"


@pytest.mark.parametrize("seed", range(3))
def test_killed_machines_leave_the_run_of_an_undisturbed_one(tmp_path, monkeypatch, seed):
    run(TRAIN, tmp_path)
    whole = rows_without_times(tmp_path / "run")
    train = [*TRAIN[:-1], URL]
    (tmp_path / "cloud").mkdir()
    with bucket("bucket", tmp_path / "cloud") as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.endpoint)
        server.random, server.random_faults = random.Random(seed), FAULTS

        def use(disk):
            monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / disk))
            return copy_folder(URL)

        def steps_in_bucket():
            found = read_record(Bucket(URL))
            names = found.record.files if found else ()
            return [0, *(int(name.split("/")[1]) for name in names if name.startswith("checkpoints/"))]

        for disk, rows in (("one", 30), ("two", 60), ("one", 80)):
            folder = use(disk)
            (tmp_path / "hold_after").write_text(str(rows + 5))
            process = start(train, tmp_path)
            wait_for(lambda folder=folder, rows=rows: updates(folder) >= rows, process)
            if rows < 80:
                wait_for(lambda rows=rows: max(steps_in_bucket()) >= rows - 10, process)
            process.kill()
            finish(process, -signal.SIGKILL)
        (tmp_path / "hold_after").unlink()
        use("two")
        run(train, tmp_path)
        server.random_faults = ()
        use("three")
        assert rows_without_times(download_run(URL, whole=True)) == whole
        ours, theirs = tpuswarm.load(URL), tpuswarm.load(tmp_path / "run")
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert len([row for row in whole if "loss" in row]) == STEPS
