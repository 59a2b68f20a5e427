"""A machine's SSH server: keys from its metadata, real processes, sftp, scp, forwarding."""

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
from tpuswarm.train.process.atomic import write_atomically

Keys = Callable[[], str]
"""Returns the metadata value `ssh-keys`: lines `USER:KEY`."""
ON_TERMINAL = 'exec "$@" <>"$0" >&0 2>&0'
"""A new session gets the first terminal that it opens; tmux also writes to its input."""
DRAIN_TIMEOUT_S = 5.0
"""How long a command's last output on a terminal waits for a slow client."""


def host_key(root: Root) -> asyncssh.SSHKey:
    if not root.host_key.exists():
        key = asyncssh.generate_private_key("ssh-ed25519")
        write_atomically(root.host_key, key.export_private_key(), 0o600)
    return asyncssh.read_private_key(str(root.host_key))


async def listen(
    root: Root,
    address: str,
    key: asyncssh.SSHKey,
    keys: Keys,
    storage: str,
    server: Callable[[Keys], "Server"] | None = None,
    is_on: Callable[[], bool] = lambda: True,
) -> asyncssh.SSHAcceptor:
    """Start a server at port 2222 of an address. Each connection gets a `server(keys)`, by default a Server.

    Connections to a machine that is not on break at their first process.
    """

    async def run(process: asyncssh.SSHServerProcess[bytes]) -> None:
        if not is_on():
            process.get_extra_info("connection").abort()
            return
        await _run(process, root, storage)

    return await asyncssh.listen(
        address,
        SSH_PORT,
        server_host_keys=[key],
        server_factory=lambda: (server or Server)(keys),
        process_factory=run,
        sftp_factory=lambda channel: SftpServer(channel, root),
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
    """Accepts keys of the metadata, and every forwarding."""

    def __init__(self, keys: Keys):
        self._keys = keys

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        for line in self._keys().splitlines():
            user, _, text = line.strip().partition(":")
            if user == username:
                try:
                    if asyncssh.import_public_key(text).public_data == key.public_data:
                        return True
                except asyncssh.KeyImportError:
                    continue  # sshd skips invalid lines, too
        return False

    def connection_requested(self, dest_host: str, dest_port: int, orig_host: str, orig_port: int) -> bool:
        return True

    def server_requested(self, listen_host: str, listen_port: int) -> bool:
        return True

    def unix_connection_requested(self, dest_path: str) -> bool:
        return True

    def unix_server_requested(self, listen_path: str) -> bool:
        return True


class SftpServer(asyncssh.SFTPServer):
    """Relative paths begin at the user's home, not in the server's working folder."""

    def __init__(self, channel: Any, root: Root):
        super().__init__(channel)
        self._home = os.fsencode(root.home(channel.get_extra_info("username")))

    def exit(self) -> None:
        """Send an exit status: without one, OpenSSH's scp fails."""
        self.channel.exit(0)

    def map_path(self, path: bytes) -> bytes:
        return os.path.join(self._home, path)  # noqa: PTH118


async def _run(process: asyncssh.SSHServerProcess[bytes], root: Root, storage: str) -> None:
    user = process.get_extra_info("username")
    home = root.home(user)
    environment = root.environment(user, storage)
    environment |= {name: value for name, value in process.env.items() if name == "LANG" or name.startswith("LC_")}
    environment["SSH_CLIENT"] = "127.0.0.1 22 22"  # Debian's bash then reads ~/.bashrc before a command
    words = ["/bin/bash", "-c", process.command] if process.command else ["/bin/bash", "-l"]
    try:
        if process.term_type:
            environment["TERM"] = process.term_type
            code = await _on_terminal(process, words, environment, home)
        else:
            code = await _on_pipes(process, words, environment, home)
    except OSError as error:
        process.stderr.write(f"the machine cannot start a process: {error}\n".encode())
        code = 255
    if code < 0:
        process.exit_with_signal(signal.Signals(-code).name.removeprefix("SIG"))
    else:
        process.exit(code)
    await process.wait_closed()


async def _on_pipes(process: Any, words: list[str], environment: Mapping[str, str], home: Path) -> int:
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment, cwd=home, start_new_session=True
    )
    # asyncssh's `redirect` breaks the connection if a child ends before reading all, and loses output.
    process.channel.get_connection().create_task(_feed(process.stdin, child))
    await asyncio.gather(_pass(child, 1, process.stdout), _pass(child, 2, process.stderr))
    return await child.wait()


async def _feed(reader: Any, child: Any) -> None:
    """Pass a channel's input to a process, and read on after the process stops reading."""
    is_open = True
    try:
        while data := await _read(reader):
            try:
                if is_open:
                    child.stdin.write(data)
                    await child.stdin.drain()
            except OSError:
                is_open = False
    finally:
        child.stdin.close()


async def _read(reader: Any) -> bytes:
    """Return some input of a channel; empty at its end."""
    while True:
        try:
            return await reader.read(1 << 16)
        except (asyncssh.SignalReceived, asyncssh.BreakReceived, asyncssh.TerminalSizeChanged):
            continue  # OpenSSH sends none
        except (OSError, asyncssh.Error):
            return b""


async def _pass(child: Any, number: int, writer: Any) -> None:
    """Pass a process's output to a channel; close the pipe when the channel is gone."""
    reader = child.stdout if number == 1 else child.stderr
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except (OSError, asyncssh.Error):
        child._transport.get_pipe_transport(number).close()


async def _on_terminal(process: Any, words: list[str], environment: Mapping[str, str], home: Path) -> int:
    master, slave = os.openpty()
    width, height, *_ = process.term_size
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height or 24, width or 80, 0, 0))
    # The child inherits the terminal, so that ours is never closed, and opens it again as its session's own.
    child = await asyncio.create_subprocess_exec(
        *("/bin/sh", "-c", ON_TERMINAL, os.ttyname(slave), *words),
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment,
        cwd=home,
        start_new_session=True,
    )
    os.close(slave)
    process.set_redirect_pid(child.pid)
    await process.redirect(stdin=os.dup(master), stdout=master)
    code = await child.wait()
    process.set_redirect_pid(None)
    # Do not wait for the terminal's end: background processes may hold it open for hours.
    draining = asyncio.ensure_future(process.stdout.drain())
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    while not draining.done() and _has_output(master) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)  # the client may be gone
    return code


def _has_output(terminal: int) -> bool:
    ready = select.poll()
    ready.register(terminal, select.POLLIN)
    return any(event & select.POLLIN for _, event in ready.poll(0))
