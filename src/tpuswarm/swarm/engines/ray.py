"""The processes of a swarm as Ray actors: Ray places them and carries their calls; nothing correct rests on it.

Every process is one actor without automatic restart. A call that Ray cannot carry out is Unreachable, whatever the
reason; the process that made it decides what that means.
"""

import importlib
import json
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import ray
from ray.exceptions import ActorAlreadyExistsError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.swarm.engines.notice import on_notice
from tpuswarm.swarm.engines.opening import NAMESPACE, open_ray
from tpuswarm.swarm.engines.ports import Ports
from tpuswarm.swarm.engines.variables import CALLS, DISMISSED, MEMBER, NAMED, store_bytes, use_token
from tpuswarm.swarm.processes.effects import Call, Over, Unreachable
from tpuswarm.train.process.stop import held

ANYWHERE = "anywhere"
"""In the place of a node's name: wherever a cluster that was there already has room."""
ACTOR = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
"""We make it again ourselves; that Ray writes down each call was a third of what a heartbeat cost."""
GROUPS = {"work": 1, "calls": CALLS, "beats": 4, "control": 4}
"""Threads of an actor for each kind of method."""
NODES = 2.0
"""Seconds between two looks for machines that joined."""
BEAT, CALL = 20.0, 60.0
"""Seconds for an answer to a heartbeat, and to any other call that carries nothing."""
SLOWEST = 10 * 2**20
"""Bytes a second of the slowest link or disk on which what a call carries is still waited for."""
CARRYING = {"fetch", "average", "updates", "file", "check", "merge"}
"""Calls whose answers are arrays, or need arrays to be read: at most as large as the whole shared state, or about so.
"""


class Workload(Protocol):
    """What runs in a process."""

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Carry out a call; may raise Unreachable."""
        ...

    def run(self) -> str:
        """Its work, until a word that says how it ended."""
        ...

    def look(self, since: int) -> Any:
        """How it stands."""
        ...

    def leave(self) -> None:
        """It will have to go soon."""
        ...


class Outcome(NamedTuple):
    """How a process ended."""

    how: Literal["ended", "left", "over", "wrong", "failed", "dead"]
    """The run ended; asked to go; no place in the swarm; wrong input; an error; gone without a word."""
    reason: str


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
            raise Unreachable(f"{call.address}: {str(error).splitlines()[0]}") from error


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


class Actor:
    """The process. Its control calls have threads of their own, so that no payload delays a heartbeat."""

    def __init__(self, name: str, maker: str, arguments: dict[str, Any], environment: dict[str, str], log: str | None):
        """maker: module:function that makes the work from the arguments; environment: set before JAX is imported."""
        os.environ.update(environment)
        if log:
            _redirect(Path(log))
        self._name, self._log = name, log
        module, _, function = maker.partition(":")
        self._made = threading.Event()
        self._leaving = False
        self._work: Workload
        on_notice(self._go)
        self._make: Callable[[], Workload] = lambda: getattr(importlib.import_module(module), function)(**arguments)

    @ray.method(concurrency_group="work")
    def run(self) -> Outcome:
        """Make the work and let it run; errors are told in words, their tracebacks are in the log."""
        # On a joined node Ray's processes begin without it (engines/node.py); those that are started here end at one.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            self._work = self._make()
            self._made.set()
            if self._leaving:
                self._work.leave()
            return Outcome(self._work.run(), "")  # type: ignore[arg-type]  # the words of Outcome
        except Over as error:
            return Outcome("over", str(error))
        except InputError as error:
            return Outcome("wrong", str(error))
        except TpuswarmError as error:
            return Outcome("failed", str(error))
        except BaseException as error:  # noqa: BLE001  # whatever it is, the supervisor is told
            traceback.print_exc()
            where = f"; its traceback is in logs/{self._name}.log" if self._log else ""
            return Outcome("failed", f"{type(error).__name__}: {error}{where}")

    @ray.method(concurrency_group="calls")
    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A call from another process of the swarm."""
        return self._serve(method, arguments)

    @ray.method(concurrency_group="beats")
    def beat(self, arguments: bytes) -> bytes:
        """A heartbeat: of so many each comes pickled, which is less work than what Ray would do with objects."""
        return pickle.dumps(self._serve("beat", pickle.loads(arguments)))

    @ray.method(concurrency_group="control")
    def look(self, since: int) -> tuple[int, Any]:
        """The process's pid, and how its work stands (None before there is one)."""
        return os.getpid(), self._work.look(since) if self._made.is_set() else None

    @ray.method(concurrency_group="control")
    def trace(self, steps: int) -> None:
        """A member's next steps."""
        if self._made.is_set():
            host: Any = self._work  # only a member has steps
            host.trace(steps)

    @ray.method(concurrency_group="control")
    def leave(self) -> None:
        """It will have to go soon."""
        self._go()

    def _serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        if not self._made.wait(BEAT):
            raise Unreachable(self._name)
        return self._work.serve(method, arguments)

    def _go(self) -> None:
        self._leaving = True
        if self._made.is_set():
            self._work.leave()


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
            return Outcome("dead", str(error).splitlines()[0])

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


def _redirect(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file, stream.fileno())
