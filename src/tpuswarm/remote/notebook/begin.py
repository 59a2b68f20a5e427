"""Start Jupyter on a machine unless it runs there; on a slice, also a service on each other worker."""

import asyncio
import json
import re
import secrets
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, TypeVar

from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.remote.connect import Connections, fan_out, run_shell
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import NOTEBOOK, SERVICE_PREFIX, VENV, in_environment
from tpuswarm.remote.supervisor import Supervisor

T = TypeVar("T")
FOLDER = f"~/{NOTEBOOK}"
SERVER, WORKER = f"{SERVICE_PREFIX}notebook", f"{SERVICE_PREFIX}notebook-worker"
COLAB = "https://colab.research.google.com"
"""The only foreign origin that may use the server, with its token."""
START_TIMEOUT_S = 60.0
FIND_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
PATHS = (
    f'programs=~/{VENV}/bin/python; if [ -x "$programs" ]; then export PYTHONPATH="$("$programs" -c '
    f'{shlex.quote(FIND_PACKAGES)})"; fi; export PATH=~/{NOTEBOOK}/venv/bin:"$PATH"; '
)
"""Jupyter's own environment first on PATH; packages of the machine's programs before its own."""
RUN = """\
import importlib, sys
main = importlib.import_module(f"tpuswarm_slice.{sys.argv.pop(1)}").main
sys.path.pop(0)  # this folder is not the user's
main()
"""


class NoJupyter(InputError):
    """Hosts lack packages that a notebook needs."""

    def __init__(self, labels: Sequence[str], package: str):
        machine = labels[0].partition("/")[0]
        hosts = f"{labels[0]} has" if len(labels) == 1 else f"{len(labels)} workers of {machine} have"
        super().__init__(f"{hosts} no {package}: `notebook = true` in [setup] puts it there")


@dataclass(frozen=True)
class Notebook:
    """A running server."""

    host: Host
    port: int
    """On the host's loopback."""
    token: str
    is_new: bool
    """Whether this call started it."""

    def url(self, port: int, name: str = "127.0.0.1", path: str = "") -> str:
        """Return the URL through a port of this computer."""
        return f"http://{name}:{port}/{path}?token={self.token}"


async def start(
    connections: Connections, hosts: Sequence[Host], addresses: Sequence[str], folder: str, before: Notebook | None
) -> Notebook:
    """Return a machine's server; start it on the first host if it does not run.

    hosts: all hosts of the machine; addresses: theirs in its network. folder: the notebooks' folder, from the home.
    before: the server that this command knew; a replaced machine gets the same port and token. Raises NoJupyter;
    RunFailed if the server does not start; HostUnreachable.
    """
    supervisors = {host: Supervisor(connections, host) for host in hosts}
    jobs = dict(zip(hosts, await _on_all(hosts, lambda host: supervisors[host].show()), strict=True))
    first, others = hosts[0], hosts[1:]
    token = before.token if before else secrets.token_urlsafe(24)
    is_running = _last_run(jobs[first], SERVER)[1]
    server = None if is_running else {"config": _config(token), "port": before.port if before else None}

    async def prepare(host: Host, needs: Sequence[str], texts: Mapping[str, str]) -> dict[str, Any]:
        about = {"needs": needs, "files": texts, "server": server if "jupyterlab" in needs else None}
        line = in_environment(f"{PATHS}exec python3 -c {shlex.quote(_text('prepare.py'))}")
        status, out, err = await run_shell(connections, host, line, json.dumps(about).encode())
        if status != 0:
            raise RunFailed(f"{host.label} cannot be prepared for a notebook (exit {status}): {_last_line(err)}")
        return dict(json.loads(out.decode().strip().rpartition("\n")[2]))

    async def start_job(host: Host, name: str, line: Callable[[str], str], file: str) -> str:
        """Start a job unless it runs; return the text of a file that it writes below its own path."""
        run, is_on = _last_run(jobs[host], name)
        path = f"{FOLDER}/{name.removeprefix(SERVICE_PREFIX)}-{run + (not is_on)}"
        if not is_on:
            await supervisors[host].start(name, run + 1, {"line": line(path), "alive_s": None})
        return await _wait_for_file(connections, host, name, path + file)

    kernel = _kernel_files(first.label.partition("/")[0], len(hosts))
    code = slice_files() if others else {}
    found = [await prepare(first, ("jupyterlab", "ipykernel"), {"begin": _begin_script(first), **kernel, **code})]
    code["secret"] = found[0]["secret"]
    found += await _on_all(others, lambda host: prepare(host, ("ipykernel",), {"begin": _begin_script(host), **code}))
    if lacking := [host.label for host, answer in zip(hosts, found, strict=True) if answer["lacks"]]:
        raise NoJupyter(lacking, "Jupyter" if "jupyterlab" in found[0]["lacks"] else "ipykernel")
    if others:
        program = f"{PATHS}exec python3 {FOLDER}/code/run.py worker"
        address_of = dict(zip(hosts, addresses, strict=True))
        ports = await _on_all(
            others,
            lambda host: start_job(
                host, WORKER, lambda path: in_environment(f"{program} {address_of[host]} {path}"), ""
            ),
        )
        workers = list(zip(addresses[1:], map(int, ports), strict=True))
        await prepare(first, (), {"slice.json": json.dumps({"address": addresses[0], "workers": workers})})
    text = await start_job(first, SERVER, lambda path: in_environment(_server_line(path), folder), "/jpserver-*.json")
    about = json.loads(text)
    return Notebook(first, about["port"], about["token"], not is_running)


async def stop(connections: Connections, hosts: Sequence[Host]) -> bool:
    """Stop the server and everything it started; return whether anything ran. Raises HostUnreachable."""

    async def stop_jobs(host: Host) -> bool:
        supervisor = Supervisor(connections, host)
        jobs = await supervisor.show()
        running = [name for name in (SERVER, WORKER) if _last_run(jobs, name)[1]]
        for name in running:
            await supervisor.end(name, jobs[name]["run"])
        return bool(running)

    return any(await _on_all(hosts, stop_jobs))


def line_that_reads(files: str) -> str:
    """A shell line that prints a file that is not empty: a service creates its file before it writes into it."""
    read = f'text=$(cat {files} 2>/dev/null); [ "$text" ] && echo "$text" && exit'
    return f"for try in $(seq 20); do {read}; sleep 0.1; done; exit 1"


async def _wait_for_file(connections: Connections, host: Host, job: str, file: str) -> str:
    supervisor, name = Supervisor(connections, host), "Jupyter" if job == SERVER else "the service of the slice kernel"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while True:
                status, out, _ = await run_shell(connections, host, line_that_reads(file))
                if status == 0:
                    return out.decode()
                if not _last_run(await supervisor.show(), job)[1]:
                    _, log = await supervisor.log(job, 1)
                    raise RunFailed(f"{name} on {host.label} ended at once: {_last_line(log)}")
    except TimeoutError:
        raise RunFailed(f"{name} on {host.label} does not listen after {START_TIMEOUT_S:g} s") from None


def _last_run(jobs: Mapping[str, Mapping[str, Any]], name: str) -> tuple[int, bool]:
    job = jobs.get(name, {})
    return job.get("run", 0), job.get("state") == "running"


def _config(token: str) -> dict[str, Any]:
    server = {
        "ip": "127.0.0.1", "port_retries": 0, "open_browser": False, "allow_root": True, "answer_yes": True,
        "allow_origin": COLAB, "allow_credentials": True,
    }  # fmt: skip
    kernels = {"transport_encryption": "auto"}  # all users of a machine can reach its loopback
    return {"ServerApp": server, "IdentityProvider": {"token": token}, "KernelManager": kernels}


def _server_line(runtime: str) -> str:
    return (  # this configuration follows the user's own
        f"{PATHS}export JUPYTER_CONFIG_PATH={FOLDER}/config JUPYTER_PATH={FOLDER}/share JUPYTER_RUNTIME_DIR={runtime}; "
        f"export JUPYTERLAB_SETTINGS_DIR={FOLDER}/settings; exec python3 -m jupyterlab "
        f"--config={FOLDER}/config/jupyter_server_config.json"
    )


def _begin_script(host: Host) -> str:
    line = in_environment(f'{PATHS}export PYTHONHASHSEED=0; exec "$@"', exports=host.exports)
    return f"#!/bin/bash\n{line}\n"


def slice_files() -> dict[str, str]:
    """The package of the slice kernel and its launcher, by path on a host."""
    modules = ("__init__.py", "engine.py", "kernel.py", "output.py", "worker.py")
    return {"code/run.py": RUN, **{f"code/tpuswarm_slice/{name}": _text(name) for name in modules}}


def _kernel_files(machine: str, workers: int) -> dict[str, str]:
    """The kernel, named as notebooks from elsewhere ask; JupyterLab without news."""
    program = "python3 -m ipykernel_launcher" if workers == 1 else f"python3 {FOLDER}/code/run.py kernel"
    about = {
        "argv": ["/bin/bash", "-c", f'exec /bin/bash {FOLDER}/begin {program} -f "$0"', "{connection_file}"],
        "display_name": machine if workers == 1 else f"{machine} ({workers} workers)",
        "language": "python",
        "interrupt_mode": "signal" if workers == 1 else "message",
        "metadata": {"debugger": True, "supported_encryption": "curve"},
    }
    announcements = {"@jupyterlab/apputils-extension:announcements": True}
    return {
        "share/kernels/python3/kernel.json": json.dumps(about),
        "config/labconfig/page_config.json": json.dumps({"disabledExtensions": announcements}),
    }


def _text(name: str) -> str:
    return files("tpuswarm.remote.notebook").joinpath(name).read_text(encoding="utf-8")


def _last_line(output: bytes) -> str:
    line = output.decode(errors="replace").strip().rpartition("\n")[2]
    return re.sub(r"token=[\w-]+", "token=…", line) or "no message"


async def _on_all(hosts: Sequence[Host], work: Callable[[Host], Awaitable[T]]) -> list[T]:
    """Return the results; raise the first error."""
    results: list[T] = []
    for result in await fan_out(hosts, work, time_out_s=2 * START_TIMEOUT_S):
        if isinstance(result, TpuswarmError):
            raise result
        results.append(result)
    return results
