"""Collect facts from hosts, one round trip each, and check them; carry out fixes."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence

from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Machine
from tpuswarm.doctor.checks import CHECKS, VERSIONS, compare_versions
from tpuswarm.doctor.cloud import check_health, unreachable
from tpuswarm.doctor.finding import THIS_COMPUTER, Check, CheckedHost, Facts, Finding
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.decide.money import machine_price
from tpuswarm.fleet.hosts.routes import ReachableHosts
from tpuswarm.remote.connect import Connections, fan_out, run_shell
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.remote.modules import bootstrap, pack_modules

MODULES = "tpuswarm.doctor.processes", "tpuswarm.doctor.collect"
"""Sent to a host; the last one runs."""
HOST_TIMEOUT_S = 30.0


def examine_here() -> list[Finding]:
    """Check this computer."""
    before = time.time()
    done = run_here([sys.executable, "-c", bootstrap(MODULES[-1])], pack_modules(*MODULES))
    facts = parse_facts(done.returncode, done.stdout, done.stderr)
    if isinstance(facts, str):
        raise RunFailed(f"this computer cannot be checked: {facts}")
    metadata = facts.get("metadata") or {}
    try:
        accelerator = find(metadata.get("type") or "")
    except InputError:  # no TPU VM, or a type newer than the catalogue
        return judge([CheckedHost(THIS_COMPUTER, facts, _clock_skew(facts, before, time.time()))])
    worker = int(metadata.get("worker") or 0)
    return judge([CheckedHost(THIS_COMPUTER, facts, 0.0, accelerator.name, accelerator.chips_per_host, worker)])


async def examine(
    connections: Connections,
    reached: ReachableHosts,
    head: str = "",
    bucket: str = "",
    checks: Sequence[Check] = CHECKS,
) -> list[Finding]:
    """Check hosts and their machines' health in the cloud.

    head: HOST:PORT of the swarm's head; bucket: the fleet's. Empty: none.
    """
    line = shlex.join(["exec", "python3", "-c", bootstrap(MODULES[-1]), head, bucket])

    async def collect_from(host: Host) -> CheckedHost:
        before = time.time()
        facts = parse_facts(*await run_shell(connections, host, line, pack_modules(*MODULES)))
        if isinstance(facts, str):
            raise HostUnreachable(host, facts)
        skew_s = _clock_skew(facts, before, time.time())
        return _describe_host(host.label, reached.machines[host.label], facts, skew_s)

    answers = await fan_out(reached.hosts, collect_from, time_out_s=HOST_TIMEOUT_S)
    findings = [unreachable(away.partition(" ")[0], away.partition(" ")[2]) for away in reached.away]
    for host, answer in zip(reached.hosts, answers, strict=True):
        if isinstance(answer, TpuswarmError):
            findings.append(unreachable(host.label, str(answer).partition(" ")[2]))
    machines = {machine.name: machine for machine in reached.machines.values()}
    findings += [finding for machine in machines.values() for finding in check_health(machine)]
    return findings + judge([answer for answer in answers if isinstance(answer, CheckedHost)], checks)


def judge(hosts: list[CheckedHost], checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Run checks on hosts; report missing facts, with the checks that need them."""
    findings = [finding for host in hosts for finding in _judge_host(host, checks)]
    return findings + list(compare_versions(hosts) if len(hosts) > 1 else ())


def _judge_host(host: CheckedHost, checks: Sequence[Check]) -> list[Finding]:
    lost: Mapping[str, str] = host.facts["lost"]
    skipped = {"packages": [VERSIONS.id]} if checks is CHECKS else {}
    found: list[Finding] = []
    for check in checks:
        try:
            for finding in check.find(host):
                found.append(finding)
        except KeyError as missing:
            if missing.args[0] not in lost:
                raise
            skipped.setdefault(missing.args[0], []).append(check.id)
    reported = lost if checks is CHECKS else [fact for fact in lost if fact in skipped]
    return [*(_report_lost(host.label, fact, lost[fact], skipped.get(fact, [])) for fact in reported), *found]


def _report_lost(host: str, fact: str, why: str, skipped: list[str]) -> Finding:
    affected = f"; skipped or incomplete: {', '.join(skipped)}" if skipped else ""
    return unreachable(host, f"{fact} could not be read: {why}", f"fix the reported error{affected}")


def fix_here(findings: Iterable[Finding]) -> list[str]:
    """Carry out the fixes on this computer; return a sentence for each."""
    sentences = []
    for finding in findings:
        done = run_here(["/bin/bash", "-c", finding.fix or "true"])
        sentences.append(_fix_result(finding, done.returncode, done.stderr))
    return sentences


async def fix_hosts(connections: Connections, hosts: Mapping[str, Host], findings: Iterable[Finding]) -> list[str]:
    """Carry out the fixes on hosts; return a sentence for each, also for those done before a host was lost."""
    by_host: dict[str, list[Finding]] = {}
    sentences: dict[str, list[str]] = {}
    for finding in findings:
        if finding.fix is not None and finding.subject in hosts:
            by_host.setdefault(finding.subject, []).append(finding)

    async def fix_host(host: Host) -> None:
        for finding in by_host[host.label]:
            code, _, err = await run_shell(connections, host, finding.fix or "true")
            sentences.setdefault(host.label, []).append(_fix_result(finding, code, err))

    answers = await fan_out([hosts[name] for name in by_host], fix_host, time_out_s=HOST_TIMEOUT_S)
    for name, answer in zip(by_host, answers, strict=True):
        done = sentences.setdefault(name, [])
        if isinstance(answer, TpuswarmError):
            left = ", ".join(finding.check for finding in by_host[name][len(done) :])
            done.append(f"{answer}; {left} may or may not be fixed")
    return [sentence for done in sentences.values() for sentence in done]


def run_here(
    words: list[str], stdin: bytes = b"", timeout_s: float = HOST_TIMEOUT_S
) -> "subprocess.CompletedProcess[bytes]":
    """Run a program on this computer. Raise RunFailed if it does not end in time."""
    try:
        return subprocess.run(words, input=stdin, capture_output=True, check=False, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"this computer did not answer within {timeout_s:g} s") from error


def _fix_result(finding: Finding, code: int, err: bytes) -> str:
    if code == 0:
        return f"{finding.subject}: {finding.check} is fixed"
    return f"{finding.subject}: {finding.check} is not fixed (exit {code}): {_last_line(err)}"


def _last_line(err: bytes) -> str:
    return err.decode(errors="replace").strip().rpartition("\n")[2] or "no output"


def parse_facts(code: int, out: bytes, err: bytes) -> Facts | str:
    """Return the JSON that a module printed on a host, or why there is none."""
    if code == 127:
        return "has no python3, which doctor and jobs need"
    try:
        facts: Facts = json.loads(out.decode().strip().rpartition("\n")[2])
    except ValueError:
        return f"cannot be checked (exit {code}): {_last_line(err)}"
    return facts


def _clock_skew(facts: Facts, before: float, after: float) -> float:
    """Return the least skew that explains the host's time, which it read between `before` and `after`."""
    host_time: float = facts["time"]
    return host_time - after if host_time > after else min(0.0, host_time - before)


def _describe_host(label: str, machine: Machine, facts: Facts, skew_s: float) -> CheckedHost:
    try:
        accelerator = find(machine.type) if machine.kind == "tpu" else None
    except InputError:  # a type newer than the catalogue
        accelerator = None
    return CheckedHost(
        label,
        facts,
        skew_s,
        tpu_type=machine.type if accelerator else None,
        chips=accelerator.chips_per_host if accelerator else None,
        worker=int(label.rpartition("/")[2]) if machine.kind == "tpu" else None,
        age_s=time.time() - machine.created if machine.created else None,
        dollars_per_hour=machine_price(machine),
    )
