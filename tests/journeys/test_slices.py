"""The data files of a member of several hosts, and the end of its run while it waits for a host."""

import hashlib
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace

import pytest

from tests.hosts import free_port
from tests.processes import PATIENCE
from tests.waiting import until
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.arithmetic.fragments import Piece
from tpuswarm.swarm.engines.variables import BATCH
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.member.member_process import MemberProcess, MemberSpec
from tpuswarm.swarm.member.metrics_buffer import MetricsBuffer
from tpuswarm.swarm.processes.coordinator import Joining
from tpuswarm.swarm.processes.run_plan import RunPlan
from tpuswarm.swarm.processes.run_plan import Swarm as Table
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.swarm.supervision import entry as hosts_of_run
from tpuswarm.swarm.supervision import join as joining
from tpuswarm.swarm.supervision.join import join
from tpuswarm.train.hosts import rendezvous
from tpuswarm.train.hosts.control_channel import ControlChannel, ExitStatus, WrongSecret, authenticate


def test_host_with_another_token_is_refused(tmp_path, monkeypatch):
    """Host 0 keeps waiting; the command of the other host ends with the reason."""
    ends, run_host = [], joining._run_host
    monkeypatch.setattr(joining, "_run_host", lambda *about: ends.append(run_host(*about)) or ends[-1])
    other = tmp_path / "other"
    other.write_text("wrong")
    with rendezvous.listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        at = f"127.0.0.1:{listener.getsockname()[1]}"

        def be_host_0() -> None:
            listener.accept()[0].close()  # `join` checks first that the swarm's address answers, here the same one
            with listener.accept()[0] as connection, pytest.raises(WrongSecret):
                authenticate(connection, b"right", 0)

        host_0 = pool.submit(be_host_0)
        with pytest.raises(InputError, match=f"host 0 at {at} has a different secret; all hosts need the same"):
            join(at, None, Group(at, 2, 1, str(other)), other, lambda text: None)
        host_0.result(PATIENCE)
    assert ends[0].status == ExitStatus.REFUSED, "a host that has made steps would try again"


def test_host_receives_missing_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PART_BYTES", 3)
    there = {"have": b"at both", "lack": b"ten bytes.", "short": b"whole", "other": b"bytes of its size", "empty": b""}
    zero, one = tmp_path / "zero", tmp_path / "one"
    for folder in (zero, one):
        folder.mkdir()
        (folder / "have").write_bytes(there["have"])
    for name, data in there.items():
        (zero / name).write_bytes(data)
    (one / "short").write_bytes(b"who")
    (one / "other").write_bytes(b"zeros of its size")
    whole = files.describe(zero)
    before = (one / "have").stat().st_ino
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(files.receive, rendezvous.Hosts(1, 2, {0: ControlChannel(far, pytest.fail)}), one, whole)
        files.send(rendezvous.Hosts(0, 2, {1: ControlChannel(near, pytest.fail)}), zero, whole)
        taken.result(PATIENCE)
    assert {path.name: path.read_bytes() for path in one.iterdir()} == there
    assert (one / "have").stat().st_ino == before, "an identical file is not sent"


def test_changed_file_on_the_runs_machine_is_refused(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"tokens")
    plan = replace(PLAN, files=files.describe(tmp_path))
    member = MemberProcess(MemberSpec("m0", plan, (), tmp_path, None, 0, False, pytest.fail, pytest.fail))
    assert member._fetch_files() == tmp_path
    (tmp_path / "tokens.bin").write_bytes(bytes(6))
    for use in (
        member._fetch_files,
        lambda: files.describe(tmp_path, {"tokens.bin": plan.files["tokens.bin"].digest}),
    ):
        with pytest.raises(InputError, match=r"tokens.bin has changed since the run was started; restore a copy"):
            use()


def test_batch_that_does_not_divide_the_runs_is_refused(monkeypatch):
    monkeypatch.setenv(BATCH, "4")
    made = hosts_of_run.member(PLAN, "j0", ("shard",), None, 0, False, pytest.fail)
    with pytest.raises(InputError, match="j0 cannot join: its batch of 4 does not divide the run's batch of 2"):
        made.run()


def test_joined_machine_fetches_changed_files(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokens.bin").write_bytes(b"tokens")
    plan = replace(PLAN, files=files.describe(tmp_path))
    there = files.cache_folder(plan) / "tokens.bin"
    there.parent.mkdir(parents=True)
    there.write_bytes(bytes(6))
    requests = []

    def calls(call):
        requests.append(call.arguments)
        return b"tokens"

    for _ in range(2):
        assigned = MemberSpec("j0", plan, ("aggregator-0",), None, None, 0, False, calls, lambda text: None)
        MemberProcess(assigned)._fetch_files()
    assert there.read_bytes() == b"tokens" and requests == [("tokens.bin", 0, files.PART_BYTES)]


WHOLE = hashlib.sha256(b"whole").hexdigest()


def test_interrupted_transfer_leaves_no_file(tmp_path):
    """It also removes files of killed processes."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f"tokens.bin.{dead.pid}").write_bytes(b"half")
    (tmp_path / f"tokens.bin.{os.getppid()}").write_bytes(b"another process is at it")

    def parts():
        yield b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "tokens.bin", parts(), WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == [f"tokens.bin.{os.getppid()}"]
    with pytest.raises(RunFailed, match=r"tokens.bin arrived with the digest [0-9a-f]{12}…, not"):
        files.write(tmp_path / "tokens.bin", [b"who", b"om"], WHOLE)
    assert [path.name for path in tmp_path.iterdir()] == [f"tokens.bin.{os.getppid()}"]
    files.write(tmp_path / "tokens.bin", [b"who", b"le"], WHOLE)
    assert (tmp_path / "tokens.bin").read_bytes() == b"whole"


PLAN = RunPlan(
    swarm=Table("run", 1, 8, "average", None, "plain", True, 1), target="gpt2-tiny", options={},
    settings={"deterministic": False, "steps": 10, "batch": 2}, files={}, shared={}, tokens_per_row=3, data="",
    code="", evaluate_every=None,
)  # fmt: skip


def waiting(answer: Joining) -> MemberProcess:
    """Return host 0 of two, whose other host never connects."""
    at = f"127.0.0.1:{free_port()}"
    group = Group(at, 2, 0, os.devnull)
    return MemberProcess(
        MemberSpec("j0", PLAN, ("shard",), None, group, 0, False, lambda call: answer, lambda text: None)
    )


@pytest.mark.parametrize(("tokens", "how"), [(59, "left"), (60, "ended")])
def test_member_waiting_for_a_host_lets_the_run_end(tokens, how):
    """The run has 10 steps of 2 rows of 3 tokens."""
    founding = Founding(((Piece("w", (1,)),),), {})
    member = waiting(Joining(PLAN.terms(founding), founding, 1, tokens, ("",)))
    with ThreadPoolExecutor(1) as pool:
        work = pool.submit(member.run)
        if how == "left":
            assert not wait([work], 0.5).done
            member.leave()
        assert work.result(PATIENCE) == how


def test_unreadable_metrics_end_the_member():
    rows = MetricsBuffer("m0", 0, 6, lambda: 0)
    rows.add_step({"loss": "of a device that is gone"})
    with pytest.raises(ValueError, match="of a device that is gone"):
        until(lambda: rows.add_step({"loss": 1.0}))
