"""Find processes that hold chips, and processes of jobs and `exec`.

Runs on a host with only its Python, 3.6 or later; changes nothing.
"""

import json
import os
import pwd
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("TPUSWARM_ROOT", "/"))
"""`/`, or its replacement on a machine of the local cloud."""
ENVIRONMENT_MARK = b"\0TPUSWARM_ROOT=" + os.fsencode(ROOT) if "TPUSWARM_ROOT" in os.environ else b""
"""In the environment of all processes of such a machine, which shares /proc with others."""
MARKS = re.compile(rb"(?:^|\0)TPUSWARM_(JOB|EXEC)=([^\0]*)")
EXEC_PID = re.compile(rb"(?:^|\0)TPUSWARM_EXEC_PID=(\d+)")
"""In the environment of requested processes: a job has its folder (remote/supervise.py), an `exec` a random mark and
the process of its command (remote/remote_process.sh).
"""
LIST_OPEN_CHIPS = "find /proc/[0-9]*/fd -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' 2>/dev/null; true"
"""Shell command that lists the open chips of all processes."""
TERMINAL_MAJORS = range(136, 144)
"""Device numbers of log-in terminals (devpts)."""


def list_devices() -> "list[Path]":
    """Return the device files of the chips."""
    return sorted([*(ROOT / "dev").glob("accel[0-9]*"), *(ROOT / "dev/vfio").glob("[0-9]*")])


def machine_path(path: Path) -> str:
    """Return a path as the machine sees it."""
    return "/" + str(path.relative_to(ROOT))


def file_identity(found: os.stat_result) -> "tuple[int, ...]":
    """Return what identifies a file, or its device: a container has its own file for a device."""
    return (found.st_rdev,) if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def find_holders(paths: "list[Path]") -> "list[dict[str, Any]]":
    """Return the processes with one of the files open; only root sees other users' processes."""
    wanted = {}
    for path in paths:
        try:
            wanted[file_identity(path.stat())] = path
        except OSError:
            continue
    held = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            for file in (place / "fd").iterdir():
                found = file_identity(file.stat())
                if found in wanted:
                    held.append(describe_process(place, wanted[found]))
                    break
        except OSError:
            continue
    return held


def find_holders_as_root() -> "list[dict[str, Any]] | None":
    """Return other users' processes with a chip; null: sudo is not possible."""
    if os.getuid() == 0 or ENVIRONMENT_MARK:
        return []
    try:
        words = ["sudo", "-n", "sh", "-c", LIST_OPEN_CHIPS]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=3)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # it needs a password
        return None
    found = []
    for place in sorted({Path(*Path(line).parts[:3]) for line in done.stdout.decode().split()}):
        try:
            if place.stat().st_uid != os.getuid():
                found.append(describe_process(place, ROOT / "dev"))
        except OSError:  # ended
            continue
    return found


def describe_process(place: Path, path: Path) -> "dict[str, Any]":
    """Describe the process that has a file."""
    command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    ticks = int((place / "stat").read_bytes().rpartition(b")")[2].split()[19])  # a name may be any bytes
    up = float(Path("/proc/uptime").read_text().split()[0])
    is_requested = is_leftover = False
    job = ""
    try:
        environment = (place / "environ").read_bytes()
        mark = MARKS.search(environment)
        is_requested = find_request(environment) is not None
        is_leftover = not is_requested and mark is not None
        if is_requested and mark and mark.group(1) == b"JOB":
            job = Path(os.fsdecode(mark.group(2))).name
    except OSError:  # another user's
        pass
    return {
        "pid": int(place.name), "user": user_name(place.stat().st_uid), "command": command[:200],
        "age_s": up - ticks / os.sysconf("SC_CLK_TCK"), "path": machine_path(path),
        "is_requested": is_requested, "is_leftover": is_leftover, "job": job,
    }  # fmt: skip


def find_request(environment: bytes) -> "bytes | None":
    """Return the running job or `exec` that a process belongs to."""
    mark, command = MARKS.search(environment), EXEC_PID.search(environment)
    if not mark:
        return None
    try:
        if mark.group(1) == b"JOB":
            state = json.loads(Path(os.fsdecode(mark.group(2)), "state.json").read_text())
            supervisor = Path("/proc", str(state["pid"]), "cmdline")
            runs = state["state"] == "running" and b"supervise" in supervisor.read_bytes()
        else:
            runs = not command or mark.group(2) in Path("/proc", command.group(1).decode(), "environ").read_bytes()
    except PermissionError:  # another user's by now
        runs = True
    except (OSError, ValueError, KeyError):  # ended
        runs = False
    return mark.group(2) if runs else None


def user_name(uid: int) -> str:
    """Return a user's name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def find_requested() -> "tuple[list[tuple[Path, bytes, bytes]], bool]":
    """Return requested processes (/proc folder, request, environment), and whether somebody is logged in."""
    found, is_logged_in = [], False
    for place in Path("/proc").glob("[0-9]*"):
        has_terminal, environment = False, b""
        try:
            terminal = int((place / "stat").read_bytes().rpartition(b")")[2].split()[4])
            has_terminal = terminal >> 8 in TERMINAL_MAJORS
            environment = (place / "environ").read_bytes()
        except OSError:  # ended, or another user's
            pass
        if ENVIRONMENT_MARK in b"\0" + environment:
            is_logged_in = is_logged_in or has_terminal
            request = find_request(environment)
            if request is not None:
                found.append((place, request, environment))
    return found, is_logged_in


def find_cpu_programs(
    holders: "list[dict[str, Any]]", requested: "list[tuple[Path, bytes, bytes]]"
) -> "list[dict[str, Any]]":
    """Return requested programs that have loaded JAX without JAX_PLATFORMS=cpu, and whose request holds no chip."""
    pids = {holder["pid"] for holder in holders}
    served = {request for place, request, _ in requested if int(place.name) in pids}
    found = []
    for place, request, environment in requested:
        try:
            expects_chip = request not in served and b"\0JAX_PLATFORMS=cpu" not in b"\0" + environment
            if expects_chip and b"/jaxlib/" in (place / "maps").read_bytes():
                found.append(describe_process(place, ROOT))
        except OSError:  # ended
            continue
    return found
