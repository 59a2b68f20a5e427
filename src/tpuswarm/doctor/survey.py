"""Print what `doctor --report` needs to know of a host, as JSON. Runs with only Python 3.6 or later.

It starts JAX for a moment if no process uses the chips. Values of variables and metadata that may be secret stay here.
"""

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import Any

from tpuswarm.doctor.collect import (
    LOCK,
    LOGS,
    collect,
    find_locker,
    metadata_host,
    read_entry,
    read_fact,
    read_metadata_value,
    try_connection,
)
from tpuswarm.doctor.processes import ENVIRONMENT_MARK, ROOT, list_devices, machine_path

SHOWN_VARIABLES = re.compile(r"(TPU|JAX|XLA|LIBTPU|PJRT|MEGASCALE|CLOUD_TPU)_\w+|ALLOW_MULTIPLE_LIBTPU_LOAD|LD_PRELOAD")
"""Variables whose values are reported; of all others only the name is."""
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
ADDRESS = re.compile(r"\b[1-9]\d{0,2}(\.\d{1,3}){3}\b")
"""Not a version of libtpu, such as 0.0.42.1."""
SHOWN_FACTS = (
    "is_rehearsed", "system", "cpus", "memory", "devices", "pci", "lock", "logs", "preload", "packages",
    "wanted_libtpu", "environment", "product", "metadata", "metadata_keys", "endpoints", "messages", "jax", "lost",
)  # fmt: skip
JAX_TIMEOUT_S, SECOND_TIMEOUT_S = 120.0, 60.0
METRICS_ADDRESS = "127.0.0.1:8431"
PROGRAM = """\
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)  # libraries may print
import jax
if len(sys.argv) > 1:
    address, count, number = sys.argv[1:]
    jax.distributed.initialize(
        address, int(count), int(number), cluster_detection_method="deactivate", coordinator_bind_address=address,
        initialization_timeout=60,
    )
import numpy as np
count = jax.device_count()
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("device"))
ones = jax.make_array_from_callback((count,), sharding, lambda index: np.ones(count, np.int32)[index])
devices = jax.local_devices()
found = {
    "version": jax.__version__, "platform": devices[0].platform, "runtime": devices[0].client.platform_version,
    "kinds": [device.device_kind for device in devices],
    "memory": [(device.memory_stats() or {}).get("bytes_limit") for device in devices],
    "process": jax.process_index(), "processes": jax.process_count(),
    "devices": count, "sum": int(jax.jit(lambda ones: ones.sum())(ones)),
}
os.write(out, json.dumps(found).encode() + b"\\n")
sys.stdin.read()
"""
"""Starts JAX, joined with the other workers of a slice (HOST:PORT, count, number), and adds a one of each device.

Then it waits until its input ends.
"""


def hide_addresses(text: str) -> str:
    """Replace each address of a network by IP."""
    return ADDRESS.sub("IP", text)


def read_environment() -> "dict[str, str | None]":
    """Return all variables; the value is null unless it is known to be no secret."""
    return {
        name: value if SHOWN_VARIABLES.fullmatch(name) and not SECRET.search(name) else None
        for name, value in sorted(os.environ.items())
    }


def read_system() -> "dict[str, str]":
    """Return the names of the distribution, the kernel and Python's version."""
    found = re.search(r'^PRETTY_NAME="?([^"\n]+)', Path("/etc/os-release").read_text(), re.MULTILINE)
    name = found.group(1) if found else ""
    return {"name": name, "kernel": platform.release(), "python": platform.python_version()}


def read_mode(path: Path) -> "dict[str, Any] | None":
    """Return the mode of a file without its owner's name; null if there is none."""
    entry = read_entry(path)
    return entry and {name: entry[name] for name in ("mode", "is_mine", "is_writable")}


def read_product() -> str:
    """Return the maker's name of this machine; empty if it has none."""
    file = Path("/sys/class/dmi/id/product_name")
    return file.read_text().strip() if file.exists() else ""


def read_pci() -> "dict[str, list[str]]":
    """Return the PCI addresses behind each device file."""
    groups = ROOT / "sys/kernel/iommu_groups"
    return {
        machine_path(file): sorted(path.name for path in (groups / file.name / "devices").glob("*"))
        for file in list_devices()
    }


def list_metadata_keys() -> "list[str] | None":
    """Return the names in the folders of this instance; null outside Google."""
    host = metadata_host()
    if host is None:
        return None
    return [folder + name for folder in ("", "attributes/") for name in read_metadata_value(host, folder).split("\n")]


def read_endpoints() -> "list[str]":
    """Return the entries of worker-network-endpoints, in their order."""
    host = metadata_host()
    return [] if host is None else read_metadata_value(host, "attributes/worker-network-endpoints").split(",")


def find_python() -> str:
    """Return the Python of set-up, or this one."""
    installed = Path.home() / ".tpuswarm/venv/bin/python"
    return str(installed) if installed.exists() else sys.executable


def last_line(output: bytes) -> str:
    """Return the last line of an error."""
    return output.decode(errors="replace").strip().rpartition("\n")[2][:300] or "no output"


def start_jax(facts: "dict[str, Any]", port: str, only_run: bool = False) -> "dict[str, Any]":
    """Start JAX, look at the lock and the ports meanwhile, and try to start a second process beside it.

    only_run: start it also without a TPU, and no second process.
    """
    if any(holder["path"].startswith("/dev") for holder in facts["holders"]):
        return {"error": "not started, because a process uses the chips"}
    metadata = facts.get("metadata") or {}
    if not facts["devices"] and not metadata.get("type") and not only_run:
        return {"error": "not started, because this is no TPU VM"}
    endpoints = facts.get("endpoints", [])
    place = []  # type: list[str]
    if len(endpoints) > 1:
        place = [f"{endpoints[0].rpartition(':')[2]}:{port}", str(len(endpoints)), metadata["worker"]]
    words = [find_python(), "-c", PROGRAM]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*words, *place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        timer = threading.Timer(JAX_TIMEOUT_S, process.kill)
        timer.start()
        line = process.stdout.readline() if process.stdout else b""
        found = json.loads(line.decode()) if line else {}
        if found:
            found["lock"] = {"file": read_mode(LOCK), "is_locked": find_locker(LOCK) is not None}
            found["metrics_error"] = try_connection(METRICS_ADDRESS)["error"]
            if not place and not only_run:
                found["second"] = start_second(words)
        if process.stdin:
            process.stdin.close()
        code = process.wait()
        timer.cancel()
        if not found:
            log.seek(0)
            found["error"] = f"exit {code}: {last_line(log.read())}"
    return found


def start_second(words: "list[str]") -> "dict[str, str]":
    """Start JAX again; return the platform that it gets, or its error."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        done = subprocess.run(words, timeout=SECOND_TIMEOUT_S, **pipes)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        return {"error": f"it had not started after {SECOND_TIMEOUT_S:g} s"}
    if not done.stdout:
        return {"error": last_line(done.stderr)}
    return {"platform": json.loads(done.stdout.decode())["platform"]}


def survey(port: str, only_run: bool) -> "dict[str, Any]":
    """Return the facts of this host that may leave it.

    port: where JAX's processes of a slice meet; only_run: see `start_jax`.
    """
    facts = collect("", "")
    facts.update(is_rehearsed=bool(ENVIRONMENT_MARK), cpus=os.cpu_count())
    read = partial(read_fact, facts)
    read("environment", read_environment)
    read("system", read_system)
    read("product", read_product)
    read("lock", read_mode, LOCK)
    read("logs", read_mode, LOGS)
    read("pci", read_pci)
    read("metadata_keys", list_metadata_keys)
    read("endpoints", read_endpoints)
    read("jax", start_jax, facts, port, only_run)
    shown = {name: facts[name] for name in SHOWN_FACTS if name in facts}
    hidden = json.loads(hide_addresses(json.dumps(shown)))  # type: dict[str, Any]
    return hidden


def main() -> None:
    """Print the facts."""
    sys.stdout.write(json.dumps(survey(sys.argv[1], sys.argv[2] == "run")) + "\n")
