"""Brings a tree to hosts: each says what it has of it, and gets what it lacks; unchanged, that is one round trip."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.remote.connect import AT_ONCE, Connections, on_host
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import Host, NoWay
from tpuswarm.remote.sync.tree import CHUNK, Change, KeptTree, Tree, difference

if TYPE_CHECKING:
    import asyncssh

RECEIVE = (Path(__file__).parent / "receive.py").read_bytes()
PROGRAM = f"import sys; exec(compile(sys.stdin.buffer.read({len(RECEIVE)}), 'sync', 'exec'))"
COMMAND = f'exec python3 -I -S -X utf8 -c "{PROGRAM}"'
"""The machine's own Python, which reads first what it is to do: nothing of ours has to be there."""
LOST = "was lost in the middle: the files that arrived stay, and the same command goes on from there"
Told = Callable[[Host, int], None]
"""Called with each part that was sent: to whom, and its bytes."""


@dataclass
class Outcome:
    """What came of it, for each host that was asked."""

    same: list[Host] = field(default_factory=list)
    changed: dict[Host, Change] = field(default_factory=dict)
    failed: dict[Host, TpuswarmError] = field(default_factory=dict)
    left: dict[Host, tuple[str, ...]] = field(default_factory=dict)
    """Files that were changed there, and stay as they are."""


async def send(
    connections: Connections,
    hosts: Sequence[Host],
    tree: Tree,
    kept: KeptTree,
    agree: Callable[[Mapping[Host, Change]], None] = lambda changes: None,
    told: Told = lambda host, count: None,
    at_once: int = AT_ONCE,
    leaves: bool = False,
) -> Outcome:
    """Make the folder of the tree's name, in the home of each host, what the tree is. What was not sent stays there.

    agree: called with what will happen, before anything does; raises where a person says no. Nothing is half a file
    after a lost connection or a full disk, and the next time goes on from there.
    leaves: what was changed there stays as it is, where no person is asked.
    """
    outcome, sessions = Outcome(), {}

    async def compare(host: Host) -> "Session":
        session = Session(host, await connections.to(host))
        await session.compare(tree)
        return session

    try:
        for host, found in zip(hosts, await fan_out(hosts, compare, at_once), strict=True):
            if isinstance(found, TpuswarmError):
                outcome.failed[host] = found
                continue
            sessions[host] = found
            if leaves and found.leave():
                outcome.left[host] = found.left
            if found.change is None:
                outcome.same.append(host)
            else:
                outcome.changed[host] = found.change
        if not outcome.changed:
            return outcome
        agree(outcome.changed)
        packs = Packs(tree, kept)
        try:
            lacking = list(outcome.changed)
            done = await fan_out(lacking, lambda host: sessions[host].bring(tree, packs, told), at_once)
        finally:
            packs.close()
        for host, error in zip(lacking, done, strict=True):
            if error is not None:
                outcome.failed[host] = error
                del outcome.changed[host]
        return outcome
    finally:
        for session in sessions.values():
            session.close()


class Packs:
    """What is in the files that are sent, packed once for all hosts that lack the same."""

    def __init__(self, tree: Tree, kept: KeptTree):
        self._tree, self._kept = tree, kept
        self._made: dict[tuple[str, ...], asyncio.Task[IO[bytes]]] = {}

    async def of(self, paths: tuple[str, ...]) -> IO[bytes]:
        """Of these files."""
        if paths not in self._made:
            files = [self._tree.files[path] for path in paths]
            self._made[paths] = asyncio.ensure_future(asyncio.to_thread(self._kept.pack, files))
        return await asyncio.shield(self._made[paths])

    def close(self) -> None:
        """They are not needed any more."""
        for task in self._made.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()


class Session:
    """The program on one host that takes a tree."""

    def __init__(self, host: Host, connection: "asyncssh.SSHClientConnection"):
        self._host, self._connection = host, connection
        self._process: asyncssh.SSHClientProcess[bytes] | None = None
        self.change: Change | None = None
        """What lacks there; None: nothing."""
        self.left: tuple[str, ...] = ()
        """What was changed there and stays so."""

    async def compare(self, tree: Tree) -> None:
        """Ask what is there. Raises RunFailed."""

        async def ask() -> None:
            self._process = await self._connection.create_process(COMMAND, encoding=None)
            self._write(RECEIVE + f"{os.fsencode(tree.name).hex()} {tree.digest}\n".encode())

        await on_host(self._host, ask)
        answer = await self._answer()
        if answer.get("busy"):
            raise RunFailed(f"{self._host.label}: another sync of {tree.name} to it is under way; try again after it")
        if not answer.get("same"):
            there = {path: (each[0], each[1]) for path, each in answer["files"].items()}
            edited = list(answer["edited"])
            if unsent := [path for path in tree.files if path not in there]:
                self._write(_line(look=unsent))
                made = (await self._answer())["files"]
                there |= {path: (each[0], each[1]) for path, each in made.items()}
                edited += made
            self.change = difference(tree, there, edited)

    def leave(self) -> bool:
        """Let what was changed there be as it is; whether there is any."""
        if self.change is None or not self.change.edited:
            return False
        self.left = self.change.edited
        send = tuple(each for each in self.change.send if each not in self.left)
        delete = tuple(each for each in self.change.delete if each not in self.left)
        self.change = Change(send, delete, ()) if send or delete else None
        return True

    async def bring(self, tree: Tree, packs: Packs, told: Told) -> TpuswarmError | None:
        """Send what lacks; what went wrong, in words."""
        assert self.change is not None
        pack = await packs.of(self.change.send)
        files = [(path, tree.files[path]) for path in self.change.send]
        answering = asyncio.ensure_future(self._answer())
        sending = asyncio.ensure_future(
            self._send(_line(delete=self.change.delete, send=files, leave=self.left), pack, told)
        )
        try:
            await asyncio.wait((answering, sending), return_when=asyncio.FIRST_EXCEPTION)
            answer = await answering
        except NoWay:
            return NoWay(self._host, LOST)
        except TpuswarmError as error:
            return error
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if "error" in answer:
            return RunFailed(self._said(answer, len(files)))
        return None

    async def _send(self, first: bytes, pack: IO[bytes], told: Told) -> None:
        """Until all is sent or the other end has had enough; why is in its answer."""
        assert self._process is not None
        self._write(first)
        at = 0
        while not self._connection.is_closed() and (
            chunk := os.pread(pack.fileno(), CHUNK, at)
        ):  # others read the same file at other places
            at += len(chunk)
            self._write(chunk)
            await self._process.stdin.drain()
            told(self._host, len(chunk))
        self._process.stdin.write_eof()

    def _write(self, data: bytes) -> None:
        assert self._process is not None
        self._process.stdin.write(data)

    async def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        process = self._process

        async def read() -> bytes:
            return await process.stdout.readline()

        line = await on_host(self._host, read)
        try:
            answer = json.loads(line)
            assert isinstance(answer, dict)
        except (ValueError, AssertionError):
            raise await self._broken(line) from None
        return answer

    async def _broken(self, line: bytes) -> TpuswarmError:
        """Why there is no answer."""
        assert self._process is not None
        if self._connection.is_closed():
            return NoWay(self._host, LOST)
        said = (line + await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        why = said[-1] if said else LOST
        return RunFailed(f"{self._host.label}: {why}")

    def _said(self, answer: Mapping[str, Any], count: int) -> str:
        there = f"{answer['done']:,} of {count:,} files have arrived and stay; the same command goes on from there"
        if answer["full"]:
            return f"{self._host.label}: its disk is full: {there}, after `tpuswarm exec {self._host.label} -- df -h`"
        return f"{self._host.label}: {answer['path']}: {answer['error']}; {there}"

    def close(self) -> None:
        """It is not needed any more; what it has taken it has noted by itself."""
        if self._process is not None:
            self._process.close()


def _line(**what: Any) -> bytes:
    return json.dumps(what).encode() + b"\n"
