"""Flags of XLA and libtpu: which apply to a program on a machine, and how a shell passes them."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tpuswarm.plan.flags import FlagVariable, format_flag

Layer = Literal["all", "generation", "pool", "machine"]
LAYERS: tuple[Layer, ...] = ("all", "generation", "pool", "machine")
"""A later layer wins; a flag for one job wins over a flag for all jobs."""


@dataclass(frozen=True)
class Flag:
    name: str
    value: str
    variable: FlagVariable
    layer: Layer
    where: str
    """The generation, pool or machine, or `all`."""
    job: str | None = None
    """The only job that gets this flag; None: all jobs."""

    @property
    def place(self) -> tuple[str, Layer, str, str | None]:
        """Flags with the same place replace each other."""
        return self.name, self.layer, self.where, self.job

    @property
    def text(self) -> str:
        where = "all" if self.layer == "all" else f"{self.layer} {self.where}"
        return where if self.job is None else f"{where}, job {self.job}"


def resolve_flags(
    flags: Iterable[Flag], machine: str, pool: str | None, generation: str | None, job: str | None
) -> dict[str, Flag]:
    """Return the flags that apply to a job on a machine, by name. A later flag replaces one in the same place."""
    places: Mapping[Layer, str | None] = {"all": "all", "generation": generation, "pool": pool, "machine": machine}
    matching = [flag for flag in flags if flag.where == places[flag.layer] and flag.job in (None, job)]
    matching.sort(key=lambda flag: (flag.job is not None, LAYERS.index(flag.layer)))
    return {flag.name: flag for flag in matching}


def shell_exports(flags: Mapping[str, Flag]) -> str:
    """Return shell commands that append the flags to their variables.

    XLA and libtpu use the last value if a flag occurs twice, so these win over flags that are set already.
    """
    arguments: dict[FlagVariable, list[str]] = {}
    for name, flag in sorted(flags.items()):
        arguments.setdefault(flag.variable, []).append(format_flag(flag.variable, name, flag.value))
    return "".join(
        f'export {variable}="${{{variable}:+${variable} }}"{shlex.quote(" ".join(words))}; '
        for variable, words in sorted(arguments.items())
    )


def set_flag(flags: Iterable[Flag], new: Flag) -> tuple[Flag, ...]:
    return (*unset_flag(flags, new), new)


def unset_flag(flags: Iterable[Flag], old: Flag) -> tuple[Flag, ...]:
    return tuple(flag for flag in flags if flag.place != old.place)
