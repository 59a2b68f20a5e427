"""`tpuswarm doctor`: find faults, why they matter, and how to fix them."""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tpuswarm.cli.console import FleetOption, Json, Yes, confirm
from tpuswarm.cli.fleet.fleet_training import find_fleet_training
from tpuswarm.doctor.cloud import check_fleet, check_jobs, check_missing
from tpuswarm.doctor.examine import examine, examine_here, fix_here, fix_hosts
from tpuswarm.doctor.finding import THIS_COMPUTER, Finding
from tpuswarm.doctor.report import (
    Purpose,
    check_jax,
    describe_jax,
    list_refusals,
    make_report,
    survey_here,
    survey_hosts,
)
from tpuswarm.doctor.run import check_run
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.spec.file import DEFAULT_FILE, asks_for_machines
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.swarm.views.status import read_run
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import is_run, read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import download_run
from tpuswarm.train.storage.folders import is_url, shown

CLOUD = "cloud"
REPORT = "tpuswarm-report.json"
FIRST_CHECKS = ("credentials", "project", "billing", "apis")
"""Without these, the cloud answers no further questions."""


def doctor(
    where: Annotated[
        str,
        typer.Argument(metavar="[WHERE]", help="here, NAME, NAME/2 (a worker), POOL, all, cloud, or a run."),
    ] = THIS_COMPUTER,
    fix: Annotated[bool, typer.Option("--fix", help="Fix what is safe to fix, and check again.")] = False,
    kill: Annotated[
        bool, typer.Option("--kill", help="With --fix: also end processes that hold chips. Asks first.")
    ] = False,
    run: Annotated[bool, typer.Option("--run", help="Start JAX on the machines and add on all their chips.")] = False,
    report: Annotated[
        bool, typer.Option("--report", help=f"Write {REPORT}: what the machines show of docs/assumptions.md.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Find what is wrong with machines or a run: why it matters, how to fix it. Exit code 1 if something is."""
    if kill and not fix:
        raise InputError("--kill needs --fix")
    if fix + report + run > 1:
        raise InputError("--fix, --report and --run are different things: give one")
    if where == CLOUD or (where != THIS_COMPUTER and _names_run(where)):
        if fix:
            raise InputError("--fix is for machines only; follow the remedies that doctor prints without it")
        if report or run:
            option = "--report" if report else "--run"
            raise InputError(f"{option} is for machines only: NAME, POOL, all, or nothing for this computer")
        raise typer.Exit(_check_cloud(fleet, as_json) if where == CLOUD else _check_run(where, as_json))
    if report:
        raise typer.Exit(_write_report(where, fleet, as_json))
    if run:
        raise typer.Exit(_run_jax(where, fleet, as_json))

    def choose_fixes(findings: list[Finding]) -> list[Finding]:
        return _choose_fixes(findings, kill, yes, as_json) if fix else []

    if where == THIS_COMPUTER:
        findings, host_count = examine_here(), 1
        if fixable := choose_fixes(findings):
            for sentence in fix_here(fixable):
                echo(sentence, err=True)
            findings = examine_here()
    else:
        findings, host_count = _check_machines(where, fleet, choose_fixes)
    if as_json:
        print(json.dumps({"hosts": host_count, "found": [_json_object("host", finding) for finding in findings]}))
    else:
        is_here = where == THIS_COMPUTER
        _print_findings("this computer" if is_here else _count_hosts(host_count), findings)
        if is_here and asks_for_machines(DEFAULT_FILE):
            echo(f"the machines of {DEFAULT_FILE}: `tpuswarm doctor all`")
    raise typer.Exit(1 if findings else 0)


def _survey(where: str, fleet_name: str | None, purpose: Purpose) -> tuple[list[dict[str, Any]], list[str]]:
    """Return facts of machines, on which JAX is started, and the cloud's refusals."""
    if where == THIS_COMPUTER:
        with waiting("starting JAX on this computer"):
            return survey_here(purpose), []
    routes = open_routes(find_fleet(fleet_name)[0])
    snapshot = routes.snapshot()
    reached = routes.find_listed(where, snapshot)

    async def survey() -> list[dict[str, Any]]:
        async with Connections(routes.key) as connections:
            return await survey_hosts(connections, reached, purpose)

    with waiting(f"starting JAX on {_count_hosts(len(reached.hosts))}"):
        return asyncio.run(survey()), list_refusals(snapshot.document)


def _run_jax(where: str, fleet_name: str | None, as_json: bool) -> int:
    """Add on all chips; return the exit code."""
    hosts, _ = _survey(where, fleet_name, "run")
    findings = check_jax(hosts)
    if as_json:
        print(json.dumps({"hosts": len(hosts), "found": [_json_object("host", finding) for finding in findings]}))
    else:
        for line in describe_jax(hosts):
            echo(line)
        _print_findings(_count_hosts(len(hosts)), findings)
    return 1 if findings else 0


def _write_report(where: str, fleet_name: str | None, as_json: bool) -> int:
    """Write what machines show of the assumptions; return the exit code, 1 if they contradict one."""
    hosts, refusals = _survey(where, fleet_name, "report")
    report = make_report(hosts, refusals)
    text = json.dumps(report, indent=1)
    write_atomically(Path(REPORT), text + "\n")
    if as_json:
        print(text)
        return 1 if report["contradicted"] else 0
    for assumption, seen in report["contradicted"].items():
        echo(f"contradicted  {assumption}: {seen}")
    for host in hosts:
        lost = [f"{fact} could not be read: {error}" for fact, error in host.get("lost", {}).items()]
        for error in filter(None, (host.get("error"), host.get("jax", {}).get("error"), *lost)):
            echo(f"not seen  {host['host']}: {error}", err=True)
    counts = [f"{len(report[key])} {key.replace('_', ' ')}" for key in ("confirmed", "contradicted", "not_seen")]
    echo(f"{REPORT}: of the assumptions of docs/assumptions.md {', '.join(counts)}. Read it before you send it.")
    return 1 if report["contradicted"] else 0


def _check_cloud(fleet_name: str | None, as_json: bool) -> int:
    """Check the project and the fleet as a whole; return the exit code."""
    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import GoogleProvider
    from tpuswarm.fleet.apply.preflight import run_checks
    from tpuswarm.fleet.apply.project_facts import collect_facts

    fleet, file = find_fleet(fleet_name)
    cloud = fleet.provider()
    findings: list[Finding] = []
    with waiting(f"checking project {cloud.project}"):
        if file is not None and isinstance(cloud, GoogleProvider):
            facts = collect_facts(cloud, Project(cloud.access), file)
            findings += [
                Finding(cloud.project, check.id, check.sentence, "no machine can be created", check.mend)
                for check in run_checks(file, facts, time.time(), paid=True)
                if not check.ok
            ]
        can_ask = not any(finding.check in FIRST_CHECKS for finding in findings)
        if can_ask and (document := fleet.store(cloud).load()) is not None:
            listing, now = cloud.machines(document.zones), time.time()
            findings += [*check_fleet(document, listing, now), *check_missing(document, listing, ALL, now)]
            findings += check_jobs(document)
    return _report("fleet", fleet.full_name, findings, as_json)


def _names_run(where: str) -> bool:
    # NAME is a machine, NAME/2 a worker
    folder, _, last = where.rpartition("/")
    return where == "last" or is_url(where) or is_run(Path(where)) or (bool(folder) and not last.isdigit())


def _check_run(where: str, as_json: bool) -> int:
    """Check a run; return the exit code."""
    folder = find_run(where)
    read_config(folder)
    return _report("run", shown(folder), list(check_run(folder, shown(folder))), as_json)


def _report(kind: str, name: str, findings: list[Finding], as_json: bool) -> int:
    """Print findings about a fleet or a run; return the exit code."""
    if as_json:
        print(json.dumps({kind: name, "found": [_json_object("of", finding) for finding in findings]}))
    else:
        _print_findings(name, findings)
    return 1 if findings else 0


def _check_machines(
    where: str, fleet_name: str | None, choose_fixes: Callable[[list[Finding]], list[Finding]]
) -> tuple[list[Finding], int]:
    """Check machines of a fleet; return the findings and the number of hosts."""
    fleet = find_fleet(fleet_name)[0]
    routes = open_routes(fleet)
    snapshot = routes.snapshot()
    reached = routes.find_listed(where, snapshot)
    missing = list(check_missing(snapshot.document, snapshot.listing, where, time.time()))
    missing += check_jobs(snapshot.document, where)
    head, bucket = _head_address(), _bucket_name(fleet)
    hosts = {host.label: host for host in reached.hosts}

    async def check() -> list[Finding]:
        async with Connections(routes.key) as connections:
            with waiting(f"checking {_count_hosts(len(hosts))}"):
                findings = await examine(connections, reached, head, bucket)
            if fixable := choose_fixes(findings):
                for sentence in await fix_hosts(connections, hosts, fixable):
                    echo(sentence, err=True)
                with waiting("checking again"):
                    findings = await examine(connections, reached, head, bucket)
            return findings

    findings = missing + asyncio.run(check())
    return findings, len(hosts) + len(reached.away)


def _bucket_name(fleet: Fleet) -> str:
    return fleet.bucket or ""


def _head_address() -> str:
    """Return the address of the head if the fleet of this folder trains a swarm, else an empty text."""
    if (training := find_fleet_training(None)) is None:
        return ""
    try:
        run = read_run(download_run(training.url))
    except InputError:  # it has not begun yet
        return ""
    return run.status.address if run.state == "running" else ""


def _choose_fixes(findings: list[Finding], kill: bool, yes: bool, as_json: bool) -> list[Finding]:
    """Print and return what to fix. Ask before processes are ended."""
    fixable = [finding._replace(fix=finding.kill if kill and finding.kill else finding.fix) for finding in findings]
    fixable = [finding for finding in fixable if finding.fix]
    for finding in fixable:
        echo(f"{finding.subject}: {finding.problem}: {finding.fix}", err=as_json)
    if kill and any(finding.kill for finding in fixable):
        confirm(yes)
    return fixable


def _print_findings(name: str, findings: list[Finding]) -> None:
    for finding in findings:
        host = "" if finding.subject == THIS_COMPUTER else f" {finding.subject}"
        echo(f"{finding.subject}  {finding.check}: {finding.problem}")
        echo(f"    why: {finding.why}")
        if finding.advice:
            echo(f"    fix: {finding.advice}" + (f"; or `tpuswarm doctor{host} --fix`" if finding.fix else ""))
    echo(f"{name}: {len(findings) or 'nothing is'} wrong")


def _json_object(subject: str, finding: Finding) -> dict[str, str | None]:
    """Return a finding for --json, under the keys that it has always had."""
    return {
        subject: finding.subject, "check": finding.check, "what": finding.problem, "why": finding.why,
        "mend": finding.advice, "fix": finding.fix,
    }  # fmt: skip


def _count_hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
