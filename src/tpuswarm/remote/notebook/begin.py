"""Begins Jupyter on a machine where it does not run, and says where it is; on a slice, what its kernel needs, too."""

import asyncio
import json
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.remote.connect import Connections, ask
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.places import NOTEBOOK, SERVICE, VENV, as_set_up
from tpuswarm.remote.supervisor import Supervisor

FOLDER = f"~/{NOTEBOOK}"
SERVER, WORKER = f"{SERVICE}notebook", f"{SERVICE}notebook-worker"
COLAB = "https://colab.research.google.com"
"""The only other page that may talk to the server, with its token."""
NEEDS = ("jupyterlab", "ipykernel")
"""Of worker 0; the others need the second alone."""
PURELIB = 'import sysconfig; print(sysconfig.get_path("purelib"))'
PATHS = (
    f'programs=~/{VENV}/bin/python; if [ -x "$programs" ]; then export PYTHONPATH="$("$programs" -c '
    f'{shlex.quote(PURELIB)})"; fi; export PATH=~/{NOTEBOOK}/venv/bin:"$PATH"; '
)
"""Jupyter's own environment first, and the packages of the machine's programs before those of it."""
BEGINS_S, ANSWERS_S = 60.0, 60.0
"""Seconds for a server to listen, and for a host to answer."""


class NoJupyter(InputError):
    """Hosts do not have what a notebook needs."""

    def __init__(self, labels: Sequence[str], lacks: str):
        who = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
        super().__init__(
            f"{who} {'has' if len(labels) == 1 else 'have'} no {lacks}: `notebook = true` in [setup] puts it there"
        )


@dataclass(frozen=True)
class Notebook:
    """A server that runs."""

    host: Host
    port: int
    """On the host's loopback."""
    token: str
    is_new: bool
    """Whether it was begun now."""

    def url(self, port: int, name: str = "127.0.0.1", path: str = "") -> str:
        """By which it is opened through a port of this computer."""
        return f"http://{name}:{port}/{path}?token={self.token}"


async def begin(
    connections: Connections, hosts: Sequence[Host], addresses: Sequence[str], folder: str, before: Notebook | None
) -> Notebook:
    """The server of a machine, begun on its first host unless it runs there.

    hosts: all of the machine; addresses: theirs within its network. folder: in which notebooks lie, from the home,
    where there is such a one. before: the server as this command knew it: on a machine that came back it gets the same
    port and token. Raises NoJupyter; RunFailed where it ends at once; NoWay.
    """
    asked = [Supervisor(connections, host) for host in hosts]
    shown = await _on_all(hosts, lambda host: asked[hosts.index(host)].show())
    runs = [_run(each, WORKER) for each in shown]
    run, is_on = _run(shown[0], SERVER)
    is_slice = len(hosts) > 1
    token = before.token if before else secrets.token_urlsafe(24)
    config = None if is_on else {"config": _config(token), "port": before.port if before else None}

    async def prepare(host: Host) -> dict[str, object]:
        first = host is hosts[0]
        found = _kernel(host.label.partition("/")[0], len(hosts)) if first else {}
        about = {
            "needs": NEEDS if first else NEEDS[1:],
            "files": {"begin": _begin(host), **found},
            "begins": config if first else None,
        }
        line = as_set_up(f"{PATHS}exec python3 -c {shlex.quote(_text('prepare.py'))}")
        code, out, err = await ask(connections, host, line, json.dumps(about).encode())
        if code != 0:
            raise RunFailed(f"{host.label} cannot be prepared for a notebook (exit {code}): {_last(err)}")
        return dict(json.loads(out.decode().strip().rpartition("\n")[2]))

    said = await _on_all(hosts, prepare)
    if lacking := [host.label for host, each in zip(hosts, said, strict=True) if each["lacks"]]:
        raise NoJupyter(lacking, "Jupyter" if "jupyterlab" in str(said[0]["lacks"]) else "ipykernel")
    if is_slice:
        await _begin_workers(connections, hosts, addresses, runs)
    run += not is_on
    place = f"{FOLDER}/server-{run}"
    if not is_on:
        line = as_set_up(_server_line(place), folder)
        await asked[0].start(SERVER, run, {"line": line, "alive_s": None})
    server = json.loads(await _listens(connections, hosts[0], SERVER, f"{place}/jpserver-*.json"))
    return Notebook(hosts[0], server["port"], server["token"], not is_on)


async def end(connections: Connections, hosts: Sequence[Host]) -> bool:
    """End the server, its kernels, and on a slice their engines; whether any was running. Raises NoWay."""

    async def one(host: Host) -> bool:
        supervisor, ran = Supervisor(connections, host), False
        for name, state in (await supervisor.show()).items():
            if name in (SERVER, WORKER) and state["state"] == "running":
                await supervisor.end(name, state["run"])
                ran = True
        return ran

    return any(await _on_all(hosts, one))


async def _begin_workers(
    connections: Connections, hosts: Sequence[Host], addresses: Sequence[str], runs: Sequence[tuple[int, bool]]
) -> None:
    """What starts engines, on all workers; and what the kernel has to know of them, on the first."""
    code, out, _ = await ask(connections, hosts[0], f"cat {FOLDER}/secret 2>/dev/null")
    secret = out.decode().strip() if code == 0 and out.strip() else secrets.token_hex(32)
    await _put(connections, hosts, {"secret": secret, "worker.py": _text("worker.py"), "kernel.py": _text("kernel.py")})

    async def start(host: Host) -> int:
        number = hosts.index(host)
        run, is_on = runs[number]
        run += not is_on
        place = f"{FOLDER}/worker-{run}"
        if not is_on:
            line = as_set_up(f"{PATHS}exec python3 {FOLDER}/worker.py {addresses[number]} {place}")
            await Supervisor(connections, host).start(WORKER, run, {"line": line, "alive_s": None})
        return int(await _listens(connections, host, WORKER, place))

    ports = await _on_all(hosts, start)
    told = json.dumps({"workers": list(zip(addresses, ports, strict=True))})
    await _put(connections, hosts[:1], {"slice.json": told})


async def _put(connections: Connections, hosts: Sequence[Host], texts: Mapping[str, str]) -> None:
    about = json.dumps({"needs": [], "files": texts, "begins": None}).encode()
    line = as_set_up(f"{PATHS}exec python3 -c {shlex.quote(_text('prepare.py'))}")

    async def put(host: Host) -> None:
        code, _, err = await ask(connections, host, line, about)
        if code != 0:
            raise RunFailed(f"{host.label} takes no files for a notebook (exit {code}): {_last(err)}")

    await _on_all(hosts, put)


def line_that_reads(files: str) -> str:
    """A shell line that prints a file once it holds something: a service creates it before it writes into it."""
    read = f'text=$(cat {files} 2>/dev/null); [ "$text" ] && echo "$text" && exit'
    return f"for try in $(seq 20); do {read}; sleep 0.1; done; exit 1"


async def _listens(connections: Connections, host: Host, job: str, files: str) -> str:
    """Wait until a service has written its file; what stands in it. Raises RunFailed where it has ended instead."""
    line = line_that_reads(files)
    supervisor = Supervisor(connections, host)
    try:
        async with asyncio.timeout(BEGINS_S):
            while True:
                code, out, _ = await ask(connections, host, line)
                if code == 0:
                    return out.decode()
                if (await supervisor.show())[job]["state"] != "running":
                    _, log = await supervisor.log(job, 1)
                    what = "Jupyter" if job == SERVER else "the part that runs cells"
                    raise RunFailed(f"{what} on {host.label} has ended at once: {_last(log)}")
    except TimeoutError:
        raise RunFailed(f"{job.strip('.')} on {host.label} does not listen after {BEGINS_S:g} s") from None


def _run(shown: Mapping[str, Mapping[str, object]], job: str) -> tuple[int, bool]:
    """Which run was the last one, and whether it goes on."""
    state = shown.get(job, {})
    return int(str(state.get("run", 0))), state.get("state") == "running"


def _config(token: str) -> str:
    """Of the server, as its own file has it; the port comes on the host."""
    server = {
        "ip": "127.0.0.1", "port_retries": 0, "open_browser": False, "allow_root": True, "answer_yes": True,
        "allow_origin": COLAB, "allow_credentials": True,
    }  # fmt: skip
    return json.dumps({"ServerApp": server, "IdentityProvider": {"token": token}})


def _server_line(place: str) -> str:
    """The line of a shell. Its configuration comes after the user's own, which it does not touch."""
    return (
        f"{PATHS}export JUPYTER_CONFIG_PATH={FOLDER}/config JUPYTER_PATH={FOLDER}/share JUPYTER_RUNTIME_DIR={place}; "
        f"export JUPYTERLAB_SETTINGS_DIR={FOLDER}/settings; exec python3 -m jupyterlab "
        f"--config={FOLDER}/config/jupyter_server_config.json"
    )


def _begin(host: Host) -> str:
    """A script that is another program, with the environment of the machine and its flags as they are now."""
    line = as_set_up(f'{PATHS}exec "$@"', exports=host.exports)
    return f"#!/bin/bash\n{line}\n"


def _kernel(name: str, workers: int) -> dict[str, str]:
    """Of Jupyter: the kernel, under the name that notebooks from elsewhere ask for; no news, no questions."""
    words = f"exec /bin/bash {FOLDER}/begin python3 "
    words += "-m ipykernel_launcher" if workers == 1 else f"{FOLDER}/kernel.py"
    about = {
        "argv": ["/bin/bash", "-c", f'{words} -f "$0"', "{connection_file}"],
        "display_name": name if workers == 1 else f"{name} ({workers} workers)",
        "language": "python",
        "interrupt_mode": "signal" if workers == 1 else "message",
        "metadata": {"debugger": workers == 1},
    }
    announcements = {"@jupyterlab/apputils-extension:announcements": True}
    return {
        "share/kernels/python3/kernel.json": json.dumps(about),
        "config/labconfig/page_config.json": json.dumps({"disabledExtensions": announcements}),
    }


@cache
def _text(name: str) -> str:
    return files("tpuswarm.remote.notebook").joinpath(name).read_text(encoding="utf-8")


def _last(said: bytes) -> str:
    line = said.decode(errors="replace").strip().rpartition("\n")[2]
    return re.sub(r"token=[\w-]+", "token=…", line) or "it said nothing"


async def _on_all(hosts: Sequence[Host], work):  # type: ignore[no-untyped-def]
    """What comes of it on each; the first error where there is one."""
    found = await fan_out(hosts, work, time_out_s=ANSWERS_S + BEGINS_S)
    for each in found:
        if isinstance(each, TpuswarmError):
            raise each
    return found
