"""Run N SSH servers with real processes on ports of loopback: `python -m benchmarks.ssh_servers DIR N`."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import asyncssh


async def forward(reader: Any, writer: Any) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def serve(folder: Path, count: int) -> None:
    """Serve until killed. Writes new keys to `host` and `user`, and the ports to `ready`."""
    host, user = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    for key, name in ((host, "host"), (user, "user")):
        key.write_private_key(str(folder / name))
        key.write_public_key(str(folder / f"{name}.pub"))
        (folder / name).chmod(0o600)

    async def run(process: Any) -> None:
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            "/bin/bash", "-c", process.command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        await process.redirect(stdin=child.stdin)
        await asyncio.gather(forward(child.stdout, process.stdout), forward(child.stderr, process.stderr))
        code = await child.wait()
        process.exit(code)

    servers = [
        await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[host], authorized_client_keys=str(folder / "user.pub"),
            process_factory=run, gss_host=None, encoding=None, line_editor=False, compression_algs=None,
        )
        for _ in range(count)
    ]  # fmt: skip
    (folder / "ready.new").write_text(json.dumps([server.get_port() for server in servers]))
    (folder / "ready.new").rename(folder / "ready")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), int(sys.argv[2])))
