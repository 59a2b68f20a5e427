"""A fake cluster for a supervisor: the test says how its processes stand and how they end."""

from pathlib import Path

from tpuswarm.errors import RunFailed
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.core.values import Incarnation
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.run_plan import COORDINATOR, RunPlan, Swarm

SWARM = Swarm("run", 1, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1)
PLAN = RunPlan(
    SWARM, "module:Recipe", {}, {"steps": 8, "batch": 2}, files={}, shared={}, tokens_per_row=4, data="data",
    code="code", evaluate_every=None,
)  # fmt: skip
NO_TOKENS = Tokens(0, 0, 0, 0, 0)


class FakeProcess:
    """A process that answers the supervisor as the test says."""

    def __init__(self, cluster: "FakeCluster", name: str, node: str | None, evaluates: bool | None, log: Path):
        self.cluster, self.name, self.node, self.evaluates, self._log = cluster, name, node, evaluates, log
        self.ended: Outcome | None = None
        self.answers = not cluster.is_silent
        self.is_slow = False
        """Whether it answers only a supervisor that waits."""
        self.gone = self.evaluating = False
        self.incarnation: str | None = None
        self.rows: list[dict] = []
        self.tokens = cluster.tokens
        """The counts when the supervisor asked last."""

    def outcome(self):
        return self.ended

    def report(self, since, seconds=0.0):
        if not self.answers or self.ended or (self.is_slow and not seconds):
            return None
        if self.name == COORDINATOR:
            leased = tuple(Incarnation("x", name) for name in self.cluster.leased)
            tokens, self.tokens = self.tokens, self.cluster.tokens
            return 1, Summary(0, 1, False, "", tokens, leased, None, tokens.outstanding > 0)
        rows, self.rows = self.rows, []
        seen = {"incarnation": self.incarnation, "base": 0, "tokens": 0, "at_risk": 7, "rows_per_s": 3.0}
        return 2, {**seen, "evaluating": self.evaluating, "rows": rows} if self.name[0] in "mj" else None

    def leave(self):
        pass

    def kill(self):
        self.gone = True

    def lease(self, incarnation: str):
        """Let it train: the coordinator knows its incarnation."""
        self.incarnation = incarnation * 32
        self.cluster.leased = (self.incarnation,)

    def die(self, reason: str = "killed", written: str = ""):
        """written: what it writes into its log before."""
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("a") as file:
            file.write(written)
        self.ended = Outcome("dead", reason)


class FakeCluster:
    """Ray, as a supervisor sees it; `nodes` are the machines with a member, `rooms` those with room for aggregators."""

    is_external, join_address, state_bytes = False, "here:1", 0

    def __init__(self):
        self.nodes: dict[str, str] = {}
        self.rooms: dict[str, str] = {}
        self.started: list[FakeProcess] = []
        self.dismissed: list[tuple[str, Outcome]] = []
        self.is_silent = False
        """Whether new processes never answer."""
        self.leased: tuple[str, ...] = ()
        self.tokens = NO_TOKENS
        self.failure: RunFailed | None = None

    def require_alive(self):
        if self.failure:
            raise self.failure

    def member_nodes(self):
        return dict(self.nodes)

    def aggregator_nodes(self):
        return dict(self.rooms)

    def dismiss(self, node, outcome):
        self.dismissed.append((node, outcome))

    def start(self, name, maker, arguments, environment, log, node):
        self.started.append(FakeProcess(self, name, node, arguments.get("evaluates"), log))
        self.started[-1].store = arguments.get("store")
        return self.started[-1]

    def newest(self, name: str) -> FakeProcess:
        return [process for process in self.started if process.name == name][-1]

    def remove(self, host: str, reason: str = "its node died"):
        del self.nodes[next(node for node, name in self.nodes.items() if name == host)]
        self.newest("j-" + host.replace(" ", "-")).die(reason)
        self.leased = ()

    def finish(self):
        for name in {process.name for process in self.started if process.name == COORDINATOR or process.name[0] == "m"}:
            self.newest(name).ended = Outcome("ended", "")


def states(supervisor) -> dict[str, str]:
    return {member.id: member.state for member in supervisor.status.members if member.id != "m0"}


def rounds(count: int):
    """Let the supervisor go round so many times: `yield from rounds(2)`."""
    yield from [None] * count
