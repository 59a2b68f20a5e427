"""`tpuswarm init`: prepare a project for a fleet."""

import getpass
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.catalog import find
from tpuswarm.cli.console import ANSWERS, Yes, confirm, option, print_checks
from tpuswarm.cloud.google.accounts import account_address
from tpuswarm.cloud.google.endpoints import LOCAL_ACCOUNT
from tpuswarm.cloud.google.firewall import network_tag
from tpuswarm.cloud.google.settings import find_project, signed_in_account
from tpuswarm.config.toml_file import parse_toml
from tpuswarm.errors import InputError
from tpuswarm.fleet.apply import init as preparation
from tpuswarm.fleet.apply.file_text import complete, swarm_toml
from tpuswarm.fleet.apply.preflight import run_checks
from tpuswarm.fleet.decide.money import describe_grant, is_generation
from tpuswarm.fleet.spec.checks import find_problems
from tpuswarm.fleet.spec.file import DEFAULT_FILE, SwarmFile, read_swarm
from tpuswarm.fleet.spec.providers import REHEARSAL_PROJECT, check_provider, open_access
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting

GRANTS_INTRODUCTION = """TPUs that you were granted, for example by TPU Research Cloud, are free. Paste
the mail's lines one by one, such as: 64 spot Cloud TPU v6e chips in zone us-east1-d
or type them, such as: 64 v6e us-east1-d spot until 2099-01-31
End with an empty line."""
INFORMATIVE_CHECKS = ("account", "bucket", "quota", "region", "price")
"""Printed even if they pass."""

Question = Callable[[str, str, str | None], str]
"""Asks a question, names the option that answers it, and has a default."""
WriteFile = Callable[[preparation.InitPlan], str]
"""Returns the text of swarm.toml for a plan with the bucket's region."""


def init(
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="swarm.toml: used if it exists, else written.")
    ] = DEFAULT_FILE,
    project: Annotated[str | None, option("Google Cloud project. Default: gcloud's.")] = None,
    grant: Annotated[
        list[str] | None,
        option("TPUs that are free: a line of TRC's mail, or `64 v6e us-east1-d spot until 2099-01-31`."),
    ] = None,
    grant_mail: Annotated[str | None, option("A file with the whole mail of TPU Research Cloud; -: stdin.")] = None,
    type_: Annotated[
        str | None, option("TPU type: without a grant, or the slices of granted chips.", flag="--type")
    ] = None,
    zone: Annotated[list[str] | None, option("Zones in order of preference.")] = None,
    count: Annotated[int | None, option("Machines. Default: 1.")] = None,
    on_demand: Annotated[
        bool, typer.Option("--on-demand", help="On-demand instead of spot: more expensive, never preempted.")
    ] = False,
    bucket: Annotated[
        str | None, option("Its name. Default: PROJECT-YOU, or PROJECT-FILE for another FILE than swarm.toml.")
    ] = None,
    service_account: Annotated[
        str | None, option("Service account of the machines. Default: a new one of the fleet.")
    ] = None,
    cross_region: Annotated[
        bool, typer.Option("--allow-cross-region", help="Allow TPUs outside the bucket's region, which costs extra.")
    ] = False,
    provider: Annotated[str | None, option("google or rehearsal. Default: google.")] = None,
    yes: Yes = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the steps, do nothing. Needs no credentials.")
    ] = False,
) -> None:
    """Prepare a project for a fleet: APIs, bucket, network, firewall, service account, key, swarm.toml.

    Skips what already exists.
    """
    ask = _make_question(yes or dry_run)
    mail = _read_mail(grant_mail) if grant_mail else None
    options = project, grant, grant_mail, type_, zone, count, bucket, service_account, on_demand, cross_region, provider
    if file.exists():
        if any(value not in (None, False, []) for value in options):
            raise InputError(f"{file} exists. Change it there, or name another file.")
        provider, plan, write = _plan_of_file(file)
    else:
        provider = provider or "google"
        check_provider(provider)
        if not (grant or mail or type_ or yes or dry_run) and sys.stdin.isatty():
            print(GRANTS_INTRODUCTION)
        grants = [*map(preparation.parse_grant, grant or ()), *(mail.grants if mail else ())]
        grants, pools = _ask_machines(ask, grants, type_, zone or [], count, on_demand)
        if mail:
            project = project or mail.project
        plan, write = _plan_new_file(ask, file, provider, project, bucket, service_account, cross_region, grants, pools)
    state = preparation.ProjectState()
    if not dry_run:
        from tpuswarm.cloud.google.project import Project

        with waiting("checking what exists"):
            access = open_access(provider, plan.project)
            cloud_project = Project(access)
            state = preparation.inspect_project(cloud_project, plan)
    plan = replace(plan, region=state.bucket_region or plan.region)
    text = write(plan)
    echo(f"project {plan.project}; bucket {plan.bucket} in {plan.region}; network {plan.network}")
    if mail and mail.days:
        echo(f"the grants end {mail.days} days after the mail: add `expires = DATE` to each [[grant]]")
    if dry_run:
        _print_steps(preparation.list_steps(plan, text, state))
        echo("nothing was done; a dry run does not check what exists already")
        return
    steps = preparation.list_steps(plan, text, state)
    _print_steps(steps)
    if not all(step.there for step in steps):
        confirm(yes)
    for number, step in enumerate(steps, 1):
        if not step.there:
            try:
                with waiting(step.says) as show_progress:
                    preparation.run_step(step, cloud_project, plan, state, text, show_progress)
            except KeyboardInterrupt:
                echo(f"{number}. not finished: {step.says}; the same command continues")
                raise
            echo(f"{number}. done: {step.says}")
    _print_next_commands(access, cloud_project, file)


def _print_next_commands(access: Any, cloud_project: Any, file: Path) -> None:
    """Check whether machines can be created, and print the next commands."""
    from tpuswarm.cloud.google.provider import GoogleProvider
    from tpuswarm.fleet.apply.project_facts import collect_facts

    spec = read_swarm(file)
    with waiting("checking quota, zones and runtime versions"):
        facts = collect_facts(GoogleProvider(access), cloud_project, spec)
        checks = run_checks(spec, facts, time.time(), paid=True)
    print_checks([check for check in checks if not check.ok or not check.known or check.id in INFORMATIVE_CHECKS])
    words = "" if file == DEFAULT_FILE else f" {file}"
    echo(f"next: `tpuswarm up{words}`" if all(check.ok for check in checks) else f"fix this, then `tpuswarm up{words}`")
    if spec.provider == "google":
        echo(
            f"at the end: `tpuswarm down{words}`. To make sure that nothing costs money then: "
            f"`gcloud billing projects unlink {cloud_project.id}`"
        )


def _plan_of_file(file: Path) -> tuple[str, preparation.InitPlan, WriteFile]:
    spec, text = read_swarm(file), file.read_text(encoding="utf-8")
    is_rehearsal = spec.provider == "rehearsal"
    project = (spec.project or REHEARSAL_PROJECT) if is_rehearsal else find_project(spec.project)
    completed = parse_toml(complete(text, spec, project), file, SwarmFile)
    plan = preparation.plan_from_file(completed, file, project, _user(spec.provider))
    return spec.provider, plan, lambda plan: complete(text, spec, project, plan.region)


def _user(provider: str) -> str | None:
    return LOCAL_ACCOUNT if provider == "rehearsal" else signed_in_account()


def _ask_machines(
    ask: Question,
    grants: list[preparation.GrantText],
    type_: str | None,
    zones: list[str],
    count: int | None,
    on_demand: bool,
) -> tuple[list[preparation.GrantText], list[preparation.PoolText]]:
    """Return grants and pools, from options or answers."""
    if not grants and not type_:
        while text := ask("grant", "--grant", ""):
            grants.append(preparation.parse_grant(text))
    wanted = find(type_) if type_ else None
    if not zones and count is None and (pools := preparation.pools_from_grants(grants, wanted)):
        for grant in grants:
            if is_generation(grant.type):
                _print_slices(grant, pools)
        return grants, pools
    tpu = find(type_ or ask("TPU type, such as v5e-8 (`tpuswarm catalog` lists them)", "--type or --grant", None))
    if not zones:
        known, sold = ",".join(tpu.zones()), ", ".join(tpu.zones("sold"))
        more = f" (some projects have {sold} too)" if sold else ""
        zones = ask(f"zones, in order of preference{more}", "--zone", known or None).replace(",", " ").split()
    return grants, [
        preparation.PoolText(
            tpu.name, tuple(zones), 1 if count is None else count, "on-demand" if on_demand else "spot"
        )
    ]


def _read_mail(place: str) -> preparation.GrantMail:
    try:
        return preparation.parse_mail(sys.stdin.read() if place == "-" else Path(place).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{place} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _print_slices(grant: preparation.GrantText, pools: list[preparation.PoolText]) -> None:
    """Say which slices a grant of chips becomes."""
    for pool in pools:
        tpu = find(pool.type)
        if tpu.generation.name == grant.type and pool.how == grant.how and grant.zone in pool.zones:
            slices = f"{grant.count // tpu.chips:,} × {tpu.name}"
            echo(
                f"{describe_grant(grant.type, grant.count)} ({grant.how}) in {grant.zone}: {slices}; "
                "--type chooses others, which `tpuswarm plan` compares"
            )


def _plan_new_file(
    ask: Question,
    file: Path,
    provider: str,
    project: str | None,
    bucket: str | None,
    account: str | None,
    cross_region: bool,
    grants: list[preparation.GrantText],
    pools: list[preparation.PoolText],
) -> tuple[preparation.InitPlan, WriteFile]:
    if provider == "rehearsal":
        project = project or REHEARSAL_PROJECT
    else:
        project = project or _default_project() or ask("Google Cloud project", "--project", None)
    name = _user_fleet_name() if file == DEFAULT_FILE else file.stem
    zones = Counter({zone: pool.count for pool in pools for zone in pool.zones})
    plan = preparation.InitPlan(
        name,
        project,
        network_tag(name),
        bucket or f"{project}-{name}",
        preparation.main_region(zones),
        file,
        account or account_address(name, project),
        _user(provider),
    )

    def problems(plan: preparation.InitPlan) -> list[tuple[bool, str]]:
        text = swarm_toml(plan, provider, cross_region, grants, pools)
        found = find_problems(parse_toml(text, file, SwarmFile), time.time())
        return [(place == ("storage", "region"), sentence) for place, sentence in found]

    def write(plan: preparation.InitPlan) -> str:
        allowed = cross_region
        for _, sentence in problems(plan)[:1]:
            echo(sentence)
            if not _ask_yes_or_no(ask, "allow it, yes or no", "--allow-cross-region"):
                raise InputError(f"{sentence} (--allow-cross-region)")
            allowed = True
        return swarm_toml(plan, provider, allowed, grants, pools)

    for is_about_region, sentence in problems(plan):
        if not is_about_region:
            raise InputError(sentence)
    return plan, write


def _user_fleet_name() -> str:
    # a name of the user, since others may share the project
    words = re.findall(r"[a-z0-9]+", getpass.getuser().lower())
    name = "-".join(words).lstrip("-0123456789")[:20].rstrip("-")
    return name or DEFAULT_FILE.stem


def _default_project() -> str | None:
    try:
        return find_project()
    except InputError:
        return None


def _ask_yes_or_no(ask: Question, question: str, flag: str) -> bool:
    while (answer := ask(question, flag, "no").strip().lower()) not in ANSWERS:
        echo("answer yes or no", err=True)
    return ANSWERS[answer]


def _print_steps(steps: list[preparation.InitStep]) -> None:
    for number, step in enumerate(steps, 1):
        done = " – already done" if step.there else ""
        echo(f"{number}. {step.says}{done}", hang=3)
        if not step.there:
            print(textwrap.indent(step.line, "     "))


def _make_question(is_silent: bool) -> Question:
    """Return a function that asks on a terminal. Elsewhere it returns the default, or raises InputError."""

    def ask(question: str, flag: str, default: str | None) -> str:
        if is_silent or not sys.stdin.isatty():
            if default is None:
                raise InputError(f"{flag} is needed, since there is no terminal to ask on")
            return default
        return str(typer.prompt(question, default=default, show_default=bool(default)))

    return ask
