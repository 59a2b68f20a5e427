"""The processes of a swarm as Ray actors: Ray places them and carries their calls; nothing correct rests on it.

Every process is one actor without automatic restart. A call that Ray cannot carry out is Unreachable, whatever the
reason; the process that made it decides what that means.
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
import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpuswarm.errors import first_line
from tpuswarm.swarm.engines.actor import GROUPS, Actor, Outcome
from tpuswarm.swarm.engines.opening import NAMESPACE, open_ray
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import DISMISSED, MEMBER, NAMED, store_bytes, use_token
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.train.process.stop import held

ANYWHERE = "anywhere"
"""In the place of a node's name: wherever a cluster that was there already has room."""
ACTOR = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
"""We make it again ourselves; that Ray writes down each call was a third of what a heartbeat cost."""
NODES = 2.0
"""Seconds between two looks for machines that joined."""
BEAT, CALL = 20.0, 60.0
"""Seconds for an answer to a heartbeat, and to any other call that carries nothing."""
SLOWEST = 10 * 2**20
"""Bytes a second of the slowest link or disk on which what a call carries is still waited for."""
CARRYING = {"fetch", "average", "updates", "file", "check", "merge"}
"""Calls whose answers are arrays, or need arrays to be read: at most as large as the whole shared state, or about so.
"""


@dataclass(frozen=True)
class Calls:
    """Carries calls to the actors of one run."""

    run: str
    state_bytes: int
    """Of the state that members share."""

    def __call__(self, call: Call) -> Any:
        """The answer; Unreachable without one."""
        seconds = seconds_for(call, self.state_bytes)
        try:
            actor: Any = ray.get_actor(f"{self.run}/{call.address}", NAMESPACE)
            if call.method == "beat":
                return pickle.loads(ray.get(actor.beat.remote(pickle.dumps(call.arguments)), timeout=seconds))
            answer = ray.get(actor.call.remote(call.method, call.arguments), timeout=seconds)
            return answer.copy() if isinstance(answer, np.ndarray) else answer  # else Ray's store could not let it go
        except (RayError, ValueError, Unreachable) as error:  # ValueError: no actor of that name
            raise Unreachable(f"{call.address}: {first_line(error)}") from error


def seconds_for(call: Call, state_bytes: int) -> float:
    """How long an answer is waited for: by what the call carries there and back."""
    if call.method == "beat":
        return BEAT
    given = [
        each
        for argument in call.arguments
        for each in (argument.values() if isinstance(argument, dict) else [argument])
    ]
    sent = sum(each.nbytes for each in given if isinstance(each, np.ndarray))
    return CALL + (sent + state_bytes * (call.method in CARRYING)) / SLOWEST


class Started:
    """An actor, seen from the supervisor; nothing here waits, unless asked to."""

    def __init__(self, actor: Any):
        self._actor = actor
        self._work = actor.run.remote()
        self._look: Any = None
        self.gone = False
        """A look found it dead."""

    def outcome(self) -> Outcome | None:
        """How it ended; None while it works."""
        done, _ = ray.wait([self._work], timeout=0)
        if not done:
            return None
        try:
            return Outcome(*ray.get(self._work))
        except (RayActorError, RayError) as error:
            return Outcome("dead", first_line(error))

    def look(self, since: int, seconds: float = 0.0) -> tuple[int, Any] | None:
        """The newest answer to a look, once, waited for so long; the next call begins another look."""
        if self._look is None:
            self._look = self._actor.look.remote(since)
        done, _ = ray.wait([self._look], timeout=seconds)
        if not done:
            return None
        look, self._look = self._look, None
        try:
            return ray.get(look)
        except RayError:  # its outcome tells, where it has none yet
            self.gone = True
            return None

    def trace(self, steps: int) -> None:
        """Ask a member to trace its next steps; a look has what came of it."""
        self._actor.trace.remote(steps)

    def leave(self) -> None:
        """Ask it to go."""
        self._actor.leave.remote()

    def kill(self) -> None:
        """End it at once."""
        ray.kill(self._actor)


class Cluster:
    """Ray, started for one run on this machine, or a running one at an address. A context manager."""

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
    ):
        """token: file with the secret that joins, made if it is not there; devices: of a member placed anywhere;
        largest: bytes of the largest thing that is sent at once; state: bytes of all that members share;
        ports: on which a Ray that is started here listens, None: any; dashboard: serve Ray's own, to this
        machine alone.
        """
        self._ports, self._dashboard = ports, dashboard
        self.state_bytes = state
        """Of all that members share."""
        self._store_bytes = store_bytes(largest)
        self._run, self.token, self._address, self._devices = run, token, address, devices
        self.found = address is not None
        """Whether it was there already."""
        self.address = ""
        self.dashboard: str | None = None
        """Host and port of Ray's dashboard, where it is served."""
        self._joined: dict[str, str] = {}

    def __enter__(self) -> "Cluster":
        if not self.found:
            use_token(self.token)
        context = open_ray(self._address, self._store_bytes, self._ports, self._dashboard)
        self.address = context.address_info["address"]
        self.dashboard = None if self.found else context.dashboard_url or None
        self._session = Path(context.address_info["session_dir"])
        self._node = ray.get_runtime_context().get_node_id()
        threading.Thread(target=self._watch_nodes, name="nodes", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        with held():
            ray.shutdown()
            if not self.found:
                shutil.rmtree(self._session, ignore_errors=True)

    def start(
        self,
        name: str,
        maker: str,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path,
        node: str | None,
    ) -> Started | None:
        """Start a process; node: one of `joined`, ANYWHERE, or None: here, where the run's storage is.

        None while Ray has not noticed yet that the one before it is dead.
        """
        make: Any = ray.remote  # its types do not know of groups
        actor = make(concurrency_groups=GROUPS)(Actor).options(name=f"{self._run}/{name}", **ACTOR, **self._place(node))
        given = {**arguments, "calls": Calls(self._run, self.state_bytes)}
        try:
            return Started(actor.remote(name, maker, given, dict(environment), None if node else str(log)))
        except ActorAlreadyExistsError:
            return None

    def _place(self, node: str | None) -> dict[str, Any]:
        if node == ANYWHERE:
            resources_of: Any = ray.cluster_resources  # it has no types
            have = resources_of()
            needs: dict[str, Any] = {"num_cpus": 1}
            if "TPU" in have:
                needs["resources"] = {"TPU": self._devices}
            elif "GPU" in have:
                needs["num_gpus"] = self._devices
            return {**needs, "scheduling_strategy": "SPREAD"}
        resources = {MEMBER: 1} if node else None
        where = NodeAffinitySchedulingStrategy(node or self._node, soft=False)
        return {"num_cpus": 0, "resources": resources, "scheduling_strategy": where}

    def joined(self) -> dict[str, str]:
        """Nodes that offer a member, each with the name of its machine."""
        return self._joined

    def dismiss(self, node: str, outcome: Outcome) -> None:
        """Tell the command on a machine that joined why no member is started there any more."""
        tell: Any = ray.remote(_dismissed)
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        tell.options(num_cpus=0, scheduling_strategy=where).remote(outcome.how, outcome.reason)

    def _watch_nodes(self) -> None:
        """In a thread of its own: where Ray's head is gone, the question is never answered."""
        nodes: Any = ray.nodes  # it has no types
        while ray.is_initialized():
            with suppress(RayError, RuntimeError):  # it is shutting down
                alive = [node for node in nodes() if node["Alive"] and node.get("Resources", {}).get(MEMBER, 0) >= 1]
                self._joined = {node["NodeID"]: _called(node) for node in alive}
            time.sleep(NODES)


def _called(node: dict[str, Any]) -> str:
    """What a machine that joined is called: as it was told, or as it calls itself."""
    told = [each.removeprefix(NAMED) for each in node["Resources"] if each.startswith(NAMED)]
    return told[0] if told else str(node["NodeManagerHostname"])


def _dismissed(how: str, reason: str) -> None:
    """On a machine that joined: leave the command there word (engines/node.py)."""
    letter = Path(ray.get_runtime_context().get_temp_dir()) / DISMISSED
    part = letter.with_suffix(".part")
    part.write_text(json.dumps({"how": how, "reason": reason}))
    part.rename(letter)
