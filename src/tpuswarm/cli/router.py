"""`tpuswarm router`: reach many machines through one address."""

import json
import os
import shlex
import shutil
import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import Json
from tpuswarm.errors import InputError
from tpuswarm.router import apply as router
from tpuswarm.router import machine
from tpuswarm.router.file import RouterFile, make_mapping, read_router
from tpuswarm.router.mapping import Mapping, format_ports
from tpuswarm.router.ruleset import ruleset
from tpuswarm.router.settings import sysctl_file, tuning
from tpuswarm.router.status import Status, read_status
from tpuswarm.train.process.terminal import echo

app = typer.Typer(help="Forward ports of this machine to many others, with nftables.", rich_markup_mode=None)
File = Annotated[Path, typer.Argument(metavar="ROUTER.toml", help="See examples/router-ssh.toml.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


@app.command()
def show(
    file: Annotated[Path | None, typer.Argument(metavar="[ROUTER.toml]", help="See examples/router-ssh.toml.")] = None,
    of_fleet: Annotated[
        Path | None, typer.Option("--from", metavar="SWARM.toml", help="Instead: a port to each TPU worker of a fleet.")
    ] = None,
) -> None:
    """Print a file as input for `nft -f`, with comments. Needs no privileges, changes nothing."""
    labels: dict[int, str] = {}
    if file is not None and of_fleet is None:
        spec, ports = read_router(file)
    elif of_fleet is not None and file is None:
        spec, labels = _read_fleet(of_fleet)
        ports = make_mapping(spec)
    else:
        raise InputError("give one of ROUTER.toml and --from SWARM.toml")
    for line in _describe_ports(spec, ports):
        print(f"# {line}".rstrip())
    for port, label in labels.items():
        print(f"# port {port}: {label}")
    print(f"\n{ruleset(ports)}")
    print("# --tune also sets")
    for line in sysctl_file(tuning(ports)).splitlines():
        print(f"# {line}")


@app.command()
def apply(
    file: File,
    dry_run: DryRun = False,
    tune: Annotated[bool, typer.Option("--tune", help="Also apply the kernel settings that `show` lists.")] = False,
    persist: Annotated[
        bool, typer.Option("--persist", help="Also load the rules at every boot, through systemd.")
    ] = False,
) -> None:
    """Replace the current rules by a file's, atomically. Open connections stay up."""
    if dry_run:
        is_root = os.geteuid() == 0
        _print_plan(router.make_plan(file, tune, persist, is_root))
        echo("nothing was done" if is_root else "nothing was done; the current rules were not read, which needs root")
        return
    _require_root()
    with machine.exclusive():
        plan = router.make_plan(file, tune, persist, root=True)
        _print_plan(plan)
        router.apply(plan)


@app.command()
def tune(dry_run: DryRun = False) -> None:
    """Prepare a client for many connections through a router: kernel settings and open files, also after a restart.

    TPUs of a fleet with a router have them from set-up.
    """
    if not dry_run:
        _require_root()
    with nullcontext() if dry_run else machine.exclusive():
        plan = router.plan_client()
        steps = plan.steps()
        _print_numbered(steps)
        if not steps:
            echo("this machine is tuned already")
        elif dry_run:
            echo("nothing was done")
        else:
            router.tune_client(plan)
            echo("new logins may open more files; `tpuswarm router remove` deletes the files")


@app.command()
def status(as_json: Json = False) -> None:
    """Show attempts and connections per port, and any drift between the file, the kernel and the settings."""
    _require_root()
    found = read_status()
    if as_json:
        print(json.dumps(asdict(found)))
        return
    if not found.rows and not found.drift:
        echo("nothing is applied to this machine")
        return
    for line in _describe_traffic(found):
        echo(line)
    for sentence in found.drift:
        echo(f"drift: {sentence}")


@app.command()
def remove(dry_run: DryRun = False) -> None:
    """Delete the rules and all files that apply and tune wrote. Kernel settings keep their values until a restart."""
    _require_root()
    with machine.exclusive():
        was_tuned = machine.SYSCTL.exists() or machine.CLIENT_SYSCTL.exists()
        _print_numbered(router.removal_steps())
        if dry_run:
            echo("nothing was done")
            return
        router.remove()
    if was_tuned:
        echo("kernel settings, forwarding included, stay until this machine restarts")


def _read_fleet(file: Path) -> tuple[RouterFile, dict[int, str]]:
    """Return the router's file for a fleet, and the names of the workers by port."""
    from tpuswarm.fleet.hosts.routers import router_file
    from tpuswarm.fleet.store.fleets import find_fleet

    fleet, _ = find_fleet(str(file))
    cloud = fleet.provider()
    document = fleet.store(cloud).load()
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}. Create it: `tpuswarm up`")
    return router_file(document.desired, cloud.machines(document.zones).machines)


def _describe_traffic(found: Status) -> list[str]:
    """Return a sentence about all ports, and a line for each that is or was in use."""
    count = sum(row.attempts for row in found.rows)
    attempts = f"{count:,} attempt{'s' * (count != 1)}"
    summary = f"{found.file or 'unknown file'}: {len(found.rows):,} ports; {attempts} since the rules were applied"
    if found.kept is not None:
        summary += f", {sum(row.open or 0 for row in found.rows):,} open"
    if found.kept:
        summary += f", {found.kept:,} open to old targets"
    lines = [summary]
    if found.followed:
        lines.append(f"the kernel tracks {found.followed[0]:,} connections, of {found.followed[1]:,} at most")
    used = [row for row in found.rows if row.attempts or row.open]
    if not used:
        return lines
    width = max(len(row.to) for row in used)
    lines.append(f"port   {'to':{width}}  attempts  open")
    for row in used:
        open_count = "–" if row.open is None else f"{row.open:,}"
        lines.append(f"{row.port:<5}  {row.to:{width}}  {row.attempts:8,}  {open_count:>4}")
    return lines


def _describe_ports(file: RouterFile, ports: Mapping) -> list[str]:
    """Return a line for each range and target of the file."""
    rows = [("ports", "to", "count")]
    for table in file.tables().values():
        numbers = table.numbers()
        first, last = ports.targets[numbers[0]], ports.targets[numbers[-1]]
        rows.append((format_ports(numbers), f"{first}" if first == last else f"{first} … {last}", f"{len(numbers)}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [
        f"{len(ports.targets):,} ports, for connections from {', '.join(ports.sources)} arriving on "
        f"{ports.outside}; the targets are behind {ports.inside}",
        "",
        *(f"{numbers:{widths[0]}}  {to:{widths[1]}}  {count:>{widths[2]}}" for numbers, to, count in rows),
    ]


def _print_plan(plan: router.Plan) -> None:
    for note in plan.notes:
        echo(f"note: {note}", err=True)
    steps = plan.steps()
    _print_numbered(steps)
    if not steps:
        echo(f"{plan.file} is already applied; nothing to do")


def _print_numbered(steps: list[str]) -> None:
    for number, step in enumerate(steps, 1):
        echo(f"{number}. {step}", hang=3)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise InputError(f"only root may see or change this machine's rules; run: {_with_sudo()}")


def _with_sudo() -> str:
    program = shutil.which("tpuswarm", path=str(Path(sys.executable).parent)) or "tpuswarm"
    return shlex.join(["sudo", program, *sys.argv[1:]])
