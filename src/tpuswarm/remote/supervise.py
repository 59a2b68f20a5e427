"""On a host: runs one job, keeps its output and its exit code, and lives on when we have gone.

This file is sent to the host and needs nothing but Python 3.10 there. A job is a folder, ~/.tpuswarm/jobs/NAME:
`lock`, held by the supervisor for as long as anything of the job runs; `state.json`, how it stands; `log` and `log.1`,
what it printed. Runs are numbered by whoever asks for them: a number that is not higher than the last one starts
nothing, so whoever asks twice, or late, cannot make it run twice.

    supervise.py start NAME RUN     what to run as JSON on standard input; says the state
    supervise.py show [NAME]        the states as JSON, a line for each
    supervise.py end NAME RUN       end that run and all that it has started; says the state
    supervise.py log NAME LINES [FROM]
"""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

JOBS = Path.home() / ".tpuswarm" / "jobs"
MARK = "TPUSWARM_JOB"
LOG_BYTES = 64 << 20
"""Of `log`; then it becomes `log.1`, and the `log.1` before it is gone."""
GRACE = 20.0
"""Seconds between asking a job to end and killing it."""
LOOK = 0.1
PREEMPTED = "computeMetadata/v1/instance/preempted"


def boot() -> str:
    """What is another one after every start of the machine. A rehearsal's machine has a file for that."""
    root = os.environ.get("TPUSWARM_ROOT")
    path = Path(root) / "run" / "boot" if root else Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip()


def write(folder: Path, state: "dict[str, Any]") -> None:
    """The state, whole or not at all."""
    new = folder / "state.json.new"
    with new.open("w") as file:
        json.dump(state, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(folder / "state.json")


def read(folder: Path) -> "dict[str, Any]":
    """How a job stands: running, ended (with a code), asked (to end), stalled or lost; empty: it has never run here."""
    try:
        state = json.loads((folder / "state.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    if state["state"] == "running" and (state["boot"] != boot() or not held(folder)):
        # Read again: it may have ended between the two looks.
        state = json.loads((folder / "state.json").read_text())
        if state["state"] == "running":
            state.update(state="lost", why="its process was killed, or the machine started anew")
    return state


def held(folder: Path) -> bool:
    """Whether a supervisor has the job."""
    with (folder / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def start(name: str, run: int, spec: "dict[str, Any]") -> "dict[str, Any]":
    """Start a run in the background, unless it, or a later one, was started before."""
    folder = JOBS / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return read(folder)  # something runs: whoever asks sees which run it is
    before = read(folder)
    if before.get("run", 0) >= run:
        return before
    end_all(name, signal.SIGKILL)  # what a supervisor that was killed has left
    state = {"name": name, "run": run, "state": "running", "boot": boot(), "began": time.time(), "pid": 0}
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(ready)
        state["pid"] = os.getpid()
        try:
            write(folder, state)
            os.write(tell, b".")
            os.close(tell)
            apart()
            supervise(folder, state, spec)
        finally:
            os._exit(0)
    os.close(tell)
    os.wait()
    os.read(ready, 1)  # the state is written, or it could not be
    lock.close()  # the supervisor has it
    return read(folder)


def apart() -> None:
    """Hold nothing of whoever has started us."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os.chdir(Path.home())


class Asked(Exception):
    """A signal: SIGINT asks us to end the job, anything else comes with the end of the machine."""


def supervise(folder: Path, state: "dict[str, Any]", spec: "dict[str, Any]") -> None:
    """One run, from its first process to its last."""

    def asked(number: int, frame: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise Asked(number)

    name = state["name"]
    log = Log(folder / "log")
    environment = {**os.environ, MARK: str(folder)}
    child = None
    try:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, asked)
        child = subprocess.Popen(
            ["/bin/bash", "-c", spec["line"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, env=environment, start_new_session=True,
        )  # fmt: skip
        if follow(child, log, spec.get("alive_s")):
            state.update(state="ended", code=child.returncode if child.returncode >= 0 else 128 - child.returncode)
            if state["code"] and preempted():
                state.update(state="lost", why="the machine is being taken away")
        else:
            state.update(state="stalled", why=f"nothing was printed for {spec['alive_s']:g} s")
    except Asked as number:
        if number.args[0] == signal.SIGINT:
            state.update(state="asked", code=130, why="its end was asked for")
        else:
            state.update(state="lost", why="the machine was ending")
            write(folder, state)  # at once: there may be no later
    except OSError as error:
        state.update(state="ended", code=126, why=str(error))
    # What it has started ends with it. It may still have much to say.
    if child is not None:
        finish(name, child, log)
    log.close()
    state["ended"] = time.time()
    write(folder, state)


def follow(child: "subprocess.Popen[bytes]", log: "Log", alive_s: "float | None") -> bool:
    """Write down what it prints until it ends; False: it has said nothing for too long."""
    pipe: Any = child.stdout
    os.set_blocking(pipe.fileno(), False)
    last = time.monotonic()
    while True:
        if drain(pipe, log):
            last = time.monotonic()
        elif child.poll() is not None:
            drain(pipe, log)
            return True
        elif alive_s is not None and time.monotonic() - last > alive_s:
            return False
        else:
            time.sleep(LOOK)


def drain(pipe: Any, log: "Log") -> bool:
    """Take what is there; whether there was any."""
    try:
        data = os.read(pipe.fileno(), 1 << 16)
    except BlockingIOError:
        return False
    if data:
        log.write(data)
    return bool(data)


def finish(name: str, child: "subprocess.Popen[bytes]", log: "Log") -> None:
    """End all that is left of it: SIGINT, then SIGTERM, then SIGKILL."""
    pipe: Any = child.stdout
    os.set_blocking(pipe.fileno(), False)
    began = time.monotonic()
    sent = 0
    while True:
        took = time.monotonic() - began
        due = 1 if took < GRACE / 2 else 2 if took < GRACE else 3
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[due - 1]
        left = end_all(name, number if due > sent or due == 3 else 0)
        sent = due
        while drain(pipe, log):
            pass
        child.poll()
        if not left:
            return
        time.sleep(LOOK)


def end_all(name: str, number: int) -> int:
    """Send a signal (0: none) to all that carries the job's mark, but for ourselves; to how many."""
    mark = f"{MARK}={JOBS / name}".encode()
    count = 0
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        try:
            if mark in (each / "environ").read_bytes().split(b"\0"):
                count += 1
                if number:
                    os.kill(int(each.name), number)
        except OSError:
            continue  # it has ended, or is another user's
    return count


def preempted() -> bool:
    """Whether the cloud is taking the machine away."""
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    request = urllib.request.Request(f"http://{host}/{PREEMPTED}", headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            return answer.read().strip() == b"TRUE"
    except OSError:
        return False


def end(name: str, run: int) -> "dict[str, Any]":
    """End a run; one that was never started never will be. What is found dead is cleared of what it has left."""
    folder = JOBS / name
    folder.mkdir(parents=True, exist_ok=True)
    state = read(folder)
    if state.get("run", 0) < run:
        with (folder / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return state  # what was before it has not ended yet
            now = time.time()
            why = "its end was asked for before it began"
            state = {"name": name, "run": run, "state": "asked", "boot": boot(), "began": now, "ended": now, "pid": 0}
            write(folder, {**state, "code": 130, "why": why})
        return read(folder)
    if state.get("run") != run:
        return state
    if state["state"] == "running":
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGINT)
    elif not held(folder):
        end_all(name, signal.SIGKILL)
    return read(folder)


class Log:
    """A file of bounded size. A full disk loses what is printed, not the job."""

    def __init__(self, path: Path):
        self.path = path
        self.file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """More of it."""
        try:
            self.file.write(data)
            if self.file.tell() >= LOG_BYTES:
                self.file.close()
                self.path.replace(self.path.with_name("log.1"))
                self.file = self.path.open("ab", buffering=0)
        except OSError:
            pass

    def close(self) -> None:
        """No more comes."""
        self.file.close()


def show_log(name: str, lines: int, begin: "int | None") -> None:
    """The last lines of the log; or all from a byte on. Before them a line: INODE SIZE."""
    try:
        file = (JOBS / name / "log").open("rb")
    except FileNotFoundError:
        print("0 0", flush=True)
        return
    about = os.fstat(file.fileno())
    print(about.st_ino, about.st_size, flush=True)
    if begin is None:
        begin = max(0, about.st_size - (lines + 1) * 4096)
        file.seek(begin)
        data = b"".join(file.read(about.st_size - begin).splitlines(keepends=True)[-lines:] if lines else [])
    else:
        file.seek(begin if begin <= about.st_size else 0)
        data = file.read(about.st_size - file.tell())
    sys.stdout.buffer.write(data)


def main(words: "list[str]") -> None:
    """One of the verbs."""
    verb, rest = words[0], words[1:]
    if verb == "start":
        print(json.dumps(start(rest[0], int(rest[1]), json.load(sys.stdin))))
    elif verb == "end":
        print(json.dumps(end(rest[0], int(rest[1]))))
    elif verb == "log":
        show_log(rest[0], int(rest[1]), int(rest[2]) if len(rest) > 2 else None)
    else:
        for each in sorted(JOBS.iterdir()) if JOBS.exists() else ():
            if not rest or each.name in rest:
                print(json.dumps({"name": each.name, **read(each)}))


if __name__ == "__main__":
    main(sys.argv[1:])
