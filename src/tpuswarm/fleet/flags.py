"""Flags of a fleet: what its file names, what holds on a machine, and what old TensorFlow pods need for them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tpuswarm.catalog import find, generations
from tpuswarm.cloud.protocol import ENV_VARS, Machine, Spec, TpuSpec
from tpuswarm.config.toml_file import TomlPath
from tpuswarm.errors import InputError
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.core.flags import Flag, Layer, exports, resolved
from tpuswarm.fleet.core.names import ALL, resolve
from tpuswarm.fleet.file import SwarmFile
from tpuswarm.fleet.keeping.document import Document
from tpuswarm.plan import flags as asked

TF_POD = re.compile(r"tpu-vm-tf-.*-pod(-.*)?")
"""Runtimes whose programs do not load libtpu: a service does, tpu-runtime, which reads ENV_VARS as it starts."""
RESTART = "sudo systemctl restart tpu-runtime"


def of_file(file: SwarmFile) -> tuple[Flag, ...]:
    """Those that a file names. Raises InputError for one that neither XLA nor libtpu takes."""
    variables = _checked(file).variables
    return tuple(
        Flag(name, value, variables[name], layer, where)
        for _, layer, where, flags in _tables(file)
        for name, value in flags.items()
    )


def problems(file: SwarmFile) -> Iterator[tuple[TomlPath, str]]:
    """What is wrong with those of a file: where it stands, and a sentence."""
    try:
        _checked(file)
    except InputError:  # of one of them: each is asked for by itself
        for place, _, _, flags in _tables(file):
            for name, value in flags.items():
                try:
                    asked.check({name: value})
                except InputError as error:
                    yield (*place, name), str(error)


def warnings(file: SwarmFile) -> Iterator[str]:
    """Of those that nobody can check here."""
    unchecked = _checked(file).unchecked
    for _, _, where, flags in _tables(file):
        for name in flags:
            if name in unchecked:
                yield f"{name} of {where}: {asked.UNCHECKED}"


def _checked(file: SwarmFile) -> asked.Checked:
    return asked.check(*(flags for _, _, _, flags in _tables(file)))


def _tables(file: SwarmFile) -> Iterator[tuple[TomlPath, Layer, str, Mapping[str, str]]]:
    for name, flags in file.flags.items():
        yield ("flags", name), "all" if name == ALL else "generation", name, flags
    for number, pool in enumerate(file.pool):
        if pool.flags:
            yield ("pool", number, "flags"), "pool", pool.name, pool.flags


def place_of(where: str, desired: Desired, machines: Iterable[Machine]) -> tuple[Layer, str]:
    """What WHERE means: `all`, a pool, a generation or a machine. Raises InputError."""
    pools, known = [each.name for each in desired.pools], [each.name for each in generations()]
    if where == ALL:
        return "all", ALL
    if where in pools:
        return "pool", where
    if where in known:
        return "generation", where
    if "/" in where:
        raise InputError(f"{where} is one worker, and flags are for a whole machine: {where.partition('/')[0]}")
    return "machine", resolve(where, (each.name for each in machines if each.fleet == desired.fleet), (*pools, *known))


def generation_of(type_: str) -> str | None:
    """Of a machine's type; None: it is no TPU that we know."""
    try:
        return find(type_).generation.name
    except InputError:
        return None


def on(document: Document, machine: Machine, job: str | None = None) -> dict[str, Flag]:
    """Those that hold on a machine for what is started there, or for a job of it."""
    given = (*document.desired.flags, *document.flags)
    return resolved(given, machine.name, machine.pool, generation_of(machine.type), job)


def exported(document: Document, machine: Machine, job: str | None = None) -> str:
    """The same, for a shell."""
    return exports(on(document, machine, job)) if document.desired.flags or document.flags else ""


# Pods with a TensorFlow runtime.


def is_pod(spec: Spec) -> bool:
    """Whether flags reach its machines through their metadata."""
    return isinstance(spec, TpuSpec) and TF_POD.fullmatch(spec.runtime) is not None


def metadata_of(flags: Mapping[str, Flag]) -> dict[str, str]:
    """With which tpu-runtime begins with those of libtpu; empty where there is none."""
    ours = [f"--{each.name}={each.value}" for each in flags.values() if each.variable == "LIBTPU_INIT_ARGS"]
    return {ENV_VARS: f"-e LIBTPU_INIT_ARGS={' '.join(ours)}" if ours else ""}


def outdated(document: Document, machines: Iterable[Machine]) -> dict[str, dict[str, str]]:
    """By name, machines of pods whose service may have other flags than hold there, and what metadata should have."""
    pods = {each.name for each in document.desired.pools if is_pod(each.spec)}
    ours = (each for each in machines if each.fleet == document.desired.fleet and each.pool in pods)
    wanted = [(each, metadata_of(on(document, each))) for each in ours if each.state == "ready"]
    return {each.name: new for each, new in wanted if new[ENV_VARS] != each.runtime_env}


def check_pods(document: Document) -> None:
    """Raises InputError where a pod would need several flags: how its start script takes a blank nobody says."""
    given = (*document.desired.flags, *document.flags)
    named = [each.where for each in given if each.layer == "machine"]
    for pool in document.desired.pools:
        for machine in ("", *named) if is_pod(pool.spec) else ():
            found = resolved(given, machine, pool.name, generation_of(pool.type), None)
            ours = [each.name for each in found.values() if each.variable == "LIBTPU_INIT_ARGS"]
            if len(ours) > 1:
                raise InputError(
                    f"pool {pool.name} has a TensorFlow runtime for pods, which takes one flag of libtpu "
                    f"({ENV_VARS} has no form for several), and these are {len(ours)}: {' and '.join(ours)}"
                )


def made_with(spec: Spec, document: Document) -> Spec:
    """A machine that is to be made, with the flags in its metadata where it takes them from there."""
    given = (*document.desired.flags, *document.flags)
    if not is_pod(spec) or not given:
        return spec
    flags = resolved(given, spec.name, spec.pool, generation_of(spec.type), None)
    return replace(spec, metadata={**metadata_of(flags), **spec.metadata})
