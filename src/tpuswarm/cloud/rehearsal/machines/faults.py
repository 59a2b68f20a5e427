"""What may be wrong with a machine's inside: one table. `rehearsal break NAME FAULT` plants them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tpuswarm.cloud.rehearsal.machines import processes
from tpuswarm.cloud.rehearsal.machines.root import TCMALLOC, Root

HOLDER = "holder"
READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
MIGRATES = "MIGRATE_ON_HOST_MAINTENANCE"
WRONG_NUMBER = "TPU_WORKER_ID=7\n"


class Broken(NamedTuple):
    """A machine, as a fault finds it: its id, its folder, the environment of its processes."""

    id: str
    root: Root
    environment: Mapping[str, str]


class Fault(NamedTuple):
    """What it is, how it is planted, how it is mended."""

    what: str
    plant: Callable[[Broken], None]
    mend: Callable[[Broken], None]


def _lock(machine: Broken) -> None:
    machine.root.lock.touch()


def _lock_as_another(machine: Broken) -> None:
    machine.root.lock.touch()
    machine.root.lock.chmod(0o400)


def _unlock(machine: Broken) -> None:
    machine.root.lock.unlink(missing_ok=True)


def _hold(machine: Broken) -> None:
    _lock(machine)
    # A name that says what it is, a process that does nothing, and the first chip's file held open.
    script = 'exec 9<>"$1"; exec -a "python3 train.py" sleep infinity'
    subprocess.Popen(
        ["/bin/bash", "-c", script, HOLDER, str(machine.root.devices[0])],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=machine.environment,
        cwd=machine.root.path,
        start_new_session=True,
    )


def _release(machine: Broken) -> None:
    held = machine.root.devices[0].stat()
    processes.send([machine.id], signal.SIGKILL, only=lambda pid: processes.has_open(pid, held))
    _unlock(machine)


def _take_device(machine: Broken) -> None:
    machine.root.devices[-1].unlink(missing_ok=True)


def _give_device(machine: Broken) -> None:
    machine.root.devices[-1].touch()


def _logs(machine: Broken) -> Path:
    return machine.root.path / "tmp" / "tpu_logs"


def _close_logs(machine: Broken) -> None:
    _logs(machine).mkdir(exist_ok=True)
    _logs(machine).chmod(0o555)


def _open_logs(machine: Broken) -> None:
    if _logs(machine).exists():
        _logs(machine).chmod(0o777)


def _take_library(machine: Broken) -> None:
    (machine.root.path / TCMALLOC).unlink(missing_ok=True)


def _give_library(machine: Broken) -> None:
    (machine.root.path / TCMALLOC).touch()


def _dpkg(machine: Broken) -> Path:
    return machine.root.path / "var" / "lib" / "dpkg" / "lock-frontend"


def _hold_apt(machine: Broken) -> None:
    _dpkg(machine).parent.mkdir(parents=True, exist_ok=True)
    script = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(1e9)"
    )
    held = subprocess.Popen(
        [sys.executable, "-c", script, str(_dpkg(machine)), "unattended-upgrade"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=machine.environment,
        cwd=machine.root.path,
        start_new_session=True,
    )
    assert held.stdout is not None
    held.stdout.readline()


def _release_apt(machine: Broken) -> None:
    if _dpkg(machine).exists():
        held = _dpkg(machine).stat()
        processes.send([machine.id], signal.SIGKILL, only=lambda pid: processes.has_open(pid, held))


def _say(**told: str) -> Callable[[Broken], None]:
    def say(machine: Broken) -> None:
        machine.root.told.write_text(json.dumps(told))

    return say


def _unsay(machine: Broken) -> None:
    machine.root.told.unlink(missing_ok=True)


def _number(machine: Broken) -> None:
    with machine.root.profile.open("a") as file:
        file.write(WRONG_NUMBER)


def _unnumber(machine: Broken) -> None:
    machine.root.profile.write_text(machine.root.profile.read_text().replace(WRONG_NUMBER, ""))


MACHINE_FAULTS: dict[str, Fault] = {
    "lock": Fault("a libtpu lock file that cannot be opened, and no process has it", _lock_as_another, _unlock),
    HOLDER: Fault("a process that holds the first chip and the lock", _hold, _release),
    "missing-device": Fault("the file of the last chip is not there", _take_device, _give_device),
    "tpu-logs": Fault("/tmp/tpu_logs cannot be written", _close_logs, _open_logs),
    "preload": Fault("the library that /etc/environment preloads is not there", _take_library, _give_library),
    "worker-id": Fault("/etc/environment gives it another worker's number", _number, _unnumber),
    "read-only": Fault("its access scopes let it write to no bucket", _say(scopes=READ_ONLY), _unsay),
    "maintenance": Fault("its metadata announces a maintenance", _say(maintenance=MIGRATES), _unsay),
    "apt": Fault("a process that holds apt's lock", _hold_apt, _release_apt),
}
NODE_FAULTS = {
    "symptom": "the cloud calls it healthy, and reports a symptom",
    "unhealthy": "the cloud calls it unhealthy",
}
"""What the cloud may say of a TPU, without anything wrong inside."""
