"""What XLA and libtpu say of flags: each is asked in a process of its own, which a wrong flag ends."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Literal, NamedTuple

from tpuswarm.config.nearest import nearest_name
from tpuswarm.errors import InputError, RunFailed

Variable = Literal["XLA_FLAGS", "LIBTPU_INIT_ARGS"]
"""Of the environment: in which a flag is given."""
NAME = r"[a-z][a-z0-9_]*"
SECONDS = 60.0
"""One of them may take so long to say it; half a second is usual."""
UNCHECKED = "libtpu is not installed here, so nobody has checked it: pip install 'tpuswarm[plan]'"
PROGRAMS: Mapping[Variable, str] = {
    "XLA_FLAGS": "import jax; jax.devices('cpu')",
    "LIBTPU_INIT_ARGS": "from jax.experimental import topologies; topologies.get_topology_desc('v5e:2x2', 'tpu')",
}
"""What makes each of them read its variable."""
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
"""libtpu as a compiler, where there is no TPU or somebody else has it."""


class Meaning(NamedTuple):
    """Of a flag, as XLA says it."""

    kind: str
    """bool, string, int32 and so on."""
    default: str
    text: str


class Checked(NamedTuple):
    """Flags that XLA or libtpu takes."""

    variables: Mapping[str, Variable]
    """By the name of the flag: XLA's where both know it."""
    unchecked: tuple[str, ...] = ()
    """Those that XLA does not know, where there is no libtpu to be asked: taken for libtpu's."""


def check(*tables: Mapping[str, str]) -> Checked:
    """Whose each flag is, by name and value, each library asked once for all. InputError: an unknown one, a value.

    A name may stand in several tables: every value of it is read.
    """
    return _check(tuple(dict.fromkeys(each for table in tables for each in table.items())))


@cache
def _check(flags: tuple[tuple[str, str], ...]) -> Checked:
    strange = _strange("XLA_FLAGS", flags) if flags else {}
    variables: dict[str, Variable] = {name: "LIBTPU_INIT_ARGS" if name in strange else "XLA_FLAGS" for name, _ in flags}
    rest = tuple((name, value) for name, value in flags if name in strange)
    for name, value in rest:
        if re.search(r"\s", value) or not value:
            raise InputError(
                f"{name} is libtpu's, and libtpu reads no value that is empty or has a blank, whatever the quotes: "
                f"not {value!r}"
            )
    if not rest or importlib.util.find_spec("libtpu") is None:
        return Checked(variables, tuple(strange))
    for name, near in _strange("LIBTPU_INIT_ARGS", rest).items():
        known = nearest_name(name, {*meanings(), near} - {""}, 0.7)
        raise InputError(f"neither XLA nor libtpu has a flag {name}" + (f"; did you mean {known}?" if known else ""))
    return Checked(variables)


def _strange(variable: Variable, flags: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Those that it does not know, each with the nearest one where it says that. InputError: a value is refused."""
    said = _ask(variable, " ".join(written(variable, name, value) for name, value in flags))
    if said is None:
        return {}
    if wrong := re.search(r"Illegal value '(?P<value>.*)' specified for flag '(?P<name>\w+)'", said) or re.search(
        r"Couldn't interpret value (?P<value>.*) for flag (?P<name>\w+)\.", said
    ):
        of = f" is of type {found.kind} and" if (found := meanings().get(wrong["name"])) else ""
        raise InputError(f"{wrong['name']}{of} does not take {wrong['value']!r}")
    if names := re.findall(r"Unknown command line flag '(\w+)'(?:\. Did you mean: (\w+))?", said):
        return dict(names)
    if unknown := re.search(r"Unknown flags? in XLA_FLAGS:(.*)", said):
        return {name: "" for name, _ in flags if re.search(rf"--{name}=", unknown[1])}
    last = said.strip().rpartition("\n")[2][:300]
    raise RunFailed(f"whether {', '.join(dict(flags))} may be set cannot be told: with it {variable} ends JAX: {last}")


def written(variable: Variable, name: str, value: str) -> str:
    """A flag as the variable holds it. InputError for a value that it cannot hold.

    XLA takes quotes, and a backslash before one; libtpu ends a value at a blank (tried).
    """
    if variable == "LIBTPU_INIT_ARGS" or not re.search(r"[\s'\"\\]", value):
        return f"--{name}={value}"
    if "\n" in value:
        raise InputError(f"{name} cannot hold a line break: not {value!r}")
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{inner}"'


@cache
def meanings() -> Mapping[str, Meaning]:
    """The flags that XLA explains, by name: its first ones, for its help ends where a message may not be longer."""
    said = _ask("XLA_FLAGS", "--help") or ""
    found = {}
    for each in said.split("\n\t--")[1:]:
        if parts := re.fullmatch(rf"({NAME})=(.*?)\s*\t(\w+)\t(.*)", each, re.DOTALL):
            found[parts[1]] = Meaning(parts[3], parts[2].strip('"'), " ".join(parts[4].split()))
    return found


def _ask(variable: Variable, flags: str) -> str | None:
    """What is said of flags; None: they are taken."""
    environment = {name: value for name, value in os.environ.items() if name not in PROGRAMS} | WITHOUT_TPU
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAMS[variable]], env={**environment, variable: flags},
            capture_output=True, text=True, errors="replace", timeout=SECONDS, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{variable}={flags} was not read within {SECONDS:g} s") from error
    return None if done.returncode == 0 else done.stderr + done.stdout
