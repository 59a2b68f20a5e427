"""What a simulation found, as plain values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from tpuswarm.swarm.core.rows import Rows
from tpuswarm.swarm.core.summary import Tokens
from tpuswarm.swarm.simulation.cluster import SimulatedSwarm
from tpuswarm.swarm.simulation.timed_member import Machine


@dataclass(frozen=True)
class Spread:
    """Of some numbers."""

    mean: float
    least: float
    most: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        """All 0 for none."""
        found = list(values) or [0.0]
        return Spread(fmean(found), min(found), max(found))


@dataclass(frozen=True)
class Link:
    """Traffic of one machine, the mean of those alike."""

    up_bytes: float
    down_bytes: float
    up_mbit: float
    """Megabits a second, over the whole time."""
    down_mbit: float


@dataclass(frozen=True)
class Part:
    """Some of the members, each on average."""

    name: str
    count: int
    tokens_per_s: float
    """Undisturbed."""
    training: float
    """Shares of the time: in steps, waiting for rows or for the swarm, fetching the model, gone."""
    waiting: float
    joining: float
    gone: float
    stall: float
    """Of the time in which they were there and had the model, the share in which they did not train."""
    applied: float
    """Share of all applied tokens."""
    link: Link


@dataclass(frozen=True)
class Result:
    """Everything but what took the processor's time."""

    seconds: float
    finished: bool | None
    """Whether the tokens asked for were counted; None where a time was asked for."""
    tokens: Tokens
    goodput: float | None
    """Applied tokens over those whose fate is known: the outstanding ones are left out. None while there are none."""
    tokens_per_s: float
    """Applied."""
    share: float
    """Of what all members would train undisturbed."""
    versions: int
    commits: int
    """With contributors."""
    contributors: Spread
    """Of each of these."""
    staleness: Spread
    """Of each applied contribution."""
    commit_seconds: Spread
    """From the choice to the record."""
    preemptions: int
    refusals: dict[str, int]
    """Lives of members that the coordinator ended, by its reason."""
    members: Part
    groups: tuple[Part, ...]
    shards: int
    shard: Link
    """Down is what it receives, up what it sends."""
    messages_per_s: float
    """That the coordinator receives."""


def result(cluster: SimulatedSwarm) -> Result:
    """Of a cluster that has simulated."""
    view, seconds = cluster.state.view, cluster.now
    found = tokens(cluster)
    records = [cluster.records[version] for version in range(1, len(cluster.records))]
    applied = {record.version: [each for each in record.decisions if each.fate == "applied"] for record in records}
    counted = [len(each) for each in applied.values() if each]
    stale = [
        cluster.records[version - 1].changes - cluster.records[each.base].changes
        for version, decisions in applied.items()
        for each in decisions
    ]
    by_member: dict[str, int] = {}
    for decision in (each for decisions in applied.values() for each in decisions):
        member = decision.identity.incarnation.member
        by_member[member] = by_member.get(member, 0) + decision.tokens
    known = found.processed - found.outstanding
    horizon = cluster.terms.horizon * cluster.terms.tokens_per_row
    shards = list(cluster.shards.values())

    def part(name: str, machines: Sequence[Machine]) -> Part:
        return _part(name, machines, seconds, cluster.scenario.tokens_per_step, by_member, found.applied)

    return Result(
        seconds=seconds,
        finished=view.tokens >= horizon if cluster.scenario.tokens else None,
        tokens=found,
        goodput=found.applied / known if known else None,
        tokens_per_s=found.applied / seconds,
        share=found.applied / seconds / cluster.scenario.tokens_per_s,
        versions=view.version,
        commits=len(counted),
        contributors=Spread.of(counted),
        staleness=Spread.of(stale),
        commit_seconds=Spread.of(cluster.coordinator.merges),
        preemptions=cluster.preemptions,
        refusals=dict(cluster.refusals),
        members=part("all", cluster.machines),
        groups=tuple(
            part(group.name or f"group {number}", [each for each in cluster.machines if each.group is group])
            for number, group in enumerate(cluster.scenario.members, 1)
        ),
        shards=len(shards),
        shard=_link([each.sent for each in shards], [each.received for each in shards], seconds),
        messages_per_s=sum(cluster.coordinator.count.values()) / seconds,
    )


def tokens(cluster: SimulatedSwarm) -> Tokens:
    """Where every trained token is, counted with the members and not from what they reported."""
    view, per_row = cluster.state.view, cluster.terms.tokens_per_row
    accepted = Rows.union(header.rows for header, _ in cluster.state.pending.values())
    held = Rows.union(machine.life.state.outstanding for machine in cluster.machines if machine.life)
    processed = sum(machine.rows for machine in cluster.machines) * per_row
    outstanding = len((accepted | held) - view.spent) * per_row
    applied = view.tokens
    return Tokens(processed, applied, view.dropped, outstanding, processed - applied - view.dropped - outstanding)


def _part(
    name: str, machines: Sequence[Machine], seconds: float, tokens: int, by_member: dict[str, int], applied: int
) -> Part:
    share: Callable[[Iterable[float]], float] = lambda values: sum(values) / seconds / len(machines)  # noqa: E731
    alive = share(each.seconds["alive"] for each in machines)
    training = share(each.training for each in machines)
    return Part(
        name=name,
        count=len(machines),
        tokens_per_s=fmean(tokens / each.step_s for each in machines),
        training=training,
        waiting=alive - training,
        joining=share(each.seconds["joining"] for each in machines),
        gone=share(each.seconds["gone"] for each in machines),
        stall=1 - training / alive if alive else 0.0,
        applied=sum(by_member.get(each.name, 0) for each in machines) / applied if applied else 0.0,
        link=_link([each.up.bytes for each in machines], [each.down.bytes for each in machines], seconds),
    )


def _link(up: Sequence[float], down: Sequence[float], seconds: float) -> Link:
    sent, received = fmean(up), fmean(down)
    return Link(sent, received, sent * 8 / 1e6 / seconds, received * 8 / 1e6 / seconds)
