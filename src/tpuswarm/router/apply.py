"""Apply a ROUTER.toml to this machine, and remove it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.router import machine
from tpuswarm.router.file import read_router
from tpuswarm.router.machine import CLIENT_LIMITS, CLIENT_SYSCTL, ENABLED, RULES, SYSCTL, UNIT
from tpuswarm.router.mapping import Mapping
from tpuswarm.router.ruleset import TABLE, Listing, parse_listing, replace_table, ruleset
from tpuswarm.router.settings import (
    Setting,
    endpoint_settings,
    forwarding,
    limits_file,
    sysctl_file,
    tuning,
    unit_file,
)

HEADER = "# tpuswarm router apply {file}\n# sha256 of its rules: {digest}\n"
HEADER_PATTERN = re.compile(r"# tpuswarm router apply (.*)\n# sha256 of its rules: (\w+)\n")


@dataclass(frozen=True)
class Applied:
    """Content of RULES: the state after the last apply."""

    file: str
    """ROUTER.toml, absolute."""
    digest: str
    """SHA-256 of the generated ruleset."""
    listing: Listing
    """The table as nft printed it after loading."""


def read_applied() -> Applied | None:
    """Read RULES; None if it is missing or not ours."""
    text = machine.read_file(RULES) or ""
    if not (header := HEADER_PATTERN.match(text)):
        return None
    return Applied(header[1], header[2], parse_listing(text[header.end() :].removeprefix(replace_table() + "\n")))


def digest(rules: str) -> str:
    """Return the digest of a generated ruleset."""
    return sha256(rules.encode()).hexdigest()


@dataclass(frozen=True)
class Plan:
    """Steps of an apply, in this order."""

    file: Path
    mapping: Mapping
    rules: str | None
    """Already loaded if None."""
    settings: tuple[Setting, ...]
    files: dict[Path, str]
    notes: tuple[str, ...]
    """Warnings."""

    def steps(self) -> list[str]:
        """Describe the steps; empty if nothing needs to change."""
        steps = []
        if self.rules:
            count = len(self.mapping.targets)
            steps.append(f"nft: table ip {TABLE}, {count:,} port{'s' * (count > 1)}, in one transaction")
        steps += [f"{setting.path}: {setting.value}" for setting in self.settings]
        return steps + [f"write {path}" for path in ([RULES] if self.rules else []) + [*self.files]]


def make_plan(file: Path, tune: bool, persist: bool, root: bool) -> Plan:
    """Read the file and the machine; change nothing. Without `root` the loaded rules are unknown.

    Once used, `--tune` and `--persist` stay in force until `remove`.
    """
    _, mapping = read_router(file)
    tune, persist = tune or SYSCTL.exists(), persist or UNIT.exists()
    machine.require_interfaces(mapping.outside, mapping.inside)
    nft = machine.find_nft()
    if persist:
        machine.require_systemd()
    settings = tuning(mapping) if tune else ()
    with _without_tune():
        machine.require_settings(settings)
    files = {SYSCTL: sysctl_file(settings)} if tune else {}
    if persist:
        files |= {UNIT: unit_file(nft, str(RULES)), ENABLED: str(UNIT)}
    rules, applied = ruleset(mapping), read_applied()
    listing = machine.list_table() if root else None
    is_loaded = (
        applied is not None
        and listing is not None
        and (applied.file, applied.digest) == (str(file.resolve()), digest(rules))
        and applied.listing.text == listing.text
    )
    return Plan(
        file.resolve(),
        mapping,
        None if is_loaded else rules,
        tuple(setting for setting in settings if not machine.has_value(setting)),
        {path: text for path, text in files.items() if machine.read_file(path) != text},
        tuple(_warnings(mapping, tune, root)),
    )


def _warnings(mapping: Mapping, tune: bool, root: bool) -> list[str]:
    notes = []
    has_remote = any(target.address for target in mapping.targets.values())
    off = [setting.path for setting in forwarding(mapping) if not machine.has_value(setting)]
    if off and not tune and has_remote:
        notes.append(f"no target can be reached until this host forwards packets: {', '.join(off)}; --tune sets it")
    for chain in machine.blocking_chains() if has_remote and root else ():
        # iptables refuses its whole table after nft has added a rule to it.
        add = "iptables -I FORWARD -m conntrack --ctstate DNAT -j ACCEPT"
        if chain != "ip filter FORWARD":
            add = f"nft insert rule {chain} ct status dnat accept"
        notes.append(f"the chain {chain} drops packets by default; to let forwarded connections through: {add}")
    if used := sorted(mapping.targets.keys() & machine.listening_ports()):
        notes.append(
            f"this host itself listens on {', '.join(map(str, used))}: new connections from "
            f"{', '.join(mapping.sources)} through {mapping.outside} will no longer reach it there"
        )
    return notes


def apply(plan: Plan) -> None:
    """Carry out a plan. The rules change in one transaction; every step can be repeated after a failure."""
    if plan.rules:
        machine.load_rules(plan.rules)
        listing = machine.list_table()
        assert listing is not None
        header = HEADER.format(file=plan.file, digest=digest(plan.rules))
        machine.write_file(RULES, f"{header}{replace_table()}\n{listing.text}")
    with _without_tune():
        for setting in plan.settings:
            machine.set_value(setting)
    for path, text in plan.files.items():
        machine.write_file(path, text)
    if UNIT in plan.files:
        machine.reload_systemd()


@contextmanager
def _without_tune() -> Iterator[None]:
    """Add the way out to errors about kernel settings."""
    try:
        yield
    except (InputError, RunFailed) as error:
        raise type(error)(f"{error}; apply without --tune") from error


@dataclass(frozen=True)
class ClientPlan:
    """What this machine lacks to open many connections through a router."""

    settings: tuple[Setting, ...]
    files: dict[Path, str]

    def steps(self) -> list[str]:
        return [f"{setting.path}: {setting.value}" for setting in self.settings] + [
            f"write {path}" for path in self.files
        ]


def plan_client() -> ClientPlan:
    """Compare this machine with a client's settings; raise InputError if its kernel lacks one."""
    settings = endpoint_settings()
    machine.require_settings(settings)
    files = {CLIENT_SYSCTL: sysctl_file(settings), CLIENT_LIMITS: limits_file()}
    return ClientPlan(
        tuple(setting for setting in settings if not machine.has_value(setting)),
        {path: text for path, text in files.items() if machine.read_file(path) != text},
    )


def tune_client(plan: ClientPlan) -> None:
    for setting in plan.settings:
        machine.set_value(setting)
    for path, text in plan.files.items():
        machine.write_file(path, text)


def removal_steps() -> list[str]:
    """Describe what `remove` deletes; raise InputError if nothing is applied."""
    steps = [f"nft: delete table ip {TABLE}"] if machine.list_table() else []
    steps += [f"delete {path}" for path in machine.FILES if machine.read_file(path) is not None]
    if not steps:
        raise InputError("nothing is applied to this machine")
    return steps


def remove() -> None:
    """Delete our table and files. Kernel settings keep their values until the machine restarts."""
    machine.delete_table()
    machine.delete_files()
    machine.reload_systemd()
