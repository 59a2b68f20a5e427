"""The result of a simulation, as plain values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.simulation.cluster import SimulatedSwarm
from tpuswarm.swarm.simulation.timed_member import Machine


@dataclass(frozen=True)
class Spread:
    """Mean, minimum and maximum of some numbers."""

    mean: float
    least: float
    most: float

    @staticmethod
    def from_values(values: Iterable[float]) -> "Spread":
        """Return zeros if there are no values."""
        found = list(values) or [0.0]
        return Spread(fmean(found), min(found), max(found))


@dataclass(frozen=True)
class Link:
    """Mean traffic of a machine of some group."""

    up_bytes: float
    down_bytes: float
    up_mbit: float
    """Megabits per second over the whole time."""
    down_mbit: float


@dataclass(frozen=True)
class GroupResult:
    """Averages over a group of members."""

    name: str
    count: int
    tokens_per_s: float
    """Speed without disturbances."""
    training: float
    """Shares of the time: in steps, waiting for rows or the swarm, fetching the model, gone."""
    waiting: float
    joining: float
    gone: float
    stall: float
    """Share of the time with a model in which they did not train."""
    applied: float
    """Share of all applied tokens."""
    link: Link


@dataclass(frozen=True)
class Result:
    """Everything except processor times."""

    seconds: float
    finished: bool | None
    """Whether the requested tokens were counted; None if a time was requested."""
    tokens: Tokens
    goodput: float | None
    """Applied tokens as a share of all but the outstanding ones; None without any."""
    tokens_per_s: float
    """Applied tokens."""
    share: float
    """`tokens_per_s` as a share of the undisturbed speed of all members."""
    versions: int
    commits: int
    """Commits with contributors."""
    contributors: Spread
    """Per commit with contributors."""
    staleness: Spread
    """Per applied contribution."""
    commit_seconds: Spread
    """From the choice to the record."""
    preemptions: int
    refusals: dict[str, int]
    """Incarnations that the coordinator ended, by reason."""
    members: GroupResult
    groups: tuple[GroupResult, ...]
    shards: int
    shard: Link
    """`down` counts received bytes, `up` sent ones."""
    messages_per_s: float
    """Messages to the coordinator."""


def result(cluster: SimulatedSwarm) -> Result:
    """Collect the result of a finished simulation."""
    view, seconds = cluster.state.view, cluster.now
    found = tokens(cluster)
    records = [cluster.records[version] for version in range(1, len(cluster.records))]
    applied = {
        record.version: [decision for decision in record.decisions if decision.fate == "applied"] for record in records
    }
    counted = [len(decisions) for decisions in applied.values() if decisions]
    stale = [
        cluster.records[version - 1].changes - cluster.records[decision.base].changes
        for version, decisions in applied.items()
        for decision in decisions
    ]
    by_member: dict[str, int] = {}
    for decision in (decision for decisions in applied.values() for decision in decisions):
        member = decision.identity.incarnation.member
        by_member[member] = by_member.get(member, 0) + decision.tokens
    known = found.processed - found.outstanding
    horizon = cluster.terms.horizon * cluster.terms.tokens_per_row
    shards = list(cluster.shards.values())

    def group_result(name: str, machines: Sequence[Machine]) -> GroupResult:
        return _group_result(name, machines, seconds, cluster.scenario.tokens_per_step, by_member, found.applied)

    return Result(
        seconds=seconds,
        finished=view.tokens >= horizon if cluster.scenario.tokens else None,
        tokens=found,
        goodput=found.applied / known if known else None,
        tokens_per_s=found.applied / seconds,
        share=found.applied / seconds / cluster.scenario.tokens_per_s,
        versions=view.version,
        commits=len(counted),
        contributors=Spread.from_values(counted),
        staleness=Spread.from_values(stale),
        commit_seconds=Spread.from_values(cluster.coordinator.merges),
        preemptions=cluster.preemptions,
        refusals=dict(cluster.refusals),
        members=group_result("all", cluster.machines),
        groups=tuple(
            group_result(
                group.name or f"group {number}", [machine for machine in cluster.machines if machine.group is group]
            )
            for number, group in enumerate(cluster.scenario.members, 1)
        ),
        shards=len(shards),
        shard=_link([shard.sent for shard in shards], [shard.received for shard in shards], seconds),
        messages_per_s=sum(cluster.coordinator.count.values()) / seconds,
    )


def tokens(cluster: SimulatedSwarm) -> Tokens:
    """Count where every trained token is, from the members themselves and not from their reports."""
    view, per_row = cluster.state.view, cluster.terms.tokens_per_row
    accepted = Rows.union(header.rows for header, _ in cluster.state.pending.values())
    held = Rows.union(machine.loop.state.outstanding for machine in cluster.machines if machine.loop)
    processed = sum(machine.rows for machine in cluster.machines) * per_row
    outstanding = len((accepted | held) - view.spent) * per_row
    applied = view.tokens
    return Tokens(processed, applied, view.dropped, outstanding, processed - applied - view.dropped - outstanding)


def _group_result(
    name: str, machines: Sequence[Machine], seconds: float, tokens: int, by_member: dict[str, int], applied: int
) -> GroupResult:
    share: Callable[[Iterable[float]], float] = lambda values: sum(values) / seconds / len(machines)  # noqa: E731
    alive = share(machine.seconds["alive"] for machine in machines)
    training = share(machine.training for machine in machines)
    return GroupResult(
        name=name,
        count=len(machines),
        tokens_per_s=fmean(tokens / machine.step_s for machine in machines),
        training=training,
        waiting=alive - training,
        joining=share(machine.seconds["joining"] for machine in machines),
        gone=share(machine.seconds["gone"] for machine in machines),
        stall=1 - training / alive if alive else 0.0,
        applied=sum(by_member.get(machine.name, 0) for machine in machines) / applied if applied else 0.0,
        link=_link([machine.up.bytes for machine in machines], [machine.down.bytes for machine in machines], seconds),
    )


def _link(up: Sequence[float], down: Sequence[float], seconds: float) -> Link:
    sent, received = fmean(up), fmean(down)
    return Link(sent, received, sent * 8 / 1e6 / seconds, received * 8 / 1e6 / seconds)
