"""A member of two hosts, started by commands: it loses either host, comes back, and leaves.

What it computes and evaluates: swarm/member/test_leader.py.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.hosts import free_port
from tests.processes import PATIENCE, PROGRAM, Forked
from tests.swarm.chaos import SMALL, Swarm
from tests.waiting import until
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify

pytestmark = pytest.mark.long
TWO_DEVICES = {"XLA_FLAGS": re.sub(r"device_count=\d+", "device_count=2", os.environ["XLA_FLAGS"])}


@pytest.fixture
def swarm(tmp_path, text_file):
    arguments = ["gpt2-tiny", "--data", str(text_file), *SMALL, "--cycle", "8", "--steps", "10M", "--eval-every", "8"]
    swarm = Swarm(tmp_path / "run", [*arguments, "--members", "0", "--expect", "1", "--outer", "average"])
    yield swarm
    swarm.end()


class Host:
    """`tpuswarm join` as one of two hosts, with its own cache."""

    def __init__(self, folder: Path, line: list[str], index: int):
        self.log = folder / f"host-{index}.err"
        cache = folder / f"cache-{index}"
        with self.log.open("a") as log:
            self.process = Forked(
                [PROGRAM, *line, "--host", str(index)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env={**os.environ, **TWO_DEVICES, "TPUSWARM_CACHE": str(cache)},
            )  # fmt: skip

    def child(self) -> int:
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def test_member_of_two_hosts_dies_with_either_and_comes_back(swarm, tmp_path):
    swarm.start()
    swarm.wait(lambda: swarm.status().get("address"))
    at = f"127.0.0.1:{free_port()}"
    line = ["join", swarm.status()["address"], "--token-file", str(swarm.run / "token"), "--hosts", "2"]
    zero, one = started = [Host(tmp_path, [*line, "--hosts-at", at], index) for index in range(2)]

    def slice_() -> dict:
        return next(
            (member for member in swarm.status()["members"] if member["id"].startswith("j")), {"incarnation": None}
        )

    def commits() -> int:
        return sum(c["member"].startswith("j") for event in swarm.events("commit") for c in event["contributors"])

    def contributes(before: str | None) -> None:
        swarm.wait(lambda: slice_()["incarnation"] not in (None, before))
        had = commits()
        swarm.wait(lambda: commits() >= had + 2)

    try:
        contributes(None)
        first, rows = slice_(), swarm.run / "metrics.jsonl"
        swarm.wait(lambda: rows.read_text().count('"eval_loss"') >= 2)  # only the slice can measure it
        got, shared = (list((tmp_path / f"cache-{index}/swarm").glob("*/tokens.bin")) for index in range(2))
        assert got[0].read_bytes() == shared[0].read_bytes() == (swarm.run / "data/tokens.bin").read_bytes()

        os.kill(one.child(), signal.SIGKILL)  # its `join` brings it back
        swarm.wait(lambda: swarm.events("lost"))
        assert swarm.events("lost")[0]["incarnation"] == first["incarnation"]
        contributes(first["incarnation"])
        assert "its process was killed; waiting for all hosts" in one.log.read_text()

        second = slice_()
        os.kill(second["pid"], signal.SIGKILL)  # host 0: the swarm's supervisor makes it again
        contributes(second["incarnation"])
        assert "host 0 is gone (connection closed); waiting for all hosts" in one.log.read_text()

        third, child = slice_(), one.child()
        one.kill()  # the whole machine, until it joins again
        swarm.wait(lambda: len(swarm.events("lost")) == 3)
        until(lambda: not Path(f"/proc/{child}").exists())  # else a host outlives its machine's command
        one = Host(tmp_path, [*line, "--hosts-at", at], 1)
        started.append(one)
        contributes(third["incarnation"])

        zero.process.send_signal(signal.SIGINT)
        assert zero.process.wait(PATIENCE) == 0, zero.log.read_text()
        assert one.process.wait(PATIENCE) == 0, one.log.read_text()
        assert one.log.read_text().endswith("host 0 has left the swarm, or the swarm has ended\n")
        swarm.wait(lambda: swarm.events("left"))
        assert swarm.events("left")[0]["incarnation"] not in {event["incarnation"] for event in swarm.events("lost")}
    finally:
        for host in started:
            host.kill()
    assert len({event["incarnation"] for event in swarm.events("lost")}) == 3
    assert "Gloo" not in one.log.read_text()
    assert "Traceback" not in one.log.read_text() + zero.log.read_text()
    swarm.end()
    assert Ledger(Store(swarm.run)).view().version > 6
    report = verify(Store(swarm.run), lambda text: None)
    assert report.problems == [] and report.recomputed
