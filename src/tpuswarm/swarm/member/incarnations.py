"""A member's process: it learns what the run is, compiles, and lives one incarnation after the other."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.books import Adopt, Member
from tpuswarm.swarm.core.messages import Gone, Refused
from tpuswarm.swarm.core.state import disagreement
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member import follower
from tpuswarm.swarm.member.contract import Holder
from tpuswarm.swarm.member.cycle import MemberProcesses
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.member.lead import Lead
from tpuswarm.swarm.member.metrics import MetricsRows
from tpuswarm.swarm.member.program import Ready, make_ready
from tpuswarm.swarm.member.trace import Tracer
from tpuswarm.swarm.processes.effects import Call, Over, Unreachable
from tpuswarm.swarm.processes.founder import Begin, Joining
from tpuswarm.swarm.processes.plan import HEAD, Plan
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.train.hosts.rendezvous import Absent, Hosts
from tpuswarm.train.loop.recorded import chosen
from tpuswarm.train.process import platform
from tpuswarm.train.recipe import Metrics

AGAIN = 0.5
"""Seconds between two tries of a call that nobody answers."""
HANGS = 60.0
"""Seconds after the end of an incarnation until what its devices still do is given up, and with it the process."""
LIVES = 5
"""Incarnations in a row that hand in nothing which is finite, until a member gives up."""


@dataclass
class Assigned:
    """What a member's process was given by who started it."""

    name: str
    plan: Plan
    shards: tuple[str, ...]
    data: Path | None
    """The run's data files; None where they have to be fetched."""
    group: Group | None
    """The hosts of this member, of which this is host 0; None for one host."""
    steps: int
    """That this member made before."""
    evaluates: bool
    calls: Callable[[Call], Any]
    say: Callable[[str], None]
    batch: int | None = None
    """Rows of one of its steps; None: the run's batch."""
    compiled: Callable[[], None] = lambda: None
    """Told when there is nothing left to do but to train; of a process that is this member's alone."""


@dataclass
class MemberHost:
    """The process; `run` in one thread, `look` and `leave` from others."""

    place: Assigned
    _rows: MetricsRows = field(init=False)
    _tracer: Tracer = field(default_factory=Tracer)
    _member: MemberProcesses | None = None
    _last: Member | None = None
    """The books of the incarnation before."""
    _evaluating: bool = False
    """Whether it evaluates the last version."""
    _leaving: bool = False

    def __post_init__(self) -> None:
        place = self.place
        rows = place.batch or int(place.plan.settings["batch"])
        self._rows = MetricsRows(place.name, place.steps, rows * place.plan.tokens_per_row, self._version)

    def _version(self) -> int:
        return self._member.books.base if self._member else 0

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """A member dials out; nobody calls it."""
        raise Unreachable(self.place.name)

    def leave(self) -> None:
        """Hand in what is done, give the rest back, and go."""
        self._leaving = True
        if self._member:
            self._member.leaving = True

    def trace(self, steps: int) -> None:
        """Trace its next steps; a later look has what came of it."""
        self._tracer.ask(steps)

    def _took(self, number: int, metrics: Metrics) -> None:
        self._rows.took(metrics)
        self._tracer.took(metrics)

    def look(self, since: int) -> dict[str, Any]:
        """How it stands, with its rows of metrics from number `since` on; those before are forgotten."""
        member = self._member
        books = member.books if member else self._last
        rows = self._rows.since(since)
        return {
            "incarnation": books.incarnation.name if books else None,
            "base": books.base if books else None,
            "tokens": books.processed if books else 0,
            "at_risk": member.at_risk * member.books.terms.tokens_per_row if member else 0,
            "rows_per_s": member.rows_per_s if member else None,
            "evaluating": self._evaluating or (member is not None and member.evaluating),
            "rows": rows,
            "trace": self._tracer.taken(),
        }

    def run(self) -> str:
        """Until the run ends (`ended`) or this member was asked to leave (`left`).

        Raises RunFailed, InputError, and Over where it gives up.
        """
        place, plan = self.place, self.place.plan
        if place.batch and int(plan.settings["batch"]) % place.batch:
            raise InputError(
                f"{place.name} cannot join: its batch is {place.batch}, and the run's, {plan.settings['batch']}, is no "
                "multiple of it"
            )
        platform.prepare(bool(plan.settings["deterministic"]))
        data = self._fetch_files()
        hosts = self._gather()
        if hosts is None:
            return "left" if self._leaving else "ended"
        with hosts:
            follower.tell(hosts, plan, data, place.batch)
            devices = jax.devices() if place.group else platform.local_devices()
            ready = make_ready(plan, data, devices, place.evaluates, self._took, place.say, place.batch)
            hosts.agree(ready.facts())
            place.compiled()
            return self._lives(ready, Lead(hosts, ready.holder, ready.begin) if hosts.count > 1 else ready)

    def _gather(self) -> Hosts | None:
        """All hosts of this member; None where it was told to leave, or the run has ended, before they came."""
        group = self.place.group
        if group is None:
            return Hosts(0, 1, {})
        self.place.say(f"waiting for {group.count - 1} other hosts at {group.at}")
        try:
            return group.gather(lambda: not self._leaving and not self._over())
        except Absent:
            return None

    def _over(self) -> bool:
        """Whether everything is trained that the run asked for."""
        try:
            answer = self.place.calls(Call(HEAD, "hello", (self.place.name, False)))
        except Unreachable:
            return False
        return isinstance(answer, Joining) and answer.tokens >= answer.terms.horizon * answer.terms.tokens_per_row

    def _lives(self, ready: Ready, programs: Ready | Lead) -> str:
        """One incarnation after the other."""
        place = self.place
        fruitless = 0
        while not self._leaving:
            newest = self._newest(ready, programs)
            if newest is None:
                break
            reason = self._live(*newest, ready, programs)
            if reason is None:
                return "ended"
            place.say(f"its incarnation is over: {reason}")
            assert self._member is not None
            self._last, self._member = self._member.books, None  # and with it what it held on the devices
            fruitless = 0 if self._last.finite_pushes else fruitless + 1
            if fruitless >= LIVES:
                raise Over(f"{place.name} gave up after {LIVES} incarnations without a finite push: {reason}")
        return "left"

    def _live(self, joining: Joining, anchor: list[np.ndarray], ready: Ready, programs: Ready | Lead) -> str | None:
        """One incarnation, from a version on; why it is over, None at the end of the run."""
        place, swarm = self.place, self.place.plan.swarm
        incarnation = Incarnation(place.name, secrets.token_hex(16))
        books = Member(
            joining.terms,
            swarm.quantize,
            swarm.overlap,
            incarnation,
            joining.version,
            joining.tokens,
            batch=place.batch,
        )
        holder = programs.holder(anchor)
        place.say(f"incarnation {incarnation.name[:8]} starts from commit {joining.version}")
        node = NodeThreads(place.calls)
        self._member = member = MemberProcesses(
            books,
            holder,
            HEAD,
            place.shards,
            time.monotonic,
            anchor=None if swarm.quantize == "plain" else anchor,
            say=place.say,
            leaving=self._leaving,
            evaluate_every=place.plan.evaluate_every if place.evaluates else None,
            evaluated=self._rows.evaluated,
        )
        member.leaving = self._leaving  # it may have been asked while the member was made
        node.start("train", member.train())
        node.start("exchange", member.exchange())
        node.start("heartbeats", member.heartbeats())
        if not node.drain(HANGS):
            raise RunFailed(f"{place.name} hangs: its devices have been at one thing for {member.stalled:.0f} s")
        if node.failure is None or member.ended:
            if ready.validation is not None:
                self._last_evaluation(holder, ready, programs)
            return None
        if isinstance(node.failure, Over | Unreachable):
            return str(node.failure)
        raise node.failure

    def _last_evaluation(self, holder: Holder, ready: Ready, programs: Ready | Lead) -> None:
        """Of the run's last version, which nobody had to adopt."""
        newest = self._newest(ready, programs)
        if newest is None:
            return
        last, fragments = newest
        self.place.say(f"evaluating commit {last.version}")
        self._evaluating = True
        version = holder.place(fragments)
        holder.adopt(Adopt("take", None, last.version, last.state), version, 0.0)
        average = None
        if self.place.plan.average:
            asked = [(number, last.version) for number in range(len(last.state))]
            means = [self._answer(Call(self._shard(number), "average", each)) for number, each in enumerate(asked)]
            average = holder.place(means)
        if found := holder.evaluate(lambda: self._leaving, average, last.version, last.tokens):
            self._rows.evaluated(found)

    def _newest(self, ready: Ready, programs: Ready | Lead) -> tuple[Joining, list[np.ndarray]] | None:
        """What the run is, and the fragments of its newest version; None when told to leave.

        Raises InputError where this member trains something else.
        """
        while joining := self._hello(ready, programs):
            if ready.digests != joining.terms.digests:
                why = disagreement(ready.digests, joining.terms.digests)
                way_out = _way_out(ready.digests, joining.terms.digests)
                raise InputError(f"{self.place.name} cannot join: {why}{way_out}")
            asked = enumerate(joining.state)
            fragments = [self._answer(Call(self._shard(number), "fetch", (number, name))) for number, name in asked]
            if not any(isinstance(each, Gone) for each in fragments):
                return joining, fragments
            self.place.say(f"commit {joining.version} was removed meanwhile; fetching a newer one")
        return None

    def _hello(self, ready: Ready, programs: Ready | Lead) -> Joining | None:
        """What the run is, from the coordinator; None when told to leave. Makes the first state where asked to."""
        while not self._leaving:
            answer = self._answer(Call(HEAD, "hello", (self.place.name,)))
            if isinstance(answer, Joining):
                return answer
            if isinstance(answer, Begin):
                self.place.say("initializing the model")
                outer = self.place.plan.outer
                made = [
                    self._answer(Call(self._shard(number), "found", (fragment, outer)))
                    for number, fragment in enumerate(programs.begin())
                ]
                state = tuple(digest for digest, _ in made)
                outer_state = tuple(digest for _, digest in made if digest)
                founding = Founding(ready.layout.fragments, chosen(ready.compiled))
                answer = self._answer(Call(HEAD, "found", (founding, state, outer_state, ready.digests)))
                if isinstance(answer, Refused):
                    raise InputError(f"{self.place.name} cannot join: {answer.reason}")
            time.sleep(AGAIN)
        return None

    def _fetch_files(self) -> Path:
        """The folder of the run's data files, fetched from the shards where they are not there."""
        place = self.place
        if place.data:
            files.check(place.data, place.plan.files)
            return place.data
        folder, known = files.folder_of(place.plan), place.plan.files
        for name in files.missing(folder, known):
            place.say(f"fetching {name}, {known[name].size / 2**20:.1f} MiB")
            starts = range(0, known[name].size, files.PART)
            files.keep(
                folder / name,
                (self._answer(Call(place.shards[0], "file", (name, start, files.PART))) for start in starts),
                known[name].digest,
            )
        return folder

    def _shard(self, fragment: int) -> str:
        return self.place.shards[fragment % len(self.place.shards)]

    def _answer(self, call: Call) -> Any:
        """What a call returns, tried until somebody answers."""
        while True:
            try:
                return self.place.calls(call)
            except Unreachable:
                time.sleep(AGAIN)


def _way_out(ours: Digests, run: Digests) -> str:
    """What to do about other code than the run was started with, which it keeps."""
    if ours.code == run.code:
        return ""
    return (
        "; tpuswarm or the recipe's file has changed here since the run was started, or differs on this machine: put "
        "it back, or stop the run and resume it with --accept-code"
    )
