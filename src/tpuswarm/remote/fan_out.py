"""The same on many hosts at once."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from tpuswarm.errors import TpuswarmError
from tpuswarm.remote.host import Host, Silent

T = TypeVar("T")


async def fan_out(
    hosts: Sequence[Host],
    work: Callable[[Host], Awaitable[T]],
    at_once: int | None = None,
    time_out_s: float | None = None,
) -> list[T | TpuswarmError]:
    """What came of `work` for each host, in their order: its value, or our own error where it failed.

    `at_once`: how many are worked on at the same time; None: all. A host that is not done `time_out_s` after its turn
    came is given up, and named; the others finish.
    """
    turn = asyncio.Semaphore(at_once or max(len(hosts), 1))

    async def one(host: Host) -> T | TpuswarmError:
        async with turn:
            limit = asyncio.timeout(time_out_s)
            try:
                async with limit:
                    return await work(host)
            except TimeoutError:
                if not limit.expired():
                    raise
                return Silent(host, time_out_s or 0.0, "was not done")
            except TpuswarmError as error:
                return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(each)) for each in hosts]
    return [each.result() for each in tasks]
