"""Print the facts that `doctor` checks, as JSON. Runs on a host with only its Python, 3.6 or later; changes nothing."""

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tpuswarm.doctor.processes import (
    ENVIRONMENT_MARK,
    ROOT,
    describe_process,
    find_cpu_programs,
    find_holders,
    find_holders_as_root,
    find_requested,
    list_devices,
    machine_path,
    user_name,
)

ANSWER_TIMEOUT_S = 5.0
"""Long enough for a busy machine's metadata server."""
LOCK, LOGS = ROOT / "tmp/libtpu_lockfile", ROOT / "tmp/tpu_logs"
PACKAGES = ("jax", "jaxlib", "libtpu", "tpuswarm", "ray", "torch")
KNOWN_MESSAGES = re.compile(
    rb"Couldn't open iommu group|open\(/dev/vfio|Failed to initialize TPU system|TPU initialization failed"
    rb"|No accelerator found|[Ff]alling back to (?:cpu|CPU)|required by \S*libtcmalloc|cannot be preloaded"
    rb"|os\.fork\(\) was called"
)
"""Messages in job logs that a check explains."""
LOG_TAIL_BYTES = 65536
MAX_LOG_AGE_S = 86400.0
METADATA = {
    "worker": "attributes/agent-worker-number", "type": "attributes/accelerator-type", "preempted": "preempted",
    "maintenance": "maintenance-event", "scopes": "service-accounts/default/scopes",
    "upcoming": "upcoming-maintenance?alt=json",
}  # fmt: skip
PERMISSIONS = ("storage.objects.create", "storage.objects.delete", "storage.objects.get", "storage.objects.list")
DERIVED = {"others": ("is_blind",), "holders": ("holders", "on_cpu"), "requested": ("is_attended", "on_cpu")}
"""Facts that are lost with another one."""


def read_entry(path: Path) -> "dict[str, Any] | None":
    """Return the owner and mode of a file, and whether this user may write it; null if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    is_mine = found.st_uid == os.getuid()
    is_root = os.getuid() == 0 and not ENVIRONMENT_MARK
    is_writable = is_root or bool(found.st_mode & (0o200 if is_mine else 0o002))
    mode = f"{found.st_mode & 0o7777:o}"
    return {"user": user_name(found.st_uid), "mode": mode, "is_writable": is_writable, "is_mine": is_mine}


def read_preload() -> "dict[str, str]":
    """Return the libraries in LD_PRELOAD, each with what is wrong with it."""
    try:
        text = (ROOT / "etc/environment").read_text()
    except OSError:
        return {}
    found = re.search(r'^\s*LD_PRELOAD=["\']?([^"\'\n]+)', text, re.MULTILINE)
    named = re.split(r"[:\s]+", found.group(1).strip()) if found else []
    return {library: try_preload(library) for library in named}


def try_preload(library: str) -> str:
    """Start a program with a preloaded library; return what goes wrong, or nothing."""
    if "/" in library:
        library = "./" + library.lstrip("/")
        if not (ROOT / library).exists():
            return "does not exist"
    environment = {**os.environ, "LD_PRELOAD": library}
    words, pipes = [sys.executable, "-I", "-c", ""], {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    try:
        done = subprocess.run(words, cwd=str(ROOT), env=environment, timeout=ANSWER_TIMEOUT_S, **pipes)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return "hangs programs"
    said = done.stderr.decode(errors="replace").strip()
    return f"breaks programs (exit {done.returncode}): {said[-200:]}" if done.returncode or said else ""


def read_disk(path: Path) -> "dict[str, Any]":
    """Return the free space of a folder's file system, and the error of writing a file there."""
    found = os.statvfs(path)
    test = path / f".tpuswarm-doctor-{os.getpid()}"
    error = None
    try:
        test.write_bytes(bytes(4096))
    except OSError as refused:
        error = os.strerror(refused.errno or 0)
    if test.exists():
        test.unlink()
    return {
        "path": str(path), "free": found.f_bavail * found.f_frsize, "size": found.f_blocks * found.f_frsize,
        "inodes": found.f_favail if found.f_files else None, "error": error,
    }  # fmt: skip


def read_disks() -> "list[dict[str, Any]]":
    """Read the disks of the home folder and of /tmp, once if they are the same."""
    home, temporary = Path.home(), ROOT / "tmp"
    is_same = home.stat().st_dev == temporary.stat().st_dev
    return [read_disk(folder) for folder in ([home] if is_same else [home, temporary])]


def max_open_files() -> "int | None":
    """Return the hard limit on open files; null: unlimited."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return None if limit == resource.RLIM_INFINITY else limit


def read_memory() -> "dict[str, int]":
    """Read /proc/meminfo, in bytes."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    names = ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    return {name: int(found[name]) * 1024 for name in names if name in found}


def find_locker(path: Path) -> "dict[str, Any] | None":
    """Return the process that has locked a file."""
    try:
        found = path.stat()
        inode = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()
            if "->" not in words and words[5] == inode:
                return describe_process(Path("/proc") / words[4], path)
    except (OSError, IndexError, ValueError):
        return None
    return None


def find_site_packages() -> "list[Path]":
    """Return the package folder of set-up's environment, or of this Python, in which jax is installed."""
    installed = sorted((Path.home() / ".tpuswarm/venv/lib").glob("python*/site-packages"))
    own = [Path(folder) for folder in sys.path if folder.endswith("-packages")]
    folders = [*installed, *([] if ENVIRONMENT_MARK else own)]
    return [folder for folder in folders if any(folder.glob("jax-*.dist-info"))][:1]


def read_versions() -> "dict[str, str]":
    """Return the versions of PACKAGES and of their Python."""
    for site in find_site_packages():
        found = dict(info.stem.split("-", 1) for info in site.glob("*-*.dist-info"))
        return {
            "python": site.parent.name[len("python") :],
            **{name: found[name] for name in PACKAGES if name in found},
        }
    return {}


def wanted_libtpu() -> "str | None":
    """Return the versions of libtpu that jax requires, such as ==0.0.42.*; null: unknown."""
    for metadata in (path for site in find_site_packages() for path in site.glob("jax-*.dist-info/METADATA")):
        found = re.search(r"^Requires-Dist: libtpu\s*\(?([^;)\n]*)", metadata.read_text(), re.MULTILINE)
        return found.group(1).strip() if found else None
    return None


def find_messages() -> "list[dict[str, str]]":
    """Return the last line with each known message in each job's log."""
    found = []
    for log in sorted((Path.home() / ".tpuswarm/jobs").glob("*/log")):
        try:
            if time.time() - log.stat().st_mtime > MAX_LOG_AGE_S:
                continue
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
                lines = re.split(rb"[\r\n]+", file.read())  # progress bars end in \r
        except OSError:
            continue
        last = {match.group(0): line for line in lines for match in [KNOWN_MESSAGES.search(line)] if match}
        for mark, line in last.items():
            text = line.decode(errors="replace").strip()[:200]
            found.append({"job": log.parent.name, "mark": mark.decode(), "text": text})
    return found


def metadata_host() -> "str | None":
    """Return the address of the metadata server; null outside Google."""
    host = os.environ.get("GCE_METADATA_HOST")
    try:
        if host is None and Path("/sys/class/dmi/id/product_name").read_text().strip() == "Google Compute Engine":
            return "metadata.google.internal"
    except OSError:
        return None
    return host


def read_metadata_value(host: str, path: str) -> str:
    """Read one value from the metadata server."""
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
        found: str = answer.read().decode().strip()
    return found


def read_metadata() -> "dict[str, str | None] | None":
    """Return the machine's metadata; null outside Google. Raise OSError if the server does not answer."""
    host = metadata_host()
    if host is None:
        return None
    found: dict[str, str | None] = {}
    for name, path in METADATA.items():
        try:
            found[name] = read_metadata_value(host, path)
        except (urllib.error.HTTPError, ValueError):  # not set
            found[name] = None
    return found


def check_bucket(name: str) -> "dict[str, Any] | None":
    """Return the permissions that this machine lacks in a bucket; null outside Google.

    Raise OSError if the metadata server does not answer.
    """
    host = metadata_host()
    if host is None:
        return None
    service = os.environ.get("STORAGE_EMULATOR_HOST", "https://storage.googleapis.com")
    query = "&".join(f"permissions={permission}" for permission in PERMISSIONS)
    found: dict[str, Any] = {"name": name, "missing": [], "error": ""}
    try:
        token = json.loads(read_metadata_value(host, "service-accounts/default/token"))["access_token"]
    except (urllib.error.HTTPError, ValueError, KeyError):
        return {**found, "error": "the machine has no service account"}
    try:
        request = urllib.request.Request(
            f"{service}/storage/v1/b/{name}/iam/testPermissions?{query}", headers={"Authorization": f"Bearer {token}"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as answer:
            allowed = json.loads(answer.read().decode()).get("permissions", [])
        found["missing"] = [permission for permission in PERMISSIONS if permission not in allowed]
    except urllib.error.HTTPError as error:
        found["error"] = "there is no such bucket" if error.code == 404 else f"{error.code} {error.reason}"
    except (OSError, ValueError) as error:
        found["error"] = str(error)
    return found


def try_connection(address: str) -> "dict[str, str]":
    """Connect to HOST:PORT; return the error, or none."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S).close()
        return {"address": address, "error": ""}
    except (OSError, ValueError) as error:
        return {"address": address, "error": getattr(error, "strerror", None) or str(error)}


def read_fact(found: "dict[str, Any]", fact: str, probe: "Callable[..., Any]", *arguments: Any) -> None:
    """Add a fact to `found`, or its error to `found["lost"]`."""
    try:
        found[fact] = probe(*arguments)
    except Exception as error:  # noqa: BLE001  # one broken probe must not hide the other facts
        found["lost"].update(dict.fromkeys(DERIVED.get(fact, (fact,)), type(error).__name__ + ": " + str(error)))


def collect(head: str, bucket: str) -> "dict[str, Any]":
    """Return all facts; head: the swarm's HOST:PORT; bucket: the fleet's. Empty: none.

    A fact that cannot be read is missing, and `lost` has the error.
    """
    lost = {}  # type: dict[str, str]
    found = {"time": time.time(), "user": user_name(os.getuid()), "lost": lost}  # type: dict[str, Any]
    read = partial(read_fact, found)
    read("devices", lambda: [machine_path(path) for path in list_devices()])
    read("others", find_holders_as_root)
    others = found.pop("others", None)
    read("holders", lambda: find_holders([*list_devices(), LOCK]) + (others or []))
    read("requested", find_requested)
    requested, is_logged_in = found.pop("requested", ([], False))
    if "on_cpu" not in lost:
        read("on_cpu", find_cpu_programs, found["holders"], requested)
    for fact, value in (("is_blind", others is None), ("is_attended", bool(requested) or is_logged_in)):
        if fact not in lost:
            found[fact] = value
    read("lock", read_entry, LOCK)
    read("locker", find_locker, LOCK)
    read("logs", read_entry, LOGS)
    read("preload", read_preload)
    read("disks", read_disks)
    read("memory", read_memory)
    read("files", max_open_files)
    read("apt", find_locker, ROOT / "var/lib/dpkg/lock-frontend")
    read("packages", read_versions)
    read("wanted_libtpu", wanted_libtpu)
    read("metadata", read_metadata)
    read("messages", find_messages)
    read("worker_id", os.environ.get, "TPU_WORKER_ID")
    read("accelerator", os.environ.get, "TPU_ACCELERATOR_TYPE")
    read("head", lambda: try_connection(head) if head else None)
    read("bucket", lambda: check_bucket(bucket) if bucket else None)
    return found


def main() -> None:
    """Print the facts."""
    sys.stdout.write(json.dumps(collect(*([*sys.argv[1:], "", ""][:2]))) + "\n")
