"""`tpuswarm doctor`: find faults, why they matter, and how to mend them."""

import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

import typer

from tpuswarm.cli.console import FleetOption, Json
from tpuswarm.cli.fleet.view import find_fleet_training
from tpuswarm.doctor import cloud as cloud_checks
from tpuswarm.doctor import run as run_checks_of
from tpuswarm.doctor.check import HERE
from tpuswarm.doctor.examine import WHY, Found, examine, examine_here, fix, fix_here
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts.routes import open_routes
from tpuswarm.fleet.store.fleets import Fleet, find_fleet
from tpuswarm.remote.connect import Connections
from tpuswarm.swarm.views.status import read_run
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import is_run, read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.storage.copy import bring
from tpuswarm.train.storage.folders import is_url, shown

CLOUD = "cloud"
FIRST_CHECKS = ("credentials", "project", "billing", "apis")
"""Without these, the cloud answers no further questions."""

Finding = dict[str, str]
"""A finding about a fleet or a run, as --json prints it: of, check, what, why, mend."""


def doctor(
    where: Annotated[
        str,
        typer.Argument(metavar="[WHERE]", help="here, NAME, NAME/2 (a worker), POOL, all, cloud, or a run."),
    ] = HERE,
    mend: Annotated[bool, typer.Option("--fix", help="Mend what is safe to mend, and check again.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Find what is wrong with machines or a run: why it matters, how to mend it. Exit code 1 if something is."""
    if where == CLOUD or (where != HERE and _names_run(where)):
        if mend:
            raise InputError("--fix mends machines only; follow the remedies that doctor prints without it")
        raise typer.Exit(_check_cloud(fleet, as_json) if where == CLOUD else _check_run(where, as_json))
    if where == HERE:
        findings, host_count = examine_here(), 1
        if mend and (fixable := _print_fixes(findings, as_json)):
            for sentence in fix_here(fixable):
                say(sentence, err=True)
            findings = examine_here()
    else:
        findings, host_count = _check_machines(where, fleet, mend, as_json)
    if as_json:
        print(json.dumps({"hosts": host_count, "found": [_json_object(finding) for finding in findings]}))
    else:
        for finding in findings:
            _print_finding(finding)
        say(f"{_count_hosts(host_count)}: {len(findings) or 'nothing is'} wrong")
    raise typer.Exit(1 if findings else 0)


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
                {"of": cloud.project, "check": check.id, "what": check.sentence,
                 "why": "no machine can be created", "mend": check.mend}
                for check in run_checks(file, facts, time.time(), paid=True) if not check.ok
            ]  # fmt: skip
        can_ask = not any(finding["check"] in FIRST_CHECKS for finding in findings)
        if can_ask and (document := fleet.store(cloud).load()) is not None:
            listing = cloud.machines(document.zones)
            for name, check, wrong in cloud_checks.of_fleet(document, listing, time.time()):
                why = cloud_checks.WHY[check]
                findings.append({"of": name, "check": check, "what": wrong.what, "why": why, "mend": wrong.mend})
    return _print_findings("fleet", fleet.full_name, findings, as_json)


def _names_run(where: str) -> bool:
    # NAME is a machine, NAME/2 a worker
    folder, _, last = where.rpartition("/")
    return where == "last" or is_url(where) or is_run(Path(where)) or (bool(folder) and not last.isdigit())


def _check_run(where: str, as_json: bool) -> int:
    """Check a run; return the exit code."""
    folder = find_run(where)
    read_config(folder)
    findings = [
        {"of": one.of, "check": one.check, "what": one.wrong.what, "why": run_checks_of.WHY[one.check],
         "mend": one.wrong.mend}
        for one in run_checks_of.of_run(folder, shown(folder))
    ]  # fmt: skip
    return _print_findings("run", shown(folder), findings, as_json)


def _print_findings(kind: str, name: str, findings: list[Finding], as_json: bool) -> int:
    """Print findings about a fleet or a run; return the exit code."""
    if as_json:
        print(json.dumps({kind: name, "found": findings}))
    else:
        for finding in findings:
            say(f"{finding['of']}  {finding['check']}: {finding['what']}")
            say(f"    why: {finding['why']}")
            if finding["mend"]:
                say(f"    mend: {finding['mend']}")
        say(f"{name}: {len(findings) or 'nothing is'} wrong")
    return 1 if findings else 0


def _check_machines(where: str, fleet_name: str | None, mend: bool, as_json: bool) -> tuple[list[Found], int]:
    """Check machines of a fleet; return the findings and the number of hosts."""
    fleet = find_fleet(fleet_name)[0]
    routes = open_routes(fleet)
    snapshot = routes.snapshot()
    reached = routes.find_listed(where, snapshot)
    missing = cloud_checks.lacking(snapshot.document, snapshot.listing, where, time.time())
    head, bucket = _head_address(), _bucket_name(fleet)
    hosts = {host.label: host for host in reached.hosts}

    async def check() -> list[Found]:
        async with Connections(routes.key) as connections:
            with waiting(f"checking {_count_hosts(len(hosts))}"):
                findings = await examine(connections, reached, head, bucket)
            if mend and (fixable := _print_fixes(findings, as_json)):
                for sentence in await fix(connections, hosts, fixable):
                    say(sentence, err=True)
                with waiting("checking again"):
                    findings = await examine(connections, reached, head, bucket)
            return findings

    findings = [Found(pool, cloud_checks.REACH, wrong) for pool, wrong in missing] + asyncio.run(check())
    return findings, len(hosts) + len(reached.away)


def _bucket_name(fleet: Fleet) -> str:
    return fleet.bucket or ""


def _head_address() -> str:
    """Return the address of the head if the fleet of this folder trains a swarm, else an empty text."""
    if (training := find_fleet_training(None)) is None:
        return ""
    try:
        run = read_run(bring(training.url))
    except InputError:  # it has not begun yet
        return ""
    return run.status.address if run.state == "running" else ""


def _print_fixes(findings: list[Found], as_json: bool) -> list[Found]:
    fixable = [finding for finding in findings if finding.wrong.fix]
    for finding in fixable:
        say(f"{finding.host}: {finding.wrong.what}: {finding.wrong.fix}", err=as_json)
    return fixable


def _print_finding(finding: Found) -> None:
    command = "tpuswarm doctor --fix" if finding.host == HERE else f"tpuswarm doctor {finding.host} --fix"
    say(f"{finding.host}  {finding.check}: {finding.wrong.what}")
    say(f"    why: {WHY[finding.check]}")
    say(f"    mend: {finding.wrong.mend}" + (f"; or `{command}`" if finding.wrong.fix else ""))


def _json_object(finding: Found) -> dict[str, str | None]:
    return {
        "host": finding.host, "check": finding.check, "what": finding.wrong.what, "why": WHY[finding.check],
        "mend": finding.wrong.mend, "fix": finding.wrong.fix,
    }  # fmt: skip


def _count_hosts(count: int) -> str:
    return f"{count} host{'s' * (count != 1)}"
