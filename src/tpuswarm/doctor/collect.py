"""Runs on a host, with its own Python (3.6 or later) and nothing else: prints what `doctor` looks at, as JSON.

Nothing is changed, and no answer is waited for longer than a second; what cannot be found out is null.
"""

import json
import os
import pwd
import re
import resource
import socket
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(os.environ.get("TPUSWARM_ROOT", "/"))
"""The folder that stands for `/` on a machine of the local cloud."""
HERE = b"\0TPUSWARM_ROOT=" + os.fsencode(ROOT) if "TPUSWARM_ROOT" in os.environ else b""
"""What stands in the environment of all processes of such a machine: it shares /proc with others."""
LOCK = ROOT / "tmp/libtpu_lockfile"
PACKAGES = ("jax", "jaxlib", "libtpu", "tpuswarm", "ray", "torch")
MARKS = re.compile(rb"(?:^|\0)TPUSWARM_(?:JOB|EXEC)=([^\0]*)")
"""In the environment of what runs because somebody asked for it: a kept job (remote/supervise.py), or an `exec`."""
SPOKEN = re.compile(
    rb"Couldn't open iommu group|open\(/dev/vfio|Failed to initialize TPU system|TPU initialization failed"
    rb"|No accelerator found|[Ff]alling back to (?:cpu|CPU)|required by \S*libtcmalloc|cannot be preloaded"
    rb"|os\.fork\(\) was called"
)
"""What logs of jobs say that doctor knows the meaning of."""
TAIL, OLD_S = 65536, 86400.0
"""Bytes at the end of a log that are read, if it was written to within so many seconds."""
METADATA = {
    "worker": "attributes/agent-worker-number", "type": "attributes/accelerator-type", "preempted": "preempted",
    "maintenance": "maintenance-event", "scopes": "service-accounts/default/scopes",
}  # fmt: skip
SEEN_BY_ROOT = "find /proc/[0-9]*/fd -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' 2>/dev/null; true"
"""A line for each file of a chip that a process has open."""
TERMINALS = range(136, 144)
"""Major numbers of the terminals that people log in at (devpts)."""
PERMISSIONS = ("storage.objects.create", "storage.objects.delete", "storage.objects.get", "storage.objects.list")
"""What a run needs of its bucket."""


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
    ticks = int((place / "stat").read_text().rpartition(")")[2].split()[19])
    up = float(Path("/proc/uptime").read_text().split()[0])
    try:
        asked = bool(MARKS.search((place / "environ").read_bytes()))
    except OSError:  # another user's
        asked = False
    return {
        "pid": int(place.name), "user": owner(place.stat().st_uid), "command": command[:200],
        "age_s": up - ticks / os.sysconf("SC_CLK_TCK"), "path": shown(path),
        "asked_for": asked,
    }  # fmt: skip


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
            terminal = int((each / "stat").read_text().rpartition(")")[2].split()[4]) >> 8 in TERMINALS
            environment = (each / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            pass
        if HERE in b"\0" + environment:
            logged_in = logged_in or terminal
            mark = MARKS.search(environment)
            if mark:
                found.append((each, mark.group(1), environment))
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


def entry(path: Path) -> "dict[str, Any] | None":
    """Whose a file is, and whether this user may write it; null where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    mine = found.st_uid == os.getuid()
    is_root = os.getuid() == 0 and not HERE
    writable = is_root or bool(found.st_mode & (0o200 if mine else 0o002))
    return {"user": owner(found.st_uid), "mode": f"{found.st_mode & 0o7777:o}", "writable": writable, "mine": mine}


def preload() -> "dict[str, bool]":
    """What every program is to load first, and whether it is there."""
    try:
        text = (ROOT / "etc/environment").read_text()
    except OSError:
        return {}
    found = re.search(r'^\s*LD_PRELOAD=["\']?([^"\'\n]+)', text, re.MULTILINE)
    named = re.split(r"[:\s]+", found.group(1).strip()) if found else []
    return {each: (ROOT / each.lstrip("/")).exists() for each in named}


def disk(path: Path) -> "dict[str, Any]":
    """Room of the file system that a folder is on, and whether a file can be made there, or why not."""
    found = os.statvfs(path)
    test = path / f".tpuswarm-doctor-{os.getpid()}"
    writable = None
    try:
        test.write_bytes(bytes(4096))
    except OSError as error:
        writable = os.strerror(error.errno or 0)
    if test.exists():
        test.unlink()
    return {
        "path": str(path), "free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize,
        "inodes": found.f_favail if found.f_files else None, "refused": writable,
    }  # fmt: skip


def memory() -> "dict[str, int]":
    """Of /proc/meminfo, in bytes."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    names = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    return {name: int(found[name]) * 1024 for name in names if name in found}


def locked(path: Path) -> "dict[str, Any] | None":
    """The process that has locked a file; null: none."""
    try:
        about = path.stat()
        place = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and words[5] == place:
                return process(Path("/proc") / words[4], path)
    except (OSError, IndexError, ValueError):
        return None
    return None


def sites() -> "list[Path]":
    """The folder of packages of what set-up has made, or of the Python that this is."""
    made = sorted((Path.home() / ".tpuswarm/venv/lib").glob("python*/site-packages"))
    own = [Path(each) for each in sys.path if each.endswith("-packages")]
    return [each for each in [*made, *([] if HERE else own)] if any(each.glob("jax-*.dist-info"))][:1]


def packages() -> "dict[str, str]":
    """Versions of what set-up has put into its environment, and of its Python."""
    for site in sites():
        found = dict(each.stem.split("-", 1) for each in site.glob("*-*.dist-info"))
        return {
            "python": site.parent.name[len("python") :],
            **{name: found[name] for name in PACKAGES if name in found},
        }
    return {}


def wanted_libtpu() -> "str | None":
    """The versions of libtpu that the jax there asks for, such as ==0.0.42.*; null: nobody knows."""
    for about in (each for site in sites() for each in site.glob("jax-*.dist-info/METADATA")):
        found = re.search(r"^Requires-Dist: libtpu\s*\(?([^;)\n]*)", about.read_text(), re.MULTILINE)
        return found.group(1).strip() if found else None
    return None


def spoken() -> "list[dict[str, str]]":
    """The last of those sentences in the log of each kept job."""
    found = []
    for log in sorted((Path.home() / ".tpuswarm/jobs").glob("*/log")):
        try:
            if time.time() - log.stat().st_mtime > OLD_S:
                continue
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - TAIL))
                lines = re.split(rb"[\r\n]+", file.read())  # a progress bar has no line's end
        except OSError:
            continue
        last = {match.group(0): line for line in lines for match in [SPOKEN.search(line)] if match}
        for mark, line in last.items():
            said = line.decode(errors="replace").strip()[:200]
            found.append({"job": log.parent.name, "mark": mark.decode(), "line": said})
    return found


def metadata_host() -> "str | None":
    """Who tells the machine about itself; null where it is none of Google's."""
    host = os.environ.get("GCE_METADATA_HOST")
    try:
        if host is None and Path("/sys/class/dmi/id/product_name").read_text().strip() == "Google Compute Engine":
            return "metadata.google.internal"
    except OSError:
        return None
    return host


def told(host: str, path: str) -> str:
    """One thing that it is told."""
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=1) as answer:
        found: str = answer.read().decode().strip()
    return found


def metadata() -> "dict[str, str | None] | None":
    """What the machine is told about itself; null where it is none of Google's."""
    host = metadata_host()
    if host is None:
        return None
    found: dict[str, str | None] = {}
    for name, path in METADATA.items():
        try:
            found[name] = told(host, path)
        except (OSError, ValueError):
            found[name] = None
    return found


def bucket(name: str) -> "dict[str, Any] | None":
    """What this machine may not do with a bucket, or why that is not known; null where it is none of Google's."""
    host = metadata_host()
    if host is None:
        return None
    service = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
    asked = "&".join(f"permissions={each}" for each in PERMISSIONS)
    found: dict[str, Any] = {"name": name, "lacks": [], "why": ""}
    try:
        token = json.loads(told(host, "service-accounts/default/token"))["access_token"]
    except (OSError, ValueError, KeyError):
        return {**found, "why": "the machine has no service account"}
    try:
        request = urllib.request.Request(
            f"{service}/storage/v1/b/{name}/iam/testPermissions?{asked}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=3) as answer:
            allowed = json.loads(answer.read().decode()).get("permissions", [])
        found["lacks"] = [each for each in PERMISSIONS if each not in allowed]
    except urllib.error.HTTPError as error:
        found["why"] = "there is no such bucket" if error.code == 404 else f"{error.code} {error.reason}"
    except (OSError, ValueError) as error:
        found["why"] = str(error)
    return found


def reached(address: str) -> "dict[str, str]":
    """Whether something answers at HOST:PORT, and why not."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
        return {"address": address, "why": ""}
    except (OSError, ValueError) as error:
        return {"address": address, "why": getattr(error, "strerror", None) or str(error)}


def collect(head: str, name: str) -> "dict[str, Any]":
    """All of it; head: where a swarm's is; name: of the fleet's bucket. Empty: there is none."""
    chips = devices()
    held, others, (there, logged_in) = holders([*chips, LOCK]), holders_of_others(), at_work()
    held += others or []
    home, temporary = Path.home(), ROOT / "tmp"
    disks = [home] if home.stat().st_dev == temporary.stat().st_dev else [home, temporary]
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return {
        "time": time.time(), "user": owner(os.getuid()), "devices": [shown(each) for each in chips],
        "holders": held, "blind": others is None, "lock": entry(LOCK), "locker": locked(LOCK),
        "logs": entry(ROOT / "tmp/tpu_logs"),
        "preload": preload(), "disks": [disk(each) for each in disks], "memory": memory(),
        "files": None if soft == resource.RLIM_INFINITY else soft, "apt": locked(ROOT / "var/lib/dpkg/lock-frontend"),
        "packages": packages(), "wanted_libtpu": wanted_libtpu(), "metadata": metadata(), "spoken": spoken(),
        "on_cpu": on_cpu(held, there), "attended": bool(there) or logged_in,
        "worker_id": os.environ.get("TPU_WORKER_ID"),
        "accelerator": os.environ.get("TPU_ACCELERATOR_TYPE"), "head": reached(head) if head else None,
        "bucket": bucket(name) if name else None,
    }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(collect(*([*sys.argv[1:], "", ""][:2]))) + "\n")
