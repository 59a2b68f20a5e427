"""Flags of XLA and libtpu: which hold for a program on a machine, and how they reach it."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from tpuswarm.plan.flags import Variable, written

Layer = Literal["all", "generation", "pool", "machine"]
LAYERS: tuple[Layer, ...] = ("all", "generation", "pool", "machine")
"""The later one wins, and what is for one job wins over what is for all."""


@dataclass(frozen=True)
class Flag:
    """One flag, and for what it is set."""

    name: str
    value: str
    variable: Variable
    layer: Layer
    where: str
    """The generation, pool or machine, or `all`."""
    job: str | None = None
    """The only job that it is for; None: all that is started."""

    @property
    def place(self) -> tuple[str, Layer, str, str | None]:
        """In which only one value stands."""
        return self.name, self.layer, self.where, self.job

    @property
    def text(self) -> str:
        """For what it is set, in words: `pool small, job train`."""
        where = "all" if self.layer == "all" else f"{self.layer} {self.where}"
        return where if self.job is None else f"{where}, job {self.job}"


def resolve_flags(
    flags: Iterable[Flag], machine: str, pool: str | None, generation: str | None, job: str | None
) -> dict[str, Flag]:
    """By name, those that hold on a machine for a job; of two in the same place the later one."""
    places: Mapping[Layer, str | None] = {"all": "all", "generation": generation, "pool": pool, "machine": machine}
    mine = [each for each in flags if each.where == places[each.layer] and each.job in (None, job)]
    mine.sort(key=lambda each: (each.job is not None, LAYERS.index(each.layer)))
    return {each.name: each for each in mine}


def shell_exports(flags: Mapping[str, Flag]) -> str:
    """What a shell does before a program that is to have them: they come after what the variables hold already.

    Of a flag that is given twice the last one counts, to XLA and to libtpu.
    """
    found: dict[Variable, list[str]] = {}
    for name, each in sorted(flags.items()):
        found.setdefault(each.variable, []).append(written(each.variable, name, each.value))
    return "".join(
        f'export {variable}="${{{variable}:+${variable} }}"{shlex.quote(" ".join(words))}; '
        for variable, words in sorted(found.items())
    )


def set_flag(flags: Iterable[Flag], new: Flag) -> tuple[Flag, ...]:
    """With another value in its place."""
    return (*unset_flag(flags, new), new)


def unset_flag(flags: Iterable[Flag], old: Flag) -> tuple[Flag, ...]:
    """Without what stands in its place."""
    return tuple(each for each in flags if each.place != old.place)
