"""Does the steps that machines need: asks each what holds, and does the rest in order, on all machines at once."""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.remote.connect import Connections, on_host
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host
from tpuswarm.remote.setup.step import CHECKS_S, FOLDER, LIMIT_S, SEND, VERSIONS, Step, script, survey

SKEW = 30.0
"""Seconds that a clock may be off: signed requests bear more, logs that are read together less."""
Told = Callable[[Host, str, str], None]
"""Called with host, step and what is up with it: `begun`, `done`, or words of its own."""
Send = Callable[[Connections, Host, Step], Awaitable[str]]
"""Sends what a step needs; what that was, in words."""


@dataclass
class Outcome:
    """What came of it."""

    done: dict[Host, list[str]] = field(default_factory=dict)
    """The steps that were done, none where all held; of the machines that are set up."""
    failed: dict[Host, TpuswarmError] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    settled: str = ""
    """The versions that all have."""


NOTE = "note: "
"""How a line begins that a step says at once and that is worth reading at the end, too."""


async def set_up(
    connections: Connections,
    wanted: Mapping[Host, Sequence[Step]],
    told: Told = lambda host, step, what: None,
    versions: str = "",
    send: Send | None = None,
    limit_s: float = LIMIT_S,
) -> Outcome:
    """Do what lacks. A machine that fails stops where it is, the others go on; the next time all go on from there.

    versions: of the packages, as machines of the fleet have them already; empty: the first one decides.
    limit_s: seconds after which a step is ended on its machine.
    """
    outcome = Outcome(settled=versions)
    doing = Doing(connections, outcome, told, send, limit_s)
    over = {each.id: asyncio.Event() for steps in wanted.values() for each in steps}

    async def one(host: Host) -> None:
        steps = wanted[host]
        try:
            there, skew, have = await _survey(connections, host, steps)
            if abs(skew) > SKEW:
                outcome.notes.append(
                    f"{host.label}: its clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this "
                    "computer's; its time service was switched on"
                )
                await _run(connections, host, "sudo timedatectl set-ntp true")
            done = outcome.done[host] = []
            for step in steps:
                if step.waits_for in over and there[step.id] != "same":
                    told(host, step.id, "waits for the server")
                    await over[step.waits_for].wait()
                if there[step.id] != "same":
                    told(host, step.id, "begun")
                    have = await doing.step(host, step) or have
                    done.append(step.id)
                    told(host, step.id, "done")
                over[step.id].set()
            told(host, "", "done")
            versions_of[host] = have
        except TpuswarmError as error:
            outcome.done.pop(host, None)
            told(host, "", "failed")
            for step in steps:
                if not any(each.id == step.id for other in wanted if other != host for each in wanted[other]):
                    over[step.id].set()  # nobody else does it: those who wait have to see that it is not there
            outcome.failed[host] = error

    versions_of: dict[Host, str] = {}
    await fan_out(list(wanted), one)
    outcome.notes += doing.notes()
    outcome.settled = outcome.settled or next(iter(versions_of.values()), "")
    _refuse_others(outcome, versions_of)
    return outcome


def _refuse_others(outcome: Outcome, versions: Mapping[Host, str]) -> None:
    """A machine with other versions than the rest is not set up."""
    for host, text in versions.items():
        if text and outcome.settled and text != outcome.settled:
            mine, others = set(text.splitlines()), set(outcome.settled.splitlines())
            differing = ", ".join(sorted(mine - others)[:3]) or "a package less"
            outcome.done.pop(host, None)
            outcome.failed[host] = RunFailed(
                f"{host.label} has other versions than the fleet ({differing} there, "
                f"{', '.join(sorted(others - mine)[:3]) or 'nothing of it'} elsewhere), and hosts that differ give "
                f"wrong sums: `tpuswarm exec {host.label} -- rm {FOLDER}/packages.stamp` and the same command once "
                "more installs what the others have"
            )


async def _survey(connections: Connections, host: Host, steps: Sequence[Step]) -> tuple[dict[str, str], float, str]:
    """What holds of each step, by how many seconds its clock is ahead, and its versions."""
    before = time.time()
    code, said = await _run(connections, host, survey(steps))
    after = time.time()
    words = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
    if code != 0 or "clock" not in words:
        raise RunFailed(f"{host.label}: {_why(said)}")
    if hangs := next((each.id for each in steps if each.id not in words), None):
        raise RunFailed(f"{host.label}: {hangs}: whether it still holds could not be told within {CHECKS_S:.0f} s")
    theirs = float(words["clock"])
    skew = theirs - before if theirs < before else max(0.0, theirs - after)
    return words, skew, base64.b64decode(words.get("versions", "")).decode()


class Doing:
    """Does steps."""

    def __init__(self, connections: Connections, outcome: Outcome, told: Told, send: Send | None, limit_s: float):
        self._connections, self._outcome, self._told, self._send = connections, outcome, told, send
        self._limit_s = limit_s
        self._first = asyncio.Lock()
        self._noted: dict[str, set[str]] = {}

    async def step(self, host: Host, step: Step) -> str:
        """One step; for one that settles something what it came to, else nothing."""
        if not step.settles:
            await self._try(host, step, "")
            return ""
        async with self._first:
            if not self._outcome.settled:
                await self._try(host, step, "")
                self._outcome.settled = await self._versions(host)
                return self._outcome.settled
        await self._try(host, step, self._outcome.settled)
        return await self._versions(host)

    def notes(self) -> list[str]:
        """What steps noted, each once for all hosts of which it is true."""
        return [
            f"{next(iter(hosts)) if len(hosts) == 1 else f'{len(hosts)} hosts'}: {text}"
            for text, hosts in self._noted.items()
        ]

    async def _versions(self, host: Host) -> str:
        return (await _run(self._connections, host, f"cat {VERSIONS}"))[1]

    async def _try(self, host: Host, step: Step, given: str) -> None:
        def line(text: str) -> None:
            if text.startswith(NOTE):
                self._noted.setdefault(text.removeprefix(NOTE), set()).add(host.label)
            else:
                self._told(host, step.id, text)

        text = script(step, given, self._limit_s)
        code, said = await _run(self._connections, host, text, line)
        if code == SEND and self._send is not None:
            self._told(host, step.id, "sending what it lacks")
            self._told(host, step.id, f"{await self._send(self._connections, host, step)} sent")
            code, said = await _run(self._connections, host, text, line)
        if code != 0:
            raise RunFailed(
                f"{host.label}: {step.id}: {_why(said)}; what was done stays, and the same command goes on from there "
                f"(all it said: {FOLDER}/{step.id}.log)"
            )


async def _run(
    connections: Connections, host: Host, text: str, line: Callable[[str], None] | None = None
) -> tuple[int, str]:
    """Give a script to a shell there, by its standard input: nobody sees it among the processes. Exit code, output."""
    connection = await connections.to(host)

    async def work() -> tuple[int, str]:
        process = await connection.create_process("exec bash", encoding=None)
        with suppress(BrokenPipeError):
            process.stdin.write(text.encode())
            process.stdin.write_eof()
        said = []
        async for each in process.stdout:
            said.append(each.decode(errors="replace"))
            if line and (words := said[-1].strip()):
                line(words)
        said.append((await process.stderr.read()).decode(errors="replace"))
        await process.wait_closed()
        if process.exit_status is None or process.exit_status < 0:
            raise ConnectionError("the connection was lost in the middle; the same command goes on from there")
        return process.exit_status, "".join(said)

    return await on_host(host, work)


def _why(said: str) -> str:
    """The line of what a step said that tells a person what to do."""
    lines = [each.strip() for each in said.splitlines() if each.strip()]
    for each in lines:
        if "no space left on device" in each.lower():
            return (
                f"its disk is full ({each[-100:]}): a head's grows with disk_gib, a TPU VM's cannot; put data on a "
                "data disk (data_disk), or in a bucket"
            )
    return lines[-1][-200:] if lines else "it said nothing"
