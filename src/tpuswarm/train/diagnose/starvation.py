"""Devices that wait for data."""

from tpuswarm.train.diagnose.finding import Finding

SHARE = 0.2
"""Of the time of training; less is not worth a sentence."""
STEPS, SECONDS = 20, 2.0
"""A look at the share is over so many steps and so much time at least."""


class Starvation:
    """Looks at the share of training that was spent waiting for the next batch."""

    def __init__(self) -> None:
        self._said = False
        self.begin(0, 0.0, 0.0)

    def look(self, step: int, waited: float, trained: float) -> Finding | None:
        """At the end of a step: seconds waited for data and seconds of training so far, the waiting included."""
        steps, wait, whole = step - self._step, waited - self._waited, trained - self._trained
        if self._said or steps < STEPS or whole < SECONDS:
            return None
        first, last = self._step + 1, step
        self.begin(step, waited, trained)
        if wait < SHARE * whole:
            return None
        self._said = True
        return Finding(
            "starvation",
            f"the devices waited for data {wait / whole:.0%} of the time in steps {first} to {last} "
            f"({wait / steps:.3f} of {whole / steps:.3f} s per step): the source's rows() is slower than a step; "
            "prepare its rows before training (a memory-mapped file), or build them with fewer, larger NumPy calls",
            {"first_step": first, "last_step": last, "wait_s": wait, "window_s": whole},
        )

    def begin(self, step: int, waited: float, trained: float) -> None:
        """Begin to look after `step`."""
        self._step, self._waited, self._trained = step, waited, trained
