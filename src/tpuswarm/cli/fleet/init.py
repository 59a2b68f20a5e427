"""`tpuswarm init`: from nothing to a project that is ready for a fleet."""

import getpass
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import confirm, print_checks
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.fleet.apply.init import GrantText, InitPlan, InitStep, PoolText

GRANTS = """TPUs that you were granted, as by TPU Research Cloud, cost nothing. Type one
grant a line, such as: 100 v2-8 us-central1-f spot until 2027-01-31
An empty line ends them."""
DEFAULT = Path("swarm.toml")
TOLD = ("bucket", "quota", "price")
"""Checks of preflight that tell something worth knowing where they are passed."""
File = Annotated[Path, typer.Argument(metavar="[FILE]", help="swarm.toml: used if it exists, else written.")]


def option(flag: str, text: str) -> Any:
    """A typer option with its help."""
    return typer.Option(flag, help=text, show_default=False)


def init(
    file: File = DEFAULT,
    project: Annotated[str | None, option("--project", "Google Cloud project. Default: gcloud's.")] = None,
    grant: Annotated[
        list[str] | None,
        option("--grant", "TPUs that are free: `100 v2-8 us-central1-f spot until 2027-01-31`."),
    ] = None,
    type_: Annotated[str | None, option("--type", "TPU type, where there is no grant.")] = None,
    zone: Annotated[list[str] | None, option("--zone", "Zones in order of preference.")] = None,
    count: Annotated[int | None, option("--count", "Machines. Default: 1.")] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="On-demand instead of spot: more expensive, never preempted.")
    ] = False,
    bucket: Annotated[
        str | None,
        option("--bucket", "Its name. Default: PROJECT-YOU, or PROJECT-FILE for another FILE than swarm.toml."),
    ] = None,
    cross_region: Annotated[
        bool, typer.Option("--allow-cross-region", help="Allow TPUs outside the bucket's region, which costs extra.")
    ] = False,
    provider: Annotated[str | None, option("--provider", "google or rehearsal. Default: google.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, do nothing. Needs no credentials.")
    ] = False,
) -> None:
    """Prepare a project for a fleet: APIs, bucket, network, firewall, key, swarm.toml. Skips what already exists."""
    from tpuswarm.fleet.apply.init import ProjectState, inspect_project, list_steps, run_step
    from tpuswarm.fleet.spec.providers import check_provider

    ask = _asker(yes or dry_run)
    given = project, grant, type_, zone, count, bucket, on_demand, cross_region, provider
    if file.exists():
        if any(each not in (None, False, []) for each in given):
            raise InputError(f"{file} is there already: change it there, or name another file")
        provider, plan, text = _of_file(file)
    else:
        provider = provider or "google"
        check_provider(provider)
        if not (grant or type_ or yes or dry_run) and sys.stdin.isatty():
            print(GRANTS)
        grants, pools = _machines(ask, grant or [], type_, zone or [], 1 if count is None else count, on_demand)
        plan, text = _new(ask, file, provider, project, bucket, cross_region, grants, pools)
    say(f"project {plan.project}; bucket {plan.bucket} in {plan.region}; network {plan.network}")
    if dry_run:
        _print_steps(list_steps(plan, text, ProjectState(file=file.exists())))
        say("nothing was done; a dry run does not look at what exists already")
        return
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.fleet.spec.providers import open_access

    with waiting("looking at what is there"):
        access = open_access(provider, plan.project)
        setup = Project(access)
        found = inspect_project(setup, plan)
    todo = list_steps(plan, text, found)
    _print_steps(todo)
    if not all(each.there for each in todo):
        confirm(yes)
    for number, step in enumerate(todo, 1):
        if not step.there:
            try:
                with waiting(step.says) as far:
                    run_step(step, setup, plan, found, text, far)
            except KeyboardInterrupt:
                say(f"{number}. not finished: {step.says}; the same command goes on from here")
                raise
            say(f"{number}. done: {step.says}")
    _finish(access, setup, file)


def _finish(access: Any, setup: Any, file: Path) -> None:
    """What preflight says of the file, and how to go on."""
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.fleet.apply.preflight import run_checks
    from tpuswarm.fleet.apply.project_facts import collect_facts
    from tpuswarm.fleet.spec.file import read_swarm

    read = read_swarm(file)
    with waiting("checking quota, zones and runtime versions"):
        found = run_checks(read, collect_facts(Google(access), setup, read), time.time(), paid=True)
    print_checks([each for each in found if not each.ok or not each.known or each.id in TOLD])
    here = "" if file == DEFAULT else f" {file}"
    say(f"next: `tpuswarm up{here}`" if all(each.ok for each in found) else f"mend this, then `tpuswarm up{here}`")
    if read.provider == "google":
        say(
            f"to stop it all at the end: `tpuswarm down{here}`; nothing can cost anything any more after "
            f"`gcloud billing projects unlink {setup.id}`"
        )


def _of_file(file: Path) -> "tuple[str, InitPlan, str]":
    from tpuswarm.cloud.google.settings import find_project
    from tpuswarm.fleet.apply.init import plan_from_file
    from tpuswarm.fleet.spec.file import read_swarm
    from tpuswarm.fleet.spec.providers import REHEARSAL_PROJECT

    read = read_swarm(file)
    local = read.provider == "rehearsal"
    project = (read.project or REHEARSAL_PROJECT) if local else find_project(read.project)
    return read.provider, plan_from_file(read, file, project), file.read_text(encoding="utf-8")


def _machines(
    ask: Callable[[str, str, str | None], str],
    typed: list[str],
    type_: str | None,
    zones: list[str],
    count: int,
    on_demand: bool,
) -> "tuple[list[GrantText], list[PoolText]]":
    """Grants and pools, from options or answers."""
    from tpuswarm.catalog import find
    from tpuswarm.fleet.apply.init import PoolText, parse_grant, pools_from_grants

    grants = [parse_grant(each) for each in typed]
    if not grants and not type_:
        while text := ask("grant", "--grant", ""):
            grants.append(parse_grant(text))
    if grants and not type_:
        return grants, pools_from_grants(grants)
    wanted = find(type_ or ask("TPU type, such as v5e-8 (`tpuswarm catalog` lists them)", "--type or --grant", None))
    if not zones:
        known = ",".join(wanted.zones())
        zones = ask("zones, in order of preference", "--zone", known or None).replace(",", " ").split()
    return grants, [PoolText(wanted.name, tuple(zones), count, "on-demand" if on_demand else "spot")]


def _new(
    ask: Callable[[str, str, str | None], str],
    file: Path,
    provider: str,
    project: str | None,
    bucket: str | None,
    cross_region: bool,
    grants: "list[GrantText]",
    pools: "list[PoolText]",
) -> "tuple[InitPlan, str]":
    from tpuswarm.cloud.google.firewall import tag_of
    from tpuswarm.config.toml_file import parse_toml
    from tpuswarm.fleet.apply.init import InitPlan, main_region, swarm_toml
    from tpuswarm.fleet.spec.checks import find_problems
    from tpuswarm.fleet.spec.file import SwarmFile
    from tpuswarm.fleet.spec.providers import REHEARSAL_PROJECT

    if provider == "rehearsal":
        project = project or REHEARSAL_PROJECT
    else:
        project = project or _known_project() or ask("Google Cloud project", "--project", None)
    name = _own_name() if file == DEFAULT else file.stem
    zones = Counter({zone: pool.count for pool in pools for zone in pool.zones})
    plan = InitPlan(name, project, tag_of(name), bucket or f"{project}-{name}", main_region(zones), file)
    text = swarm_toml(plan, provider, cross_region, grants, pools)
    for place, sentence in find_problems(parse_toml(text, file, SwarmFile), time.time()):
        if place != ("storage", "region"):
            raise InputError(sentence)
        say(sentence)
        if ask("allow it, yes or no", "--allow-cross-region", "no").lower() not in ("y", "yes"):
            raise InputError(f"{sentence} (--allow-cross-region)")
        return plan, swarm_toml(plan, provider, True, grants, pools)
    return plan, text


def _own_name() -> str:
    """What a person's fleet is called where nothing says it: whoever shares the project has another one."""
    words = re.findall(r"[a-z0-9]+", getpass.getuser().lower())
    name = "-".join(words).lstrip("-0123456789")[:20].rstrip("-")
    return name or DEFAULT.stem


def _known_project() -> str | None:
    from tpuswarm.cloud.google.settings import find_project

    try:
        return find_project()
    except InputError:
        return None


def _print_steps(todo: "list[InitStep]") -> None:
    for number, step in enumerate(todo, 1):
        there = " – already done" if step.there else ""
        say(f"{number}. {step.says}{there}", hang=3)
        if not step.there:
            print(textwrap.indent(step.line, "     "))


def _asker(silent: bool) -> Callable[[str, str, str | None], str]:
    """Asks a person; where there is none, or none is to be asked, takes the default or names the option left out."""

    def ask(question: str, flag: str, default: str | None) -> str:
        if silent or not sys.stdin.isatty():
            if default is None:
                raise InputError(f"nobody can be asked here: give {flag}")
            return default
        return str(typer.prompt(question, default=default, show_default=bool(default)))

    return ask
