"""`tpuswarm router`: many targets behind one address."""

import json
import os
import shlex
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import Json
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say

if TYPE_CHECKING:
    from tpuswarm.router.apply import Prepared
    from tpuswarm.router.file import RouterFile
    from tpuswarm.router.mapping import Mapping
    from tpuswarm.router.status import Status

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
    """Print what a file means, as input for `nft -f`; the rest is comments. Needs no privileges, changes nothing."""
    from tpuswarm.router.ruleset import ruleset
    from tpuswarm.router.settings import tuning

    if (file is None) == (of_fleet is None):
        raise InputError("give one of ROUTER.toml and --from SWARM.toml")
    read, mapping, labels = _meant(file, of_fleet)
    for line in _table(read, mapping):
        print(f"# {line}".rstrip())
    for port, label in labels.items():
        print(f"# port {port}: {label}")
    print(f"\n{ruleset(mapping)}")
    print("# --tune also sets")
    for path, value in tuning(mapping):
        print(f"# {path}: {value}")


@app.command()
def apply(
    file: File,
    dry_run: DryRun = False,
    tune: Annotated[bool, typer.Option("--tune", help="Also apply the host settings that `show` lists.")] = False,
    persist: Annotated[bool, typer.Option("--persist", help="Also apply at every boot, through systemd.")] = False,
) -> None:
    """Replace the current rules with a file's, atomically. Open connections stay up."""
    from tpuswarm.router import apply as act
    from tpuswarm.router import machine
    from tpuswarm.router.plan import undo

    if dry_run:
        root = os.geteuid() == 0
        try:
            prepared = act.prepare(file, tune, persist, root)
        except PermissionError as error:
            raise InputError(f"only root may read {error.filename}; run: {_with_rights()}") from None
        _print_plan(file, prepared)
        say("nothing was done" if root else "nothing was done; without root the current rules cannot be read")
        return
    _need_root()
    with machine.alone():
        prepared = act.prepare(file, tune, persist, root=True)
        changes = _print_plan(file, prepared)
        record = act.apply(prepared)
    if not changes:
        return
    say(f"to undo it: `tpuswarm router remove`, or by hand (kept in {machine.RECORD}):")
    for line in undo(record):
        print(f"  {line}")


@app.command()
def status(as_json: Json = False) -> None:
    """Show attempts and connections per port, and any drift between the file, the kernel and the settings applied."""
    from tpuswarm.router.apply import look

    _need_root()
    found = look()
    if as_json:
        print(json.dumps(asdict(found)))
        return
    if not found.rows and not found.drift:
        say("nothing is applied to this machine")
        return
    for line in _counters(found):
        say(line)
    for sentence in found.drift:
        say(f"drift: {sentence}")


@app.command()
def remove(dry_run: DryRun = False) -> None:
    """Delete the rules and restore every setting that apply changed."""
    from tpuswarm.router import apply as act
    from tpuswarm.router import machine

    _need_root()
    with machine.alone():
        removal = act.prepare_removal()
        _print_numbered(removal.steps())
        for each in removal.foreign:
            say(f"left alone: {each.path}, which someone else has changed since")
        if not dry_run:
            act.remove(removal)
    if dry_run:
        say("nothing was done")
    else:
        say("everything else was restored" if removal.foreign else "everything was restored")


def _meant(file: Path | None, of_fleet: Path | None) -> "tuple[RouterFile, Mapping, dict[int, str]]":
    """A router's file, what it means, and what its ports lead to where that has names."""
    from tpuswarm.router.file import mapping, read_router

    if file is not None:
        return *read_router(file), {}
    from tpuswarm.fleet.hosts.routers import router_file
    from tpuswarm.fleet.store import fleets

    fleet, _ = fleets.find_fleet(str(of_fleet))
    cloud = fleet.provider()
    document = fleet.store(cloud).load()
    if document is None:
        raise InputError(f"there is no fleet {fleet.name} in project {fleet.project}: `tpuswarm up` makes it")
    read, labels = router_file(document.desired, cloud.machines(document.zones).machines)
    return read, mapping(read), labels


def _counters(found: "Status") -> list[str]:
    """All ports in a sentence, and a line for each that is or was in use."""
    tried = sum(each.attempts for each in found.rows)
    attempts = f"{tried:,} attempt{'s' * (tried != 1)}"
    said = f"{found.file or 'no record'}: {len(found.rows):,} ports; {attempts} since the rules were applied"
    if found.kept is not None:
        said += f", {sum(each.open or 0 for each in found.rows):,} open"
    if found.kept:
        said += f", {found.kept:,} open to old targets"
    lines = [said]
    if found.followed:
        lines.append(f"the kernel tracks {found.followed[0]:,} connections, of {found.followed[1]:,} at most")
    busy = [each for each in found.rows if each.attempts or each.open]
    if not busy:
        return lines
    width = max(len(each.to) for each in busy)
    lines.append(f"port   {'to':{width}}  attempts  open")
    for each in busy:
        now = "–" if each.open is None else f"{each.open:,}"
        lines.append(f"{each.port:<5}  {each.to:{width}}  {each.attempts:8,}  {now:>4}")
    return lines


def _table(file: "RouterFile", mapping: "Mapping") -> list[str]:
    """A line for each range and target of the file."""
    from tpuswarm.router.mapping import show_ports

    lines = [("ports", "to", "count")]
    for each in file.tables().values():
        ports = each.numbers()
        first, last = mapping.targets[ports[0]], mapping.targets[ports[-1]]
        lines.append((show_ports(ports), f"{first}" if first == last else f"{first} … {last}", f"{len(ports)}"))
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    return [
        f"{len(mapping.targets):,} ports, for connections from {', '.join(mapping.sources)} arriving on "
        f"{mapping.outside}; the targets are behind {mapping.inside}",
        "",
        *(f"{ports:{widths[0]}}  {to:{widths[1]}}  {count:>{widths[2]}}" for ports, to, count in lines),
    ]


def _print_plan(file: Path, prepared: "Prepared") -> bool:
    """What is to be done; whether there is anything."""
    for note in prepared.notes:
        say(f"note: {note}", err=True)
    steps = prepared.plan.steps()
    _print_numbered(steps)
    if not steps:
        say(f"{file} is already applied; nothing to do")
    return bool(steps)


def _print_numbered(steps: list[str]) -> None:
    for number, step in enumerate(steps, 1):
        say(f"{number}. {step}", hang=3)


def _need_root() -> None:
    if os.geteuid() != 0:
        raise InputError(f"only root may see or change this machine's rules; run: {_with_rights()}")


def _with_rights() -> str:
    program = shutil.which("tpuswarm", path=str(Path(sys.executable).parent)) or "tpuswarm"
    return shlex.join(["sudo", program, *sys.argv[1:]])
