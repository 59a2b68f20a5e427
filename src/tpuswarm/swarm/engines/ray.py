"""Run the processes of a swarm as Ray actors. Ray places them and carries their calls.

Every process is one actor without automatic restart. A call that Ray cannot deliver is Unreachable, whatever the
reason; its caller decides what that means.
"""

import json
import pickle
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpuswarm.errors import RunFailed, first_line
from tpuswarm.swarm.engines.actor import CONCURRENCY_GROUPS, Actor, Outcome, ServerActor
from tpuswarm.swarm.engines.opening import NAMESPACE, open_ray
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import AGGREGATORS, DISMISSED, MEMBER, NAMED, store_bytes, use_token
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.train.process.stop import defer_interrupts

ANYWHERE = "anywhere"
"""Instead of a node's name: any node of an existing cluster with room."""
ACTOR_OPTIONS = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
"""The supervisor restarts actors. Ray's record of each call cost a third of a heartbeat."""
NODE_POLL_INTERVAL_S = 2.0
SERVER_NAMES = ("raylet", "gcs_server")
"""Ray's processes without which nothing works; this process starts them."""
HEARTBEAT_TIMEOUT_S, CALL_TIMEOUT_S = 20.0, 60.0
"""Timeouts of a heartbeat and of a call without arrays."""
MIN_TRANSFER_BYTES_PER_S = 10 * 2**20
"""Speed of the slowest supported link or disk; calls with arrays get more time accordingly."""
ARRAY_CALLS = {"fetch", "average", "updates", "file", "check", "merge"}
"""Calls that return or read arrays, up to about the size of the shared parameters."""


@dataclass(frozen=True)
class Calls:
    """Makes calls to the actors of one run."""

    run: str
    state_bytes: int
    """Size of the shared parameters."""

    def __call__(self, call: Call) -> Any:
        """Return the answer, or raise Unreachable."""
        seconds = call_timeout_s(call, self.state_bytes)
        try:
            actor: Any = ray.get_actor(f"{self.run}/{call.address}", NAMESPACE)
            if call.method == "beat":
                return pickle.loads(ray.get(actor.beat.remote(pickle.dumps(call.arguments)), timeout=seconds))
            answer = ray.get(actor.call.remote(call.method, call.arguments), timeout=seconds)
            return answer.copy() if isinstance(answer, np.ndarray) else answer  # a copy lets Ray's store free it
        except (RayError, ValueError, Unreachable) as error:  # ValueError: no actor of that name
            raise Unreachable(f"{call.address}: {first_line(error)}") from error


def call_timeout_s(call: Call, state_bytes: int) -> float:
    """Return the timeout of a call, by the bytes that it carries in both directions."""
    if call.method == "beat":
        return HEARTBEAT_TIMEOUT_S
    values = [
        value
        for argument in call.arguments
        for value in (argument.values() if isinstance(argument, dict) else [argument])
    ]
    sent = sum(value.nbytes for value in values if isinstance(value, np.ndarray))
    return CALL_TIMEOUT_S + (sent + state_bytes * (call.method in ARRAY_CALLS)) / MIN_TRANSFER_BYTES_PER_S


class ActorHandle:
    """An actor as the supervisor sees it. No method waits unless asked to."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._work = actor.run.remote()
        self._report: Any = None
        self.gone = False
        """Whether a report found it dead."""

    def outcome(self) -> Outcome | None:
        """Return how it ended; None while it works."""
        done, _ = ray.wait([self._work], timeout=0)
        if not done:
            return None
        try:
            return Outcome(*ray.get(self._work))
        except (RayActorError, RayError) as error:
            return Outcome("dead", first_line(error))

    def report(self, since: int, seconds: float = 0.0) -> tuple[int, Any] | None:
        """Request a report, wait this long, and return it once; a call after an unanswered one awaits its answer."""
        if self._report is None:
            self._report = self._actor.report.remote(since)
        done, _ = ray.wait([self._report], timeout=seconds)
        if not done:
            return None
        report, self._report = self._report, None
        try:
            return ray.get(report)
        except RayError:  # its outcome says why
            self.gone = True
            return None

    def trace(self, steps: int) -> None:
        """Have a member trace its next steps; a later report contains the trace."""
        self._actor.trace.remote(steps)

    def leave(self) -> None:
        self._actor.leave.remote()

    def send(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Make a call without waiting for an answer."""
        self._actor.call.remote(method, arguments)

    def kill(self) -> None:
        ray.kill(self._actor)


class Cluster:
    """Ray, started for one run on this machine, or an existing cluster at an address. A context manager."""

    def __init__(
        self,
        run: str,
        token: Path,
        address: str | None,
        devices: int = 1,
        largest: int = 0,
        state: int = 0,
        ports: Ports | None = None,
        dashboard: bool = False,
        is_open: bool = False,
    ):
        """token: file with the secret for joining, created if missing; devices: of a member placed anywhere; largest:
        bytes of the largest message; state: bytes of the shared parameters; ports: for a Ray that is started here, None
        for any; dashboard: serve Ray's dashboard to this machine; is_open: other machines may join.
        """
        self.is_open = is_open
        """Whether a Ray that is started here listens for other machines."""
        self._ports, self._dashboard = ports, dashboard
        self.state_bytes, self.largest = state, largest
        """Size of the shared parameters."""
        self._store_bytes = store_bytes(largest)
        self._run, self.token, self._address, self._devices = run, token, address, devices
        self.is_external = address is not None
        """Whether the cluster existed before."""
        self.address = ""
        self.dashboard: str | None = None
        """Host and port of Ray's dashboard, if it is served."""
        self._offers: dict[str, dict[str, str]] = {MEMBER: {}, AGGREGATORS: {}}
        """Living nodes with their machines, by what they offer."""
        self._servers: list[psutil.Process] = []
        self._node_died = False

    def __enter__(self) -> "Cluster":
        if not self.is_external:
            use_token(self.token)
        context = open_ray(self._address, self._store_bytes, self._ports, self._dashboard, self.is_open)
        self.address = context.address_info["address"]
        self.dashboard = None if self.is_external else context.dashboard_url or None
        self._session = Path(context.address_info["session_dir"])
        self._node = ray.get_runtime_context().get_node_id()
        self._servers = [child for child in psutil.Process().children() if _name(child) in SERVER_NAMES]
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with defer_interrupts():
            ray.shutdown()
            if not self.is_external:
                shutil.rmtree(self._session, ignore_errors=True)

    @property
    def join_address(self) -> str:
        """Where other machines join; empty if they cannot."""
        return self.address if self.is_open and not self.is_external else ""

    def require_alive(self) -> None:
        """Raise RunFailed if Ray's node on this machine has died: its calls then never return."""
        dead = [server.pid for server in self._servers if not _is_running(server)]
        if dead or self._node_died:
            which = f"a process of Ray died (pid {dead[0]})" if dead else "Ray's node died"
            raise RunFailed(
                f"{which} on this machine, and with it all processes of the run; its commits are safe: start the same "
                "command again to resume"
            )

    def start(
        self,
        name: str,
        maker: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        node: str | None,
    ) -> ActorHandle | None:
        """Start a process; None while Ray has not noticed that its predecessor is dead.

        node: one of `member_nodes` or `aggregator_nodes`, ANYWHERE, or None for this machine.
        """
        make: Any = ray.remote  # its types lack groups
        is_member = maker.endswith(":member")
        options = {**ACTOR_OPTIONS, **self._placement(node, is_member)}
        kind = Actor if is_member else ServerActor
        actor = make(concurrency_groups=CONCURRENCY_GROUPS)(kind).options(name=f"{self._run}/{name}", **options)
        given = {**arguments, "calls": Calls(self._run, self.state_bytes)}
        try:
            return ActorHandle(actor.remote(name, maker, given, dict(environment), None if node else str(log)))
        except ActorAlreadyExistsError:
            return None

    def _placement(self, node: str | None, is_member: bool) -> dict[str, Any]:
        if node == ANYWHERE:
            cluster_resources: Any = ray.cluster_resources  # it has no types
            have = cluster_resources()
            needs: dict[str, Any] = {"num_cpus": 1}
            if "TPU" in have:
                needs["resources"] = {"TPU": self._devices}
            elif "GPU" in have:
                needs["num_gpus"] = self._devices
            return {**needs, "scheduling_strategy": "SPREAD"}
        resources = {MEMBER: 1} if node and is_member else None
        where = NodeAffinitySchedulingStrategy(node or self._node, soft=False)
        return {"num_cpus": 0, "resources": resources, "scheduling_strategy": where}

    def member_nodes(self) -> dict[str, str]:
        """Nodes that offer a member, with the names of their machines."""
        return self._offers[MEMBER]

    def aggregator_nodes(self) -> dict[str, str]:
        """Nodes with room for aggregators, with the names of their machines."""
        return self._offers[AGGREGATORS]

    def dismiss(self, node: str, outcome: Outcome) -> None:
        """Tell the command on a machine that joined why no process is started there."""
        write: Any = ray.remote(_write_dismissal)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        write.options(num_cpus=0, scheduling_strategy=where).remote(outcome.how, outcome.reason)

    def _watch_nodes(self) -> None:
        """Poll the nodes in a thread: without Ray's head the request never returns."""
        nodes: Any = ray.nodes  # it has no types
        while ray.is_initialized():
            with suppress(RayError, RuntimeError):  # Ray is shutting down
                listed = nodes()
                self._node_died = any(node["NodeID"] == self._node and not node["Alive"] for node in listed)
                alive = [node for node in listed if node["Alive"] and "Resources" in node]
                for offer in self._offers:
                    offering = [node for node in alive if node["Resources"].get(offer, 0) >= 1]
                    self._offers[offer] = {node["NodeID"]: _machine_name(node) for node in offering}
            time.sleep(NODE_POLL_INTERVAL_S)


def _name(process: psutil.Process) -> str | None:
    try:
        name: str = process.name()
    except psutil.NoSuchProcess:
        return None
    return name


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _machine_name(node: dict[str, Any]) -> str:
    names = [resource.removeprefix(NAMED) for resource in node["Resources"] if resource.startswith(NAMED)]
    return names[0] if names else str(node["NodeManagerHostname"])


def _write_dismissal(how: str, reason: str) -> None:
    path = Path(ray.get_runtime_context().get_temp_dir()) / DISMISSED
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"how": how, "reason": reason}))
    part.rename(path)
