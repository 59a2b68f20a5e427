"""Run jobs on a host, and keep their output and exit codes; needs only Python 3.10 and survives our connection.

A job is a folder, ~/.tpuswarm/jobs/NAME. Its supervisor, a process, holds `lock` while anything of the job runs.
`state.json` is the job's state; `log` and `log.1` are its output. The caller numbers the runs: a number that is not
higher than the last one starts nothing, so a repeated or late request cannot run a job twice.

    supervise.py start NAME RUN     start a run, described by JSON on standard input; print the state
    supervise.py show [NAME]        print the states as lines of JSON
    supervise.py end NAME RUN       end this run, or an earlier one, and all its processes; print the state
    supervise.py log NAME LINES     print a line INODE OFFSET, and the last lines of the output
    supervise.py log NAME LINES OFFSET INODE        the same for the output since then, up to a limit
    supervise.py maintenance        print the answer of the metadata key upcoming-maintenance, as one line of JSON
    supervise.py again              after a reboot, restart jobs that the host may restart by itself
"""

import contextlib
import ctypes
import fcntl
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import IO, Any

JOBS = Path.home() / ".tpuswarm" / "jobs"
STATE = "state.json"
JOB_VARIABLE = "TPUSWARM_JOB"
MAX_LOG_BYTES = 64 << 20
"""A longer `log` replaces `log.1`."""
MAX_ANSWER_BYTES = 8 << 20
ERROR_LINE = re.compile(r"error: |Fatal Python error|[\w.]+(Error|Exception)\b")
TAIL_BYTES, MAX_ERROR_CHARS = 8192, 300
KILL_AFTER_S = 20.0
SHUTDOWN_KILL_AFTER_S = 30.0
STUCK_AFTER_S = 60.0
"""Report processes that no signal ends for so long."""
POLL_INTERVAL_S = 0.1
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MARKED_SHELL = ("/bin/bash", "--norc", "-c", '/bin/bash --norc -c "$1"; exit $?', "job")
"""The outer shell keeps the job's mark: bash replaces itself with a single command, and sudo drops the mark."""
RESTART_DELAY_S = 120
"""After a reboot a keeper may restart jobs first, after set-up."""
SERVICE = """\
[Unit]
Description=Restart tpuswarm jobs after a reboot
[Service]
Type=oneshot
RemainAfterExit=yes
OOMPolicy=continue
ExecStartPre=/bin/sleep {delay}
ExecStart=/usr/bin/env python3 {program} again
[Install]
WantedBy=default.target
"""


def boot_id() -> str:
    """Return the id of this boot; a rehearsed machine has its own file."""
    root = os.environ.get("TPUSWARM_ROOT")
    path = Path(root) / "run" / "boot" if root else Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip()


def save(path: Path, value: "dict[str, Any]") -> None:
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_state(folder: Path) -> "dict[str, Any]":
    """Return a job's state: running, ended, asked (to end), stalled or lost; empty if it has never run here."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if state["state"] == "running" and (state["boot"] != boot_id() or not is_locked(folder)):
        state = json.loads((folder / STATE).read_text())  # it may have ended since
        if state["state"] == "running":
            state.update(state="lost", why="its process was killed, or the machine started anew")
    return state


def try_lock(folder: Path) -> "IO[str] | None":
    """Return the job's lock; None if a supervisor holds it."""
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    return lock


def is_locked(folder: Path) -> bool:
    lock = try_lock(folder)
    if lock is not None:
        lock.close()
    return lock is None


def start(name: str, run: int, spec: "dict[str, Any]", restart: bool = False) -> "dict[str, Any]":
    """Start a run in the background unless it or a later one has started; end an earlier one first.

    spec: `line`; `alive_s`, the longest silence, or None; `again`, whether the host restarts the job after a reboot.
    restart: the host does. On a machine that is being preempted nothing restarts, so that the earlier run stays lost.
    """
    folder = JOBS / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = try_lock(folder)
    if lock is None:
        end_earlier(folder, run)
        return read_state(folder)  # the caller sees which run it is, and repeats the request
    before = read_state(folder)
    if before.get("run", 0) >= run and not restart:
        return before
    if before.get("state") == "lost" and before["boot"] == boot_id() and is_preempted():
        return before
    save(folder / "spec.json", spec)
    signal_job(name, signal.SIGKILL)  # a killed supervisor left its processes
    state = {"name": name, "run": run, "state": "running", "boot": boot_id(), "began": time.time(), "pid": 0}
    ready, report = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        state["pid"] = os.getpid()
        enter_scope(name, run)
        try:
            save(folder / STATE, state)
            os.write(report, b".")
            os.close(report)
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.chdir(Path.home())
            supervise(folder, state, spec)
        except OSError as error:
            os.write(report, str(error).encode())
        finally:
            os._exit(0)
    os.close(report)
    os.wait()
    answer = os.read(ready, 1024)
    if answer != b".":
        sys.exit(f"the state of the job cannot be written: {answer.decode() or 'its supervisor was killed'}")
    lock.close()  # the supervisor holds it too
    if spec.get("again"):
        enable_restart_after_reboot()
    return read_state(folder)


def has_systemd() -> bool:
    """Whether jobs are systemd units. A rehearsed machine must not touch the units of the computer that it runs on."""
    return "TPUSWARM_ROOT" not in os.environ and Path("/run/systemd/system").exists()


def enter_scope(name: str, run: int) -> None:
    """Move this process from its login session into a systemd unit: logind may end a session's processes at logout."""
    if not has_systemd():
        return
    unit = f"tpuswarm-{os.getuid()}-{name}-{run}.scope"  # several users may have a job of that name
    manager = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"]
    pids = ["PIDs", "au", "1", str(os.getpid())]
    # without it, systemd 253 and later stop the whole scope after an out-of-memory kill
    survive = ["OOMPolicy", "s", "continue"]
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # there is no sudo
        for properties in (["2", *pids, *survive], ["1", *pids]):
            words = ["StartTransientUnit", "ssa(sv)a(sa(sv))", unit, "fail", *properties, "0"]
            done = subprocess.run(
                ["sudo", "-n", "busctl", "call", *manager, *words],
                stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False,
            )  # fmt: skip
            if done.returncode == 0:
                break
        deadline = time.monotonic() + 10
        while not done.returncode and unit not in Path("/proc/self/cgroup").read_text() and time.monotonic() < deadline:
            time.sleep(0.01)  # systemd answers before it has moved us


def end_earlier(folder: Path, run: int) -> None:
    state = read_state(folder)
    if state.get("state") == "running" and 0 < state["run"] < run and state["pid"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGINT)


def enable_restart_after_reboot() -> None:
    """Let systemd run `again` after a reboot. Without systemd, or on an error, a keeper restarts jobs."""
    unit = Path.home() / ".config" / "systemd" / "user" / "tpuswarm-jobs.service"
    text = SERVICE.format(delay=RESTART_DELAY_S, program=Path(__file__).resolve())
    if shutil.which("systemctl") is None:
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        if unit.exists() and unit.read_text() == text:
            return
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
        for words in (  # without lingering, a user's units run only while he is logged in
            ["sudo", "-n", "loginctl", "enable-linger", os.environ.get("USER", "root")],
            ["systemctl", "--user", "daemon-reload"],
            ["systemctl", "--user", "enable", "--quiet", unit.name],
        ):
            subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)


def restart_jobs() -> None:
    """Restart, as the same run, what ran when the host went down, unless a later run has started since."""
    for folder in sorted(JOBS.glob("*")):
        try:
            state, spec = (json.loads((folder / name).read_text()) for name in (STATE, "spec.json"))
        except (OSError, ValueError):
            continue  # it has never started
        if spec.get("again") and state["state"] in ("running", "lost") and state["boot"] != boot_id():
            start(folder.name, state["run"], spec, restart=True)


class EndRequested(Exception):
    """A signal: SIGINT asks us to end the job, any other one comes with the machine's shutdown."""


def supervise(folder: Path, state: "dict[str, Any]", spec: "dict[str, Any]") -> None:
    def on_signal(number: int, frame: object) -> None:
        for other in SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise EndRequested(number)

    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    log = Log(folder / "log", reader)
    child = None
    adopt_orphans()
    try:
        for number in SIGNALS:
            signal.signal(number, on_signal)
        child = subprocess.Popen(
            [*MARKED_SHELL, spec["line"]], stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
            env={**os.environ, JOB_VARIABLE: str(folder)}, start_new_session=True, umask=spec.get("umask", 0o022),
        )  # fmt: skip
        if follow(child, log, spec.get("alive_s")):
            state.update(state="ended", code=child.returncode if child.returncode >= 0 else 128 - child.returncode)
            if state["code"]:
                state["error"] = log.find_error()
            if state["code"] and is_preempted():
                state.update(state="lost", why="the machine is being taken away")
        else:
            state.update(state="stalled", why=f"nothing was printed for {spec['alive_s']:g} s")
    except EndRequested as request:
        if request.args[0] == signal.SIGINT:
            state.update(state="asked", code=130, why="it was asked to stop")
        else:
            state.update(state="lost", why="the machine was ending")
            save(folder / STATE, state)  # the machine may be off soon
    except OSError as error:
        state.update(state="ended", code=126, why=str(error))
    if child is not None:
        end_processes(folder, state, child, log)
    log.file.close()
    state["ended"] = time.time()
    with contextlib.suppress(OSError):  # on a full disk the job is lost
        save(folder / STATE, state)


def follow(child: "subprocess.Popen[bytes]", log: "Log", alive_s: "float | None") -> bool:
    """Log the output until the process ends; return False if it prints nothing for `alive_s`."""
    last = time.monotonic()
    while True:
        if log.drain():
            last = time.monotonic()
        elif child.poll() is not None:
            log.drain()
            return True
        elif alive_s is not None and time.monotonic() - last > alive_s:
            return False
        else:
            bury_orphans(child.pid)
            select.select([log.pipe], [], [], POLL_INTERVAL_S)


def end_processes(folder: Path, state: "dict[str, Any]", child: "subprocess.Popen[bytes]", log: "Log") -> None:
    """End all processes of the job: SIGINT, then SIGTERM, then SIGKILL. Return when none is left."""
    is_shutdown, is_reported = state["state"] == "lost", False  # then the machine has sent SIGTERM to all processes
    kill_after_s = SHUTDOWN_KILL_AFTER_S if is_shutdown else KILL_AFTER_S
    start_time = time.monotonic()
    sent = None
    while True:
        elapsed_s = time.monotonic() - start_time
        if elapsed_s >= kill_after_s:
            number = signal.SIGKILL
        else:
            number = signal.SIGTERM if is_shutdown or elapsed_s >= kill_after_s / 2 else signal.SIGINT
        left = signal_job(folder.name, number if number != sent or number == signal.SIGKILL else 0)
        sent = number
        while log.drain():
            pass
        child.poll()
        if not left:
            return
        if elapsed_s > STUCK_AFTER_S and not is_reported:
            is_reported = True
            end = state.get("why") or f"exit {state.get('code')}"
            why = f"{end}, but {left} of its processes ignore every signal: `tpuswarm down` deletes the machine"
            with contextlib.suppress(OSError):
                save(folder / STATE, {**state, "state": "running", "code": None, "why": why})
        time.sleep(POLL_INTERVAL_S)


def signal_job(name: str, number: int) -> int:
    """Send a signal (0: none) to all processes of a job but this one; return their number."""
    processes, others = find_processes(name), []
    for pid in processes:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:
            others.append(str(pid))
    if others and number:
        with contextlib.suppress(OSError):  # there is no sudo
            subprocess.run(["sudo", "-n", "kill", f"-{number:d}", *others], capture_output=True, check=False)
    return len(processes)


def find_processes(name: str) -> "list[int]":
    """Return the processes with the job's mark or in its unit, and all that descend from them or from us.

    sudo drops the mark, and a machine without systemd has no units.
    """
    mark = f"{JOB_VARIABLE}={JOBS / name}".encode()
    unit = re.compile(rf"/tpuswarm-{os.getuid()}-{re.escape(name)}-[0-9]+\.scope$".encode(), re.MULTILINE)
    has_units = has_systemd()
    parents, found = {}, {os.getpid()}
    for process in Path("/proc").glob("[1-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or its environment is another user's
            state, parent = (process / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(process.name)] = int(parent)
                in_unit = has_units and unit.search((process / "cgroup").read_bytes())
                if in_unit or mark in (process / "environ").read_bytes().split(b"\0"):
                    found.add(int(process.name))
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, so that we still find them."""
    pr_set_child_subreaper = 36  # linux/prctl.h
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def bury_orphans(child: int) -> None:
    """Reap adopted processes that have ended."""
    with contextlib.suppress(OSError):
        for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
            if pid != child:
                os.waitpid(pid, os.WNOHANG)


def read_metadata(path: str) -> str:
    """Return a value from the metadata server; empty if there is none."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    url = f"http://{host}/computeMetadata/v1/instance/{path}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return str(answer.read().decode().strip())
    except OSError:
        return ""


def is_preempted() -> bool:
    return read_metadata("preempted") == "TRUE"


def end(name: str, run: int) -> "dict[str, Any]":
    """End a run, or prevent its start. Kill processes that a dead supervisor left."""
    folder = JOBS / name
    folder.mkdir(parents=True, exist_ok=True)
    state = read_state(folder)
    if state.get("run", 0) < run:
        lock = try_lock(folder)
        if lock is None:
            end_earlier(folder, run)
            return read_state(folder)
        with lock:
            now = time.time()
            state = {"name": name, "run": run, "state": "asked", "boot": boot_id(), "began": now, "ended": now}
            save(folder / STATE, {**state, "pid": 0, "code": 130, "why": "it was asked to stop before it began"})
    elif state.get("run") == run and state["state"] == "running":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGINT)
    elif state.get("run") == run and not is_locked(folder):
        signal_job(name, signal.SIGKILL)
        if state["state"] == "lost":  # prevents a restart
            save(folder / STATE, {**state, "state": "asked", "code": 130, "why": "its end was asked for"})
    return read_state(folder)


class Log:
    """Copies a pipe to a file of bounded size. A full disk loses output, not the job."""

    def __init__(self, path: Path, pipe: int):
        self.path, self.pipe = path, pipe
        self.file = path.open("ab", buffering=0)
        self.tail = b""

    def drain(self) -> bool:
        """Copy available output; return whether there was any."""
        try:
            data = os.read(self.pipe, 1 << 16)
        except BlockingIOError:
            return False
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        with contextlib.suppress(OSError):
            self.file.write(data)
            if self.file.tell() >= MAX_LOG_BYTES:
                self.path.replace(self.path.with_name("log.1"))
                new = self.path.open("ab", buffering=0)
                self.file.close()
                self.file = new
        return bool(data)

    def find_error(self) -> str:
        """Return the last line that names an error, else the last line."""
        lines = [line.strip() for line in self.tail.decode(errors="replace").splitlines() if line.strip()]
        error = next((line for line in reversed(lines) if ERROR_LINE.match(line)), lines[-1] if lines else "")
        return error[:MAX_ERROR_CHARS]


def show_log(name: str, lines: int, offset: int = 0, inode: int = 0) -> None:
    """Print INODE OFFSET, and the last lines of the log, or the output since an offset in the file of that inode.

    If that file is `log.1` by now, its rest comes first, and the next call begins `log`.
    """
    files: dict[int, Any] = {}
    # The newer file first: if the log is rotated in between, the same file is opened twice, and none is missed.
    for file_name in ("log", "log.1"):
        with contextlib.suppress(FileNotFoundError):
            file = (JOBS / name / file_name).open("rb")
            files.setdefault(os.fstat(file.fileno()).st_ino, file)
    if not files:
        print("0 0", flush=True)
        return
    newest, oldest = next(iter(files)), next(reversed(files))
    if inode:
        shown = inode if inode in files else oldest
        size = os.fstat(files[shown].fileno()).st_size
        files[shown].seek(offset if shown == inode and offset <= size else 0)
        data = files[shown].read(MAX_ANSWER_BYTES)
        if not data and shown != newest:
            shown = newest
            data = files[shown].read(MAX_ANSWER_BYTES)
    else:
        shown, data = newest, b""
        for file in files.values():
            size = os.fstat(file.fileno()).st_size
            first = max(0, size - (lines + 1) * 4096) if lines else size
            file.seek(first)
            data = file.read() + data
            if first:
                break  # the older file would leave a gap
        data = b"".join(data.splitlines(keepends=True)[-lines:])
    print(shown, files[shown].tell(), flush=True)
    sys.stdout.buffer.write(data)


def main(verb: str, *words: str) -> None:
    umask = os.umask(0o077)  # command lines and output are for this user alone
    JOBS.mkdir(parents=True, exist_ok=True)
    JOBS.chmod(0o700)
    if verb == "start":
        print(json.dumps(start(words[0], int(words[1]), {**json.load(sys.stdin), "umask": umask})))
    elif verb == "end":
        print(json.dumps(end(words[0], int(words[1]))))
    elif verb == "log":
        show_log(words[0], *map(int, words[1:]))
    elif verb == "maintenance":
        print(json.dumps(read_metadata("upcoming-maintenance?alt=json")))
    elif verb == "again":
        restart_jobs()
    else:
        for folder in sorted(JOBS.glob("*")):
            if not words or folder.name in words:
                print(json.dumps({"name": folder.name, **read_state(folder)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
