"""Open Ray: start a small, quiet cluster on this machine, or connect to an existing one."""

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
from warnings import catch_warnings, filterwarnings

import psutil  # type: ignore[import-untyped]
import ray

from tpuswarm.errors import InputError, RunFailed, first_line
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import ENVIRONMENT, private_folder, require_room
from tpuswarm.train.process.stop import defer_interrupts

NAMESPACE = "tpuswarm"
LOOPBACK = "127.0.0.1"


def open_ray(address: str | None, store_bytes: int, ports: Ports | None, dashboard: bool, is_open: bool = False) -> Any:
    """Return Ray's context for the cluster at an address, or for a new one. Raise RunFailed if it does not start.

    dashboard: serve Ray's dashboard to this machine; is_open: a new cluster listens for other machines, not only on
    the loopback address. If interrupted, everything that Ray has started is ended.
    A new cluster that does not start in time is started once more: Ray's raylet aborts if its agents need more than
    15 s, as on a busy machine (Ray 2.60).
    """
    os.environ |= ENVIRONMENT  # for Ray's processes
    _listen(is_open or address is not None)
    own: dict[str, Any] = {}
    if address is None:
        sessions = _sessions()
        require_room(store_bytes)
        own = {
            "include_dashboard": dashboard,
            "dashboard_host": LOOPBACK,
            "object_store_memory": store_bytes,
            "num_cpus": _processors(ports),
            "num_gpus": 0,
            "_temp_dir": str(sessions),
            "_metrics_export_port": ports.port_of("metrics") if ports else None,
        }
    start = partial(_start_ray, address or "local", ports, own)
    try:
        try:
            return start()
        except Exception as error:  # Ray has no exception type for a machine that is too busy
            if address or "timed out during startup" not in str(error):
                raise
        ray.shutdown()  # Ray keeps its half-started node
        _remove_sessions(lambda pid: pid == os.getpid())
        return start()
    except Exception as error:
        raise RunFailed(_no_cluster(address, error)) from error


def _start_ray(address: str, ports: Ports | None, options: dict[str, Any]) -> Any:
    with _no_processes_left(), _signals_blocked(), _uninterrupted_connect(), _ray_parameters(ports), catch_warnings():
        # JAX warns of forks once its threads run; those of Ray start another program at once.
        filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
        context = ray.init(
            address=address, namespace=NAMESPACE, logging_level=logging.CRITICAL, log_to_driver=False,
            configure_logging=False, **options,
        )  # fmt: skip
        _silence()
    return context


def _listen(everywhere: bool) -> None:
    """Choose where a Ray that starts from now on listens: everywhere, or on the loopback address alone.

    This is Ray's own switch for desktops, whose firewalls would ask; it reads it when it is imported (Ray 2.60).
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    os.environ[constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "1" if everywhere else "0"
    constants.ENABLE_RAY_CLUSTER = everywhere


def require_dashboard() -> None:
    """Raise InputError if this Python lacks the dependencies of Ray's dashboard."""
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        raise InputError(
            f"--dashboard needs ray[default] ({error}): pip install 'ray[default]'; for a fleet, add it to "
            "pip in [setup]"
        ) from error


def _processors(ports: Ports | None) -> int:
    """Return the number of processors to tell Ray: it keeps a process with a port in reserve for each."""
    have = os.cpu_count() or 1
    return min(have, ports.workers // 2) if ports else have


def _sessions() -> Path:
    _remove_sessions(lambda pid: not Path(f"/proc/{pid}").exists())
    return private_folder() / "ray"


def _remove_sessions(should_remove: Callable[[int], bool]) -> None:
    for session in (private_folder() / "ray").glob("session_*_*"):
        pid = session.name.rpartition("_")[2]
        if pid.isdigit() and should_remove(int(pid)):
            shutil.rmtree(session, ignore_errors=True)


def _silence() -> None:
    """Keep Ray's own messages off the screen: the supervisor reports the processes in its own words."""
    import ray._private.worker as worker

    worker.print_to_stdstream = lambda data, ignore_prefix: None


@contextmanager
def _no_processes_left() -> Iterator[None]:
    """Kill all processes of a start that fails or is interrupted.

    Ray's processes end with this one, except an agent, which searches a minute for a server that is gone.
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
        with defer_interrupts():
            for end in (psutil.Process.suspend, psutil.Process.kill):  # a suspended process starts no other
                for process in started():
                    with suppress(psutil.NoSuchProcess):
                        end(process)
        raise


@contextmanager
def _ray_parameters(ports: Ports | None) -> Iterator[None]:
    """Start Ray with our ports, and without log monitor (6% of a core) and autoscaler.

    `ray start` has options for that, `ray.init` has not.
    """
    parameter: Any = importlib.import_module("ray._private.parameter")
    real = parameter.RayParams
    given = ports.head_parameters() if ports else {}
    parameter.RayParams = partial(real, include_log_monitor=False, no_monitor=True, **given)
    try:
        yield
    finally:
        parameter.RayParams = real


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """While Ray starts, keep it from handling SIGTERM here, and have its processes survive a closed terminal.

    They inherit this process's signal mask; Ray itself makes them block SIGINT for the same reason.
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
def _uninterrupted_connect() -> Iterator[None]:
    """Block interrupts between the creation of Ray's state accessor and its connection.

    An unconnected accessor hangs or aborts in its destructor (Ray 2.60).
    """
    state: Any = importlib.import_module("ray._private.state").GlobalState
    real = state._connect_and_get_accessor

    def connect(self: Any) -> Any:
        with defer_interrupts():
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
