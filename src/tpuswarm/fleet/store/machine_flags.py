"""Find the flags that apply to a machine, and pass them to TensorFlow pods through metadata.

On a pod with a TensorFlow runtime, programs do not load libtpu themselves: the service `tpu-runtime` does, and reads
its flags from the machine's metadata (ENV_VARS) when it starts. One program on worker 0 has the chips of all workers.
"""

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace

from tpuswarm.catalog import find, generations
from tpuswarm.cloud.protocol import ENV_VARS, Machine, Spec, TpuSpec
from tpuswarm.errors import InputError
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.flags import Flag, Layer, resolve_flags, shell_exports
from tpuswarm.fleet.decide.names import ALL, resolve_name
from tpuswarm.fleet.store.document import Document
from tpuswarm.plan.flags import FlagVariable

TF_POD_RUNTIME = re.compile(r"tpu-vm-tf-.*-pod(-.*)?")
WHOLE_POD_EXPORT = "export TPU_LOAD_LIBRARY=0; "
"""Makes TensorFlow use the pod's chips through tpu-runtime, instead of loading libtpu for those of its own host."""
LIBTPU_VARIABLE: FlagVariable = "LIBTPU_INIT_ARGS"
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


def merge_env_vars(given: str, flags: Iterable[Flag]) -> str:
    """Add libtpu flags to the user's own value of ENV_VARS, which holds options of `docker run`.

    No source says how the start script treats quotes, so no option holds a blank: with several flags, libtpu reads
    each from a variable of its own (https://abseil.io/docs/cpp/guides/flags, `--fromenv`). Raise InputError if the
    value is not understood, or sets one of the flags otherwise.
    """
    try:
        words = shlex.split(given)
    except ValueError as error:
        raise InputError(f"metadata {ENV_VARS} cannot be read ({error}): {given!r}") from None
    others: list[str] = []
    arguments: list[str] = []
    in_arguments = False
    for word in words:
        if found := re.fullmatch(rf"(-e=?|--env=)?{LIBTPU_VARIABLE}=(.*)", word):
            if not found[1] and (not others or others.pop() not in ("-e", "--env")):
                raise _not_understood(word)
            arguments += found[2].split()
            in_arguments = True
        elif in_arguments and word.startswith("--") and "_" in _split_argument(word)[0]:  # docker's have none
            arguments.append(word)
        elif LIBTPU_VARIABLE in word or (in_arguments and re.match("--(?!env)", word)):
            raise _not_understood(word)
        else:
            others.append(word)
            in_arguments = False
    if unclear := [argument for argument in arguments if not re.match(r"--?\w", argument)]:
        raise _not_understood(unclear[0])
    values = {name: value if equals else "true" for name, equals, value in map(_split_argument, arguments)}
    for flag in flags:
        if flag.variable == LIBTPU_VARIABLE and values.setdefault(flag.name, flag.value) != flag.value:
            raise InputError(
                f"{flag.name} is {values[flag.name]} in metadata {ENV_VARS} and {flag.value} for {flag.text}: "
                "give it once"
            )
    if len(values) == 1:
        (item,) = values.items()
        others += ["-e", f"{LIBTPU_VARIABLE}=--{item[0]}={item[1]}"]
    elif values:
        others += ["-e", f"{LIBTPU_VARIABLE}=--fromenv={','.join(values)}"]
        others += [word for name, value in values.items() for word in ("-e", f"FLAGS_{name}={value}")]
    return shlex.join(others) if values else given


def _not_understood(word: str) -> InputError:
    return InputError(
        f"it is unclear what {word} means in metadata {ENV_VARS}: write -e '{LIBTPU_VARIABLE}=--NAME=VALUE ...' once, "
        "after all other options"
    )


def _split_argument(argument: str) -> tuple[str, str, str]:
    return argument.lstrip("-").partition("=")


def _env_vars(spec: Spec, flags: Iterable[Flag], machine: str) -> str:
    resolved = resolve_flags(flags, machine, spec.pool, find_generation(spec.type), None)
    return merge_env_vars(spec.metadata.get(ENV_VARS, ""), resolved.values())


def outdated_pods(document: Document, machines: Iterable[Machine]) -> dict[str, dict[str, str]]:
    """Return the new metadata, by machine name, of TensorFlow pods whose flags have changed."""
    specs = {pool.name: pool.spec for pool in document.desired.pools if is_tf_pod(pool.spec)}
    outdated = {}
    for machine in document.desired.own(machines):
        if machine.pool in specs and machine.state == "ready":
            env_vars = _env_vars(specs[machine.pool], document.all_flags, machine.name)
            if env_vars != machine.runtime_env:
                outdated[machine.name] = {ENV_VARS: env_vars}
    return outdated


def check_tf_pods(document: Document) -> None:
    """Raise InputError if a flag contradicts the metadata of a TensorFlow pod."""
    flags = document.all_flags
    for pool in document.desired.pools:
        for machine in ("", *(flag.where for flag in flags if flag.layer == "machine")) if is_tf_pod(pool.spec) else ():
            _env_vars(pool.spec, flags, machine)


def add_flag_metadata(spec: Spec, flags: Iterable[Flag]) -> Spec:
    """Return the spec of a new TensorFlow pod with its flags in the metadata; other specs unchanged."""
    env_vars = _env_vars(spec, flags, spec.name) if is_tf_pod(spec) else ""
    return replace(spec, metadata={**spec.metadata, ENV_VARS: env_vars}) if env_vars else spec
