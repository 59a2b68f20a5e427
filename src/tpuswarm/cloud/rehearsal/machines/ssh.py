"""The SSH server of a machine: keys from its metadata, real processes, sftp, scp, forwarding."""

import asyncio
import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncssh

from tpuswarm.cloud.rehearsal.machines.root import SSH_PORT, Root

Keys = Callable[[], str]
"""The value of the metadata key `ssh-keys` now: a line `USER:KEY` for each."""
ON_TERMINAL = 'exec "$@" <>"$0" >&0 2>&0'
"""In a new session, the first terminal that is opened becomes the session's own; tmux also writes to its input."""

LINGER = 5.0
"""Seconds for which the last words of a command on a terminal wait for a client that takes nothing."""


def host_key(root: Root) -> asyncssh.SSHKey:
    """The machine's, made when it is asked for first."""
    if not root.host_key.exists():
        key = asyncssh.generate_private_key("ssh-ed25519")
        root.host_key.touch(0o600)
        root.host_key.write_bytes(key.export_private_key())
    return asyncssh.read_private_key(str(root.host_key))


async def listen(
    root: Root,
    address: str,
    key: asyncssh.SSHKey,
    keys: Keys,
    storage: str,
    server: Callable[[Keys], "Server"] | None = None,
    on: Callable[[], bool] = lambda: True,
) -> asyncssh.SSHAcceptor:
    """A server at port 2222 of an address. `server`: what knows its connections; None: a `Server`.

    on: whether the machine is; a connection to one that is off breaks as soon as it is used.
    """

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        if not on():
            process.get_extra_info("connection").abort()
            return
        await _run(process, root, storage)

    return await asyncssh.listen(
        address,
        SSH_PORT,
        server_host_keys=[key],
        server_factory=lambda: (server or Server)(keys),
        process_factory=run,
        sftp_factory=lambda channel: Files(channel, root),
        allow_scp=True,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        agent_forwarding=False,
        encoding=None,
        line_editor=False,
        compression_algs=None,
    )


class Server(asyncssh.SSHServer):
    """Who may come in, and what is forwarded: all of it, as on a machine of one's own."""

    def __init__(self, keys: Keys):
        self._keys = keys

    def public_key_auth_supported(self) -> bool:
        """Nothing else is."""
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        """Whether the metadata has this key for this user."""
        wanted = key.public_data
        for line in self._keys().splitlines():
            user, _, text = line.strip().partition(":")
            if user == username:
                try:
                    if asyncssh.import_public_key(text).public_data == wanted:
                        return True
                except asyncssh.KeyImportError:
                    continue  # as sshd does with a line that is no key
        return False

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        """-L."""
        return True

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        """-R."""
        return True

    def unix_connection_requested(self, dest_path: str) -> bool:
        """-L of a socket."""
        return True

    def unix_server_requested(self, listen_path: str) -> bool:
        """-R of a socket."""
        return True


class Files(asyncssh.SFTPServer):
    """Relative paths begin at the user's home, not where the cloud's server was started."""

    def __init__(self, channel: Any, root: Root):
        super().__init__(channel)
        self._home = os.fsencode(root.home(channel.get_extra_info("username")))

    def exit(self) -> None:
        """OpenSSH's scp takes a session without an exit status for one that failed."""
        self.channel.exit(0)

    def map_path(self, path: bytes) -> bytes:
        """Where it lies."""
        return os.path.join(self._home, path)  # noqa: PTH118


async def _run(process: asyncssh.SSHServerProcess[bytes], root: Root, storage: str) -> None:
    user = process.get_extra_info("username")
    home = root.home(user)
    environment = root.environment(user, storage)
    environment |= {name: value for name, value in process.env.items() if name == "LANG" or name.startswith("LC_")}
    words = ["/bin/bash", "-c", process.command] if process.command else ["/bin/bash", "-l"]
    try:
        if process.term_type:
            environment["TERM"] = process.term_type
            code = await _on_terminal(process, words, environment, home)
        else:
            code = await _plainly(process, words, environment, home)
    except OSError as error:
        process.stderr.write(f"the machine cannot start a process: {error}\n".encode())
        code = 255
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)
    await process.wait_closed()


async def _plainly(process: Any, words: list[str], environment: Mapping[str, str], home: Path) -> int:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=home, start_new_session=True
    )
    # Not by `redirect`: a child that ends without having read all breaks the whole connection, and what is under way as
    # one of its outputs ends is lost.
    process.channel.get_connection().create_task(_feed(process.stdin, child))
    await asyncio.gather(_pass(child, 1, process.stdout), _pass(child, 2, process.stderr))
    return await child.wait()


async def _feed(reader: Any, child: Any) -> None:
    """Pass on what a process is to read, to the end of the channel: what it does not take is nobody's."""
    takes = True
    try:
        while data := await _read(reader):
            try:
                if takes:
                    child.stdin.write(data)
                    await child.stdin.drain()
            except OSError:
                takes = False
    finally:
        child.stdin.close()


async def _read(reader: Any) -> bytes:
    """Some of a channel's input; nothing at its end."""
    while True:
        try:
            return await reader.read(1 << 16)
        except (asyncssh.SignalReceived, asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
            continue  # OpenSSH sends none
        except (OSError, asyncssh.Error):
            return b""


async def _pass(child: Any, number: int, writer: Any) -> None:
    """Pass on what a process writes, as fast as it is taken; where nobody takes it any more, its pipe is broken."""
    reader = child.stdout if number == 1 else child.stderr
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except (OSError, asyncssh.Error):
        child._transport.get_pipe_transport(number).close()


async def _on_terminal(process: Any, words: list[str], environment: Mapping[str, str], home: Path) -> int:
    ours, theirs = os.openpty()
    width, height, *_ = process.term_size
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height or 24, width or 80, 0, 0))
    # It has the terminal from its first moment, so that ours does not look shut, and opens it once more as its own.
    child = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", ON_TERMINAL, os.ttyname(theirs), *words),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=home,
        start_new_session=True,
    )
    os.close(theirs)
    process.set_redirect_pid(child.pid)
    await process.redirect(stdin=os.dup(ours), stdout=ours)
    code = await child.wait()
    process.set_redirect_pid(None)
    # Not until the terminal's end: what it has left running there may hold that open for hours.
    draining = asyncio.ensure_future(process.stdout.drain())
    end = time.monotonic() + LINGER
    while not draining.done() and _has_more(ours) and time.monotonic() < end:
        await asyncio.sleep(0.01)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)  # a client that is gone is no error of the command's
    return code


def _has_more(terminal: int) -> bool:
    """Whether something that was written there has not been read yet."""
    ready = select.poll()
    ready.register(terminal, select.POLLIN)
    return any(event & select.POLLIN for _, event in ready.poll(0))
