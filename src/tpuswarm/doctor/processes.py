"""Who has the chips of a host, and what runs there because somebody asked for it.

Runs on the host, with its own Python (3.6 or later) and nothing else; nothing is changed.
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
"""The folder that stands for `/` on a machine of the local cloud."""
HERE = b"\0TPUSWARM_ROOT=" + os.fsencode(ROOT) if "TPUSWARM_ROOT" in os.environ else b""
"""What stands in the environment of all processes of such a machine: it shares /proc with others."""
MARKS = re.compile(rb"(?:^|\0)TPUSWARM_(JOB|EXEC)=([^\0]*)")
COMMAND = re.compile(rb"(?:^|\0)TPUSWARM_EXEC_PID=(\d+)")
"""In the environment of what runs because somebody asked for it: a kept job, by its folder (remote/supervise.py), or an
`exec`, by a random mark and its command's process (remote/attended.sh).
"""
SEEN_BY_ROOT = "find /proc/[0-9]*/fd -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' 2>/dev/null; true"
"""A line for each file of a chip that a process has open."""
TERMINALS = range(136, 144)
"""Major numbers of the terminals that people log in at (devpts)."""


def devices() -> "list[Path]":
    """The files of the chips that are there."""
    return sorted([*(ROOT / "dev").glob("accel[0-9]*"), *(ROOT / "dev/vfio").glob("[0-9]*")])


def shown(path: Path) -> str:
    """As the machine itself would call it."""
    return "/" + str(path.relative_to(ROOT))


def identity(found: os.stat_result) -> "tuple[int, ...]":
    """Of a file; of a device's, which a container has a file of its own for, the device."""
    return (found.st_rdev,) if stat.S_ISCHR(found.st_mode) else (found.st_dev, found.st_ino)


def holders(paths: "list[Path]") -> "list[dict[str, Any]]":
    """Processes that have one of the files open; those of other users are seen by root alone."""
    wanted = {}
    for path in paths:
        try:
            wanted[identity(path.stat())] = path
        except OSError:
            continue
    held = []
    for each in Path("/proc").glob("[0-9]*"):
        try:
            for file in (each / "fd").iterdir():
                found = identity(file.stat())
                if found in wanted:
                    held.append(process(each, wanted[found]))
                    break
        except OSError:
            continue
    return held


def holders_of_others() -> "list[dict[str, Any]] | None":
    """Those of other users that root can see; null: this user may not ask as root."""
    if os.getuid() == 0 or HERE:
        return []
    try:
        words = ["sudo", "-n", "sh", "-c", SEEN_BY_ROOT]
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=3)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:  # it asks for a password
        return None
    found = []
    for place in sorted({Path(*Path(line).parts[:3]) for line in done.stdout.decode().split()}):
        try:
            if place.stat().st_uid != os.getuid():
                found.append(process(place, ROOT / "dev"))
        except OSError:  # it has ended
            continue
    return found


def process(place: Path, path: Path) -> "dict[str, Any]":
    """Who it is that has a file, and how long it has been running."""
    command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    ticks = int((place / "stat").read_bytes().rpartition(b")")[2].split()[19])  # a name may be any bytes
    up = float(Path("/proc/uptime").read_text().split()[0])
    asked = left = False
    job = ""
    try:
        environment = (place / "environ").read_bytes()
        mark = MARKS.search(environment)
        asked = asked_for(environment) is not None
        left = not asked and mark is not None
        if asked and mark and mark.group(1) == b"JOB":
            job = Path(os.fsdecode(mark.group(2))).name
    except OSError:  # another user's
        pass
    return {
        "pid": int(place.name), "user": owner(place.stat().st_uid), "command": command[:200],
        "age_s": up - ticks / os.sysconf("SC_CLK_TCK"), "path": shown(path),
        "asked_for": asked, "left": left, "job": job,
    }  # fmt: skip


def asked_for(environment: bytes) -> "bytes | None":
    """The job or `exec` that a process is of, as long as that runs; null: nobody has asked for it, or waits for it."""
    mark, command = MARKS.search(environment), COMMAND.search(environment)
    if not mark:
        return None
    try:
        if mark.group(1) == b"JOB":
            state = json.loads(Path(os.fsdecode(mark.group(2)), "state.json").read_text())
            supervisor = Path("/proc", str(state["pid"]), "cmdline")
            runs = state["state"] == "running" and b"supervise" in supervisor.read_bytes()
        else:
            runs = not command or mark.group(2) in Path("/proc", command.group(1).decode(), "environ").read_bytes()
    except PermissionError:  # it has become another user's
        runs = True
    except (OSError, ValueError, KeyError):  # it is over
        runs = False
    return mark.group(2) if runs else None


def owner(uid: int) -> str:
    """A user's name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def at_work() -> "tuple[list[tuple[Path, bytes, bytes]], bool]":
    """What runs because somebody asked for it, and whether anybody has a terminal there.

    Each process: where in /proc, for which job, with which environment.
    """
    found, logged_in = [], False
    for each in Path("/proc").glob("[0-9]*"):
        terminal, environment = False, b""
        try:
            terminal = int((each / "stat").read_bytes().rpartition(b")")[2].split()[4]) >> 8 in TERMINALS
            environment = (each / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            pass
        if HERE in b"\0" + environment:
            logged_in = logged_in or terminal
            job = asked_for(environment)
            if job is not None:
                found.append((each, job, environment))
    return found, logged_in


def on_cpu(held: "list[dict[str, Any]]", there: "list[tuple[Path, bytes, bytes]]") -> "list[dict[str, Any]]":
    """Of what was asked for: programs that have loaded JAX, may use any device, and whose jobs hold none."""
    holding = {each["pid"] for each in held}
    served = {job for place, job, _ in there if int(place.name) in holding}
    found = []
    for place, job, environment in there:
        try:
            may = job not in served and b"\0JAX_PLATFORMS=cpu" not in b"\0" + environment
            if may and b"/jaxlib/" in (place / "maps").read_bytes():
                found.append(process(place, ROOT))
        except OSError:  # it has ended
            continue
    return found
