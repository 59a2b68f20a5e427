"""Fleets on local clouds, made once in a session, and machines without a cloud."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.local_cloud import local_cloud
from tests.processes import Forked, finish
from tests.remote.machines import Machines, start_machines
from tests.terminal import PROGRAM
from tests.waiting import until
from tpuswarm.cli import main
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE, CloudFolder, send_command
from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.fleet.decide.jobs import Job
from tpuswarm.fleet.hosts.routes import Routes, open_routes
from tpuswarm.fleet.keeper.job_runner import JobRunner
from tpuswarm.fleet.store.fleets import find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.train.process.stop import SIGNALS

ONE, SLICE = "v2-usc1f-0", "v5e-usc1a-0"
"""The machines of `fleet`; the second has four workers."""
HOSTS = [f"{ONE}/0", *(f"{SLICE}/{worker}" for worker in range(4))]


def swarm_toml(name: str, region: str, *pools: str) -> str:
    """A file with a bucket and these pools, each NAME TYPE ZONE COUNT and further lines."""
    text = f'name = "{name}"\nprovider = "rehearsal"\n[storage]\nbucket = "rehearsal-{name}"\nregion = "{region}"\n'
    for pool in pools:
        first, *more = pool.split("\n")
        called, type_, zone, count = first.split()
        text += f'[[pool]]\nname = "{called}"\ntype = "{type_}"\nzones = ["{zone}"]\ncount = {count}\n'
        text += "\n".join([f'network = "tpuswarm-{name}"', *more, ""])
    return text


FILE = swarm_toml("trio", "us-central1", "one v2-8 us-central1-f 1", 'slice v5e-16 us-central1-a 1\nhow = "on-demand"')
INTERVALS = {
    "tpuswarm.cli.machine.job_logs.REFRESH_INTERVAL_S": 1.0,
    "tpuswarm.cli.machine.job_logs.POLL_INTERVAL_S": 0.1,
    "tpuswarm.fleet.decide.jobs.FIRST_BACKOFF_S": 0.2,
    "tpuswarm.fleet.decide.jobs.MISSING_GRACE_S": 0.5,
    "tpuswarm.fleet.decide.fleet_state.FIRST_BACKOFF_S": 0.2,
    "tpuswarm.fleet.keeper.job_runner.RETRY_S": 0.2,
    "tpuswarm.fleet.keeper.job_runner.BUSY_INTERVAL_S": 0.1,
    "tpuswarm.fleet.keeper.job_runner.IDLE_INTERVAL_S": 0.2,
    "tpuswarm.fleet.keeper.keeper.BUSY_INTERVAL_S": 0.1,
    "tpuswarm.fleet.keeper.keeper.IDLE_INTERVAL_S": 0.2,
}
"""Seconds that commands of `Fleet.run`, and of `Fleet.start` if asked, wait between looks and before retries."""
WITH_INTERVALS = """
import importlib, json, sys
for name, seconds in json.loads(sys.argv.pop(1)).items():
    module, _, constant = name.rpartition(".")
    setattr(importlib.import_module(module), constant, seconds)
sys.argv[0] = "tpuswarm"
from tpuswarm.cli import main
main()
"""


class Fleet:
    def __init__(self, folder: Path, place: CloudFolder):
        self.folder, self.place = folder, place
        self.environment = {**os.environ, FOLDER_VARIABLE: str(place.path), "XDG_STATE_HOME": str(folder / "state"),
                            "HOME": str(folder)}  # fmt: skip

    def enter(self, monkeypatch: pytest.MonkeyPatch, cwd: Path | None = None) -> "Fleet":
        """Give this process the environment, folder and short intervals of the fleet's commands."""
        for name in os.environ.keys() - self.environment.keys():
            monkeypatch.delenv(name)
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(cwd or self.folder)
        for name, seconds in INTERVALS.items():
            monkeypatch.setattr(name, seconds)
        return self

    def start(self, *words: str, intervals: dict[str, float] | None = None, **options) -> subprocess.Popen[str]:
        """Start a command with pipes; `intervals` changes constants of its modules."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        options = {"cwd": self.folder, "env": self.environment, "text": True, **pipes, **options}
        if intervals is None:
            return Forked([PROGRAM, *words], **options)
        return subprocess.Popen([sys.executable, "-c", WITH_INTERVALS, json.dumps(intervals), *words], **options)

    def run(self, *words: str, code: int = 0, cwd: Path | None = None) -> tuple[str, str]:
        """Run a command in this process, which has its imports already; return stdout and stderr."""
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with pytest.MonkeyPatch.context() as patch, Path(os.devnull).open() as nothing:
            self.enter(patch, cwd)
            patch.setattr(sys, "argv", ["tpuswarm", *words])
            patch.setattr(sys, "stdin", nothing)
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True))
            try:
                with pytest.raises(SystemExit) as end:
                    main()
                printed, complaints = (file.buffer.getvalue().decode() for file in (sys.stdout, sys.stderr))
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
        assert end.value.code == code, f"exit {end.value.code}, not {code}:\n{printed}\n{complaints}"
        assert "Traceback" not in complaints, complaints
        return printed, complaints

    def run_json(self, *words: str, code: int = 0) -> dict:
        return json.loads(self.run(*words, "--json", code=code)[0])

    def interrupt(self, process: subprocess.Popen[str]) -> str:
        process.send_signal(signal.SIGINT)
        err = finish(process, 130)[1]
        assert "Traceback" not in err, err
        return err

    def exec(self, where: str, line: str) -> str:
        return self.run("exec", where, "--", line)[0]

    def detach(self, where: str, name: str, line: str, *options: str, prints: str = "") -> str:
        """Start a job, and wait until its log has `prints`; return the command's stderr."""
        err = self.run("exec", where, "--detach", "--name", name, *options, "--", line)[1]
        until(lambda: not prints or prints in self.run("logs", name)[0])
        return err

    @contextmanager
    def job(self, where: str, name: str, line: str, prints: str = "") -> Iterator[None]:
        self.detach(where, name, line, prints=prints)
        try:
            yield
        finally:
            self.run("stop", name)

    @contextmanager
    def flag(self, where: str, name: str, value: str) -> Iterator[str]:
        """Set a flag until the end of the block; yield the command's output."""
        out = self.run("flags", "set", where, f"{name}={value}")[0]
        try:
            yield out
        finally:
            self.run("flags", "unset", where, f"--{name}")

    @contextmanager
    def broken(self, name: str, *faults: str) -> Iterator[None]:
        """Plant faults in a machine, a zone or a project until the end of the block."""
        for fault in faults:
            self.run("rehearsal", "break", name, fault)
        try:
            yield
        finally:
            for fault in faults:
                self.run("rehearsal", "break", name, fault, "--mend")

    def jobs(self) -> dict[str, list[dict]]:
        """The seats of each job, as `tpuswarm jobs` lists them."""
        return {job["name"]: job["seats"] for job in self.run_json("jobs")["jobs"]}

    def carry_jobs(self, done: Callable[[dict[str, Job]], bool]) -> dict[str, Job]:
        """Carry out jobs in this process, as a keeper does, until `done`; return the jobs."""

        async def rounds() -> dict[str, Job]:
            fleet = find_fleet(None)[0]
            cloud = fleet.provider()
            store = fleet.store(cloud)
            runner = JobRunner(Routes(fleet, cloud, fleet.store(cloud)), fleet.store(cloud))
            end = time.monotonic() + 240
            async with Connections(runner.key) as connections:
                while True:
                    listing = cloud.machines(store.load().zones)
                    document, _ = await runner.run_once(connections, listing, time.time())
                    jobs = {job.name: job for job in document.jobs}
                    if done(jobs):
                        return jobs
                    assert time.monotonic() < end, jobs
                    await asyncio.sleep(0.1)

        return asyncio.run(rounds())

    def machines(self) -> list[dict]:
        return send_command(self.place, "status")["machines"]

    def ready_machine(self) -> str:
        (name,) = {machine["name"] for machine in self.machines() if machine["state"] == "READY"}
        return name

    def pids(self, word: str, machine: str = "") -> list[int]:
        """Return the processes on machines whose command line contains these arguments."""
        arguments = word.replace(" ", "\0").encode()
        names = [folder.name for folder in self.place.machines.iterdir() if folder.name.startswith(machine)]
        found = []
        for pid in processes.find(names):
            with suppress(OSError):
                if arguments in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def wait_until_gone(self, word: str, machine: str = "") -> None:
        until(lambda: not self.pids(word, machine))

    def home(self, host: str) -> Path:
        """The folder of a host (NAME-WORKER) that stands for `/`."""
        return max(self.place.machines.glob(f"{host}-*"), key=lambda folder: folder.stat().st_mtime)

    def user_home(self, host: str) -> Path:
        """The home of the user who owns everything on a host."""
        root = self.home(host)
        homes = (root / "root", *root.glob("home/*"))
        return until(lambda: next((home for home in homes if any(home.iterdir())), None))


@contextmanager
def fleet_of(folder: Path, file: str) -> Iterator[Fleet]:
    """Make a local cloud, and on it the fleet of a swarm.toml."""
    (folder / "swarm.toml").write_text(file)
    with local_cloud(folder / "cloud") as place:
        fleet = Fleet(folder, place)
        fleet.run("init", "--yes")
        fleet.run("up", "--yes", "--paid")
        yield fleet


@pytest.fixture(scope="session")
def session_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with fleet_of(tmp_path_factory.mktemp("remote"), FILE) as fleet:
        yield fleet


@pytest.fixture
def fleet(session_fleet, monkeypatch) -> Fleet:
    """A v2-8 and a slice of four workers."""
    return session_fleet.enter(monkeypatch)


@pytest.fixture(scope="session")
def spot_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A spot slice of four workers, which tests may have preempted; each leaves it ready."""
    file = swarm_toml("quad", "us-central1", "slice v5e-16 us-central1-a 1")
    with fleet_of(tmp_path_factory.mktemp("spot"), file) as fleet:
        yield fleet


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A slice of two workers with Jupyter."""
    slice_ = 'slice v4-16 us-central2-b 1\nhow = "on-demand"'
    file = swarm_toml("books", "us-central2", slice_) + '[setup]\nnotebook = true\nenv = { GREETING = "hello" }\n'
    with fleet_of(tmp_path_factory.mktemp("books"), file) as fleet:
        yield fleet


@pytest.fixture
def routes(fleet) -> Routes:
    return open_routes(find_fleet(None)[0])


@pytest.fixture
def machines(tmp_path) -> Iterator[Machines]:
    """Three machines without a cloud."""
    with start_machines(tmp_path, 3) as found:
        yield found
