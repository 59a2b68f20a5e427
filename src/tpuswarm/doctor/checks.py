"""Check hosts: a table of all checks, and how each turns facts into problems."""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from tpuswarm.catalog import find
from tpuswarm.config.formatting import format_age
from tpuswarm.config.units import GIB
from tpuswarm.doctor.finding import THIS_COMPUTER, Check, CheckedHost, Finding, Problem
from tpuswarm.errors import InputError
from tpuswarm.remote.paths import SERVICE_PREFIX
from tpuswarm.train.process.metadata import format_maintenance

LOCK = "/tmp/libtpu_lockfile"
LOGS = "/tmp/tpu_logs"
ROOT = '"${TPUSWARM_ROOT:-}'

IDLE_AFTER_S = 3600.0
CHIP_GRACE_S = 60.0
"""Time that a program may take until it opens its chips."""
MAX_CLOCK_SKEW_S = 30.0
MIN_FREE_BYTES, MIN_FREE_SHARE = 2 * GIB, 0.02
MIN_FREE_MEMORY_SHARE = 0.03
MIN_OPEN_FILES = 4096
"""Ray calls fewer too few (ray.init)."""
WRITE_SCOPES = ("cloud-platform", "devstorage.read_write", "devstorage.full_control")
"""cloud.google.com/compute/docs/access/service-accounts#scopes_best_practice"""
BAD_CHIP_MESSAGES = (
    "Couldn't open iommu group",
    "open(/dev/vfio",
    "Failed to initialize TPU system",
    "TPU initialization failed",
    "No accelerator found",
)
"""Messages of libtpu on machines that a restart does not repair (github.com/marin-community/marin, issue 4120)."""
KILL_HOLDER = """\
holds() { for file in /proc/$1/fd/*; do [ "$file" -ef "$2" ] && return; done; return 1; }
holds "$@" && kill $1 || exit 0
for second in 1 2 3 4 5 6 7 8 9 10; do sleep 1; holds "$@" || exit 0; done
kill -9 $1; sleep 1; ! holds "$@"
"""
"""Ends the process PID if it still has FILE open."""
REPLACE = "replace the machine: `tpuswarm down NAME`"


def check_devices(host: CheckedHost) -> Iterator[Problem]:
    """Compare the chips with the TPU type."""
    devices = host.facts["devices"]
    if host.chips is not None and len(devices) < host.chips:
        shown = f"{len(devices)}: {', '.join(devices)}" if devices else "none"
        yield Problem(f"a host of a {host.tpu_type} has {host.chips} chips, but this one shows {shown}")


def check_held(host: CheckedHost) -> Iterator[Problem]:
    """Find processes with a chip that no running job or `exec` started."""
    return (_holder(host, process) for process in _holders(host) if not process["is_requested"])


def check_busy(host: CheckedHost) -> Iterator[Problem]:
    """Find any process with a chip, except a notebook."""
    return (_holder(host, process) for process in _holders(host))


def _holders(host: CheckedHost) -> Iterator[Mapping[str, Any]]:
    for process in host.facts["holders"]:
        is_service = (
            process["job"].startswith(SERVICE_PREFIX) or "tpu-runtime" in process["command"]
        )  # TensorFlow's service
        if process["path"].startswith("/dev") and not is_service:
            yield process


def _holder(host: CheckedHost, process: Mapping[str, Any]) -> Problem:
    job, pid, user = process["job"], process["pid"], process["user"]
    leftover = ", left over from an `exec` or a job that ended" if process["is_leftover"] else ""
    who = f"job {job} (process {pid} of {user})" if job else f"process {pid} of {user}{leftover}"
    sudo = "" if user == host.facts["user"] else "sudo "
    here = "" if host.label == THIS_COMPUTER else f" {host.label}"
    started = f"started {format_age(process['age_s'])} ago"
    return Problem(
        f"{who} holds {process['path']}, {started}: {process['command'][:60]}",
        f"if it is unused: `{f'tpuswarm stop {job}' if job else f'tpuswarm doctor{here} --fix --kill'}`",
        kill=f'{sudo}sh -c {shlex.quote(KILL_HOLDER)} sh {pid} {ROOT}{process["path"]}"',
    )


def check_lock(host: CheckedHost) -> Iterator[Problem]:
    """Find libtpu's lock file if this user cannot open it and no process has it; libtpu reuses any other."""
    lock = host.facts["lock"]
    if not lock or lock["is_writable"] or host.facts["locker"] or host.facts["holders"]:
        return
    sudo = "" if lock["is_mine"] else "sudo "
    fix = (
        f'F={ROOT}{LOCK}"; N=$(stat -c %i "$F" 2>/dev/null) || exit 0; '
        'if grep -q ":$N " /proc/locks; then echo "a process has locked it now" >&2; exit 1; fi; '
        f'{sudo}rm -f "$F"'
    )
    owner = "you" if lock["is_mine"] else lock["user"]
    text = f"{LOCK} belongs to {owner} with mode {lock['mode']}: {host.facts['user']} cannot open it"
    yield Problem(f"{text}, and no process has it", f"`{sudo}rm {LOCK}`", fix)


def check_on_cpu(host: CheckedHost) -> Iterator[Problem]:
    """Find programs with JAX and no chip, and jobs whose log mentions the CPU."""
    lines = {line["job"]: line["text"] for line in host.facts["messages"] if "back to cpu" in line["mark"].lower()}
    for job, text in lines.items():
        yield Problem(f"log of job {job}: {text}")
    for process in host.facts["on_cpu"] if host.chips and not lines else ():
        if process["age_s"] > CHIP_GRACE_S:
            text = f"process {process['pid']} has run JAX for {format_age(process['age_s'])} without a chip"
            yield Problem(f"{text}: {process['command'][:60]}")


def check_bad_node(host: CheckedHost) -> Iterator[Problem]:
    """Find libtpu's errors about the machine; while a process holds a chip, they are only about that."""
    if any(process["path"].startswith("/dev") for process in host.facts["holders"]):
        return
    for line in host.facts["messages"]:
        if line["mark"] in BAD_CHIP_MESSAGES and not re.search(r"busy|in use", line["text"]):
            yield Problem(f"log of job {line['job']}: {line['text']}")


def check_tpu_logs(host: CheckedHost) -> Iterator[Problem]:
    """Check that libtpu can write its logs."""
    logs = host.facts["logs"]
    if logs and not logs["is_writable"]:
        fix = f'{"" if logs["is_mine"] else "sudo "}chmod 1777 {ROOT}{LOGS}"'
        text = f"{LOGS} belongs to {logs['user']} with mode {logs['mode']}: {host.facts['user']} cannot write there"
        yield Problem(text, f"`sudo chmod 1777 {LOGS}`", fix)


def check_worker(host: CheckedHost) -> Iterator[Problem]:
    """Compare the worker number and TPU type of environment and metadata with the cloud's."""
    if host.worker is None:
        return
    metadata, replace = host.facts["metadata"] or {}, REPLACE
    for source, number, advice in (
        ("TPU_WORKER_ID", host.facts["worker_id"], ""),
        ("its metadata", metadata.get("worker"), replace),
    ):
        if number is not None and number != str(host.worker):
            yield Problem(f"the cloud calls it worker {host.worker}, but {source} says {number!r}", advice)
    remove = "remove TPU_ACCELERATOR_TYPE from the environment: libtpu derives the layout of the slice from it"
    for source, tpu_type, advice in (
        ("TPU_ACCELERATOR_TYPE", host.facts["accelerator"], remove),
        ("its metadata", metadata.get("type"), replace),
    ):
        if tpu_type is not None and host.tpu_type is not None and not _same_type(tpu_type, host.tpu_type):
            yield Problem(f"the cloud calls it a {host.tpu_type}, but {source} says {tpu_type!r}", advice)


def _same_type(one: str, other: str) -> bool:
    try:
        return find(one).name == find(other).name
    except InputError:
        return False


def check_libtpu(host: CheckedHost) -> Iterator[Problem]:
    """Compare libtpu with the version that jax requires."""
    packages, wanted = host.facts["packages"], host.facts["wanted_libtpu"]
    if not wanted or "libtpu" not in packages:
        return
    try:
        fits = SpecifierSet(wanted).contains(packages["libtpu"], prereleases=True)
    except InvalidSpecifier:
        return
    if not fits:
        jax = packages.get("jax", "(version unknown)")
        yield Problem(f"libtpu is {packages['libtpu']}, but jax {jax} needs libtpu{wanted}")


def check_head(host: CheckedHost) -> Iterator[Problem]:
    """Check that the host reached the swarm's head."""
    head = host.facts["head"]
    if head and head["error"]:
        yield Problem(f"cannot reach the swarm's head (Ray, {head['address']}): {head['error']}")


def check_bucket(host: CheckedHost) -> Iterator[Problem]:
    """Check access scopes and the permissions on the fleet's bucket."""
    bucket = host.facts["bucket"]
    if bucket is None:
        return
    scopes = ((host.facts["metadata"] or {}).get("scopes") or "").split()
    if scopes and not any(scope.endswith(f"/auth/{name}") for scope in scopes for name in WRITE_SCOPES):
        keeps = "a machine keeps the scopes it was created with: `tpuswarm down NAME`; its pool recreates it"
        yield Problem(f"its access scopes allow writing to no bucket: {' '.join(scopes)}", keeps)
    elif bucket["error"]:
        yield Problem(f"gs://{bucket['name']} does not answer from here: {bucket['error']}")
    elif bucket["missing"]:
        yield Problem(f"gs://{bucket['name']} does not allow it {', '.join(bucket['missing'])}")


def check_notice(host: CheckedHost) -> Iterator[Problem]:
    """Find announced preemptions and maintenance."""
    metadata = host.facts["metadata"] or {}
    if metadata.get("preempted") == "TRUE":
        yield Problem("a preemption has begun: at most 30 seconds are left")
    event = metadata.get("maintenance") or "NONE"
    if event != "NONE":
        yield Problem(f"its metadata announces maintenance: {event}")
    if upcoming := format_maintenance(metadata.get("upcoming")):
        yield Problem(f"its metadata announces {upcoming}")


def check_disk(host: CheckedHost) -> Iterator[Problem]:
    """Check free space and a test file in the home folder and in /tmp."""
    for disk in host.facts["disks"]:
        free, size = disk["free"], disk["size"]
        if disk["error"]:
            is_damaged = "ead-only" in disk["error"]
            advice = "a disk that became read-only is damaged: replace the machine" if is_damaged else ""
            yield Problem(f"nothing can be written in {disk['path']}: {disk['error']}", advice)
        elif free < min(MIN_FREE_BYTES, MIN_FREE_SHARE * size) or disk["inodes"] == 0:
            left = "no inodes" if disk["inodes"] == 0 else f"{free / GIB:.1f} of {size / GIB:.0f} GiB"
            yield Problem(f"the disk of {disk['path']} has {left} left")


def check_memory(host: CheckedHost) -> Iterator[Problem]:
    """Check free memory and swap."""
    memory = host.facts["memory"]
    free, total = memory.get("MemAvailable"), memory.get("MemTotal")
    if free is not None and total and free < MIN_FREE_MEMORY_SHARE * total:
        yield Problem(f"{free / GIB:.1f} of {total / GIB:.0f} GiB of memory are free")
    swapped = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
    if swapped > max(GIB, memory.get("SwapTotal", 0) / 2):
        yield Problem(f"{swapped / GIB:.1f} GiB of memory are swapped to disk")


def check_files(host: CheckedHost) -> Iterator[Problem]:
    """Check the hard limit on open files, to which programs raise their own."""
    limit = host.facts["files"]
    if limit is not None and limit < MIN_OPEN_FILES:
        yield Problem(f"a process may open at most {limit:,} files, fewer than {MIN_OPEN_FILES:,}")


def check_clock(host: CheckedHost) -> Iterator[Problem]:
    """Compare the clock with this computer's."""
    if abs(host.clock_skew_s) > MAX_CLOCK_SKEW_S:
        direction = "ahead of" if host.clock_skew_s > 0 else "behind"
        yield Problem(f"its clock is {abs(host.clock_skew_s):,.0f} s {direction} this computer's")


def check_preload(host: CheckedHost) -> Iterator[Problem]:
    """Check the libraries in LD_PRELOAD."""
    for library, problem in host.facts["preload"].items():
        if problem:
            yield Problem(f"/etc/environment preloads {library}, which {problem}")
    for line in host.facts["messages"]:
        if line["mark"].startswith("required by") or line["mark"] == "cannot be preloaded":
            yield Problem(f"log of job {line['job']}: {line['text']}")


def check_apt(host: CheckedHost) -> Iterator[Problem]:
    """Find the process with apt's lock."""
    if process := host.facts["apt"]:
        started = f"process {process['pid']}, started {format_age(process['age_s'])} ago"
        yield Problem(f"{process['command'][:60]} ({started}) has apt's lock")


def check_fork(host: CheckedHost) -> Iterator[Problem]:
    """Find JAX's warnings about forks."""
    for line in host.facts["messages"]:
        if line["mark"] == "os.fork() was called":
            yield Problem(f"job {line['job']} forks while JAX's threads run: {line['text']}")


def check_idle(host: CheckedHost) -> Iterator[Problem]:
    """Find a machine without work, from its first worker: no open chip, no requested process, no log-in."""
    if host.age_s is None or host.age_s < IDLE_AFTER_S or not host.chips or host.worker or host.facts["is_blind"]:
        return
    holds_chip = any(process["path"].startswith("/dev") for process in host.facts["holders"])
    if not host.facts["is_attended"] and not holds_chip:
        costs = f"costs ${host.dollars_per_hour:,.2f} an hour" if host.dollars_per_hour else "costs money"
        yield Problem(f"it has existed for {format_age(host.age_s)}, {costs}, and runs nothing")


def compare_versions(hosts: list[CheckedHost]) -> Iterator[Finding]:
    """Find the hosts whose packages differ from most others, or from the first."""
    hosts = [host for host in hosts if host.facts.get("packages")]
    for name in sorted({name for host in hosts for name in host.facts["packages"]}):
        versions = [(host, host.facts["packages"].get(name)) for host in hosts]
        usual, count = Counter(version for _, version in versions).most_common(1)[0]
        others = [host.label for host, version in versions if version == usual]
        more = f" and {count - 3} more" if count > 3 else ""
        where = "most hosts" if 2 * count > len(versions) else ", ".join(others[:3]) + more
        for host, version in versions:
            if version != usual:
                text = f"{name} is {version or 'missing'} here, but {usual or 'missing'} on {where}"
                yield Finding(host.label, VERSIONS.id, text, VERSIONS.why, f"`tpuswarm setup --on {host.label}`")


CHIP_IS_EXCLUSIVE = 'a TPU serves one process at a time: the next waits forever or ends with "already in use"'
BUSY = Check("busy", "open files of all processes", CHIP_IS_EXCLUSIVE, "", check_busy)
"""For commands that need the chips; `doctor` does not use it."""
VERSIONS = Check(
    "versions", "packages and Python of the set-up",
    "hosts of one program with different jax or libtpu hang at the start or compute different numbers",
    "set them up alike: `tpuswarm setup --on WHERE`", lambda host: (),
)  # fmt: skip
"""Compares hosts with each other: `compare_versions`."""

CHECKS = (
    Check("devices", "/dev/accel*, /dev/vfio/*",
          "without its chips a program fails, or silently trains on the CPU",
          "delete the machine with `tpuswarm down NAME`; its pool recreates it", check_devices),
    Check("held", "open files of all processes", CHIP_IS_EXCLUSIVE,
          "if it is unused, end it: `tpuswarm doctor NAME --fix --kill`, or your own job with `tpuswarm stop JOB`",
          check_held),
    Check("lock", LOCK, 'the next program fails with "TPU already in use"',
          f"remove it if no process has it: `sudo rm {LOCK}`; --fix does that", check_lock),
    Check("on-cpu", "processes with jaxlib, open files, job logs of the last day",
          "it trains a hundred times slower, while the idle TPU costs the same",
          "libtpu is missing, or JAX_PLATFORMS names another device: `tpuswarm setup --on NAME` installs libtpu; "
          "to use the CPU on purpose, set JAX_PLATFORMS=cpu", check_on_cpu),
    Check("bad-node", "job logs of the last day",
          "a machine whose chips do not start costs as much as any other, and stops its slice",
          "if nothing else holds the chips, replace the machine: `tpuswarm down NAME`; its pool recreates it",
          check_bad_node),
    Check("tpu-logs", LOGS, "libtpu fails if it cannot write its log",
          f"let everybody write there: `sudo chmod 1777 {LOGS}`; --fix does that", check_tpu_logs),
    Check("worker", "TPU_WORKER_ID, TPU_ACCELERATOR_TYPE, agent-worker-number, accelerator-type",
          "workers with a duplicate number or a wrong topology wait for each other forever",
          "remove TPU_WORKER_ID from the environment (~/.bashrc, /etc/environment, `[setup] env`)", check_worker),
    Check("libtpu", "metadata of the installed jax", "programs end at the start, or with an obscure compiler error",
          "`tpuswarm setup --on NAME`, or `pip install 'jax[tpu]'` in the program's environment", check_libtpu),
    Check("head", "a connection to the swarm's head, if the fleet trains",
          "its member cannot join or push: its work is lost",
          "`tpuswarm init` opens the ports between the fleet's machines; a host in another network needs a peering; "
          "the keeper replaces a dead head", check_head),
    Check("bucket", "access scopes, permissions on the fleet's bucket",
          "checkpoints and commits that cannot be stored are lost with the machine",
          "`tpuswarm doctor cloud` checks the bucket itself; the machines' service account needs the role "
          "roles/storage.objectAdmin there", check_bucket),
    Check("notice", "preempted, maintenance-event and upcoming-maintenance in the metadata",
          "anything not saved within seconds is lost",
          "nothing to do: with a keeper (`tpuswarm keep`) it comes back, and jobs and members continue", check_notice),
    Check("disk", "free space and a test file in the home folder and in /tmp",
          "checkpoints fail, logs stop, and libtpu does not start on a full disk",
          "free some space: `du -xh ~ /tmp | sort -h | tail` lists the largest folders; start with old checkpoints "
          "and caches", check_disk),
    Check("memory", "/proc/meminfo", "without memory the system kills the largest process, which is the training",
          "list the largest processes: `tpuswarm exec NAME -- 'top -b -n 1 -o RES | head -15'`; use fewer data workers "
          "or a larger host", check_memory),
    Check("files", "ulimit -Hn", "Ray, data loaders and large checkpoints open thousands of files and sockets",
          "raise it: `nofile = 65536` in [setup] of swarm.toml and `tpuswarm setup`, or a line `* - nofile 65536` in "
          "/etc/security/limits.conf; then log in again", check_files),
    Check("clock", "its time against this computer's",
          "Google refuses requests signed minutes off, and leases and logs become inconsistent",
          "set it: `sudo systemctl restart chrony` (or systemd-timesyncd) on the host; if all hosts seem off, set this "
          "computer's", check_clock),
    Check("preload", "LD_PRELOAD in /etc/environment, job logs of the last day",
          "every program prints an error at its start, and some fail: TPU VMs preload tcmalloc, which newer systems "
          "have elsewhere", "remove the LD_PRELOAD line from /etc/environment, and log in again", check_preload),
    Check("apt", "/var/lib/dpkg/lock-frontend", "no other program can install packages meanwhile",
          "wait: a new machine updates itself for some minutes; set-up waits by itself", check_apt),
    Check("fork", "job logs of the last day",
          "a forked child of a process with JAX's threads may wait forever for a lock",
          "start processes with multiprocessing's `spawn`, or before anything uses JAX", check_fork),
    Check("idle", "open files, requested processes, log-ins", "it costs as much as one that trains",
          "`tpuswarm down NAME`, or `tpuswarm pause NAME` until you need it", check_idle),
)  # fmt: skip
