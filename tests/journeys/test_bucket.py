"""A swarm with its run in a bucket that answers wrongly at random: a machine with aggregators is killed, then the head.

The head is killed with its disk. A third machine reads the run. In a calm bucket: test_over_fleet.py.
"""

import json
import re
import shutil
import time

import pytest

from tests import processes
from tests.swarm.bucket import bucket
from tests.swarm.chaos import SMALL

URL = "gs://bucket/runs/all"
PATIENCE = 240.0
STEPS = 1200
"""With 384, a calm machine finishes before the first head is killed."""
FAULTS = "408", "429", "503", "reset", "lose the answer", "corrupt"

pytestmark = pytest.mark.long


@pytest.fixture
def disks(tmp_path, monkeypatch):
    """Gives a machine its own disk; all share one bucket."""
    (tmp_path / "cloud").mkdir()
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)

    def disk(name):
        monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / name))
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name

    with bucket("bucket", tmp_path / "cloud") as disk.bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", disk.bucket.endpoint)
        yield disk


@pytest.fixture
def started(tmp_path):
    """Starts commands, and ends them with the test."""
    found = []

    def start(words):
        found.append(processes.start(words, tmp_path))
        return found[-1]

    yield start
    for item in found:
        if item.poll() is None:
            item.kill()
            item.communicate()


def status(disk):
    """Return the status that a head has written on its disk, before it is in the bucket; None before the first."""
    path = disk / "runs/bucket/runs/all/status.json"
    return json.loads(path.read_text()) if path.exists() else None


def test_head_that_dies_with_its_disk_is_replaced(disks, started, tmp_path):
    """Members find the next head through the run's folder and keep their names, also one that was killed.

    Each member's machine has an aggregator. With one machine, the run loses neither a commit nor its aggregators.
    """
    disks.bucket.random_faults = FAULTS
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 500)
    (tmp_path / "token").write_text("5" * 64)
    token = ["--token-file", "token"]
    train = ["train", "gpt2-tiny", "--data", "text.txt", *SMALL, "--members", "0", "--cycle", "8", "--batch", "8",
             "--steps", str(STEPS), "--run", URL, "--expect", "17", *token]  # fmt: skip
    first = disks("first")
    head = started(train)

    def join(name):
        disks(name)
        return started(["join", URL, "--name", name, "--role", "both", *token])

    joined = [join("one"), join("two")]
    end = time.monotonic() + PATIENCE

    def wait(*machines: str) -> None:
        """Wait until the aggregators are on these machines, and for two more commits."""
        version = None
        while time.monotonic() < end:
            assert all(command.poll() is None for command in joined), [command.communicate() for command in joined]
            assert head.poll() is None, head.communicate()
            seen = status(first)
            if seen and seen["version"] is not None and sorted(seen["aggregators"].values()) == [*machines]:
                version = seen["version"] if version is None else version
                if seen["version"] >= version + 2:
                    return
            time.sleep(0.2)
        raise AssertionError(seen)

    wait("one", "two")
    joined.pop().kill()
    wait("one", "one")
    head.kill()
    head.communicate()
    joined.append(join("two"))
    while first.exists():  # its processes end a moment after it, and may still write
        assert time.monotonic() < end
        shutil.rmtree(first, ignore_errors=True)

    second = disks("second")
    out, _ = processes.run(train, tmp_path)
    assert f"{URL} finished at commit" in out
    assert status(second)["aggregators"].keys() == {"aggregator-0", "aggregator-1"}
    for command in joined:
        _, err = processes.finish(command)
        assert f"{URL} is finished" in err
    disks("laptop")
    disks.bucket.random_faults = ()
    out, _ = processes.run(["status", URL, "--json"], tmp_path)
    seen = json.loads(out)
    assert (seen["run"], seen["state"], seen["epoch"], seen["step"]) == (URL, "finished", 2, STEPS)
    out, _ = processes.run(["ledger", "verify", URL], tmp_path)
    assert f"{URL} is sound" in out
    out, _ = processes.run(["logs", URL], tmp_path)
    assert f"finished: {STEPS} steps" in out
    # A member that rejoins too late is only in the log.
    assert set(re.findall(r"\bj-[\w-]+", out)) == {"j-one", "j-two"}
    processes.run(["sample", URL, "--prompt", "the ", "--tokens", "5"], tmp_path)
