"""A swarm of real processes under Ray: killed, joined, stopped, killed as a whole, resumed, verified."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests import processes
from tests.swarm.chaos import SMALL, Swarm, torment
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

ENDLESS = "10M"


@pytest.fixture
def swarm(tmp_path):
    arguments = ["gpt2-tiny", "--data", "fake", *SMALL, "--members", "2", "--cycle", "8", "--expect", "2"]
    arguments += ["--outer", "average"]
    swarm = Swarm(tmp_path / "run", [*arguments, "--steps", ENDLESS])
    yield swarm
    swarm.end()


def version(swarm: Swarm) -> int:
    return swarm.status().get("version") or 0


def member(swarm: Swarm, name: str) -> dict:
    return next((item for item in swarm.status().get("members", []) if item["id"] == name), {"state": "none"})


def is_replaced(now: dict, first: dict) -> bool:
    return now["state"] == "alive" and all(now[name] != first[name] for name in ("pid", "incarnation"))


def contributors(swarm: Swarm) -> set[str]:
    return {part["member"] for event in swarm.events("commit") for part in event["contributors"]}


def tree(pid: int) -> list[int]:
    """Return a process and all its descendants; some may have ended meanwhile."""
    children: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(item for child in children for item in tree(int(child)))]


@pytest.mark.slow
def test_swarm_survives_kills_preemptions_and_restarts(swarm, typed, tmp_path, monkeypatch):
    swarm.start()
    swarm.wait(lambda: version(swarm) >= 2 and member(swarm, "m1")["state"] == "alive")

    titles = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in tree(swarm.process.pid)]
    assert not any(b"log_monitor" in title or b"autoscaler" in title for title in titles), "Ray runs unused helpers"
    first = member(swarm, "m1")
    os.kill(first["pid"], signal.SIGKILL)
    swarm.wait(lambda: any(event["member"] == "m1" for event in swarm.events("lost")))
    swarm.wait(lambda: is_replaced(member(swarm, "m1"), first))
    lost = swarm.events("lost")[0]
    assert (lost["incarnation"], lost["pid"]) == (first["incarnation"], first["pid"])

    for name in ("aggregator-0", "coordinator"):
        pid, before = swarm.status()["processes"][name], version(swarm)
        os.kill(pid, signal.SIGKILL)
        swarm.wait(lambda: swarm.status()["processes"].get(name, pid) != pid)  # noqa: B023  # called at once
        swarm.wait(lambda: version(swarm) > before + 1)  # noqa: B023
    assert swarm.status()["epoch"] == 2

    # SIGTERM is the notice of a preemption: the member hands in its work and goes.
    os.kill(member(swarm, "m1")["pid"], signal.SIGTERM)
    swarm.wait(lambda: swarm.events("left"))
    status = json.loads(typed("status", str(swarm.run), "--json")[1])
    assert (status["state"], {member["id"] for member in status["members"]}) == ("running", {"m0", "m1"})
    tokens = status["tokens"]
    assert tokens["processed"] == sum(tokens[name] for name in ("applied", "dropped", "outstanding", "lost"))
    out = typed("logs", str(swarm.run))[1]
    assert "m1 killed; about" in out and "m1 left cleanly" in out

    wrong = tmp_path / "wrong-token"
    wrong.write_text("0" * 64)
    address, token = swarm.status()["address"], swarm.run / "token"
    refused = processes.start(["join", address, "--token-file", str(wrong)], tmp_path)
    disk, joined = tmp_path / "disk", []
    try:
        for cache in (str(disk), os.environ["TPUSWARM_CACHE"]):
            with monkeypatch.context() as patch:
                patch.setenv("TPUSWARM_CACHE", cache)
                patch.delenv("JAX_COMPILATION_CACHE_DIR")  # a machine compiles onto its own disk
                joined.append(processes.start(["join", address, "--token-file", str(token)], tmp_path, new=True))

        def names_of_joined() -> list[str]:
            assert all(command.poll() is None for command in joined), [command.communicate() for command in joined]
            pids = [tree(command.pid) for command in joined]
            found = [[item["id"] for item in swarm.status()["members"] if item["pid"] in part] for part in pids]
            return [names[0] for names in found] if all(found) else []

        vanished, leaves = swarm.wait(names_of_joined)
        swarm.wait(lambda: {vanished, leaves} <= contributors(swarm))
        # One machine is preempted without a word: all that ran there is gone at once, and its disk.
        assert list(disk.iterdir())
        for pid in tree(joined[0].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(disk)
        swarm.wait(lambda: vanished in {event["member"] for event in swarm.events("lost")})
        before = version(swarm)
        swarm.wait(lambda: version(swarm) > before + 1)
        _, err = processes.finish(refused, 2)
        assert f"the token in {wrong} does not match the run" in err and "Traceback" not in err
        # The other one is preempted with a notice: SIGTERM to all that runs there.
        for pid in tree(joined[1].pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        joined[1].wait()
    finally:
        for command in (refused, *joined):
            command.send_signal(signal.SIGINT)
    processes.finish(joined[1])
    swarm.wait(lambda: member(swarm, leaves)["state"] == "left")
    assert leaves not in {event["member"] for event in swarm.events("lost")}
    swarm.wait(lambda: member(swarm, vanished)["state"] == "lost")
    assert sum(event["member"] == vanished for event in swarm.events("lost")) == 1

    # All processes die at once: the supervisor takes Ray with it.
    pids = swarm.pids()
    os.kill(swarm.process.pid, signal.SIGKILL)
    swarm.process.wait()
    end = time.monotonic() + 120
    while any(alive(pid) for pid in pids.values()):
        assert time.monotonic() < end, "processes outlive their supervisor"
        time.sleep(0.2)
    whole = Ledger(Store(swarm.run)).view()
    report = verify(Store(swarm.run), lambda text: None)
    assert report.problems == [] and report.recomputed

    # The same run continues with another length only if the user accepts that.
    batch_tokens = 12 * 32
    steps = whole.tokens // batch_tokens + 60
    shorter = [*swarm.arguments[:-1], str(steps), "--run", str(swarm.run)]
    _, err = processes.run(["train", *shorter], tmp_path, code=2)
    assert f"steps was 10000000, now {steps}" in err and "--accept-code" in err
    out, _ = processes.run(["train", *shorter, "--accept-code", "--json"], tmp_path)
    result = json.loads(out)
    assert result["ended"] == "finished" and result["tokens"] == steps * batch_tokens
    view = Ledger(Store(swarm.run)).view()
    assert len(view.counted) == steps * 12 and view.version > whole.version  # every row once, none skipped
    assert verify(Store(swarm.run), lambda text: None).problems == []
    assert any("steps was 10000000" in event["message"] for event in swarm.events("note"))
    rows = [json.loads(line) for line in (swarm.run / "metrics.jsonl").read_text().splitlines()]
    assert {row["member"] for row in rows} >= {"m0", "m1", vanished, leaves} and any("eval_loss" in row for row in rows)
    own = [json.loads(line) for line in (swarm.run / "members" / "m0" / "metrics.jsonl").read_text().splitlines()]
    steps_made = [row["step"] for row in own if "loss" in row]
    assert steps_made == sorted(steps_made)
    assert {"loss", "eval_loss"} <= result["metrics"].keys()
    assert f"at step {steps:,}" in typed("evaluate", str(swarm.run))[1]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.long
def test_random_kills_for_two_minutes(tmp_path):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"seed {seed}")
    rnd = Random(seed)
    arguments = ["gpt2-tiny", "--data", "fake", *SMALL, "--members", "4", "--cycle", "8", "--outer", "average"]
    swarm = Swarm(tmp_path / "run", [*arguments, "--steps", ENDLESS])
    swarm.start()
    try:
        swarm.wait(lambda: version(swarm) >= 2)
        kills = torment(swarm, rnd, 120.0, lambda: rnd.uniform(2, 15), "mac", stopped=0.3)
        before = version(swarm)
        swarm.wait(lambda: version(swarm) > before + 1)
    finally:
        swarm.end()
    report = verify(Store(swarm.run), lambda text: None)
    assert report.problems == []
    done = subprocess.run(
        [sys.executable, "-m", "tpuswarm", "ledger", "verify", str(swarm.run)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert contributors(swarm) >= {"m0", "m1", "m2", "m3"}
    print(f"{len(kills)} kills, {report.newest} versions, {report.applied:,} of {report.processed:,} tokens applied")
