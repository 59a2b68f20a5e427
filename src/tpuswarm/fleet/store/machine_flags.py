"""Find the flags that apply to a machine, and pass them to TensorFlow pods through metadata.

On a pod with a TensorFlow runtime, programs do not load libtpu themselves: the service `tpu-runtime` does, and reads
its flags from the machine's metadata (ENV_VARS) when it starts. One program on worker 0 has the chips of all workers.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tpuswarm.catalog import find, generations
from tpuswarm.cloud.protocol import ENV_VARS, Machine, Spec, TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flags import Flag, Layer, resolve_flags, shell_exports
from tpuswarm.fleet.decide.names import ALL, resolve_name
from tpuswarm.fleet.store.document import Document

TF_POD_RUNTIME = re.compile(r"tpu-vm-tf-.*-pod(-.*)?")
WHOLE_POD_EXPORT = "export TPU_LOAD_LIBRARY=0; "
"""Makes TensorFlow use the pod's chips through tpu-runtime, instead of loading libtpu for those of its own host."""
RESTART_RUNTIME = "sudo systemctl restart tpu-runtime"


def parse_scope(where: str, desired: Desired, machines: Iterable[Machine]) -> tuple[Layer, str]:
    """Parse WHERE: `all`, a pool, a generation or a machine. Raise InputError for anything else."""
    pool_names = [pool.name for pool in desired.pools]
    generation_names = [generation.name for generation in generations()]
    if where == ALL:
        return "all", ALL
    if where in pool_names:
        return "pool", where
    if where in generation_names:
        return "generation", where
    if "/" in where:
        raise InputError(f"{where} is one worker; flags apply to a whole machine: {where.partition('/')[0]}")
    names = (machine.name for machine in desired.own(machines))
    return "machine", resolve_name(where, names, (*pool_names, *generation_names))


def find_generation(type_: str) -> str | None:
    try:
        return find(type_).generation.name
    except InputError:
        return None


def machine_flags(document: Document, machine: Machine, job: str | None = None) -> dict[str, Flag]:
    """Return the flags on a machine, by name: for one job, or for everything that starts there."""
    return resolve_flags(document.all_flags, machine.name, machine.pool, find_generation(machine.type), job)


def machine_exports(document: Document, machine: Machine, job: str | None = None) -> str:
    """Return the shell commands that set the flags of a machine."""
    return shell_exports(machine_flags(document, machine, job)) if document.all_flags else ""


def is_tf_pod(spec: Spec) -> bool:
    return isinstance(spec, TpuSpec) and TF_POD_RUNTIME.fullmatch(spec.runtime) is not None


def has_tf_pod(machine: Machine) -> bool:
    return TF_POD_RUNTIME.fullmatch(machine.runtime or "") is not None


def flag_metadata(flags: Mapping[str, Flag]) -> dict[str, str]:
    """Return the metadata that gives tpu-runtime its libtpu flags."""
    arguments = [f"--{flag.name}={flag.value}" for flag in flags.values() if flag.variable == "LIBTPU_INIT_ARGS"]
    return {ENV_VARS: f"-e LIBTPU_INIT_ARGS={' '.join(arguments)}" if arguments else ""}


def outdated_pods(document: Document, machines: Iterable[Machine]) -> dict[str, dict[str, str]]:
    """Return the new metadata, by machine name, of TensorFlow pods whose flags have changed."""
    pools = {pool.name for pool in document.desired.pools if is_tf_pod(pool.spec)}
    outdated = {}
    for machine in document.desired.own(machines):
        if machine.pool in pools and machine.state == "ready":
            metadata = flag_metadata(machine_flags(document, machine))
            if metadata[ENV_VARS] != machine.runtime_env:
                outdated[machine.name] = metadata
    return outdated


def check_tf_pods(document: Document) -> None:
    """Raise InputError if a TensorFlow pod needs more than one flag: its start script may not handle spaces."""
    flags = document.all_flags
    machine_names = [flag.where for flag in flags if flag.layer == "machine"]
    for pool in document.desired.pools:
        for machine in ("", *machine_names) if is_tf_pod(pool.spec) else ():
            resolved = resolve_flags(flags, machine, pool.name, find_generation(pool.type), None)
            names = [flag.name for flag in resolved.values() if flag.variable == "LIBTPU_INIT_ARGS"]
            if len(names) > 1:
                raise InputError(
                    f"pool {pool.name} has a TensorFlow runtime for pods, which takes one flag of libtpu "
                    f"(in {ENV_VARS}); these are {len(names)}: {' and '.join(names)}"
                )


def add_flag_metadata(spec: Spec, document: Document) -> Spec:
    """Return the spec of a new TensorFlow pod with its flags in the metadata; other specs unchanged."""
    if not is_tf_pod(spec) or not document.all_flags:
        return spec
    resolved = resolve_flags(document.all_flags, spec.name, spec.pool, find_generation(spec.type), None)
    return replace(spec, metadata={**flag_metadata(resolved), **spec.metadata})
