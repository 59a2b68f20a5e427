"""Send a tree to hosts: each reports how it differs, and receives the missing files. One round trip if it is equal."""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpuswarm.errors import RunFailed, TpuswarmError
from tpuswarm.remote.connect import MAX_HANDSHAKES, Connections, fan_out, marked, on_host, skip_login_output
from tpuswarm.remote.host import Host, HostUnreachable
from tpuswarm.remote.sync.tree_store import CHUNK_BYTES, Tree, TreeStore

if TYPE_CHECKING:
    import asyncssh

RECEIVE = (Path(__file__).parent / "receive.py").read_bytes()
PROGRAM = f"import sys; exec(compile(sys.stdin.buffer.read({len(RECEIVE)}), 'sync', 'exec'))"
COMMAND = f'exec python3 -I -S -X utf8 -c "{PROGRAM}"'
"""The machine's own Python reads `receive.py` first: nothing of ours is installed there."""
LOST = "was lost in the middle; received files stay, and the same command resumes"
OnBytes = Callable[[Host, int], None]
"""Called with a host, and the bytes of each part that was sent to it."""


@dataclass(frozen=True)
class Change:
    """The changes that make a host's folder equal to the tree."""

    send: tuple[str, ...]
    delete: tuple[str, ...]
    edited: tuple[str, ...]
    """Files among them that were edited or created there."""


@dataclass
class Outcome:
    """The result of a sync for each host."""

    same: list[Host] = field(default_factory=list)
    changed: dict[Host, Change] = field(default_factory=dict)
    failed: dict[Host, TpuswarmError] = field(default_factory=dict)
    kept: dict[Host, tuple[str, ...]] = field(default_factory=dict)
    """Files that were edited there, and stay so."""


async def send(
    connections: Connections,
    hosts: Sequence[Host],
    tree: Tree,
    store: TreeStore,
    confirm: Callable[[Mapping[Host, Change]], bool] = lambda changes: True,
    on_bytes: OnBytes = lambda host, count: None,
    keep_edited: bool = False,
) -> Outcome:
    """Make the tree's folder in the home of each host equal to the tree, except for files that no sync has sent.

    confirm: called with the changes; returns whether to make them. keep_edited: leave files that were edited there.
    A lost connection or a full disk leaves no incomplete file, and the next sync resumes.
    """
    outcome = Outcome()
    sessions: dict[Host, Session] = {}
    turns = asyncio.Semaphore(MAX_HANDSHAKES)  # bounds the memory, and lets first hosts finish early

    async def compare(host: Host) -> Change | None:
        async with turns:
            sessions[host] = Session(host, await connections.to(host))
            return await sessions[host].compare(tree)

    packs: dict[tuple[str, ...], asyncio.Task[IO[bytes]]] = {}

    async def transfer(host: Host) -> None:
        change, kept = outcome.changed[host], outcome.kept.get(host, ())
        paths = tuple(path for path in change.send if path not in kept)
        if paths not in packs:  # packed once for all hosts that lack the same files
            files = [tree.files[path] for path in paths]
            packs[paths] = asyncio.ensure_future(asyncio.to_thread(store.pack, files))
        pack = await asyncio.shield(packs[paths])
        async with turns:
            await sessions[host].transfer(kept, len(paths), pack, on_bytes)

    try:
        for host, change in zip(hosts, await fan_out(hosts, compare), strict=True):
            if isinstance(change, TpuswarmError):
                outcome.failed[host] = change
            elif change is None:
                outcome.same.append(host)
            else:
                outcome.changed[host] = change
                if keep_edited and change.edited:
                    outcome.kept[host] = change.edited
        if not outcome.changed or not confirm(outcome.changed):
            return outcome
        changed = list(outcome.changed)
        for host, error in zip(changed, await fan_out(changed, transfer), strict=True):
            if error is not None:
                outcome.failed[host] = error
                del outcome.changed[host]
        return outcome
    finally:
        for session in sessions.values():
            session.close()
        for task in packs.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                task.result().close()


class Session:
    """A running `receive.py` on one host."""

    def __init__(self, host: Host, connection: "asyncssh.SSHClientConnection"):
        self._host, self._connection = host, connection
        self._process: Any = None

    async def compare(self, tree: Tree) -> Change | None:
        """Return how the host differs; None if it does not. Raise RunFailed."""

        async def start() -> None:
            self._process = await self._connection.create_process(marked(COMMAND), encoding=None)
            self._process.stdin.write(RECEIVE + f"{os.fsencode(tree.name).hex()} {tree.digest}\n".encode())
            await skip_login_output(self._process.stdout)

        await on_host(self._host, start)
        answer = await self._read_answer()
        if answer.get("busy"):
            raise RunFailed(f"{self._host.label}: another sync of {tree.name} is running; try again after it")
        if answer.get("same"):
            return None
        self._write({path: (file.digest, file.kind, file.size) for path, file in tree.files.items()})
        answer = await self._read_answer()
        return Change(tuple(answer["send"]), tuple(answer["delete"]), tuple(answer["edited"]))

    async def transfer(self, kept: Sequence[str], count: int, pack: IO[bytes], on_bytes: OnBytes) -> None:
        """Send the contents of `count` files. Raise RunFailed."""
        sending = asyncio.ensure_future(self._send(kept, pack, on_bytes))
        answering = asyncio.ensure_future(self._read_answer())
        try:
            await asyncio.wait((answering, sending), return_when=asyncio.FIRST_EXCEPTION)
            answer = await answering
        except HostUnreachable:
            raise HostUnreachable(self._host, LOST) from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        if "error" in answer:
            label = self._host.label
            arrived = f"{answer['done']:,} of {count:,} files arrived and stay, and the same command resumes"
            if answer["full"]:
                raise RunFailed(f"{label}: its disk is full; {arrived}. See `tpuswarm exec {label} -- df -h`")
            raise RunFailed(f"{label}: {answer['path']}: {answer['error']}; {arrived}")

    async def _send(self, kept: Sequence[str], pack: IO[bytes], on_bytes: OnBytes) -> None:
        """Send until the end, or until the host stops reading; its answer says why."""
        self._write({"keep": kept})
        offset = 0
        # Other hosts read the same file at their own offsets.
        while not self._connection.is_closed() and (chunk := os.pread(pack.fileno(), CHUNK_BYTES, offset)):
            offset += len(chunk)
            self._process.stdin.write(chunk)
            await self._process.stdin.drain()
            on_bytes(self._host, len(chunk))
        self._process.stdin.write_eof()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._process.stdin.write(json.dumps(values).encode() + b"\n")

    async def _read_answer(self) -> dict[str, Any]:
        line = await on_host(self._host, self._process.stdout.readline)
        try:
            return dict(json.loads(line))
        except (ValueError, TypeError):
            pass
        if self._connection.is_closed():
            raise HostUnreachable(self._host, LOST)
        output = (line + await self._process.stderr.read()).decode(errors="replace").strip().splitlines()
        raise RunFailed(f"{self._host.label}: {output[-1] if output else LOST}")

    def close(self) -> None:
        """End the program; it has written its index already."""
        if self._process is not None:
            self._process.close()
