"""How long this machine stays: a notebook's session ends after some hours, without notice."""

import time
from collections.abc import Callable, Mapping

import psutil  # type: ignore[import-untyped]

from tpuswarm.config.formatting import format_age
from tpuswarm.swarm.engines.notice import NOTICE_S

WARNING_S = 900.0
LEAVE_S = 2 * NOTICE_S
"""A member with a stated end leaves so long before it."""
LIMITS = {"COLAB_RELEASE_TAG": ("Colab", (12,)), "KAGGLE_KERNEL_RUN_TYPE": ("Kaggle", (9, 12))}
"""Variables that these services set, and the hours after which they end sessions: Kaggle earlier if it has a TPU.

As their users reported by 2026-11-30; neither service was asked.
"""


class Session:
    """The ends of this machine's time that are known."""

    def __init__(
        self,
        hours: float | None,
        environ: Mapping[str, str],
        began: Callable[[], float],
        clock: Callable[[], float] = time.time,
    ):
        """hours: that the machine stays from now on, if somebody said so; began: returns its container's start."""
        self._now, self._leave_at = clock, None if hours is None else clock() + 3600 * hours - LEAVE_S
        self._warnings: list[tuple[float, str]] = []
        """Ends, and what to say before each."""
        if hours is not None:
            said = f"the {hours:g} hours of --hours end in {{left}}; the last work is pushed before"
            self._warnings.append((clock() + 3600 * hours, said))
            return
        for variable, (service, limits) in LIMITS.items():
            for limit in limits if variable in environ else ():
                said = (
                    f"{service} may end this session in {{left}}, {limit} h after its start: interrupt the cell first"
                )
                self._warnings.append((began() + 3600 * limit, said))

    def due_warning(self) -> str | None:
        """Return a warning once, when its time has come."""
        now = self._now()
        for end, said in self._warnings:
            if now > end - WARNING_S:
                self._warnings.remove((end, said))
                return said.format(left=format_age(end - now)) if now < end else None
        return None

    @property
    def must_leave(self) -> bool:
        return self._leave_at is not None and self._now() > self._leave_at


def container_start() -> float:
    """Return when this container or machine started, in seconds since 1970."""
    return float(psutil.Process(1).create_time())
