"""Digest the computation of a step, to tell if a run resumes with the program that began it."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractMesh

from tpuswarm.train.process.numerics import numerics, run_key
from tpuswarm.train.program.contract import abstract_state, program_of
from tpuswarm.train.program.jax_versions import replace_jaxpr
from tpuswarm.train.program.mesh import AXIS
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Capability, Clock, Options, Recipe

BUILT_IN = "tpuswarm.recipes."
"""The recipes of this package change with its version alone."""
OBSERVERS = ("debug_callback", "debug_print")
"""Primitives without an effect on results."""
NAMING_PARAMS = ("name", "name_and_src_info", "debug_info")
"""Parameters of equations that hold names of functions and their lines."""
ADDRESS = re.compile(r"0x[0-9a-f]+")


def step_digest(
    recipe: Recipe, request: Request, platform: str, capability: Capability | None = None
) -> dict[str, str]:
    """Return SHA-256 digests: `step` of the computation of a step, `under` of the conditions of the trace.

    The trace has the simplest form, on one device, so the digests do not depend on how a run is resumed. Empty for a
    recipe of this package, and if the trace fails; compiling reports the failure later.
    """
    if type(recipe).__module__.startswith(BUILT_IN):
        return {}
    options = Options(
        precision=request.options(platform, "", capability).precision, clip=request.clip, freeze=request.freeze,
        decay=request.decay, ema=request.ema, platform=platform, capability=capability,
    )  # fmt: skip
    clock = Clock(jax.eval_shape(lambda: run_key(0)), np.int32(0), np.float32(0), np.float32(1))
    try:
        program = program_of(recipe, options)
        state = abstract_state(program, recipe.name)
        with jax.sharding.use_abstract_mesh(AbstractMesh((1,), (AXIS,))):
            rows = dict(program.batch_spec(request.batch))
            traced, (after, _) = jax.make_jaxpr(program.step, return_shape=True)(state, rows, clock)
            count = len(jax.tree.leaves(after))
            outputs = [number < count for number in range(len(traced.jaxpr.outvars))]
            traced = replace_jaxpr(traced, dce_jaxpr(traced.jaxpr, outputs, instantiate=True)[0])
    except Exception:  # noqa: BLE001  # of a user's code; compiling raises it again
        return {}
    digest = hashlib.sha256()
    for part in _parts(traced):
        digest.update(part)
    conditions = {
        "platform": platform, "jax": jax.__version__, "tpuswarm": version("tpuswarm"),
        "jit": str(jax.config.values["jax_disable_jit"]), **numerics(),
    }  # fmt: skip
    under = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode())
    return {"step": digest.hexdigest(), "under": under.hexdigest()}


def is_other_program(recorded: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether two digests are known to be of different programs."""
    is_comparable = bool(recorded) and recorded.get("under") == now.get("under")
    return is_comparable and recorded.get("step") != now["step"]


def is_same_program(recorded: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Return whether two digests are known to be of the same program."""
    return bool(recorded) and recorded == now


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the equations and constants of a program in order, without names."""
    if isinstance(value, ClosedJaxpr):
        yield from _parts(value.consts)
        yield from _equations(value.jaxpr)
    elif isinstance(value, Jaxpr):
        yield from _equations(value)
    elif isinstance(value, Mapping):
        yield from _parts(sorted(value.items(), key=repr))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _parts(part)
    elif isinstance(value, set | frozenset):
        yield from _parts(sorted(value, key=repr))
    elif isinstance(value, np.ndarray | np.generic | jax.Array):
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        array = np.asarray(value)
        yield f"{array.dtype} {array.shape}".encode() + array.tobytes()
    elif not callable(value) or isinstance(value, type):
        yield f"{ADDRESS.sub('', repr(value))};".encode()


def _equations(jaxpr: Jaxpr) -> Iterator[bytes]:
    numbers: dict[Any, int] = {}

    def names(variables: Sequence[Any]) -> str:
        for variable in variables:
            if not isinstance(variable, Literal):
                numbers.setdefault(variable, len(numbers))
        return ",".join(
            f"{variable.val!r}" if isinstance(variable, Literal) else f"{numbers[variable]}:{variable.aval}"
            for variable in variables
        )

    yield f"{names(jaxpr.constvars)};{names(jaxpr.invars)}".encode()
    for equation in jaxpr.eqns:
        if equation.primitive.name in OBSERVERS:
            continue
        inputs = names(equation.invars)
        yield f"{names(equation.outvars)}={equation.primitive.name}({inputs})".encode()
        yield from _parts({name: value for name, value in equation.params.items() if name not in NAMING_PARAMS})
    yield names(jaxpr.outvars).encode()
