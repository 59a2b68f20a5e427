"""A digest of what a program computes in a step: whether a run is resumed with the loss and optimizer it began with."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh

from tpuswarm.train.process.numerics import numerics, run_key
from tpuswarm.train.program.contract import abstract_state, program_of
from tpuswarm.train.program.mesh import AXIS
from tpuswarm.train.program.request import Request
from tpuswarm.train.recipe import Clock, Options, Recipe

BUILT_IN = "tpuswarm."
"""The recipes of this package change with its version alone."""
ADDRESS = re.compile(r"0x[0-9a-f]+|[^\s\"']+\.py:\d+")
"""In the text of a jaxpr: where objects lie, and functions in their files."""


def step_digest(recipe: Recipe, request: Request, platform: str) -> dict[str, str]:
    """`step`: SHA-256 of a step as JAX traces it; `under`: of all that changes it besides the recipe and its settings.

    It is traced in the simplest form, on one device: however a run is resumed, the digest is the same. Empty for a
    recipe of this package, and where the trace fails, for which there is a better place to say so.
    """
    if recipe.target.startswith(BUILT_IN):
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
            traced = jax.make_jaxpr(program.step)(state, dict(program.batch_spec(request.batch)), clock)
    except Exception:  # noqa: BLE001  # whatever a user's code raises: it is traced again to be compiled
        return {}
    digest = hashlib.sha256(ADDRESS.sub("", str(traced)).encode())
    for constant in constants(traced):
        digest.update(constant)
    conditions = {"platform": platform, "jax": jax.__version__, "tpuswarm": version("tpuswarm")} | numerics()
    under = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode())
    return {"step": digest.hexdigest(), "under": under.hexdigest()}


def is_another(recorded: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether two digests are known to be of different programs."""
    comparable = bool(recorded) and recorded.get("under") == now.get("under")
    return comparable and recorded.get("step") != now["step"]


def constants(jaxpr: Any) -> Iterator[bytes]:
    """The arrays that a program holds, which its text does not show."""
    if isinstance(jaxpr, ClosedJaxpr):
        for constant in jaxpr.consts:
            is_key = isinstance(constant, jax.Array) and jnp.issubdtype(constant.dtype, jax.dtypes.prng_key)
            array = np.asarray(jax.random.key_data(constant) if is_key else constant)
            yield f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes()
        jaxpr = jaxpr.jaxpr
    for equation in jaxpr.eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from constants(inner)
