"""A member of several hosts, started by command: joined, losing hosts, back, left; and wrong input."""

import hashlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.chaos import SMALL, Swarm

from tests.hosts import free_port
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.arithmetic.fragments import Leaf
from tpuswarm.swarm.engines.variables import BATCH
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.member.incarnations import Assigned, MemberHost
from tpuswarm.swarm.member.metrics import MetricsRows
from tpuswarm.swarm.processes.founder import Joining
from tpuswarm.swarm.processes.plan import Plan
from tpuswarm.swarm.processes.plan import Swarm as Table
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.swarm.supervision import entry as hosts_of_run
from tpuswarm.swarm.supervision import join as joining
from tpuswarm.swarm.supervision.join import join
from tpuswarm.train.hosts import rendezvous
from tpuswarm.train.hosts.line import Line, WrongSecret, authenticate

TWO_DEVICES = {"XLA_FLAGS": re.sub(r"device_count=\d+", "device_count=2", os.environ["XLA_FLAGS"])}


@pytest.fixture
def swarm(tmp_path, text_file):
    arguments = ["gpt2-tiny", "--data", str(text_file), *SMALL, "--cycle", "8", "--steps", "10M"]
    swarm = Swarm(tmp_path / "run", [*arguments, "--members", "1", "--outer", "average"])
    yield swarm
    swarm.end()


class Host:
    """`tpuswarm join` as one of two hosts, with a cache of its own as on a machine of its own."""

    def __init__(self, folder: Path, line: list[str], index: int):
        self.index, self.said = index, folder / f"host-{index}.err"
        cache = folder / f"cache-{index}"
        command = [sys.executable, "-m", "tpuswarm", *line, "--host", str(index)]
        with self.said.open("a") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, env={**os.environ, **TWO_DEVICES, "TPUSWARM_CACHE": str(cache)}
            )

    def child(self) -> int:
        """Of a host that is not the first: the process that trains."""
        pid = self.process.pid
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.mark.slow
def test_two_hosts_are_one_member_that_dies_with_either_and_comes_back(swarm, tmp_path):
    swarm.start()
    swarm.wait(lambda: (swarm.status().get("version") or 0) >= 2)
    at = f"127.0.0.1:{free_port()}"
    line = ["join", swarm.status()["address"], "--token-file", str(swarm.run / "token"), "--hosts", "2"]
    zero, one = started = [Host(tmp_path, [*line, "--hosts-at", at], index) for index in range(2)]

    def slice_() -> dict:
        return next((each for each in swarm.status()["members"] if each["id"].startswith("j")), {"incarnation": None})

    def commits() -> int:
        return sum(c["member"].startswith("j") for event in swarm.events("commit") for c in event["contributors"])

    def contributes(before: str | None) -> None:
        swarm.wait(lambda: slice_()["incarnation"] not in (None, before))
        had = commits()
        swarm.wait(lambda: commits() >= had + 2)

    try:
        contributes(None)
        first = slice_()
        got, shared = (list((tmp_path / f"cache-{index}/swarm").glob("*/tokens.bin")) for index in range(2))
        assert got[0].read_bytes() == shared[0].read_bytes() == (swarm.run / "data/tokens.bin").read_bytes()

        os.kill(one.child(), signal.SIGKILL)  # its `join` brings it back
        swarm.wait(lambda: swarm.events("lost"))
        assert swarm.events("lost")[0]["incarnation"] == first["incarnation"]
        contributes(first["incarnation"])
        assert "its process was killed; waiting for all hosts" in one.said.read_text()

        second = slice_()
        os.kill(second["pid"], signal.SIGKILL)  # host 0: the swarm's supervisor makes it again
        contributes(second["incarnation"])
        assert "host 0 is gone (connection closed); waiting for all hosts" in one.said.read_text()

        third, child = slice_(), one.child()
        one.end()  # the whole machine: nobody brings it back until it is joined again
        swarm.wait(lambda: len(swarm.events("lost")) == 3)
        end = time.monotonic() + 10
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < end, "a host outlives its machine's command"
            time.sleep(0.1)
        one = Host(tmp_path, [*line, "--hosts-at", at], 1)
        started.append(one)
        contributes(third["incarnation"])

        zero.process.send_signal(signal.SIGINT)
        assert zero.process.wait(60) == 0, zero.said.read_text()
        assert one.process.wait(60) == 0, one.said.read_text()
        assert one.said.read_text().endswith("host 0 has left the swarm, or the swarm has ended\n")
        swarm.wait(lambda: swarm.events("left"))
        assert swarm.events("left")[0]["incarnation"] not in {event["incarnation"] for event in swarm.events("lost")}
    finally:
        for host in started:
            host.end()
    assert len({event["incarnation"] for event in swarm.events("lost")}) == 3
    assert "Gloo" not in one.said.read_text()
    assert "Traceback" not in one.said.read_text() + zero.said.read_text()
    swarm.end()
    assert Ledger(Store(swarm.run)).view().version > 6
    report = verify(Store(swarm.run), lambda text: None)
    assert report.problems == [] and report.recomputed


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("--hosts 2", "also needs --host and --hosts-at"),
        ("--hosts 2 --host 1", "also needs --hosts-at"),
        ("--hosts 2 --host 2 --hosts-at 127.0.0.1:9", "there is no host 2 of 2: hosts are numbered from 0"),
        ("--hosts 2 --host 1 --hosts-at nowhere", "the address of host 0 is HOST:PORT"),
        ("--hosts 2 --host 0 --hosts-at 192.0.2.1:9", "host 0 cannot listen on 192.0.2.1:9"),
        ("--hosts 2 --host 1 --hosts-at 127.0.0.1:9", "nothing answers at 127.0.0.1:1"),
    ],
)
def test_wrong_options(tmp_path, capsys, monkeypatch, options, sentence):
    from tpuswarm.cli import main

    token = tmp_path / "token"
    token.write_text("0" * 64)
    monkeypatch.setattr(sys, "argv", ["tpuswarm", "join", "127.0.0.1:1", "--token-file", str(token), *options.split()])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and sentence in err and err.count("\n") == 1


def test_a_number_given_twice_is_refused_and_the_others_leave_with_host_0(tmp_path, monkeypatch):
    """Host 0 waits for the third host all the while."""
    token, lines, leave, said = tmp_path / "token", [], threading.Event(), []
    token.write_text("token")
    monkeypatch.setattr(rendezvous, "Line", lambda *about: lines.append(Line(*about)) or lines[-1])
    at = f"127.0.0.1:{free_port()}"
    group = Group(at, 3, 0, str(token))

    def until(number: int) -> None:
        end = time.monotonic() + 60
        while len(lines) < number:
            assert time.monotonic() < end, f"host {number} does not come"
            time.sleep(0.05)

    with ThreadPoolExecutor(2) as pool:
        zero = pool.submit(group.gather, lambda: not leave.is_set())
        try:
            one = Group(at, 3, 1, str(token))
            while joining.silent(at):
                assert not zero.done()
            first = pool.submit(join, at, None, one, token, said.append)
            until(1)
            with pytest.raises(InputError, match="it expects hosts 1 to 2, each once, not another host 1"):
                join(at, None, one, token, lambda text: None)
            assert not first.done()
        finally:
            leave.set()
        with pytest.raises(rendezvous.Absent):
            zero.result(20)
        first.result(60)
    assert said[-1] == "host 0 has left the swarm, or the swarm has ended"


def test_a_host_with_another_token_is_refused(tmp_path):
    """Host 0 waits on; the other is told why, by a command that ends."""
    token, other = tmp_path / "token", tmp_path / "other"
    token.write_text("right")
    other.write_text("wrong")
    with rendezvous.listen("127.0.0.1", 0) as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"

        def host_0() -> None:
            listener.accept()[0].close()  # the look at whether the swarm's address answers: here it is the same
            with pytest.raises(WrongSecret):
                authenticate(listener.accept()[0], token.read_bytes(), 0)

        thread = threading.Thread(target=host_0)
        thread.start()
        said: list[str] = []
        with pytest.raises(InputError, match=f"host 0 at {at} has a different secret; all hosts need the same"):
            join(at, None, Group(at, 2, 1, str(other)), other, said.append)
        thread.join()
    assert said == [f"this is host 1 of 2; connecting to {at}; Ctrl-C leaves"]


def test_another_host_gets_the_files_that_it_lacks(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART", 3)
    there = {"have": b"at both", "lack": b"ten bytes.", "short": b"whole", "other": b"bytes of its size", "empty": b""}
    zero, one = tmp_path / "zero", tmp_path / "one"
    for folder in (zero, one):
        folder.mkdir()
        (folder / "have").write_bytes(there["have"])
    for name, data in there.items():
        (zero / name).write_bytes(data)
    (one / "short").write_bytes(b"who")
    (one / "other").write_bytes(b"zeros of its size")
    whole = files.described(zero)
    before = (one / "have").stat().st_ino
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(files.take, rendezvous.Hosts(1, 2, {0: Line(far, pytest.fail)}), one, whole)
        files.give(rendezvous.Hosts(0, 2, {1: Line(near, pytest.fail)}), zero, whole)
        taken.result(20)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == there
    assert (one / "have").stat().st_ino == before, "what is there is not sent"


def test_a_member_on_the_runs_machine_trains_on_no_other_files_than_the_run_was_started_with(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"tokens")
    plan = replace(PLAN, files=files.described(tmp_path))
    member = MemberHost(Assigned("m0", plan, (), tmp_path, None, 0, False, pytest.fail, pytest.fail))
    assert member._fetch_files() == tmp_path
    (tmp_path / "tokens.bin").write_bytes(bytes(6))
    for use in (
        member._fetch_files,
        lambda: files.described(tmp_path, {"tokens.bin": plan.files["tokens.bin"].digest}),
    ):
        with pytest.raises(InputError, match=r"tokens.bin has changed since the run was started; restore a copy"):
            use()


def test_a_batch_that_is_no_part_of_the_run_s_is_refused(monkeypatch):
    monkeypatch.setenv(BATCH, "4")
    made = hosts_of_run.member(PLAN, "j0", ("shard",), None, 0, False, pytest.fail)
    with pytest.raises(InputError, match="j0 cannot join: its batch is 4, and the run's, 2, is no multiple of it"):
        made.run()


def test_a_machine_that_joined_fetches_what_has_changed_there(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokens.bin").write_bytes(b"tokens")
    plan = replace(PLAN, files=files.described(tmp_path))
    there = files.folder_of(plan) / "tokens.bin"
    there.parent.mkdir(parents=True)
    there.write_bytes(bytes(6))
    asked = []

    def calls(call):
        asked.append(call.arguments)
        return b"tokens"

    for _ in range(2):
        assigned = Assigned("j0", plan, ("aggregator-0",), None, None, 0, False, calls, lambda text: None)
        MemberHost(assigned)._fetch_files()
    assert there.read_bytes() == b"tokens" and asked == [("tokens.bin", 0, files.PART)]


WHOLE = hashlib.sha256(b"whole").hexdigest()


def test_a_file_is_whole_or_not_there(tmp_path):
    """What is interrupted leaves nothing, and what a killed process left is removed."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"tokens.bin.{dead.pid}").write_bytes(b"half")
    (tmp_path / f"tokens.bin.{os.getppid()}").write_bytes(b"another process is at it")

    def parts():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.keep(tmp_path / "tokens.bin", parts(), WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == [f"tokens.bin.{os.getppid()}"]
    with pytest.raises(RunFailed, match=r"tokens.bin arrived with the digest [0-9a-f]{12}…, not"):
        files.keep(tmp_path / "tokens.bin", [b"who", b"om"], WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == [f"tokens.bin.{os.getppid()}"]
    files.keep(tmp_path / "tokens.bin", [b"who", b"le"], WHOLE)
    assert (tmp_path / "tokens.bin").read_bytes() == b"whole"


PLAN = Plan(
    swarm=Table("run", 1, 8, "average", None, "plain", True, 1), target="gpt2-tiny", options={},
    settings={"deterministic": False, "steps": 10, "batch": 2}, files={}, shared={}, tokens_per_row=3, data="",
    code="", evaluate_every=None,
)  # fmt: skip


def waiting(answer: Joining) -> MemberHost:
    """Host 0 of two, to which nobody comes."""
    at = f"127.0.0.1:{free_port()}"
    group = Group(at, 2, 0, os.devnull)
    return MemberHost(Assigned("j0", PLAN, ("shard",), None, group, 0, False, lambda call: answer, lambda text: None))


@pytest.mark.parametrize(("tokens", "how"), [(59, "left"), (60, "ended")])
def test_a_member_that_waits_for_a_host_keeps_no_run_from_ending(tokens, how):
    """The run has 10 steps of 2 rows of 3 tokens."""
    founding = Founding(((Leaf("w", (1,)),),), {})
    member = waiting(Joining(PLAN.terms(founding), founding, 1, tokens, ("",)))
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(member.run)
        if how == "left":
            assert not wait([work], 0.5).done
            member.leave()
        assert work.result(20) == how


def test_metrics_that_cannot_be_read_end_the_member():
    rows = MetricsRows("m0", 0, 6, lambda: 0)
    rows.took({"loss": "of a device that is gone"})
    end = time.monotonic() + 20
    with pytest.raises(ValueError, match="of a device that is gone"):
        while time.monotonic() < end:
            rows.took({"loss": 1.0})
            time.sleep(0.01)
