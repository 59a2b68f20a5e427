"""Ask XLA and libtpu about flags, each in a separate process, which a wrong flag ends."""

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

FlagVariable = Literal["XLA_FLAGS", "LIBTPU_INIT_ARGS"]
"""Environment variable that holds a flag."""
FLAG_NAME_PATTERN = r"[a-z][a-z0-9_]*"
CHECK_TIMEOUT_S = 60.0
"""Half a second is usual."""
UNCHECKED = "not checked, because libtpu is not installed here: pip install 'tpuswarm[plan]'"
PROGRAMS: Mapping[FlagVariable, str] = {
    "XLA_FLAGS": "import jax; jax.devices('cpu')",
    "LIBTPU_INIT_ARGS": "from jax.experimental import topologies; topologies.get_topology_desc('v5e:2x2', 'tpu')",
}
"""Programs that read each variable."""
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu", "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
"""Settings under which libtpu compiles without a TPU."""


class FlagHelp(NamedTuple):
    """XLA's help about a flag."""

    kind: str
    """Such as bool, string, int32."""
    default: str
    text: str


class CheckedFlags(NamedTuple):
    """Flags that XLA or libtpu accepts."""

    variables: Mapping[str, FlagVariable]
    """By flag; XLA_FLAGS if both know it."""
    unchecked: tuple[str, ...] = ()
    """Flags unknown to XLA while libtpu is not installed; assumed to be libtpu's."""


def check_flags(*tables: Mapping[str, str]) -> CheckedFlags:
    """Find the library of each flag in some tables of names and values; raise InputError for a wrong name or value."""
    return _check(tuple(dict.fromkeys(flag for table in tables for flag in table.items())))


@cache
def _check(flags: tuple[tuple[str, str], ...]) -> CheckedFlags:
    unknown = _find_unknown("XLA_FLAGS", flags) if flags else {}
    variables: dict[str, FlagVariable] = {
        name: "LIBTPU_INIT_ARGS" if name in unknown else "XLA_FLAGS" for name, _ in flags
    }
    rest = tuple((name, value) for name, value in flags if name in unknown)
    for name, value in rest:
        if re.search(r"\s", value) or not value:
            raise InputError(
                f"{name} is libtpu's, and libtpu accepts no empty value and no blanks, even in quotes: not {value!r}"
            )
    if not rest or importlib.util.find_spec("libtpu") is None:
        return CheckedFlags(variables, tuple(unknown))
    for name, suggestion in _find_unknown("LIBTPU_INIT_ARGS", rest).items():
        known = nearest_name(name, {*xla_flag_help(), suggestion} - {""}, 0.7)
        raise InputError(f"neither XLA nor libtpu has a flag {name}" + (f"; did you mean {known}?" if known else ""))
    return CheckedFlags(variables)


def _find_unknown(variable: FlagVariable, flags: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the flags that a library does not know, with its suggestions; raise InputError for a refused value."""
    error = _run_with_flags(variable, " ".join(format_flag(variable, name, value) for name, value in flags))
    if error is None:
        return {}
    if wrong := re.search(r"Illegal value '(?P<value>.*)' specified for flag '(?P<name>\w+)'", error) or re.search(
        r"Couldn't interpret value (?P<value>.*) for flag (?P<name>\w+)\.", error
    ):
        kind = f" is of type {found.kind} and" if (found := xla_flag_help().get(wrong["name"])) else ""
        raise InputError(f"{wrong['name']}{kind} does not take {wrong['value']!r}")
    if names := re.findall(r"Unknown command line flag '(\w+)'(?:\. Did you mean: (\w+))?", error):
        return dict(names)
    if listed := re.search(r"Unknown flags? in XLA_FLAGS:(.*)", error):
        return {name: "" for name, _ in flags if re.search(rf"--{name}=", listed[1])}
    last = error.strip().rpartition("\n")[2][:300]
    raise RunFailed(f"{', '.join(dict(flags))} cannot be checked: JAX fails with it in {variable}: {last}")


def format_flag(variable: FlagVariable, name: str, value: str) -> str:
    """Write a flag for its variable; raise InputError if the variable cannot hold it.

    XLA accepts quotes with backslashes inside; libtpu ends a value at a blank (tried).
    """
    if variable == "LIBTPU_INIT_ARGS" or not re.search(r"[\s'\"\\]", value):
        return f"--{name}={value}"
    if "\n" in value:
        raise InputError(f"{name} cannot hold a line break: not {value!r}")
    inner = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'--{name}="{inner}"'


@cache
def xla_flag_help() -> Mapping[str, FlagHelp]:
    """Return XLA's help by flag; its output is cut off, so only the first flags are in it."""
    output = _run_with_flags("XLA_FLAGS", "--help") or ""
    found = {}
    for entry in output.split("\n\t--")[1:]:
        if parts := re.fullmatch(rf"({FLAG_NAME_PATTERN})=(.*?)\s*\t(\w+)\t(.*)", entry, re.DOTALL):
            found[parts[1]] = FlagHelp(parts[3], parts[2].strip('"'), " ".join(parts[4].split()))
    return found


def _run_with_flags(variable: FlagVariable, flags: str) -> str | None:
    """Return the error that flags cause; None if they are accepted."""
    environment = {name: value for name, value in os.environ.items() if name not in PROGRAMS} | WITHOUT_TPU
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROGRAMS[variable]], env={**environment, variable: flags},
            capture_output=True, text=True, errors="replace", check=False,
            timeout=CHECK_TIMEOUT_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{variable}={flags} was not read within {CHECK_TIMEOUT_S:g} s") from error
    return None if done.returncode == 0 else done.stderr + done.stdout
