"""A member's process: it joins the run, compiles the program, and runs one incarnation after the other."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tpuswarm.errors import InputError, RunFailed
from tpuswarm.swarm.core.member_state import Adopt, MemberState
from tpuswarm.swarm.core.messages import Refused, VersionExpired
from tpuswarm.swarm.core.transitions import disagreement
from tpuswarm.swarm.core.values import Digests, Incarnation
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.member import data_files as files
from tpuswarm.swarm.member import follower
from tpuswarm.swarm.member.device_state import DeviceState
from tpuswarm.swarm.member.group import Group
from tpuswarm.swarm.member.leader import Leader
from tpuswarm.swarm.member.loop import MemberLoop
from tpuswarm.swarm.member.metrics_buffer import MetricsBuffer
from tpuswarm.swarm.member.program import MemberProgram, make_program
from tpuswarm.swarm.member.trace import Tracer
from tpuswarm.swarm.processes.coordinator import Begin, Joining
from tpuswarm.swarm.processes.effects import Call, ProcessEnded, Unreachable
from tpuswarm.swarm.processes.run_plan import COORDINATOR, RunPlan
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.train.data.remote_files import RemoteFile, provide
from tpuswarm.train.hosts.rendezvous import Hosts, HostsAbsent
from tpuswarm.train.loop.run_config import chosen_form
from tpuswarm.train.process import platform
from tpuswarm.train.recipe import Metrics
from tpuswarm.train.user_code import blame

RETRY_INTERVAL_S = 0.5
"""Wait between two tries of an unanswered call."""
HANG_TIMEOUT_S = 60.0
"""Device actions that outlast their incarnation by this time end the process."""
MAX_FRUITLESS_INCARNATIONS = 5
"""A member gives up after this many incarnations in a row without a finite push."""


@dataclass
class MemberSpec:
    """A supervisor's instructions to a member's process."""

    name: str
    plan: RunPlan
    shards: tuple[str, ...]
    data: Path | None
    """The folder of the run's data files; None to fetch them."""
    group: Group | None
    """The hosts of this member, with this one as host 0; None for one host."""
    steps: int
    """Steps that this member made before."""
    evaluates: bool
    calls: Callable[[Call], Any]
    say: Callable[[str], None]
    batch: int | None = None
    """Rows of its steps; the default is the run's batch."""
    on_compiled: Callable[[], None] = lambda: None
    """Called when the member is ready to train."""
    files_from: str = ""
    """Address of the process that serves the run's data files."""
    requires_code: bool = True
    """Whether its code must be the swarm's. A member that dials in may have other versions of the same protocol."""
    largest_file: int | None = None
    """Bytes of the largest data file that is fetched whole if its reader can do with parts; None for any size."""
    calls_per_shard: int = 1
    """As in MemberLoop."""


@dataclass
class MemberProcess:
    """The work of the process. `run` blocks in one thread; `report` and `leave` are for others."""

    spec: MemberSpec
    _metrics: MetricsBuffer = field(init=False)
    _tracer: Tracer = field(default_factory=Tracer)
    _loop: MemberLoop | None = None
    _last_state: MemberState | None = None
    """State of the previous incarnation."""
    _lost_rows: int = 0
    """Rows that the previous incarnation trained and did not push."""
    _evaluates_last: bool = False
    """Whether it evaluates the last version."""
    _leaving: bool = False

    def __post_init__(self) -> None:
        spec = self.spec
        rows = spec.batch or int(spec.plan.settings["batch"])
        self._metrics = MetricsBuffer(spec.name, spec.steps, rows * spec.plan.tokens_per_row, self._version)

    def _version(self) -> int:
        return self._loop.state.base if self._loop else 0

    def serve(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Refuse every call: only members call."""
        raise Unreachable(self.spec.name)

    def leave(self) -> None:
        """Push the finished work, return the rest of the lease, and end."""
        self._leaving = True
        if self._loop:
            self._loop.leaving = True

    def trace(self, steps: int) -> None:
        """Trace the next steps; `report` later contains the trace."""
        self._tracer.start(steps)

    def _record_step(self, number: int, metrics: Metrics) -> None:
        self._metrics.add_step(metrics)
        self._tracer.after_step(metrics)

    def report(self, since: int) -> dict[str, Any]:
        """Report the member's state, with its metrics rows from number `since` on; earlier ones are dropped."""
        loop = self._loop
        state = loop.state if loop else self._last_state
        rows = self._metrics.since(since)
        return {
            "incarnation": state.incarnation.name if state else None,
            "base": state.base if state else None,
            "tokens": state.processed if state else 0,
            "at_risk": (loop.at_risk if loop else self._lost_rows) * self.spec.plan.tokens_per_row,
            "rows_per_s": loop.rows_per_s if loop else None,
            "push_bytes_per_s": loop.push_bytes_per_s if loop else None,
            "round_trip_s": loop.round_trip_s if loop else None,
            "awaits_storage": loop is not None and loop.awaits_storage,
            "evaluating": self._evaluates_last or (loop is not None and loop.evaluating),
            "rows": rows,
            "trace": self._tracer.next_part(),
        }

    @property
    def counted(self) -> tuple[int, int] | None:
        """Tokens of the whole run that its newest version here counts, and those at its end; None before the first."""
        state = self._loop.state if self._loop else self._last_state
        return (state.tokens, state.terms.horizon * state.terms.tokens_per_row) if state else None

    def run(self) -> str:
        """Run until the run ends (return `ended`) or this member was asked to leave (`left`).

        Raise RunFailed, InputError, or ProcessEnded if the member gives up.
        """
        spec, plan = self.spec, self.spec.plan
        if spec.batch and int(plan.settings["batch"]) % spec.batch:
            raise InputError(
                f"{spec.name} cannot join: its batch of {spec.batch} does not divide the run's batch of "
                f"{plan.settings['batch']}"
            )
        platform.configure_jax(bool(plan.settings["deterministic"]))
        data = self._fetch_files()
        hosts = self._gather()
        if hosts is None:
            return "left" if self._leaving else "ended"
        with hosts, blame("the recipe fails"):
            follower.send_plan(hosts, plan, data, spec.evaluates, spec.batch)
            devices = jax.devices() if spec.group else platform.local_devices()
            program = make_program(plan, data, devices, spec.evaluates, self._record_step, spec.say, spec.batch)
            if not spec.requires_code:
                program = replace(program, digests=replace(program.digests, code=plan.code))
            hosts.require_equal(program.facts())
            spec.on_compiled()
            programs = Leader(hosts, program.make_state, program.initialize) if hosts.count > 1 else program
            return self._run_incarnations(program, programs)

    def _gather(self) -> Hosts | None:
        """Connect all hosts of this member; None if it was asked to leave, or the run ended, before they came."""
        group = self.spec.group
        if group is None:
            return Hosts(0, 1, {})
        self.spec.say(f"waiting for {group.count - 1} other hosts at {group.at}")
        try:
            return group.gather(lambda: not self._leaving and not self._run_is_over())
        except HostsAbsent:
            return None

    def _run_is_over(self) -> bool:
        try:
            answer = self.spec.calls(Call(COORDINATOR, "hello", (self.spec.name, False)))
        except Unreachable:
            return False
        return isinstance(answer, Joining) and answer.tokens >= answer.terms.horizon * answer.terms.tokens_per_row

    def _run_incarnations(self, program: MemberProgram, programs: MemberProgram | Leader) -> str:
        spec = self.spec
        fruitless = 0
        while not self._leaving:
            newest = self._fetch_newest(program, programs)
            if newest is None:
                break
            reason = self._run_incarnation(*newest, program, programs)
            if reason is None:
                return "ended"
            spec.say(f"incarnation ended: {reason}")
            assert self._loop is not None
            self._lost_rows = self._loop.at_risk
            self._last_state, self._loop = self._loop.state, None  # frees its arrays on the devices
            fruitless = 0 if self._last_state.finite_pushes else fruitless + 1
            if fruitless >= MAX_FRUITLESS_INCARNATIONS:
                raise ProcessEnded(
                    f"{spec.name} gave up after {MAX_FRUITLESS_INCARNATIONS} incarnations without a finite push: "
                    f"{reason}"
                )
        return "left"

    def _run_incarnation(
        self, joining: Joining, anchor: list[np.ndarray], program: MemberProgram, programs: MemberProgram | Leader
    ) -> str | None:
        """Run one incarnation from a version; return why it ended, None at the end of the run."""
        spec, swarm = self.spec, self.spec.plan.swarm
        incarnation = Incarnation(spec.name, secrets.token_hex(16))
        state = MemberState(
            joining.terms,
            swarm.quantize,
            swarm.overlap,
            incarnation,
            joining.version,
            joining.tokens,
            batch=spec.batch,
        )
        device_state = programs.make_state(anchor)
        spec.say(f"incarnation {incarnation.name[:8]} starts from commit {joining.version}")
        node = NodeThreads(spec.calls)
        self._loop = loop = MemberLoop(
            state,
            device_state,
            COORDINATOR,
            spec.shards,
            time.monotonic,
            anchor=None if swarm.quantize == "plain" else anchor,
            say=spec.say,
            calls_per_shard=spec.calls_per_shard,
            leaving=self._leaving,
            evaluate_every=spec.plan.evaluate_every if spec.evaluates else None,
            on_evaluation=self._metrics.add_evaluation,
            steps_begun=lambda: self._metrics.steps_begun,
            steps_stored=self._metrics.steps_stored,
        )
        loop.leaving = self._leaving  # `leave` may have been called just before
        node.start("train", loop.train())
        node.start("exchange", loop.exchange())
        node.start("heartbeats", loop.heartbeats())
        if not node.drain(HANG_TIMEOUT_S):
            raise RunFailed(f"{spec.name} hangs: its current device action has run for {loop.stalled:.0f} s")
        if node.failure is None or loop.ended:
            if program.validation is not None:
                self._evaluate_last_version(device_state, program, programs)
            return None
        if isinstance(node.failure, ProcessEnded | Unreachable):
            return str(node.failure)
        raise node.failure

    def _evaluate_last_version(
        self, device_state: DeviceState, program: MemberProgram, programs: MemberProgram | Leader
    ) -> None:
        newest = self._fetch_newest(program, programs)
        if newest is None:
            return
        last, fragments = newest
        self.spec.say(f"evaluating commit {last.version}")
        self._evaluates_last = True
        version = device_state.place(fragments)
        device_state.adopt(Adopt("replace", None, last.version, last.state), version, 0.0)
        average = None
        if self.spec.plan.average:
            means = [
                self._call(Call(self._shard(number), "average", (number, last.version)))
                for number in range(len(last.state))
            ]
            average = device_state.place(means)

        def should_stop(allowed_s: float = 0.0) -> bool:
            return self._leaving

        if evaluation := device_state.evaluate(should_stop, average, last.version, last.tokens):
            self._metrics.add_evaluation(evaluation)

    def _fetch_newest(
        self, program: MemberProgram, programs: MemberProgram | Leader
    ) -> tuple[Joining, list[np.ndarray]] | None:
        """Fetch the run's terms and newest version; None if asked to leave.

        Raise InputError if this member's program or data differ from the run's.
        """
        while joining := self._hello(program, programs):
            if program.digests != joining.terms.digests:
                difference = disagreement(program.digests, joining.terms.digests)
                advice = _code_advice(program.digests, joining.terms.digests)
                raise InputError(f"{self.spec.name} cannot join: {difference}{advice}")
            fragments = [
                self._call(Call(self._shard(number), "fetch", (number, digest)))
                for number, digest in enumerate(joining.state)
            ]
            if not any(isinstance(fragment, VersionExpired) for fragment in fragments):
                return joining, fragments
            self.spec.say(f"commit {joining.version} was removed meanwhile; fetching a newer one")
        return None

    def _hello(self, program: MemberProgram, programs: MemberProgram | Leader) -> Joining | None:
        """Greet the coordinator until the run exists, creating its first state if asked; None if asked to leave."""
        while not self._leaving:
            answer = self._call(Call(COORDINATOR, "hello", (self.spec.name,)))
            if isinstance(answer, Joining):
                return answer
            if isinstance(answer, Begin):
                self.spec.say("initializing the model")
                outer = self.spec.plan.outer
                made = [
                    self._call(Call(self._shard(number), "found", (fragment, outer)))
                    for number, fragment in enumerate(programs.initialize())
                ]
                state = tuple(digest for digest, _ in made)
                outer_state = tuple(digest for _, digest in made if digest)
                founding = Founding(program.layout.fragments, chosen_form(program.compiled))
                self._call(Call(COORDINATOR, "found", (founding, state, outer_state, program.digests)))
            time.sleep(RETRY_INTERVAL_S)
        return None

    def _fetch_files(self) -> Path:
        """Return the folder of the run's data files, fetching missing ones from the aggregators."""
        spec = self.spec
        if spec.data:
            files.check(spec.data, spec.plan.files)
            return spec.data
        folder, known = files.cache_folder(spec.plan), spec.plan.files
        missing = files.missing(folder, known)
        remote = {name for name in missing if spec.largest_file is not None and known[name].size > spec.largest_file}
        files.require_room(folder, (known[name] for name in missing if name not in remote))
        for name in missing:
            fetch = partial(self._fetch_file, folder, name)
            if name in remote:
                provide(RemoteFile(folder / name, partial(self._read_ranges, name), fetch))
            else:
                fetch()
        return folder

    def _fetch_file(self, folder: Path, name: str) -> None:
        spec, file = self.spec, self.spec.plan.files[name]
        spec.say(f"fetching {name}, {file.size / 2**20:.1f} MiB")
        starts = range(0, file.size, files.PART_BYTES)
        parts = (self._call(Call(spec.files_from, "file", (name, start, files.PART_BYTES))) for start in starts)
        files.write(folder / name, parts, file.digest)

    def _read_ranges(self, name: str, starts: np.ndarray, length: int) -> np.ndarray:
        return np.asarray(self._call(Call(self.spec.files_from, "ranges", (name, starts, length))))

    def _shard(self, fragment: int) -> str:
        return self.spec.shards[fragment % len(self.spec.shards)]

    def _call(self, call: Call) -> Any:
        while True:
            try:
                answer = self.spec.calls(call)
            except Unreachable:
                time.sleep(RETRY_INTERVAL_S)
            else:
                if isinstance(answer, Refused):
                    raise InputError(f"{self.spec.name} cannot join: {answer.reason}")
                return answer


def _code_advice(ours: Digests, run: Digests) -> str:
    if ours.code == run.code:
        return ""
    return (
        "; tpuswarm or the recipe's file has changed here since the run was started, or differs on this machine: put "
        "it back, or stop the run and resume it with --accept-code"
    )
