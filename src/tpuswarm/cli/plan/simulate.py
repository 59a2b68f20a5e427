"""`tpuswarm simulate`: how a swarm would fare, before there is one."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import make_console
from tpuswarm.errors import RunFailed

if TYPE_CHECKING:
    from rich.table import Table

    from tpuswarm.swarm.simulation.result import Part, Result


def simulate(
    file: Annotated[Path, typer.Argument(help="TOML file with members, model and length; see examples/simulate.toml.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Simulate a swarm: goodput, traffic and staleness of many members that fail, on a virtual clock."""
    from tpuswarm.config.toml_file import read_toml
    from tpuswarm.swarm.simulation.cluster import TOO_LONG, SimulatedSwarm
    from tpuswarm.swarm.simulation.result import result
    from tpuswarm.swarm.simulation.scenario import Scenario

    cluster = SimulatedSwarm(read_toml(file, Scenario))
    with _progress(f"{cluster.scenario.count:,} members") as progress:
        cluster.simulate(progress)
    found = result(cluster)
    if as_json:
        print(json.dumps(asdict(found)))
    else:
        console = make_console()
        for table in (_facts(found), _groups(found, console.width)):
            console.print(table)
            console.print()
    if found.finished is False:
        raise RunFailed(
            f"{found.tokens.applied:,} of {cluster.scenario.tokens:,} tokens were applied in {_time(found.seconds)}, "
            f"{TOO_LONG:.0f} times what these members need undisturbed"
        )


@contextmanager
def _progress(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on a terminal, else a line for every tenth; on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda share: bar.update(task, completed=share)
        return
    tenth = 0

    def line(share: float) -> None:
        nonlocal tenth
        if int(share * 10) > tenth:
            tenth = int(share * 10)
            console.print(f"{what}: {tenth}0% simulated")

    yield line


def _facts(found: "Result") -> "Table":
    from rich.table import Table

    tokens, every = found.tokens, found.members
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    goodput = "–" if found.goodput is None else f"{found.goodput:.2%} of settled tokens applied"
    fates = ((name, getattr(tokens, name)) for name in ("applied", "dropped", "lost", "outstanding"))
    refused = sum(found.refusals.values())
    for row in (
        ("simulated", f"{_time(found.seconds)}, {every.count:,} members"),
        ("goodput", goodput),
        ("speed", f"{found.tokens_per_s:,.0f} tokens/s applied, {found.share:.1%} of the members' own speed"),
        ("tokens", f"{tokens.processed:,} processed: " + ", ".join(f"{name} {count:,}" for name, count in fates)),
        ("commits", f"{found.versions:,}, of which {found.commits:,} with contributors"),
        (
            "contributors",
            f"{found.contributors.mean:.1f} per commit, {found.contributors.least} to {found.contributors.most}",
        ),
        ("staleness", f"{found.staleness.mean:.2f} commits, at most {found.staleness.most}"),
        ("merging", f"{found.commit_seconds.mean:.1f} s per commit, at most {found.commit_seconds.most:.1f}"),
        ("preemptions", f"{found.preemptions:,}"),
        ("refused", f"{refused:,} incarnations ended by the coordinator"),
        *(("", f"{count:,}: {reason}") for reason, count in sorted(found.refusals.items(), key=lambda each: -each[1])),
        ("coordinator", f"{found.messages_per_s:,.1f} messages/s"),
        (
            "aggregators",
            f"{found.shards}; each receives {found.shard.down_mbit:,.1f} Mbit/s and sends "
            f"{found.shard.up_mbit:,.1f} Mbit/s",
        ),
    ):
        table.add_row(*row)
    return table


def _groups(found: "Result", width: int) -> "Table":
    from tpuswarm.train.look.live import Column, table

    names = ("members", "tokens/s", "trains", "stall", "gone", "share", "sends", "receives")
    groups = (*found.groups, found.members) if len(found.groups) > 1 else found.groups
    made = table([Column(""), *(Column(name, right=True) for name in names)], [_group(each) for each in groups], width)
    made.caption = "averages per member; share: of all applied tokens; sends, receives: Mbit/s"
    made.caption_justify = "left"
    return made


def _group(part: "Part") -> tuple[str, ...]:
    shares = (part.training, part.stall, part.gone, part.applied)
    return (
        part.name,
        f"{part.count:,}",
        f"{part.tokens_per_s:,.0f}",
        *(f"{share:.1%}" for share in shares),
        *(f"{mbit:,.2f}" for mbit in (part.link.up_mbit, part.link.down_mbit)),
    )


def _time(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"
