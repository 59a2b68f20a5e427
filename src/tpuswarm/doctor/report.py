"""Make the report that a person with a TPU can send: facts of hosts, refusals, and what they say about assumptions."""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any, Literal

from tpuswarm.cloud.protocol import Machine
from tpuswarm.doctor.assumptions import HOST_CHECKS, REFUSALS, judge_assumptions
from tpuswarm.doctor.examine import parse_facts, run_here
from tpuswarm.doctor.finding import THIS_COMPUTER, Finding
from tpuswarm.doctor.survey import hide_addresses
from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.fleet.hosts.routes import ReachableHosts
from tpuswarm.fleet.store.document import Document
from tpuswarm.remote.connect import Connections, fan_out, run_shell
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.remote.modules import bootstrap, pack_modules
from tpuswarm.train.hosts.host_group import PORT

MODULES = "tpuswarm.doctor.processes", "tpuswarm.doctor.collect", "tpuswarm.doctor.survey"
"""Sent to a host; the last one runs."""
Purpose = Literal["report", "run"]
SURVEY_TIMEOUT_S = 240.0
"""Two starts of JAX, and what comes before and after."""
EMAIL = re.compile(r"[\w.+-]+@[\w.-]+\w")


def survey_here(purpose: Purpose) -> list[dict[str, Any]]:
    """Return the facts of this computer."""
    words = [sys.executable, "-c", bootstrap(MODULES[-1]), str(PORT), purpose]
    done = run_here(words, pack_modules(*MODULES), SURVEY_TIMEOUT_S)
    facts = parse_facts(done.returncode, done.stdout, done.stderr)
    if isinstance(facts, str):
        raise RunFailed(f"this computer cannot be surveyed: {facts}")
    return [{"host": THIS_COMPUTER, "number": None, "type": (facts.get("metadata") or {}).get("type"), **facts}]


async def survey_hosts(connections: Connections, reached: ReachableHosts, purpose: Purpose) -> list[dict[str, Any]]:
    """Return the facts of hosts, all at once: JAX starts on a slice only if it starts on all workers."""
    line = shlex.join(["exec", "python3", "-c", bootstrap(MODULES[-1]), str(PORT), purpose])

    async def survey(host: Host) -> dict[str, Any]:
        facts = parse_facts(*await run_shell(connections, host, line, pack_modules(*MODULES)))
        if isinstance(facts, str):
            raise HostUnreachable(host, facts)
        return {"host": host.label, **_listed(host.label, reached.machines[host.label]), **facts}

    answers = await fan_out(reached.hosts, survey, time_out_s=SURVEY_TIMEOUT_S)
    away = [away.partition(" ") for away in reached.away]
    return [{"host": name, "error": hide_addresses(why)} for name, _, why in away] + [
        {"host": host.label, "error": hide_addresses(str(answer))} if isinstance(answer, TpuswarmError) else answer
        for host, answer in zip(reached.hosts, answers, strict=True)
    ]


def _listed(label: str, machine: Machine) -> dict[str, Any]:
    """Return number and type of a host as the cloud lists them; nulls for a plain VM."""
    if machine.kind != "tpu":
        return {"number": None, "type": None}
    return {"number": int(label.rpartition("/")[2]), "type": machine.type}


def list_refusals(document: Document) -> list[str]:
    """Return the refusals of the cloud among a fleet's recent events, without names of the project or of people."""
    texts = dict.fromkeys(event.text for event in document.events if event.kind == "refused")
    return [EMAIL.sub("EMAIL", text.replace(document.project, "PROJECT")) for text in texts]


def make_report(hosts: list[dict[str, Any]], refusals: Iterable[str]) -> Mapping[str, Any]:
    """Return the report, with a verdict on each assumption that it can check."""
    refusals = list(refusals)
    verdicts = judge_assumptions([host for host in hosts if "error" not in host], refusals)
    return {
        "tpuswarm": version("tpuswarm"),
        "confirmed": {id_: verdict.seen for id_, verdict in verdicts.items() if verdict.holds},
        "contradicted": {id_: verdict.seen for id_, verdict in verdicts.items() if not verdict.holds},
        "not_seen": [id_ for id_ in (*HOST_CHECKS, *REFUSALS) if id_ not in verdicts],
        "refusals": refusals,
        "hosts": hosts,
    }


def check_jax(hosts: list[dict[str, Any]]) -> list[Finding]:
    """Return the hosts on which JAX did not run as a program of the user must."""
    return [
        Finding(
            host["host"], "run", problem, "a program would fail in the same way", _jax_advice(host["host"], problem)
        )
        for host in hosts
        if (problem := _jax_problem(host))
    ]


def _jax_advice(host: str, problem: str) -> str:
    if "No module named" not in problem:
        return "read the error; `tpuswarm doctor` without --run may name its cause"
    return (
        "install it: `pip install 'jax[tpu]'`" if host == THIS_COMPUTER else f"`tpuswarm setup --on {host}` installs it"
    )


def _jax_problem(host: Mapping[str, Any]) -> str:
    jax = host.get("jax", {})
    if error := host.get("error") or host.get("lost", {}).get("jax") or jax.get("error"):
        return f"JAX did not add on all chips: {error}"
    if host["type"] and jax["platform"] != "tpu" and not host["is_rehearsed"]:
        return f"JAX runs on {jax['platform']} instead of the chips"
    if jax["sum"] != jax["devices"]:
        return f"ones of {jax['devices']} devices add up to {jax['sum']}"
    return ""


def describe_jax(hosts: list[dict[str, Any]]) -> list[str]:
    """Return a line for each program that ran: a slice is one."""
    sums: dict[tuple[str, str], int] = {}
    for host in hosts:
        if not _jax_problem(host):
            name = host["host"].rpartition("/")[0] or host["host"]
            sums[name, host["jax"]["kinds"][0]] = host["jax"]["devices"]
    return [
        f"{name}: JAX adds on {f'all {count} devices' if count > 1 else 'its only device'} ({kind})"
        for (name, kind), count in sums.items()
    ]
