"""Digest what a program computes in a step, to tell whether a run resumes with the program that began it."""

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
from tpuswarm.train.program.mesh import AXIS
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options, Recipe

BUILT_IN = "tpuswarm.recipes."
"""The recipes of this package change with its version alone."""
SEEN = ("debug_callback", "debug_print")
"""Primitives that only look."""
NAMES = ("name", "name_and_src_info", "debug_info")
"""Parameters of equations that name functions and their lines."""
ADDRESS = re.compile(r"0x[0-9a-f]+")


def step_digest(recipe: Recipe, request: Request, platform: str) -> dict[str, str]:
    """Return `step`, the SHA-256 of what a step does to the state, and `under`, that of the conditions of the trace.

    The trace is in the simplest form, on one device, so the digest does not depend on how a run is resumed. Empty for a
    recipe of this package, and if the trace fails, which compiling reports later.
    """
    if type(recipe).__module__.startswith(BUILT_IN):
        return {}
    options = Options(
        precision=request.options(platform, "").precision, clip=request.clip, freeze=request.freeze,
        decay=request.decay, ema=request.ema, platform=platform,
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
            traced = traced.replace(jaxpr=dce_jaxpr(traced.jaxpr, outputs, instantiate=True)[0])
    except Exception:  # noqa: BLE001  # whatever a user's code raises: it is traced again to be compiled
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


def is_another(recorded: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two digests are known to be of different programs."""
    comparable = bool(recorded) and recorded.get("under") == now.get("under")
    return comparable and recorded.get("step") != now["step"]


def is_same(recorded: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two digests are known to be of the same program."""
    return bool(recorded) and recorded == now


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the equations and constants of a program in order, without names."""
    if isinstance(value, ClosedJaxpr):
        yield from _parts(value.consts)
        yield from _parts(value.jaxpr)
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
        for each in variables:
            if not isinstance(each, Literal):
                numbers.setdefault(each, len(numbers))
        return ",".join(
            f"{each.val!r}" if isinstance(each, Literal) else f"{numbers[each]}:{each.aval}" for each in variables
        )

    yield f"{names(jaxpr.constvars)};{names(jaxpr.invars)}".encode()
    for equation in jaxpr.eqns:
        if equation.primitive.name in SEEN:
            continue
        inputs = names(equation.invars)
        yield f"{names(equation.outvars)}={equation.primitive.name}({inputs})".encode()
        yield from _parts({name: each for name, each in equation.params.items() if name not in NAMES})
    yield names(jaxpr.outvars).encode()
