"""Real `tpuswarm` processes, started, watched and killed by tests.

Most are forks of one process that has imported JAX and tpuswarm (tests/fork_server.py): each has its own process id,
session, pipes and environment, but starts 3 seconds of processor time sooner. A test about how a program starts says
`new=True`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.xla import OLDER_COMPILER
from tpuswarm.train.run.directory import METRICS, read_rows

PROGRAM = str(Path(sys.executable).with_name("tpuswarm"))
TIMES = ("tokens_per_s", "wait_s", "wall_s")
ONE_DEVICE = {"XLA_FLAGS": OLDER_COMPILER, "JAX_PLATFORMS": ""}
READ_AT_IMPORT = ("JAX_", "MPL", "PYTHON", "TPUSWARM_ROOT")
"""Prefixes of the variables that libraries read when they are imported."""
PATIENCE = 240.0
"""Seconds to wait for anything; other processes may have the cores."""
ROOT = Path(__file__).parents[1]

# Children inherit ignored signals (pytest under nohup, or in the background of a script), but not handlers.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)

_environment = dict(os.environ)  # before any test
_servers: dict[tuple[object, ...], socket.socket] = {}


def read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read when they are imported; a fork may still change JAX's platforms."""
    return {name: env[name] for name in sorted(env) if name.startswith(READ_AT_IMPORT) and name != "JAX_PLATFORMS"}


def fork_server(env: Mapping[str, str], enter: Sequence[str] = ()) -> socket.socket:
    """Return the socket of the fork server that has imported its libraries in this environment; start it if needed.

    enter: the prefix of a command that runs in other namespaces.
    """
    variables = read_at_import(env)
    key = (*enter, *variables.items())
    if key not in _servers:
        _servers[key], theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        others = {name: value for name, value in _environment.items() if not name.startswith(READ_AT_IMPORT)}
        with theirs:
            subprocess.Popen(
                [*enter, sys.executable, "-P", "-m", "tests.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**others, **variables, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}, cwd=ROOT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
    return _servers[key]


class Forked(subprocess.Popen[Any]):
    """A process of `tpuswarm …` or `FILE.py …` that a fork server makes; for its user a Popen like any other."""

    def __init__(self, argv: Sequence[str], *, terminal: bool = False, enter: Sequence[str] = (), **options: Any):
        """terminal: whether standard input is a terminal that becomes the controlling one. enter: as of fork_server."""
        self._terminal, self._enter = terminal, enter
        super().__init__(argv, **options)

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest) -> None:  # type: ignore[no-untyped-def]
        _startupinfo, _creationflags, _shell, *fds = rest
        stdio = [number if fd < 0 else fd for number, fd in enumerate((fds[0], fds[3], fds[5]))]
        env = dict(os.environ if env is None else env)
        job = {"argv": list(args), "cwd": str(cwd or Path.cwd()), "env": env, "terminal": self._terminal}
        self._answers, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(fork_server(env, self._enter), [json.dumps(job).encode()], [*stdio, theirs.fileno()])
        self.pid = self._read_number()
        self._child_created = True
        self._close_pipe_fds(*fds[:6])  # type: ignore[attr-defined]

    def _read_number(self) -> int:
        text = b""
        while not text.endswith(b"\n"):
            part = self._answers.recv(1)
            assert part, "the fork server has ended"
            text += part
        return int(text)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        try:
            return self._wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(self._read_number())
            self._answers.close()
        return self.returncode


def start(
    words: list[str], cwd: Path, program: list[str] | None = None, stdin: int | None = None, new: bool = False
) -> subprocess.Popen[str]:
    """Start a command in `cwd`, on the one device that a machine without accelerators has.

    program: instead of tpuswarm. new: a new process, not a fork of one that has imported its libraries.
    """
    return (subprocess.Popen if new or program else Forked)(
        [*(program or [PROGRAM]), *words], cwd=cwd, env={**os.environ, **ONE_DEVICE}, text=True,
        stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
    """Return the stdout and stderr of a process; fail unless it ends with `code`, and for an internal error."""
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code and "internal error" not in err, (
        f"exit {process.returncode}, not {code}:\n{out}\n{err}"
    )
    return out, err


def run(words: list[str], cwd: Path, code: int = 0) -> tuple[str, str]:
    """Start and finish."""
    return finish(start(words, cwd), code)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Wait until `condition` holds; if it does not, or the process ends before, fail with what that printed."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"not before the end, or in {PATIENCE:.0f} s:\n{process.communicate(timeout=60)}")
        time.sleep(0.005)


def updates(folder: Path) -> int:
    """Return how many updates a run's metrics hold."""
    return sum("loss" in row for row in read_rows(folder / METRICS))


def rows_without_times(folder: Path) -> list[dict]:
    """Return all rows of a run's metrics without times."""
    return [{name: v for name, v in row.items() if name not in TIMES} for row in read_rows(folder / METRICS)]
