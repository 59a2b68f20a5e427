"""Members that dial in, as real processes: with an invite alone, killed, without their gateway, and to the end."""

import copy
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from tests import processes
from tests.journeys.documents import ROOT
from tests.journeys.test_swarm import contributors, member, tree
from tests.swarm.chaos import SMALL, Swarm
from tests.swarm.link import Link
from tpuswarm.remote.setup.artifacts import build_wheel
from tpuswarm.swarm.core.transitions import PERSON_LEASE_S
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.storage.verify import verify
from tpuswarm.train.run.directory import METRICS, read_rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def make_swarm(tmp_path):
    swarms = []

    def make(*words: str, address: str = "127.0.0.1", port: int | None = None) -> Swarm:
        arguments = ["gpt2-tiny", "--data", "fake", *SMALL, "--cycle", "8", "--outer", "average", *words]
        listen = ["--listen", f"127.0.0.1:{port or free_port()}", "--address", address]
        swarm = Swarm(tmp_path / "run", [*arguments, *listen])
        swarm.start()
        swarms.append(swarm)
        return swarm

    yield make
    for swarm in swarms:
        swarm.end()


@pytest.fixture
def dial(tmp_path, monkeypatch):
    """Start `tpuswarm join` for a person on a machine of their own: nothing but the invite comes from the swarm."""
    started: list[subprocess.Popen[str]] = []

    def start(
        swarm: Swarm, person: str, machine: str, argument: bool = False, program: list[str] | None = None
    ) -> subprocess.Popen[str]:
        swarm.wait(lambda: (swarm.run / "invites.json").exists())
        invite, _ = processes.run(["invite", str(swarm.run), person], tmp_path)
        home = tmp_path / machine
        home.mkdir(exist_ok=True)
        monkeypatch.setenv("TPUSWARM_CACHE", str(home / "cache"))
        word = invite.strip() if argument else "-"
        join = processes.start(["join", word, "--name", machine], home, program, subprocess.PIPE)
        monkeypatch.undo()
        join.stdin.write(invite)
        join.stdin.flush()
        started.append(join)
        return join

    yield start
    for join in started:
        for pid in reversed(tree(join.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        join.communicate()


def words_of(pids: list[int]) -> str:
    return "\n".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in pids if Path(f"/proc/{pid}").exists())


@pytest.mark.slow
def test_members_of_people_come_die_and_leave(make_swarm, dial, tmp_path):
    swarm = make_swarm("--members", "1", "--steps", "10M", "--keep-payloads", "5000")
    ada, bob = dial(swarm, "ada", "colab", argument=True), dial(swarm, "bob", "home")
    swarm.wait(lambda: {"ada-colab", "bob-home"} <= contributors(swarm))
    seen = words_of([*tree(ada.pid), *tree(bob.pid)])
    assert "tpuswarm.swarm.anywhere" in seen and "tps1-" not in seen and "ray" not in seen

    before = member(swarm, "ada-colab")
    os.kill(before["pid"], signal.SIGKILL)
    swarm.wait(lambda: member(swarm, "ada-colab")["incarnation"] not in (None, before["incarnation"]))
    swarm.wait(lambda: any(event["member"] == "ada-colab" for event in swarm.events("lost")))
    count = sum("ada-colab" in str(event["contributors"]) for event in swarm.events("commit"))
    swarm.wait(lambda: sum("ada-colab" in str(event["contributors"]) for event in swarm.events("commit")) > count + 1)

    first = swarm.status()["processes"]["gateway"]
    os.kill(first, signal.SIGKILL)
    swarm.wait(lambda: swarm.status()["processes"].get("gateway", first) != first)
    now = {name: member(swarm, name)["incarnation"] for name in ("ada-colab", "bob-home")}
    done = len(swarm.events("commit"))
    swarm.wait(lambda: {"ada-colab", "bob-home"} <= {
        part["member"] for event in swarm.events("commit")[done:] for part in event["contributors"]
    })  # fmt: skip
    assert {name: member(swarm, name)["incarnation"] for name in now} == now, "nobody had to begin again"

    people = swarm.status()["people"]
    assert set(people) == {"", "ada", "bob"} and all(people.values())
    out, _ = processes.run(["status", str(swarm.run)], tmp_path)
    assert re.search(r"contributed: .*ada \d+%", out), out
    processes.run(["invite", str(swarm.run), "bob", "--revoke"], tmp_path)
    _, err = bob.communicate(timeout=processes.PATIENCE)
    assert bob.returncode == 2 and "was revoked" in err
    ada.send_signal(signal.SIGINT)
    _, err = ada.communicate(timeout=processes.PATIENCE)
    assert ada.returncode == 0 and "left" in err.splitlines()[-1], err
    swarm.wait(lambda: any(event["member"] == "ada-colab" for event in swarm.events("left")))
    swarm.end()
    assert verify(Store(swarm.run), print).problems == []
    processes.run(["ledger", "rebuild", str(swarm.run), "--without", "ada", "--to", "rebuilt"], tmp_path)
    rebuilt = Swarm(tmp_path / "rebuilt", [])
    assert verify(Store(rebuilt.run), print).problems == []
    last = Ledger(Store(rebuilt.run)).versions()[-1]
    rebuilt.start()
    rebuilt.wait(lambda: rebuilt.events("commit")[-1]["version"] > last + 1)
    rebuilt.end()
    assert verify(Store(rebuilt.run), print).problems == []

    steps = [row["step"] for row in read_rows(swarm.run / "members" / "ada-colab" / METRICS) if "loss" in row]
    assert steps == sorted(steps) and len(steps) == len(set(steps)), "its steps go on where they stopped"


@pytest.mark.slow
def test_run_of_dialled_in_members_alone_ends_and_is_evaluated(make_swarm, dial, tmp_path):
    swarm = make_swarm("--members", "0", "--steps", "1200", "--eval-every", "600")
    joined = [dial(swarm, "guest", machine) for machine in ("one", "two")]
    assert swarm.process.wait(processes.PATIENCE) == 0
    for join in joined:
        _, err = join.communicate(timeout=processes.PATIENCE)
        assert join.returncode == 0 and "the run has ended" in err, err
    assert contributors(swarm) == {"guest-one", "guest-two"}
    rows = read_rows(swarm.run / METRICS)
    assert any("eval_loss" in row for row in rows)
    assert verify(Store(swarm.run), print).problems == []


@pytest.mark.slow
def test_member_goes_on_after_its_slow_connection_was_cut(make_swarm, dial):
    """8 Mbit/s and 100 ms; it is cut for longer than the lease of a member of the swarm's own."""
    port, megabyte = free_port(), 1e6
    link = Link(port, one_way_s=0.05, bytes_per_s=megabyte)
    swarm = make_swarm("--members", "1", "--steps", "10M", address=f"127.0.0.1:{link.port}", port=port)
    join = dial(swarm, "ada", "home")
    swarm.wait(lambda: "ada-home" in contributors(swarm))
    before = member(swarm, "ada-home")
    assert before["round_trip_s"] > 0.1 and before["push_bytes_per_s"] < 1.1 * megabyte
    link.cut()
    time.sleep(25.0)
    link.mend()
    done = len(swarm.events("commit"))
    swarm.wait(lambda: "ada-home" in str(swarm.events("commit")[done + 1 :]))
    assert member(swarm, "ada-home")["incarnation"] == before["incarnation"], "it went on where it was"
    join.send_signal(signal.SIGINT)
    join.communicate(timeout=processes.PATIENCE)
    swarm.end()
    link.close()
    assert verify(Store(swarm.run), print).problems == []


@pytest.mark.slow
def test_member_waits_for_a_head_that_is_away(make_swarm, dial):
    swarm = make_swarm("--members", "1", "--steps", "10M")
    join = dial(swarm, "ada", "colab")
    swarm.wait(lambda: "ada-colab" in contributors(swarm))
    swarm.end()
    assert [event["member"] for event in swarm.events("joined")].count("ada-colab") == 1, (
        "not again by the run that stops"
    )
    began = len(swarm.events("commit"))
    time.sleep(1.0)
    swarm.start()
    swarm.wait(lambda: "ada-colab" in str(swarm.events("commit")[began:]))
    assert join.poll() is None
    swarm.end()  # while the member can still leave: the head would wait for a killed one


@pytest.mark.slow
def test_member_that_stood_still_for_longer_than_its_lease_goes_on(make_swarm, dial):
    swarm = make_swarm("--members", "1", "--steps", "10M")
    join = dial(swarm, "ada", "laptop")
    swarm.wait(lambda: "ada-laptop" in contributors(swarm))
    asleep, before = tree(join.pid), member(swarm, "ada-laptop")["pid"]
    for pid in asleep:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(PERSON_LEASE_S + 5)
    swarm.wait(lambda: any(event["member"] == "ada-laptop" for event in swarm.events("lost")))
    begun = len(swarm.events("commit"))
    swarm.wait(lambda: len(swarm.events("commit")) > begun + 2)
    assert "ada-laptop" not in str(swarm.events("commit")[begun:])
    for pid in asleep:
        os.kill(pid, signal.SIGCONT)
    begun = len(swarm.events("commit"))
    swarm.wait(lambda: "ada-laptop" in str([event["contributors"] for event in swarm.events("commit")[begun:]]))
    assert join.poll() is None and member(swarm, "ada-laptop")["pid"] == before, "it goes on in the same process"
    lives = [event["incarnation"] for event in swarm.events("joined") if event["member"] == "ada-laptop"]
    assert lives[0] != lives[-1], "without the rows that others got meanwhile"
    swarm.end()
    assert verify(Store(swarm.run), print).problems == []


@pytest.fixture
def other_program(tmp_path_factory) -> list[str]:
    """tpuswarm installed for another Python of this machine, with the newest libraries that it takes."""
    paths = [*os.get_exec_path(), *map(str, Path.home().glob(".pyenv/versions/3.*/bin"))]
    found = [shutil.which(f"python3.{minor}", path=path) for minor in range(15, 10, -1) for path in paths]
    others = [path for path in found if path and not path.endswith(f".{sys.version_info.minor}")]
    others = [path for path in others if not subprocess.run([path, "-c", ""], capture_output=True).returncode]
    if not others:
        pytest.skip("there is only one Python from 3.11 on")
    folder = tmp_path_factory.mktemp("other")
    subprocess.run([others[0], "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin/pip", "install", "-q", build_wheel(folder)], check=True)
    return ["env", "XLA_FLAGS=", str(folder / "bin/tpuswarm")]  # its compiler has other flags


@pytest.mark.long
def test_members_of_two_versions_of_python_train_one_model(make_swarm, dial, other_program):
    swarm = make_swarm("--members", "0", "--steps", "10M")
    joined = dial(swarm, "ada", "here"), dial(swarm, "bob", "there", program=other_program)
    swarm.wait(lambda: {"ada-here", "bob-there"} <= contributors(swarm))
    notes = [event["message"] for event in swarm.events("note")]
    versions = {re.search(r"connected \(python (3\.\d+)", note)[1] for note in notes if " connected (" in note}
    assert len(versions) == 2 and "3." + str(sys.version_info.minor) in versions, notes
    for join in joined:
        join.send_signal(signal.SIGINT)
        processes.finish(join)
    swarm.end()
    assert verify(Store(swarm.run), print).problems == []


class Session:
    """A notebook of examples/ in a stand-in for its service: its variable, its secrets, no TPU, 64 MiB of disk."""

    def __init__(self, folder: Path, service: str, invite: str, monkeypatch: pytest.MonkeyPatch):
        secrets = {"colab": "google/colab/userdata.py", "kaggle": "kaggle_secrets.py"}[service]
        for name, text in {
            "modules/google/colab/__init__.py": "",
            f"modules/{secrets}": f"class UserSecretsClient:\n    get_secret = get = lambda self, name: {invite!r}\n"
            "get = UserSecretsClient().get\n",
            "bin/pip": "#!/bin/sh\necho pip $*\n",
            "kernels/capped/kernel.json": json.dumps({"display_name": "capped", "language": "python", "argv": [
                "unshare", "--mount", "sh", "-c",
                f"mount -t tmpfs -o size=64m tmpfs {folder}/cache && exec {sys.executable} -m ipykernel_launcher -f $0",
                "{connection_file}",
            ]}),
        }.items():  # fmt: skip
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        (folder / "bin/pip").chmod(0o755)
        (folder / "cache").mkdir()
        for name, value in {
            {"colab": "COLAB_RELEASE_TAG", "kaggle": "KAGGLE_KERNEL_RUN_TYPE"}[service]: "1",
            "JUPYTER_PATH": str(folder),
            "SHELL": {"colab": "bash", "kaggle": "dash"}[service],  # only bash hands its process to the command
            "PYTHONPATH": str(folder / "modules"),
            "PATH": f"{folder}/bin:{Path(processes.PROGRAM).parent}:{os.environ['PATH']}",
            "TPUSWARM_CACHE": str(folder / "cache"),
            **processes.ONE_DEVICE,
        }.items():
            monkeypatch.setenv(name, value)
        notebook = nbformat.read(ROOT / "examples" / f"{service}.ipynb", as_version=4)
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code")
        self.cells = [cell, copy.deepcopy(cell)]
        notebook.cells = self.cells
        self._client = NotebookClient(notebook, timeout=None, kernel_name="capped")
        self._threads = ThreadPoolExecutor(1)
        self._end = self._threads.submit(self._client.execute, cwd=folder)
        while not (self._client.km and self._client.km.has_kernel) and not self._end.done():
            time.sleep(0.1)
        monkeypatch.undo()

    def interrupt(self) -> None:
        """Interrupt the cell that runs, as the button of the page does."""
        os.kill(self._client.km.provisioner.pid, signal.SIGINT)

    def command(self) -> psutil.Process:
        kernel = psutil.Process(self._client.km.provisioner.pid)
        return next(child for child in kernel.children(recursive=True) if "join" in child.cmdline())

    def output(self, number: int) -> str:
        return "".join(output.text for output in self.cells[number].outputs)

    def wait(self) -> None:
        """Wait until both cells have ended."""
        self._end.result(processes.PATIENCE)

    def close(self) -> None:
        if not self._end.done():
            for pid in reversed(tree(self._client.km.provisioner.pid)):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._threads.shutdown(wait=False)


@pytest.fixture
def open_session(tmp_path, monkeypatch):
    sessions = []

    def start(service: str, invite: str) -> Session:
        sessions.append(Session(tmp_path / service, service, invite, monkeypatch))
        return sessions[-1]

    yield start
    for session in sessions:
        session.close()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the small disk is a mount")
def test_notebooks_take_part_are_interrupted_run_again_and_lose_their_tpu(make_swarm, open_session, tmp_path):
    swarm = make_swarm("--members", "0", "--steps", "10M")
    swarm.wait(lambda: (swarm.run / "invites.json").exists())
    invite, _ = processes.run(["invite", str(swarm.run), "ada"], tmp_path)
    kaggle = open_session("kaggle", invite.strip())
    swarm.wait(lambda: "ada-kaggle" in contributors(swarm) and "of the run" in kaggle.output(0))
    kaggle.interrupt()
    swarm.wait(lambda: len(swarm.events("joined")) == 2)
    first, second = swarm.events("joined")
    assert second["member"] == "ada-kaggle" and second["again"] and second["incarnation"] != first["incarnation"]
    begun = len(swarm.events("commit"))
    swarm.wait(lambda: len(swarm.events("commit")) > begun)
    shown = kaggle.output(0)
    assert shown.startswith("pip install -q tpuswarm") and "as ada-kaggle" in shown and "is admitted" in shown, shown

    colab = open_session("colab", invite.strip())
    swarm.wait(lambda: "ada-colab" in contributors(swarm) and "step " in colab.output(0))
    kaggle.interrupt()
    kaggle.wait()
    colab.command().terminate()  # its TPU is taken
    swarm.wait(lambda: "left" in colab.output(0))
    swarm.wait(lambda: len(swarm.events("joined")) == 4)
    colab.interrupt()
    colab.wait()
    swarm.wait(lambda: len(swarm.events("left")) == 4)
    assert not swarm.events("lost"), "every process has pushed its last work"
    swarm.end()
    assert verify(Store(swarm.run), print).problems == []
