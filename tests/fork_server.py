"""Start programs by forking a process that has imported JAX and tpuswarm: `python -m tests.fork_server FD`.

Each request is one message on the socket FD: JSON with `argv`, `cwd`, `env` and `terminal`, and four file descriptors:
standard input, output and error, and a socket that gets the process id and, at the end, the wait status. `tpuswarm …`
and `FILE.py …` run as they would in a new process, except that the libraries are there already. No backend of JAX is
initialised before the fork. When the other end of FD closes, all these processes are killed.
"""

import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import termios
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

MODULES = (
    "asyncssh", "fsspec", "jax.ad_checkpoint", "jaxlib.mlir.dialects.mhlo", "matplotlib.backends.backend_agg",
    "matplotlib.pyplot", "optax", "orbax.checkpoint", "rich.progress", "tokenizers", "uvicorn", "tpuswarm.cli.router",
    "tpuswarm.cli.train.train", "tpuswarm.recipes.language.program", "tpuswarm.recipes.language.tokens",
    "tpuswarm.router.apply", "tpuswarm.swarm.supervision.start", "tpuswarm.train.look.report", "tpuswarm.train.trainer",
)  # fmt: skip
"""Slow to import, and without threads except numpy's, which survive a fork."""


def serve(requests: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in the new process, and None in this one when there will be none."""
    events = selectors.DefaultSelector()
    events.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        for key, _ in events.select():
            if key.fileobj is not requests:
                pid, answers = running.pop(key.fd)
                events.unregister(key.fd)
                os.close(key.fd)
                status = os.waitpid(pid, 0)[1]
                with answers, suppress(OSError):  # the requesting process may have been killed
                    answers.send(f"{status}\n".encode(), socket.MSG_NOSIGNAL)
                continue
            message, files, *_ = socket.recv_fds(requests, 1 << 20, 4)
            if not message:
                for pid, _ in running.values():
                    os.kill(pid, signal.SIGKILL)
                return None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # JAX warns of threads, which it does not have yet
                pid = os.fork()
            answers = socket.socket(fileno=files[3])
            if pid == 0:
                events.close()
                requests.close()
                for pidfd, (_, others) in running.items():
                    os.close(pidfd)
                    others.close()
                return {**json.loads(message), "stdio": files[:3], "answers": answers}
            for fd in files[:3]:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = pid, answers
            events.register(pidfd, selectors.EVENT_READ)


def become(job: dict[str, Any]) -> None:
    """Become a job's process: its descriptors, signals, environment, folder, arguments and session."""
    import jax
    import numpy

    os.setsid()
    for number, fd in enumerate(job["stdio"]):
        os.dup2(fd, number)
        os.close(fd)
    if job["terminal"]:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    for ignored in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ignored, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    sys.stdin, sys.stdout, sys.stderr = (_text_stream(number) for number in range(3))
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS"))
    numpy.random.seed()
    with job["answers"] as answers:
        answers.send(f"{os.getpid()}\n".encode())


def _text_stream(number: int) -> io.TextIOWrapper:
    raw = open(number, "wb" if number else "rb", closefd=False)  # noqa: SIM115  # as long as the process
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(raw, "utf-8", errors, line_buffering=number == 2 or os.isatty(number))


def main() -> None:
    """Serve; in a forked process, run its program."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    for name in MODULES:
        importlib.import_module(name)
    gc.freeze()
    job = serve(socket.socket(fileno=int(sys.argv[1])))
    if job is None:
        return
    become(job)
    if Path(sys.argv[0]).name == "tpuswarm":
        from tpuswarm.cli import main as command

        command()
    else:
        program = Path(sys.argv[0]).resolve()
        sys.path.insert(0, str(program.parent))
        runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
