"""Opening Ray: a cluster of one's own on this machine, quiet and small, or one that is there already."""

import importlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tpuswarm.errors import InputError, RunFailed, first_line
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import ENVIRONMENT, private_folder
from tpuswarm.train.process.stop import held

os.environ |= ENVIRONMENT  # Ray reads these while it is imported

import psutil  # type: ignore[import-untyped]
import ray

NAMESPACE = "tpuswarm"
LOOPBACK = "127.0.0.1"


def open_ray(address: str | None, store_bytes: int, ports: Ports | None, dashboard: bool) -> Any:
    """Ray's context, of the cluster at an address or of a new one; RunFailed where there is none.

    dashboard: serve Ray's own, to this machine alone. It can be cut short: what Ray has started by then is ended.
    A new cluster that does not start in time is started once more: Ray's raylet aborts if its agents need more than
    15 s, as on a busy machine (Ray 2.60).
    """
    own: dict[str, Any] = {}
    if address is None:
        own = {
            "include_dashboard": dashboard,
            "dashboard_host": LOOPBACK,
            "object_store_memory": store_bytes,
            "num_cpus": _processors(ports),
            "num_gpus": 0,
            "_temp_dir": str(_sessions()),
            "_metrics_export_port": ports.of("metrics") if ports else None,
        }
    start = partial(_start_ray, address or "local", ports, own)
    try:
        try:
            return start()
        except Exception as error:  # Ray's own words for a machine too busy to start it have no type of their own
            if address or "timed out during startup" not in str(error):
                raise
        ray.shutdown()  # Ray keeps its half-started node
        _remove_sessions(lambda pid: pid == os.getpid())
        return start()
    except Exception as error:
        raise RunFailed(_no_cluster(address, error)) from error


def _start_ray(address: str, ports: Ports | None, options: dict[str, Any]) -> Any:
    with _none_is_left(), _signals_are_ours(), _connected_as_a_whole(), _started_with(ports):
        context = ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.CRITICAL, log_to_driver=False,
            configure_logging=False, **options,
        )  # fmt: skip
        _silence()
    return context


def require_dashboard() -> None:
    """Raise InputError where this Python has not what Ray's dashboard needs."""
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        raise InputError(
            f"--dashboard needs what ray[default] brings ({error}): pip install 'ray[default]'; for a fleet, add it to "
            "pip in [setup]"
        ) from error


def _processors(ports: Ports | None) -> int:
    """As Ray is to know them: it keeps a process in reserve for each, and each has a port."""
    have = os.cpu_count() or 1
    return min(have, ports.workers // 2) if ports else have


def _sessions() -> Path:
    """Where a run's Ray has its folder; what killed runs left there is removed."""
    _remove_sessions(lambda pid: not Path(f"/proc/{pid}").exists())
    return private_folder() / "ray"


def _remove_sessions(should_remove: Callable[[int], bool]) -> None:
    """Remove folders of Ray's sessions; decide by the pid of the process that started each."""
    for session in (private_folder() / "ray").glob("session_*_*"):
        pid = session.name.rpartition("_")[2]
        if pid.isdigit() and should_remove(int(pid)):
            shutil.rmtree(session, ignore_errors=True)


def _silence() -> None:
    """Keep Ray's own messages off the user's screen: what they say of a process, the supervisor says in its words."""
    import ray._private.worker as worker

    worker.print_to_stdstream = lambda data, ignore_prefix: None


@contextmanager
def _none_is_left() -> Iterator[None]:
    """A start that fails or is cut short leaves no process.

    Ray's would end with this one, but for an agent: without its raylet it looks for a server that is gone for a minute.
    """
    this = psutil.Process()
    before = set(this.children())

    def started() -> Iterator[Any]:
        for child in set(this.children()) - before:
            with suppress(psutil.NoSuchProcess):
                yield from (child, *child.children(recursive=True))

    try:
        yield
    except BaseException:
        with held():
            for end in (psutil.Process.suspend, psutil.Process.kill):  # what stands still starts no other
                for each in started():
                    with suppress(psutil.NoSuchProcess):
                        end(each)
        raise


@contextmanager
def _started_with(ports: Ports | None) -> Iterator[None]:
    """While Ray is started: its ports, no log monitor, which takes 6% of a core for what nobody reads, no autoscaler.

    `ray start` has options for that, `ray.init` has not.
    """
    parameter: Any = importlib.import_module("ray._private.parameter")
    real = parameter.RayParams
    given = ports.of_head() if ports else {}
    parameter.RayParams = partial(real, include_log_monitor=False, no_monitor=True, **given)
    try:
        yield
    finally:
        parameter.RayParams = real


@contextmanager
def _signals_are_ours() -> Iterator[None]:
    """While Ray is started: it sets no handler of SIGTERM here, and a terminal that closes does not end its processes.

    They have this process's mask of signals; Ray itself has them block SIGINT, for the same reason.
    """
    import ray._private.utils as utils

    before, utils.set_sigterm_handler = utils.set_sigterm_handler, lambda handler: None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        utils.set_sigterm_handler = before


@contextmanager
def _connected_as_a_whole() -> Iterator[None]:
    """While Ray is started: nothing comes between making its state accessor and connecting it.

    Let go unconnected it hangs or aborts: its destructor then does not join its thread (Ray 2.60).
    """
    state: Any = importlib.import_module("ray._private.state").GlobalState
    real = state._connect_and_get_accessor

    def connect(self: Any) -> Any:
        with held():
            return real(self)

    state._connect_and_get_accessor = connect
    try:
        yield
    finally:
        state._connect_and_get_accessor = real


def _no_cluster(address: str | None, error: Exception) -> str:
    reason = first_line(error)
    where = f"the Ray cluster at {address} does not answer" if address else "Ray does not start on this machine"
    return f"{where}: {reason}"
