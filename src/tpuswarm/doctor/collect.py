"""Runs on a host, with its own Python (3.6 or later) and nothing else: prints what `doctor` looks at, as JSON.

Nothing is changed, and no answer is waited for longer than ANSWER_S; what cannot be found out is null.
"""

import json
import os
import re
import resource
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tpuswarm.doctor.processes import (
    HERE,
    ROOT,
    at_work,
    devices,
    holders,
    holders_of_others,
    on_cpu,
    owner,
    process,
    shown,
)

ANSWER_S = 5.0
"""A machine that is busy answers late, and nothing is wrong with it."""
LOCK = ROOT / "tmp/libtpu_lockfile"
PACKAGES = ("jax", "jaxlib", "libtpu", "tpuswarm", "ray", "torch")
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
PERMISSIONS = ("storage.objects.create", "storage.objects.delete", "storage.objects.get", "storage.objects.list")
"""What a run needs of its bucket."""
MADE_OF = {"others": ("blind",), "holders": ("holders", "on_cpu"), "work": ("attended", "on_cpu")}
"""What is lost where one of these cannot be looked at."""


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


def disks() -> "list[dict[str, Any]]":
    """Of the home and of /tmp, once where they are on one file system."""
    home, temporary = Path.home(), ROOT / "tmp"
    return [disk(each) for each in ([home] if home.stat().st_dev == temporary.stat().st_dev else [home, temporary])]


def files() -> "int | None":
    """How many a process may have open if it asks for all; null: any number."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if most == resource.RLIM_INFINITY else most


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
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        found: str = answer.read().decode().strip()
    return found


def metadata() -> "dict[str, str | None] | None":
    """What the machine is told about itself; null where it is none of Google's. OSError where nobody answers."""
    host = metadata_host()
    if host is None:
        return None
    found: dict[str, str | None] = {}
    for name, path in METADATA.items():
        try:
            found[name] = told(host, path)
        except (urllib.error.HTTPError, ValueError):  # it has none of these
            found[name] = None
    return found


def bucket(name: str) -> "dict[str, Any] | None":
    """What this machine may not do with a bucket, or why that is not known; null where it is none of Google's.

    OSError where nobody tells the machine who it is.
    """
    host = metadata_host()
    if host is None:
        return None
    service = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
    asked = "&".join(f"permissions={each}" for each in PERMISSIONS)
    found: dict[str, Any] = {"name": name, "lacks": [], "why": ""}
    try:
        token = json.loads(told(host, "service-accounts/default/token"))["access_token"]
    except (urllib.error.HTTPError, ValueError, KeyError):
        return {**found, "why": "the machine has no service account"}
    try:
        request = urllib.request.Request(
            f"{service}/storage/v1/b/{name}/iam/testPermissions?{asked}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
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
        socket.create_connection((host, int(port)), ANSWER_S).close()
        return {"address": address, "why": ""}
    except (OSError, ValueError) as error:
        return {"address": address, "why": getattr(error, "strerror", None) or str(error)}


def collect(head: str, name: str) -> "dict[str, Any]":
    """All of it; head: where a swarm's is; name: of the fleet's bucket. Empty: there is none.

    What cannot be looked at is missing, and why is among `lost`: the rest is told all the same.
    """
    found = {"time": time.time(), "user": owner(os.getuid())}  # type: dict[str, Any]
    lost = {}  # type: dict[str, str]

    def look(what: str, probe: "Callable[..., Any]", *about: Any) -> None:
        try:
            found[what] = probe(*about)
        except Exception as error:  # noqa: BLE001  # one host's surprise is no reason to know nothing of it
            lost.update(dict.fromkeys(MADE_OF.get(what, (what,)), type(error).__name__ + ": " + str(error)))

    look("devices", lambda: [shown(each) for each in devices()])
    look("others", holders_of_others)
    others = found.pop("others", None)
    look("holders", lambda: holders([*devices(), LOCK]) + (others or []))
    look("work", at_work)
    there, logged_in = found.pop("work", ([], False))
    if "on_cpu" not in lost:
        look("on_cpu", on_cpu, found["holders"], there)
    for what, value in (("blind", others is None), ("attended", bool(there) or logged_in)):
        if what not in lost:
            found[what] = value
    look("lock", entry, LOCK)
    look("locker", locked, LOCK)
    look("logs", entry, ROOT / "tmp/tpu_logs")
    look("preload", preload)
    look("disks", disks)
    look("memory", memory)
    look("files", files)
    look("apt", locked, ROOT / "var/lib/dpkg/lock-frontend")
    look("packages", packages)
    look("wanted_libtpu", wanted_libtpu)
    look("metadata", metadata)
    look("spoken", spoken)
    look("worker_id", os.environ.get, "TPU_WORKER_ID")
    look("accelerator", os.environ.get, "TPU_ACCELERATOR_TYPE")
    look("head", lambda: reached(head) if head else None)
    look("bucket", lambda: bucket(name) if name else None)
    return {**found, "lost": lost}


def main() -> None:
    """Print it."""
    sys.stdout.write(json.dumps(collect(*([*sys.argv[1:], "", ""][:2]))) + "\n")
