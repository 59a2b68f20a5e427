"""Read the flags of XLA and libtpu that swarm.toml sets."""

from collections.abc import Iterator, Mapping

from tpuswarm.config.toml_file import TomlPath
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.flags import Flag, Layer
from tpuswarm.fleet.decide.names import ALL
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.plan import flags as known_flags


def flags_from_file(file: SwarmFile) -> tuple[Flag, ...]:
    """Return the flags of a file. Raise InputError for a flag that neither XLA nor libtpu knows."""
    variables = _check(file).variables
    return tuple(
        Flag(name, value, variables[name], layer, where)
        for _, layer, where, flags in _tables(file)
        for name, value in flags.items()
    )


def flag_problems(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    """Yield each wrong flag: its place in the file, and a sentence."""
    try:
        _check(file)
    except InputError:
        for place, _, _, flags in _tables(file):
            for name, value in flags.items():
                try:
                    known_flags.check_flags({name: value})
                except InputError as error:
                    yield (*place, name), str(error)


def flag_warnings(file: SwarmFile) -> Iterator[str]:
    """Yield a warning for each flag that cannot be checked on this computer."""
    unchecked = _check(file).unchecked
    for _, _, where, flags in _tables(file):
        for name in flags:
            if name in unchecked:
                yield f"{name} of {where}: {known_flags.UNCHECKED}"


def _check(file: SwarmFile) -> known_flags.CheckedFlags:
    return known_flags.check_flags(*(flags for _, _, _, flags in _tables(file)))


def _tables(file: SwarmFile) -> Iterator[tuple[TomlPath, Layer, str, Mapping[str, str]]]:
    for name, flags in file.flags.items():
        yield ("flags", name), "all" if name == ALL else "generation", name, flags
    for number, pool in enumerate(file.pool):
        if pool.flags:
            yield ("pool", number, "flags"), "pool", pool.name, pool.flags
