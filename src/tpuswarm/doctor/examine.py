"""Looks at hosts, each in one round trip, and judges what was found."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tpuswarm.catalog import find
from tpuswarm.cloud.protocol import Machine
from tpuswarm.doctor.check import HERE, Check, Facts, Subject, Wrong
from tpuswarm.doctor.checks import ACROSS, CHECKS
from tpuswarm.doctor.cloud import HEALTH, REACH, SYMPTOM, health
from tpuswarm.doctor.cloud import WHY as OF_CLOUD
from tpuswarm.errors import InputError, RunFailed, TpuswarmError
from tpuswarm.fleet.decide.money import machine_price
from tpuswarm.fleet.hosts.routes import ReachableHosts
from tpuswarm.remote.connect import Connections, ask
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host, NoWay
from tpuswarm.remote.modules import boot, sent

MODULES = "tpuswarm.doctor.processes", "tpuswarm.doctor.collect"
"""What is sent to a host: the last one runs."""
PATIENCE = 30.0
"""Seconds that a host has to answer."""
WHY = {
    **{each: OF_CLOUD[each] for each in (REACH, HEALTH, SYMPTOM)},
    **{each.id: each.why for each in CHECKS},
    **{each.id: each.why for each in ACROSS},
}
"""Why each kind matters."""


class Found(NamedTuple):
    """One thing that is wrong."""

    host: str
    check: str
    wrong: Wrong


def examine_here() -> list[Found]:
    """This computer, as it is."""
    before = time.time()
    done = _run([sys.executable, "-c", boot(MODULES[-1])], sent(*MODULES))
    facts = _facts(done.returncode, done.stdout, done.stderr)
    if isinstance(facts, str):
        raise RunFailed(f"this computer cannot be looked at: {facts}")
    told = facts.get("metadata") or {}
    try:
        accelerator = find(told.get("type") or "")
    except InputError:  # no TPU VM, or a type that is newer than the catalogue
        return judge([Subject(HERE, facts, _skew(facts, before, time.time()))])
    worker = int(told.get("worker") or 0)
    return judge([Subject(HERE, facts, 0.0, accelerator.name, accelerator.chips_per_host, worker)])


async def examine(
    connections: Connections,
    reached: ReachableHosts,
    head: str = "",
    bucket: str = "",
    checks: Sequence[Check] = CHECKS,
) -> list[Found]:
    """All hosts, and what the cloud says of their machines.

    head: HOST:PORT of the swarm's that they train in; bucket: the fleet's. Empty: there is none.
    checks: of each host.
    """

    line = shlex.join(["exec", "python3", "-c", boot(MODULES[-1]), head, bucket])

    async def look(host: Host) -> Subject:
        before = time.time()
        facts = _facts(*await ask(connections, host, line, sent(*MODULES)))
        if isinstance(facts, str):
            raise NoWay(host, facts)
        return _subject(host.label, reached.machines[host.label], facts, _skew(facts, before, time.time()))

    answers = await fan_out(reached.hosts, look, time_out_s=PATIENCE)
    found = [Found(each.partition(" ")[0], REACH, _away(each.partition(" ")[2])) for each in reached.away]
    for host, answer in zip(reached.hosts, answers, strict=True):
        if isinstance(answer, TpuswarmError):
            found.append(Found(host.label, REACH, _away(str(answer).partition(" ")[2])))
    machines = {each.name: each for each in reached.machines.values()}
    found += [Found(name, check, wrong) for name, each in machines.items() for check, wrong in health(each)]
    return found + judge([each for each in answers if isinstance(each, Subject)], checks)


def judge(subjects: list[Subject], checks: Sequence[Check] = CHECKS) -> list[Found]:
    """What all checks say; of a host of which something could not be looked at that, and what the others say.

    Of a few checks alone: only what they need.
    """
    found = [each for one in subjects for each in _judge(one, checks)]
    if len(subjects) > 1:
        found += [Found(label, check.id, wrong) for check in ACROSS for label, wrong in check.probe(subjects)]
    return found


def _judge(subject: Subject, checks: Sequence[Check]) -> list[Found]:
    lost = subject.facts["lost"]
    missed = {each.fact: [each.id] for each in ACROSS if checks is CHECKS}
    said: list[Found] = []
    for check in checks:
        try:
            for wrong in check.probe(subject):
                said.append(Found(subject.label, check.id, wrong))
        except KeyError as missing:  # a fact that it needs; what it has said before stays
            if missing.args[0] not in lost:
                raise
            missed.setdefault(missing.args[0], []).append(check.id)
    told = lost if checks is CHECKS else [each for each in lost if each in missed]
    return [*(_lost(subject.label, each, lost[each], missed.get(each, [])) for each in told), *said]


def _lost(label: str, what: str, why: str, missed: list[str]) -> Found:
    mend = "fix what the message says" + (f"; not made, or only in part: {', '.join(missed)}" if missed else "")
    return Found(label, REACH, Wrong(f"{what} could not be looked at: {why}", mend))


def fix_here(found: Iterable[Found]) -> list[str]:
    """Do what is safe on this computer; a sentence for each: whether that was done."""
    said = []
    for each in found:
        done = _run(["/bin/bash", "-c", each.wrong.fix or "true"])
        said.append(_mended(each, done.returncode, done.stderr))
    return said


async def fix(connections: Connections, hosts: Mapping[str, Host], found: Iterable[Found]) -> list[str]:
    """The same on hosts, by their labels; where one is lost half-way, what was done there before."""
    theirs: dict[str, list[Found]] = {}
    said: dict[str, list[str]] = {}
    for each in found:
        if each.wrong.fix is not None and each.host in hosts:
            theirs.setdefault(each.host, []).append(each)

    async def mend(host: Host) -> None:
        for each in theirs[host.label]:
            code, _, err = await ask(connections, host, each.wrong.fix or "true")
            said.setdefault(host.label, []).append(_mended(each, code, err))

    answers = await fan_out([hosts[name] for name in theirs], mend, time_out_s=PATIENCE)
    for name, answer in zip(theirs, answers, strict=True):
        done = said.setdefault(name, [])
        if isinstance(answer, TpuswarmError):
            left = ", ".join(each.check for each in theirs[name][len(done) :])
            done.append(f"{answer}; nobody knows whether {left} is mended")
    return [text for each in said.values() for text in each]


def _run(words: list[str], said: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(words, input=said, capture_output=True, check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"this computer did not answer within {PATIENCE:g} s") from error


def _mended(each: Found, code: int, err: bytes) -> str:
    if code == 0:
        return f"{each.host}: {each.check} is mended"
    last = err.decode(errors="replace").strip().rpartition("\n")[2]
    return f"{each.host}: {each.check} is not mended (exit {code}): {last or 'it said nothing'}"


def _facts(code: int, out: bytes, err: bytes) -> Facts | str:
    """What `collect.py` has said, or why it has not."""
    if code == 127:
        return "has no python3, with which doctor looks at a host and jobs are kept"
    try:
        found: Facts = json.loads(out.decode().strip().rpartition("\n")[2])
    except ValueError:
        last = err.decode(errors="replace").strip().rpartition("\n")[2]
        return f"cannot be looked at (exit {code}): {last or 'it said nothing'}"
    return found


def _skew(facts: Facts, before: float, after: float) -> float:
    """Seconds by which its clock is surely ahead (or behind, below 0), whenever between both it was read."""
    told: float = facts["time"]
    return told - after if told > after else min(0.0, told - before)


def _subject(label: str, machine: Machine, facts: Facts, skew_s: float) -> Subject:
    try:
        accelerator = find(machine.type) if machine.kind == "tpu" else None
    except InputError:  # a type that is newer than the catalogue
        accelerator = None
    worker = int(label.rpartition("/")[2]) if machine.kind == "tpu" else None
    chips = accelerator.chips_per_host if accelerator else None
    return Subject(
        label, facts, skew_s, machine.type if accelerator else None, chips, worker,
        time.time() - machine.created if machine.created else None, machine_price(machine),
    )  # fmt: skip


def _away(why: str) -> Wrong:
    return Wrong(why, "`tpuswarm list` shows its machine; a keeper, or `tpuswarm up`, replaces what is lost")
