"""Faults inside machines and of their health in the cloud, planted by `rehearsal break NAME FAULT`."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.cloud.rehearsal.machines.root import CHATTY_SHELL, TCMALLOC, Root

WRONG_WORKER_ID = "TPU_WORKER_ID=7\n"
LOCK_APT = (
    "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
    "print('locked', flush=True); time.sleep(1e9)"
)


class FaultyMachine(NamedTuple):
    """A machine's id, its folder, and the environment of its processes."""

    id: str
    root: Root
    environment: Mapping[str, str]

    def start(self, words: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **options}
        return subprocess.Popen(words, env=self.environment, cwd=self.root.path, start_new_session=True, **pipes)

    def kill_holders(self, path: Any) -> None:
        if path.exists():
            held = path.stat()
            processes.send([self.id], signal.SIGKILL, only=lambda pid: processes.has_open(pid, held))


class Fault(NamedTuple):
    """A fault; `set(machine, is_planted)` plants or mends it."""

    effect: str
    set: Callable[[FaultyMachine, bool], None]


def _set_lock(machine: FaultyMachine, is_planted: bool) -> None:
    if is_planted:
        machine.root.lock.touch()
        machine.root.lock.chmod(0o400)
    else:
        machine.root.lock.unlink(missing_ok=True)


def _set_holder(machine: FaultyMachine, is_planted: bool) -> None:
    chip = machine.root.devices[0]
    if is_planted:
        machine.root.lock.touch()
        # An idle process with a telling name holds the first chip's file open.
        script = 'exec 9<>"$1"; exec -a "python3 train.py" sleep infinity'
        machine.start(["/bin/bash", "-c", script, "holder", str(chip)])
    else:
        machine.kill_holders(chip)
        machine.root.lock.unlink(missing_ok=True)


def _set_missing_device(machine: FaultyMachine, is_planted: bool) -> None:
    chip = machine.root.devices[-1]
    chip.unlink(missing_ok=True) if is_planted else chip.touch()


def _set_closed_logs(machine: FaultyMachine, is_planted: bool) -> None:
    logs = machine.root.path / "tmp" / "tpu_logs"
    logs.mkdir(exist_ok=True)
    logs.chmod(0o555 if is_planted else 0o777)


def _set_missing_library(machine: FaultyMachine, is_planted: bool) -> None:
    if is_planted:
        (machine.root.path / TCMALLOC).unlink(missing_ok=True)
    else:
        machine.root.make_preloaded_library()


def _set_apt_lock(machine: FaultyMachine, is_planted: bool) -> None:
    lock = machine.root.path / "var" / "lib" / "dpkg" / "lock-frontend"
    if is_planted:
        lock.parent.mkdir(parents=True, exist_ok=True)
        words = [sys.executable, "-c", LOCK_APT, str(lock), "unattended-upgrade"]
        process = machine.start(words, stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
    else:
        machine.kill_holders(lock)


def _set_wrong_worker_id(machine: FaultyMachine, is_planted: bool) -> None:
    profile = machine.root.profile
    profile.write_text(profile.read_text().replace(WRONG_WORKER_ID, "") + WRONG_WORKER_ID * is_planted)


def _set_metadata(**values: str) -> Callable[[FaultyMachine, bool], None]:
    def set_values(machine: FaultyMachine, is_planted: bool) -> None:
        others = {name: value for name, value in machine.root.read_faulty_metadata().items() if name not in values}
        machine.root.faulty_metadata.write_text(json.dumps({**others, **values} if is_planted else others))

    return set_values


def _set_upcoming_maintenance(machine: FaultyMachine, is_planted: bool) -> None:
    start = datetime.now(UTC) + timedelta(days=7)
    first, last = (time.strftime("%Y-%m-%dT%H:%M:%SZ") for time in (start, start + timedelta(hours=4)))
    notice = {
        "can_reschedule": "false", "latest_window_start_time": first, "maintenance_status": "PENDING",
        "type": "SCHEDULED", "window_end_time": last, "window_start_time": first,
    }  # fmt: skip
    _set_metadata(upcoming=json.dumps(notice))(machine, is_planted)


def _set_file(name: str) -> Callable[[FaultyMachine, bool], None]:
    def set_file(machine: FaultyMachine, is_planted: bool) -> None:
        file = machine.root.path / name
        if is_planted:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        else:
            file.unlink(missing_ok=True)

    return set_file


MACHINE_FAULTS: dict[str, Fault] = {
    "lock": Fault("a libtpu lock file that cannot be opened, and no process has it", _set_lock),
    "holder": Fault("a process that holds the first chip and the lock", _set_holder),
    "missing-device": Fault("the file of the last chip is not there", _set_missing_device),
    "tpu-logs": Fault("/tmp/tpu_logs cannot be written", _set_closed_logs),
    "preload": Fault("the library that /etc/environment preloads is not there", _set_missing_library),
    "worker-id": Fault("/etc/environment gives it another worker's number", _set_wrong_worker_id),
    "read-only": Fault(
        "its access scopes let it write to no bucket",
        _set_metadata(scopes="https://www.googleapis.com/auth/devstorage.read_only"),
    ),
    "maintenance": Fault(
        "its metadata announces a maintenance", _set_metadata(maintenance="MIGRATE_ON_HOST_MAINTENANCE")
    ),
    "upcoming-maintenance": Fault("its metadata announces a maintenance in seven days", _set_upcoming_maintenance),
    "apt": Fault("a process that holds apt's lock", _set_apt_lock),
    "chatty-shell": Fault("each shell prints a welcome as it starts", _set_file(CHATTY_SHELL)),
    "dpkg-interrupted": Fault("it went down while dpkg installed a package", _set_file("var/lib/dpkg/interrupted")),
    "repository": Fault("one of its package repositories is broken", _set_file("etc/apt/broken-repository")),
}
NODE_FAULTS = {
    "symptom": "the cloud calls it healthy, and reports a symptom",
    "unhealthy": "the cloud calls it unhealthy",
}
"""Faults in the cloud's report about a TPU; nothing inside is wrong."""
