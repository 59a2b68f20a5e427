"""`tpuswarm simulate`: how a swarm would perform, before it exists."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import Json, make_console
from tpuswarm.config.toml_file import read_toml
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.simulation import result
from tpuswarm.swarm.simulation.cluster import MAX_SLOWDOWN_FACTOR, SimulatedSwarm
from tpuswarm.swarm.simulation.scenario import Scenario

if TYPE_CHECKING:
    from rich.table import Table


def simulate(
    file: Annotated[Path, typer.Argument(help="TOML file with members, model and length; see examples/simulate.toml.")],
    as_json: Json = False,
) -> None:
    """Simulate a swarm: goodput, traffic and staleness of many members that fail, on a virtual clock."""
    cluster = SimulatedSwarm(read_toml(file, Scenario))
    with _show_progress(f"{cluster.scenario.count:,} members") as show_share:
        cluster.simulate(show_share)
    simulated = result.result(cluster)
    if as_json:
        print(json.dumps(asdict(simulated)))
    else:
        console = make_console()
        for table in (_facts_table(simulated), _groups_table(simulated, console.width)):
            console.print(table)
            console.print()
    if simulated.finished is False:
        applied, elapsed = f"{simulated.tokens.applied:,}", _format_time(simulated.seconds)
        raise RunFailed(
            f"only {applied} of {cluster.scenario.tokens:,} tokens were applied in {elapsed}, which is "
            f"{MAX_SLOWDOWN_FACTOR:.0f} times what these members need undisturbed"
        )


@contextmanager
def _show_progress(subject: str) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal, else a line for every tenth; on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(subject, total=1.0)
            yield lambda share: bar.update(task, completed=share)
        return
    tenths = 0

    def print_tenth(share: float) -> None:
        nonlocal tenths
        if int(share * 10) > tenths:
            tenths = int(share * 10)
            console.print(f"{subject}: {tenths}0% simulated")

    yield print_tenth


def _facts_table(simulated: result.Result) -> "Table":
    from rich.table import Table

    tokens, shard, contributors = simulated.tokens, simulated.shard, simulated.contributors
    fates = ", ".join(f"{name} {getattr(tokens, name):,}" for name in ("applied", "dropped", "lost", "outstanding"))
    goodput = "–" if simulated.goodput is None else f"{simulated.goodput:.2%} of settled tokens applied"
    merging = f"{simulated.commit_seconds.mean:.1f} s per commit, at most {simulated.commit_seconds.most:.1f}"
    traffic = f"each receives {shard.down_mbit:,.1f} Mbit/s and sends {shard.up_mbit:,.1f} Mbit/s"
    reasons = sorted(simulated.refusals.items(), key=lambda item: -item[1])
    speed = f"{simulated.tokens_per_s:,.0f} tokens/s applied, {simulated.share:.1%} of the members' own speed"
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for row in (
        ("simulated", f"{_format_time(simulated.seconds)}, {simulated.members.count:,} members"),
        ("goodput", goodput),
        ("speed", speed),
        ("tokens", f"{tokens.processed:,} processed: {fates}"),
        ("commits", f"{simulated.versions:,}, of which {simulated.commits:,} with contributors"),
        ("contributors", f"{contributors.mean:.1f} per commit, {contributors.least} to {contributors.most}"),
        ("staleness", f"{simulated.staleness.mean:.2f} commits, at most {simulated.staleness.most}"),
        ("merging", merging),
        ("preemptions", f"{simulated.preemptions:,}"),
        ("refused", f"{sum(simulated.refusals.values()):,} incarnations ended by the coordinator"),
        *(("", f"{count:,}: {reason}") for reason, count in reasons),
        ("coordinator", f"{simulated.messages_per_s:,.1f} messages/s"),
        ("aggregators", f"{simulated.shards}; {traffic}"),
    ):
        table.add_row(*row)
    return table


def _groups_table(simulated: result.Result, width: int) -> "Table":
    from tpuswarm.train.look.widgets import Column, make_table

    names = ("members", "tokens/s", "trains", "stall", "gone", "share", "sends", "receives")
    groups = (*simulated.groups, simulated.members) if len(simulated.groups) > 1 else simulated.groups
    columns = [Column(""), *(Column(name, right=True) for name in names)]
    drawn = make_table(columns, [_group_row(group) for group in groups], width)
    drawn.caption = "averages per member; share: of all applied tokens; sends, receives: Mbit/s"
    drawn.caption_justify = "left"
    return drawn


def _group_row(group: result.GroupResult) -> tuple[str, ...]:
    shares = (group.training, group.stall, group.gone, group.applied)
    return (
        group.name,
        f"{group.count:,}",
        f"{group.tokens_per_s:,.0f}",
        *(f"{share:.1%}" for share in shares),
        *(f"{mbit:,.2f}" for mbit in (group.link.up_mbit, group.link.down_mbit)),
    )


def _format_time(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
