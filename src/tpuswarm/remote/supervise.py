"""On a host: runs one job, keeps its output and its exit code, and lives on when we have gone.

This file is sent to the host and needs nothing but Python 3.10 there. A job is a folder, ~/.tpuswarm/jobs/NAME:
`lock`, held by the supervisor for as long as anything of the job runs; `state.json`, how it stands; `log` and `log.1`,
what it printed. Runs are numbered by whoever asks for them: a number that is not higher than the last one starts
nothing, so whoever asks twice, or late, cannot make it run twice.

    supervise.py start NAME RUN     what to run as JSON on standard input; says the state
    supervise.py show [NAME]        the states as JSON, a line for each
    supervise.py end NAME RUN       end that run, or an earlier one, and all that it has started; says the state
    supervise.py log NAME LINES     the last lines of what it printed, after a line INODE OFFSET
    supervise.py log NAME LINES OFFSET INODE        what came since, as much as is sent at once
    supervise.py again              begin again what a reboot has ended, where the host may do that by itself
"""

import contextlib
import fcntl
import json
import os
import shutil
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
NOTICE = 30.0
"""The same where the machine is ending: all of its processes have been asked by then, and none may be hurried."""
STUCK = 60.0
"""Seconds after which a process that does not end is said: in the kernel, no signal reaches it."""
LOOK = 0.1
SENT = 8 << 20
"""Bytes of a log in one answer."""
UNIT = "tpuswarm-jobs.service"
FIRST = 120
"""Seconds after a reboot in which a keeper may begin jobs, after set-up, before the host does it by itself."""
SERVICE = """\
[Unit]
Description=Jobs of tpuswarm, begun again after a reboot
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=/bin/sleep {first}
ExecStart=/usr/bin/env python3 {program} again
[Install]
WantedBy=default.target
"""
PREEMPTED = "computeMetadata/v1/instance/preempted"


def boot() -> str:
    """What is another one after every start of the machine. A rehearsal's machine has a file for that."""
    root = os.environ.get("TPUSWARM_ROOT")
    path = Path(root) / "run" / "boot" if root else Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip()


def write(folder: Path, state: "dict[str, Any]") -> None:
    """The state."""
    save(folder / "state.json", state)


def save(path: Path, what: "dict[str, Any]") -> None:
    """A file, whole or not at all."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        json.dump(what, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def load(path: Path) -> "dict[str, Any]":
    """What `save` has written."""
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}


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


def start(name: str, run: int, spec: "dict[str, Any]", once_more: bool = False) -> "dict[str, Any]":
    """Start a run in the background, unless it, or a later one, was started before; an earlier one has to end first.

    On a machine that is being taken away nothing is begun again: whoever asks finds the earlier run lost.
    `spec`: line, alive_s, and `again`: whether the host may begin it again after a reboot. `once_more`: it does.
    """
    folder = JOBS / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        supersede(folder, run)
        return read(folder)  # something runs: whoever asks sees which run it is, and asks again
    before = read(folder)
    if before.get("run", 0) >= run and not once_more:
        return before
    if before.get("state") == "lost" and before["boot"] == boot() and preempted():
        return before
    save(folder / "spec.json", spec)
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
        except OSError as error:
            os.write(tell, str(error).encode())  # where that is too late it goes nowhere
        finally:
            os._exit(0)
    os.close(tell)
    os.wait()
    said = os.read(ready, 1024)
    if said != b".":
        sys.exit(f"the state of the job cannot be written: {said.decode() or 'its supervisor was killed'}")
    lock.close()  # the supervisor has it
    if spec.get("again"):
        keep_through_reboots()
    return read(folder)


def supersede(folder: Path, run: int) -> None:
    """Ask what runs to end, if it is an earlier run."""
    state = read(folder)
    if state.get("state") == "running" and 0 < state["run"] < run and state["pid"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state["pid"], signal.SIGINT)


def keep_through_reboots() -> None:
    """See to it that systemd runs `again` after a reboot; without systemd that is left to a keeper."""
    folder = Path.home() / ".config" / "systemd" / "user"
    wanted = SERVICE.format(first=FIRST, program=Path(__file__).resolve())
    if shutil.which("systemctl") is None:
        return
    try:
        if (folder / UNIT).exists() and (folder / UNIT).read_text() == wanted:
            return
        commands = [["systemctl", "--user", "daemon-reload"], ["systemctl", "--user", "enable", "--quiet", UNIT]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / UNIT).write_text(wanted)
        # Units of a user run without a log-in only where he lingers.
        for words in (["sudo", "-n", "loginctl", "enable-linger", os.environ.get("USER", "root")], *commands):
            subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        pass  # the job runs; it is only not begun again without a keeper


def begin_again() -> None:
    """Begin again what ran when the host went down, as the same run, where nobody has begun a later one since."""
    for folder in sorted(JOBS.iterdir()) if JOBS.exists() else ():
        try:
            state, spec = load(folder / "state.json"), load(folder / "spec.json")
        except (OSError, ValueError):
            continue  # a job that has never begun
        if spec.get("again") and state["state"] in ("running", "lost") and state["boot"] != boot():
            start(folder.name, state["run"], spec, once_more=True)


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
            state.update(state="asked", code=130, why="it was asked to stop")
        else:
            state.update(state="lost", why="the machine was ending")
            write(folder, state)  # at once: there may be no later
    except OSError as error:
        state.update(state="ended", code=126, why=str(error))
    # What it has started ends with it. It may still have much to say.
    if child is not None:
        finish(folder, state, child, log)
    log.close()
    state["ended"] = time.time()
    with contextlib.suppress(OSError):  # on a full disk it is found dead, and lost
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


def finish(folder: Path, state: "dict[str, Any]", child: "subprocess.Popen[bytes]", log: "Log") -> None:
    """End all that is left of it: SIGINT, then SIGTERM, then SIGKILL. What does not end keeps the job running."""
    name, told = folder.name, False
    first, last = (2, NOTICE) if state["state"] == "lost" else (1, GRACE)
    pipe: Any = child.stdout
    os.set_blocking(pipe.fileno(), False)
    began = time.monotonic()
    sent = 0
    while True:
        took = time.monotonic() - began
        due = 3 if took >= last else max(first, 1 + (took >= last / 2))
        number = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)[due - 1]
        left = end_all(name, number if due > sent or due == 3 else 0)
        sent = due
        while drain(pipe, log):
            pass
        child.poll()
        if not left:
            return
        if took > STUCK and not told:
            told = True
            end = state.get("why") or f"exit {state.get('code')}"
            why = f"{end}, but {left} of its processes do not end, whatever signal: `tpuswarm down` ends the machine"
            with contextlib.suppress(OSError):
                write(folder, {**state, "state": "running", "code": None, "why": why})
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
                supersede(folder, run)
                return read(folder)  # what was before it has not ended yet
            now = time.time()
            why = "it was asked to stop before it began"
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
        if state["state"] == "lost":  # nobody begins it again
            write(folder, {**state, "state": "asked", "code": 130, "why": "its end was asked for"})
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


def show_log(name: str, lines: int, offset: int, inode: int) -> None:
    """The last lines of the log, or what came since an offset of a file of that inode; before it INODE OFFSET.

    Where that file is `log.1` by now, its rest comes first, and then the next file from its beginning.
    """
    files: dict[int, Any] = {}
    # The newer first: where the log is rotated between the two, the same file is found twice, and none is missed.
    for each in ("log", "log.1"):
        with contextlib.suppress(FileNotFoundError):
            file = (JOBS / name / each).open("rb")
            files.setdefault(os.fstat(file.fileno()).st_ino, file)
    if not files:
        print("0 0", flush=True)
        return
    newest, oldest = next(iter(files)), next(reversed(files))
    if inode:
        shown = inode if inode in files else oldest
        size = os.fstat(files[shown].fileno()).st_size
        files[shown].seek(offset if shown == inode and offset <= size else 0)
        data = files[shown].read(SENT)
        if not data and shown != newest:
            shown = newest
            data = files[shown].read(SENT)
    else:
        shown, data = newest, b""
        for each in files.values():
            size = os.fstat(each.fileno()).st_size
            first = max(0, size - (lines + 1) * 4096) if lines else size
            each.seek(first)
            data = each.read() + data
            if first:
                break  # what is before it does not adjoin
        data = b"".join(data.splitlines(keepends=True)[-lines:])
    print(shown, files[shown].tell(), flush=True)
    sys.stdout.buffer.write(data)


def main(words: "list[str]") -> None:
    """One of the verbs."""
    verb, rest = words[0], words[1:]
    if verb == "start":
        print(json.dumps(start(rest[0], int(rest[1]), json.load(sys.stdin))))
    elif verb == "end":
        print(json.dumps(end(rest[0], int(rest[1]))))
    elif verb == "log":
        show_log(rest[0], int(rest[1]), *(map(int, rest[2:]) if len(rest) > 2 else (0, 0)))
    elif verb == "again":
        begin_again()
    else:
        for each in sorted(JOBS.iterdir()) if JOBS.exists() else ():
            if not rest or each.name in rest:
                print(json.dumps({"name": each.name, **read(each)}))


if __name__ == "__main__":
    main(sys.argv[1:])
