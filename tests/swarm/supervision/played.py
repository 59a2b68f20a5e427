"""A cluster that is played, for a supervisor: the test says how its processes stand and how they end."""

from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.core.values import Incarnation
from tpuswarm.swarm.engines.actor import Outcome
from tpuswarm.swarm.processes.plan import HEAD, Plan, Swarm

SWARM = Swarm("run", 1, cycle=4, outer="average", outer_lr=None, quantize="plain", overlap=True, fragments=1)
PLAN = Plan(
    SWARM, "module:Recipe", {}, {"steps": 8, "batch": 2}, files={}, shared={}, tokens_per_row=4, data="data",
    code="code", evaluate_every=None,
)  # fmt: skip

NONE = Tokens(0, 0, 0, 0, 0)


class Played:
    """A process without any: the test says how it stands and how it ended."""

    def __init__(self, name: str, node: str | None):
        self.name, self.node = name, node
        self.ended: Outcome | None = None
        self.answers, self.gone, self.incarnation, self.evaluating = True, False, None, False
        self.slow = False
        """Whether it answers nobody at once."""
        self.rows: list[dict] = []
        self.tokens = Cluster.tokens
        """As they were when the look under way began."""

    def outcome(self):
        return self.ended

    def look(self, since, seconds=0.0):
        if not self.answers or self.ended or (self.slow and not seconds):
            return None
        if self.name == HEAD:
            leased = [Incarnation("x", each) for each in Cluster.leased]
            begun, self.tokens = self.tokens, Cluster.tokens
            return 1, Summary(0, 1, False, "", begun, tuple(leased), None)
        seen = {"incarnation": self.incarnation, "base": 0, "tokens": 0, "at_risk": 7, "rows_per_s": 3.0}
        seen["evaluating"] = self.evaluating
        seen["rows"], self.rows = self.rows, []
        return 2, seen if self.name[0] in "mj" else None

    def leave(self):
        pass

    def kill(self):
        self.gone = True


class Cluster:
    found, address, state_bytes = False, "here:1", 0
    leased: tuple[str, ...] = ()
    tokens = NONE

    def __init__(self):
        self.nodes: dict[str, str] = {}
        self.started: list[Played] = []
        self.silent = False
        Cluster.leased, Cluster.tokens = (), NONE

    def joined(self):
        return dict(self.nodes)

    def start(self, name, maker, arguments, environment, log, node):
        self.started.append(Played(name, node))
        self.started[-1].evaluates = arguments.get("evaluates")
        self.started[-1].answers = not self.silent
        return self.started[-1]

    def newest(self, name: str) -> Played:
        return [each for each in self.started if each.name == name][-1]


def states(supervisor):
    return {each.id: each.state for each in supervisor.status.members if each.id != "m0"}


def finish(cluster):
    """The run has ended: the coordinator says so, the first member has handed in its last rows."""
    for name in (HEAD, "m0"):
        cluster.newest(name).ended = Outcome("ended", "")
