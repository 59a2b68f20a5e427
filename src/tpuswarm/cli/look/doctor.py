"""`tpuswarm doctor`: what is wrong with machines, why it matters, how to mend it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.cli.console import FleetOption, Json
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.doctor.examine import Found
    from tpuswarm.fleet.store.fleets import Fleet

CLOUD = "cloud"
FIRST = ("credentials", "project", "billing", "apis")
"""Checks without which nothing else can be asked."""


def doctor(
    where: Annotated[
        str,
        typer.Argument(metavar="[WHERE]", help="here, NAME, NAME/2 (a worker), POOL, all, cloud, or a run."),
    ] = "here",
    mend: Annotated[bool, typer.Option("--fix", help="Mend what is safe to mend, and look again.")] = False,
    as_json: Json = False,
    fleet: FleetOption = None,
) -> None:
    """Find what is wrong with machines or a run: why it matters, how to mend it. Exit code 1 if something is."""
    from tpuswarm.doctor.check import HERE
    from tpuswarm.doctor.examine import examine_here, fix_here

    if where == HERE:
        found, hosts = examine_here(), 1
        if mend and (safe := _shown(found, as_json)):
            for sentence in fix_here(safe):
                say(sentence, err=True)
            found = examine_here()
    elif where == CLOUD:
        raise typer.Exit(_cloud(fleet, mend, as_json))
    elif _is_run(where):
        raise typer.Exit(_run(where, mend, as_json))
    else:
        found, hosts = _far(where, fleet, mend, as_json)
    if as_json:
        print(json.dumps({"hosts": hosts, "found": [_object(each) for each in found]}))
    else:
        for each in found:
            _tell(each)
        say(f"{_hosts(hosts)}: {len(found) or 'nothing is'} wrong")
    raise typer.Exit(1 if found else 0)


def _cloud(fleet: str | None, mend: bool, as_json: bool) -> int:
    """Of the project and of the fleet as a whole; the exit code."""
    import time

    from tpuswarm.cloud.google.project import Project
    from tpuswarm.cloud.google.provider import Google
    from tpuswarm.doctor.cloud import WHY, of_fleet
    from tpuswarm.fleet.apply.preflight import run_checks
    from tpuswarm.fleet.apply.project_facts import collect_facts
    from tpuswarm.fleet.store import fleets

    if mend:
        raise InputError("nothing of a cloud is safe to mend without a person: leave --fix out")
    meant, file = fleets.find_fleet(fleet)
    cloud, found = meant.provider(), []
    with waiting(f"looking at project {cloud.project}"):
        if file is not None and isinstance(cloud, Google):
            facts = collect_facts(cloud, Project(cloud.access), file)
            found += [
                {"of": cloud.project, "check": each.id, "what": each.sentence,
                 "why": "without it machines cannot be had", "mend": each.mend}
                for each in run_checks(file, facts, time.time(), paid=True) if not each.ok
            ]  # fmt: skip
        if not any(each["check"] in FIRST for each in found) and (document := meant.store(cloud).load()) is not None:
            for name, check, wrong in of_fleet(document, cloud.machines(document.zones), time.time()):
                found.append({"of": name, "check": check, "what": wrong.what, "why": WHY[check], "mend": wrong.mend})
    return _told("fleet", meant.full_name, found, as_json)


def _is_run(where: str) -> bool:
    """Whether a folder or a bucket is meant, and no machine (NAME) or worker (NAME/2)."""
    from tpuswarm.train.run.directory import is_run
    from tpuswarm.train.storage.folders import is_url

    folder, _, last = where.rpartition("/")
    return where == "last" or is_url(where) or is_run(Path(where)) or (bool(folder) and not last.isdigit())


def _run(where: str, mend: bool, as_json: bool) -> int:
    """Of a run; the exit code."""
    from tpuswarm.doctor.run import WHY, of_run
    from tpuswarm.train.run.directory import read_config
    from tpuswarm.train.run.listing import find_run
    from tpuswarm.train.storage.folders import shown

    if mend:
        raise InputError("nothing of a run is safe to mend without a person: leave --fix out")
    folder = find_run(where)
    read_config(folder)
    found = [
        {"of": each.of, "check": each.check, "what": each.wrong.what, "why": WHY[each.check], "mend": each.wrong.mend}
        for each in of_run(folder, shown(folder))
    ]
    return _told("run", shown(folder), found, as_json)


def _told(kind: str, called: str, found: list[dict[str, str]], as_json: bool) -> int:
    """Say what was found of a fleet or a run; the exit code."""
    if as_json:
        print(json.dumps({kind: called, "found": found}))
    else:
        for each in found:
            say(f"{each['of']}  {each['check']}: {each['what']}")
            say(f"    why: {each['why']}")
            if each["mend"]:
                say(f"    mend: {each['mend']}")
        say(f"{called}: {len(found) or 'nothing is'} wrong")
    return 1 if found else 0


def _far(where: str, fleet: str | None, mend: bool, as_json: bool) -> "tuple[list[Found], int]":
    """Of a fleet; how many hosts that are."""
    import asyncio
    import time

    from tpuswarm.doctor.cloud import REACH, lacking
    from tpuswarm.doctor.examine import Found, examine, fix
    from tpuswarm.fleet.hosts.routes import open_routes
    from tpuswarm.fleet.store import fleets
    from tpuswarm.remote.connect import Connections

    meant = fleets.find_fleet(fleet)[0]
    routes = open_routes(meant)
    seen = routes.snapshot()
    reached = routes.find_listed(where, seen)
    lacks = [Found(pool, REACH, why) for pool, why in lacking(seen.document, seen.listing, where, time.time())]
    head, bucket = _head(), _bucket(meant)
    hosts = {each.label: each for each in reached.hosts}

    async def work() -> "list[Found]":
        async with Connections(routes.key) as connections:
            with waiting(f"looking at {_hosts(len(hosts))}"):
                found = await examine(connections, reached, head, bucket)
            if mend and (safe := _shown(found, as_json)):
                for sentence in await fix(connections, hosts, safe):
                    say(sentence, err=True)
                with waiting("looking again"):
                    found = await examine(connections, reached, head, bucket)
            return found

    found = lacks + asyncio.run(work())
    return found, len(hosts) + len(reached.away)


def _bucket(meant: "Fleet") -> str:
    return meant.bucket or ""


def _head() -> str:
    """Where the head is of the swarm that the fleet of this folder trains; empty where there is none."""
    from tpuswarm.cli.fleet.training_view import training_here
    from tpuswarm.swarm.views.status import look
    from tpuswarm.train.storage.copy import bring

    if (training := training_here(None)) is None:
        return ""
    try:
        seen = look(bring(training.url))
    except InputError:  # not begun yet
        return ""
    return seen.status.address if seen.state == "running" else ""


def _shown(found: "list[Found]", as_json: bool) -> "list[Found]":
    """What is safe to mend, said before it is done."""
    safe = [each for each in found if each.wrong.fix]
    for each in safe:
        say(f"{each.host}: {each.wrong.what}: {each.wrong.fix}", err=as_json)
    return safe


def _tell(each: "Found") -> None:
    from tpuswarm.doctor.examine import WHY

    say(f"{each.host}  {each.check}: {each.wrong.what}")
    say(f"    why: {WHY[each.check]}")
    say(f"    mend: {each.wrong.mend}" + (f"; or `{_fix(each)}`" if each.wrong.fix else ""))


def _fix(each: "Found") -> str:
    from tpuswarm.doctor.check import HERE

    return "tpuswarm doctor --fix" if each.host == HERE else f"tpuswarm doctor {each.host} --fix"


def _object(each: "Found") -> dict[str, str | None]:
    from tpuswarm.doctor.examine import WHY

    return {
        "host": each.host, "check": each.check, "what": each.wrong.what, "why": WHY[each.check],
        "mend": each.wrong.mend, "fix": each.wrong.fix,
    }  # fmt: skip


def _hosts(count: int) -> str:
    return f"{count} host" + "s" * (count != 1)
