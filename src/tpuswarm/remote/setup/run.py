"""Set machines up, all at once: check their steps, and run new, changed and undone ones."""

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.remote.connect import Connections, fan_out, marked, on_host, skip_login_output
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.step import (
    CHECKS_TIMEOUT_S,
    FOLDER,
    NEEDS_FILE,
    STEP_TIMEOUT_S,
    VERSIONS,
    Send,
    Step,
    script,
    survey,
)

MAX_CLOCK_SKEW_S = 30.0
"""Signed requests allow more, logs of several machines less."""
NOTE = "note: "
"""Begins a line of a step's output that is repeated at the end."""
OnProgress = Callable[[Host, str, str], None]
"""Called with a host, a step (empty: the whole host) and its state: `begun`, `done`, `failed`, or a line of output."""


@dataclass
class Outcome:
    """The result of a set-up."""

    done: dict[Host, list[str]] = field(default_factory=dict)
    """Machines that are set up, each with the steps that ran."""
    failed: dict[Host, TpuswarmError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    versions: str = ""
    """The packages of all machines, with versions."""


async def set_up(
    connections: Connections,
    steps_by_host: Mapping[Host, Sequence[Step]],
    on_progress: OnProgress = lambda host, step, state: None,
    versions: str = "",
    send: Send | None = None,
    timeout_s: float = STEP_TIMEOUT_S,
) -> Outcome:
    """Run the missing steps. A machine stops at its first failed step; the next set-up resumes there.

    versions: of the fleet's packages; empty: the first machine decides. timeout_s: for each step.
    """
    outcome = Outcome(versions=versions)
    runner = StepRunner(connections, outcome, on_progress, send, timeout_s)
    finished = {step.id: asyncio.Event() for steps in steps_by_host.values() for step in steps}
    versions_by_host: dict[Host, str] = {}

    async def set_up_host(host: Host) -> None:
        steps = steps_by_host[host]
        try:
            states, skew_s, installed = await _survey(connections, host, steps)
            if abs(skew_s) > MAX_CLOCK_SKEW_S:
                direction = "ahead of" if skew_s > 0 else "behind"
                outcome.notes.append(
                    f"{host.label}: its clock is {abs(skew_s):.0f} s {direction} this computer's; its time service was "
                    "switched on"
                )
                await _run_script(connections, host, "sudo timedatectl set-ntp true")
            done = outcome.done[host] = []
            for step in steps:
                if states[step.id] != "same":
                    if step.waits_for in finished:
                        on_progress(host, step.id, "waits for the server")
                        await finished[step.waits_for].wait()
                    on_progress(host, step.id, "begun")
                    installed = await runner.run(host, step) or installed
                    done.append(step.id)
                    on_progress(host, step.id, "done")
                finished[step.id].set()
            on_progress(host, "", "done")
            versions_by_host[host] = installed
        except TpuswarmError as error:
            outcome.done.pop(host, None)
            on_progress(host, "", "failed")
            others = {step.id for other in steps_by_host if other != host for step in steps_by_host[other]}
            for step in steps:
                if step.id not in others:
                    finished[step.id].set()  # no other machine runs it; waiting machines then fail by themselves
            outcome.failed[host] = error

    await fan_out(list(steps_by_host), set_up_host)
    outcome.notes += runner.notes()
    outcome.versions = outcome.versions or next(iter(versions_by_host.values()), "")
    _refuse_other_versions(outcome, versions_by_host)
    return outcome


def _refuse_other_versions(outcome: Outcome, versions_by_host: Mapping[Host, str]) -> None:
    """Fail machines whose packages differ from the fleet's."""
    for host, versions in versions_by_host.items():
        if versions and outcome.versions and versions != outcome.versions:
            own, fleet = set(versions.splitlines()), set(outcome.versions.splitlines())
            there = ", ".join(sorted(own - fleet)[:3]) or "nothing more"
            elsewhere = ", ".join(sorted(fleet - own)[:3]) or "nothing more"
            outcome.done.pop(host, None)
            outcome.failed[host] = RunFailed(
                f"the packages of {host.label} differ from the fleet's ({there} there, {elsewhere} elsewhere), so "
                f"results would differ. To install the fleet's: `tpuswarm exec {host.label} -- rm "
                f"{FOLDER}/packages.stamp`, then this command again"
            )


async def _survey(connections: Connections, host: Host, steps: Sequence[Step]) -> tuple[dict[str, str], float, str]:
    """Return the states of the steps, how many seconds the clock is ahead, and the installed versions."""
    before = time.time()
    code, output = await _run_script(connections, host, survey(steps))
    after = time.time()
    answers = dict(line.split(" ", 1) for line in output.splitlines() if " " in line)
    if code != 0 or "clock" not in answers:
        raise RunFailed(f"{host.label}: {_describe_failure(output)}")
    if hung := next((step.id for step in steps if step.id not in answers), None):
        raise RunFailed(f"{host.label}: {hung}: its check did not end within {CHECKS_TIMEOUT_S:.0f} s")
    clock = float(answers["clock"])
    skew_s = clock - before if clock < before else max(0.0, clock - after)
    return answers, skew_s, base64.b64decode(answers.get("versions", "")).decode()


class StepRunner:
    """Runs steps on hosts."""

    def __init__(
        self, connections: Connections, outcome: Outcome, on_progress: OnProgress, send: Send | None, timeout_s: float
    ):
        self._connections, self._outcome, self._on_progress, self._send = connections, outcome, on_progress, send
        self._timeout_s = timeout_s
        self._deciding = asyncio.Lock()
        self._hosts_by_note: dict[str, set[str]] = {}

    async def run(self, host: Host, step: Step) -> str:
        """Run a step; return the installed versions after a step that installs packages, else nothing."""
        if not step.decides_versions:
            await self._run(host, step, "")
            return ""
        async with self._deciding:
            if not self._outcome.versions:
                await self._run(host, step, "")
                self._outcome.versions = await self._read_versions(host)
                return self._outcome.versions
        await self._run(host, step, self._outcome.versions)
        return await self._read_versions(host)

    def notes(self) -> list[str]:
        """Return the notes in the steps' output, each once with its hosts."""
        return [
            f"{next(iter(hosts)) if len(hosts) == 1 else f'{len(hosts)} hosts'}: {note}"
            for note, hosts in self._hosts_by_note.items()
        ]

    async def _read_versions(self, host: Host) -> str:
        return (await _run_script(self._connections, host, f"cat {VERSIONS}"))[1]

    async def _run(self, host: Host, step: Step, versions: str) -> None:
        def on_line(line: str) -> None:
            if line.startswith(NOTE):
                self._hosts_by_note.setdefault(line.removeprefix(NOTE), set()).add(host.label)
            else:
                self._on_progress(host, step.id, line)

        text = script(step, versions, self._timeout_s)
        code, output = await _run_script(self._connections, host, text, on_line)
        if code == NEEDS_FILE and self._send is not None:
            self._on_progress(host, step.id, "sending a file")
            self._on_progress(host, step.id, f"{await self._send(self._connections, host, step)} sent")
            code, output = await _run_script(self._connections, host, text, on_line)
        if code != 0:
            raise RunFailed(
                f"{host.label}: {step.id}: {_describe_failure(output)}; finished steps stay, and the same command "
                f"resumes (full log: {FOLDER}/{step.id}.log)"
            )


async def _run_script(
    connections: Connections, host: Host, text: str, on_line: Callable[[str], None] = lambda line: None
) -> tuple[int, str]:
    """Run a script, sent as a shell's input so that no process list shows it. Return exit code and output."""
    connection = await connections.to(host)

    async def run() -> tuple[int, str]:
        process = await connection.create_process(marked("exec bash"), encoding=None)
        with suppress(BrokenPipeError):
            process.stdin.write(text.encode())
            process.stdin.write_eof()
        await skip_login_output(process.stdout)
        output = []
        async for line in process.stdout:
            output.append(line.decode(errors="replace"))
            if stripped := output[-1].strip():
                on_line(stripped)
        output.append((await process.stderr.read()).decode(errors="replace"))
        await process.wait_closed()
        if process.exit_status is None or process.exit_status < 0:
            raise ConnectionError("the connection was lost in the middle; the same command resumes")
        return process.exit_status, "".join(output)

    return await on_host(host, run)


def _describe_failure(output: str) -> str:
    """Return the line of a step's output that helps most."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for line in lines:
        if "no space left on device" in line.lower():
            return (
                f"its disk is full ({line[-100:]}): a head's grows with disk_gib, a TPU VM's cannot; put data on a "
                "data disk (data_disk), or in a bucket"
            )
    return lines[-1][-200:] if lines else "no message"
