"""A slow, cut connection on loopback: a TCP proxy with a delay, a rate limit, and a switch."""

import asyncio
import threading
from contextlib import suppress


class Link:
    """Passes connections on to a port of this machine."""

    def __init__(self, to_port: int, one_way_s: float, bytes_per_s: float):
        """bytes_per_s: of all connections together, in each direction."""
        self._to_port, self._one_way_s, self._bytes_per_s = to_port, one_way_s, bytes_per_s
        self._loop = asyncio.new_event_loop()
        self._server: asyncio.Server
        self._open = asyncio.Event()
        self._open.set()
        self._free = {"up": 0.0, "down": 0.0}
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        started.wait()
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Let nothing through, and close nothing, until `mend`."""
        self._loop.call_soon_threadsafe(self._open.clear)

    def mend(self) -> None:
        self._loop.call_soon_threadsafe(self._open.set)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self, started: threading.Event) -> None:
        async def listen() -> None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
            started.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
        await asyncio.gather(self._pass_on("up", reader, back), self._pass_on("down", there, writer))

    async def _pass_on(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**14):
                now = self._loop.time()
                self._free[way] = max(self._free[way], now) + len(data) / self._bytes_per_s
                await asyncio.sleep(self._free[way] - now + self._one_way_s)
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
