"""Applying a file to this machine, and removing what was applied."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.router import machine
from tpuswarm.router.file import read_router
from tpuswarm.router.mapping import Mapping
from tpuswarm.router.plan import Asked, Change, Plan, plan, restoring, same
from tpuswarm.router.record import KeptSetting, Record
from tpuswarm.router.ruleset import TABLE
from tpuswarm.router.settings import ENABLED, KERNEL, UNIT, forwarding
from tpuswarm.router.sockets import listening_ports, open_connections
from tpuswarm.router.status import Status, status


@dataclass(frozen=True)
class Prepared:
    """What an apply would do."""

    before: Record | None
    plan: Plan
    notes: tuple[str, ...]
    """What a person should know, in sentences."""


def prepare(file: Path, tune: bool, persist: bool, root: bool) -> Prepared:
    """Read the file and the machine, changing nothing; without `root` the rules that are there cannot be seen.

    Raises InputError for what is not right in the file or missing on the machine, and PermissionError.
    """
    _, mapping = read_router(file)
    before = machine.read_record()
    asked = Asked(
        file.resolve(),
        mapping,
        tune or (before is not None and before.tune),
        persist or (before is not None and before.persist),
        machine.open_files(),
    )
    machine.check_interfaces(mapping.outside, mapping.inside)
    machine.find_nft()
    if asked.persist:
        machine.check_systemd()
    values = {path: machine.read(path) for path, _ in asked.settings()}
    for path, value in values.items():
        if value is None and path.startswith(KERNEL):
            raise InputError(f"this kernel or container has no {path}: {_without(path, before)}")
    made = plan(asked, machine.listing() if root else None, values, before)
    return Prepared(before, made, tuple(_notes(asked, root)))


def _without(path: str, before: Record | None) -> str:
    """The way out where a setting cannot be set."""
    persist = path in (UNIT, ENABLED)
    holds = before is not None and (before.persist if persist else before.tune)
    return f"{'remove, then ' if holds else ''}apply without {'--persist' if persist else '--tune'}"


def _notes(asked: Asked, root: bool) -> list[str]:
    mapping, notes = asked.mapping, []
    remote = any(target.address for target in mapping.targets.values())
    off = [each.path for each in forwarding(mapping) if (machine.read(each.path) or "").strip() != each.value]
    if off and not asked.tune and remote:
        notes.append(f"no target can be reached until this host forwards packets: {', '.join(off)}; --tune sets it")
    for chain in machine.closed() if remote and root else ():
        # That chain is managed by iptables, which refuses the whole table after a rule that nft has put there.
        add = "iptables -I FORWARD -m conntrack --ctstate DNAT -j ACCEPT"
        if chain != "ip filter FORWARD":
            add = f"nft insert rule {chain} ct status dnat accept"
        notes.append(f"the chain {chain} drops packets by default; to let forwarded connections through: {add}")
    if taken := sorted(mapping.targets.keys() & listening_ports(machine.listening())):
        notes.append(
            f"this host itself listens on {', '.join(map(str, taken))}: new connections from "
            f"{', '.join(mapping.sources)} through {mapping.outside} will no longer reach it there"
        )
    return notes


def apply(prepared: Prepared) -> Record:
    """Do it, all or nothing, and return what undoes it. Raises RunFailed where the machine refuses something."""
    wanted, before, done = prepared.plan, prepared.before, list[Change]()
    if not wanted.steps() and wanted.record == before:
        return wanted.record
    machine.write_record(wanted.record)  # before any change, so that a kill at any point leaves what undoes it
    try:
        for change in wanted.changes:
            done.append(change)
            try:
                machine.write(change.path, change.then)
            except RunFailed as error:
                raise RunFailed(f"{error}; {_without(change.path, before)}") from error
        if wanted.ruleset:
            machine.load(wanted.ruleset)
    except BaseException:
        for change in reversed(done):
            with suppress(RunFailed):  # what could not be set cannot be set back either
                machine.write(change.path, change.now)
        if all(same(machine.read(change.path), change.now) for change in done):
            machine.write_record(before)
        raise
    if not wanted.ruleset:
        return wanted.record
    listing = machine.listing()
    record = wanted.record.model_copy(update={"rest": listing.rest if listing else None})
    machine.write_record(record)
    return record


@dataclass(frozen=True)
class Removal:
    """What a remove would do, in this order."""

    table: bool
    """Whether the kernel has our table."""
    changes: tuple[Change, ...]
    foreign: tuple[KeptSetting, ...]
    """Settings that someone else has set since: they are left alone."""

    def steps(self) -> list[str]:
        """In words."""
        return [*([f"nft: delete table ip {TABLE}"] if self.table else []), *map(str, self.changes)]


def prepare_removal() -> Removal:
    """Read the machine, changing nothing. Raises InputError if nothing is applied."""
    record, table = machine.read_record(), machine.listing() is not None
    if record is None:
        if not table:
            raise InputError("nothing is applied to this machine: no rules, no record of settings")
        return Removal(table, (), ())
    return Removal(table, *restoring(record, {each.path: machine.read(each.path) for each in record.settings}))


def remove(removal: Removal) -> None:
    """Do it; can be done again after a kill at any point. Raises RunFailed where the machine refuses something."""
    if removal.table:
        machine.delete()
    for change in removal.changes:
        machine.write(change.path, change.then)
    machine.write_record(None)


def look() -> Status:
    """How things are, changing nothing. Raises InputError and RunFailed as `machine.listing` does."""
    record, text = machine.read_record(), machine.connections()
    asked: Mapping | str = ""
    if record:
        try:
            _, asked = read_router(Path(record.file))
        except InputError as error:
            asked = str(error)
    return status(
        record,
        machine.listing(),
        asked,
        {each.path: machine.read(each.path) for each in record.settings} if record else {},
        None if text is None else open_connections(text),
        machine.followed(),
    )
