"""Recipes with one hazard each; `# planted: KIND` marks its line. Run as a program, it prints the hazards as JSON."""

import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import pallas, topologies
from jax.experimental.pallas import tpu

from tpuswarm import catalog, supervised
from tpuswarm.plan.compile.hazards import explain_refusal, find_hazards
from tpuswarm.train.program.compiled import CompilerRefused, compile_step
from tpuswarm.train.program.request import Request

WIDTH = 256


def clean(w, x):
    return jnp.tanh(x @ w["a"]) @ w["b"]


def narrow(w, x):
    return jnp.tanh(x @ w["a"][:, :64]) @ w["b"][:64]  # planted: matrix unit


def prints(w, x):
    h = clean(w, x)
    jax.debug.print("{norm}", norm=h.astype(jnp.float32).sum())  # planted: host transfer
    return h


def calls_back(w, x):
    return clean(w, jax.pure_callback(np.tanh, x, x))  # planted: host transfer


def casts(w, x):
    return clean(w, x) + (x.astype(jnp.float32) @ w["c"].astype(jnp.float32)).astype(x.dtype)  # planted: float32


def mirrors(w, x):
    h = clean(w, x)
    return h - h[::-1]  # planted: collective


def contrasts(w, x):
    h = clean(w, x)
    return h @ h.T  # planted: collective


def repeats(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w["a"])  # planted: unrolled
    return x


def repeats_little(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w["a"])
    return clean(w, jnp.tile(x, (1024, 1)))


def scans(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w["a"]), None), x, length=8)[0]


def unknown_to_tpus(w, x):
    return clean(w, x) + jnp.linalg.eigvals(w["a"].astype(jnp.float32)).real.sum()  # planted: refused


def kernel_of_a_later_tpu(w, x):
    fixed = jax.lax.stop_gradient(w["a"].astype(x.dtype))
    return clean(w, x) + pallas.pallas_call(multiply, out_shape=x)(x, fixed)  # planted: refused


def multiply(x, w, out):
    out[...] = jnp.dot(x[...], w[...].T, preferred_element_type=jnp.float32).astype(x.dtype)


def too_large_for_the_chips_own_memory(w, x):
    scratch = tpu.VMEM((2**18, WIDTH), jnp.float32)
    kernel = pallas.pallas_call(copy, out_shape=x, scratch_shapes=[scratch])
    return clean(w, x) + kernel(jax.lax.stop_gradient(x))  # planted: refused


def copy(x, out, scratch):
    scratch[:8] = x[:8].astype(jnp.float32)
    out[...] = x[...]


def recipe(model):
    shape = jax.random.normal
    return supervised(
        lambda key: {name: shape(key, (WIDTH, WIDTH)) for name in "abc"},
        lambda w, batch, key: jnp.square(model(w, batch["x"]).astype(jnp.float32)).mean(),
        optax.adam(1e-3),
        {"x": np.ones((8, WIDTH), np.float32)},
        cast="x",
    )


ALONE = (clean, narrow, prints, calls_back, casts, repeats, repeats_little, scans, unknown_to_tpus)
CASES = {model.__name__: (partial(recipe, model), "v5e-1") for model in ALONE}
CASES |= {model.__name__: (partial(recipe, model), "v5e-4") for model in (mirrors, contrasts)}
CASES |= {
    "kernel_of_a_later_tpu": (partial(recipe, kernel_of_a_later_tpu), "v3-8"),
    "too_large_for_the_chips_own_memory": (partial(recipe, too_large_for_the_chips_own_memory), "v5e-1"),
    "clean on four": (partial(recipe, clean), "v5e-4"),
}


def found(make, where):
    slice_ = catalog.find(where)
    compiler = slice_.compiler
    devices = topologies.get_topology_desc(compiler.name, "tpu", **compiler.options).devices
    made = make()
    batch = 512 * len(devices)
    request = Request(batch=batch, shard="replicate", accumulate=1)
    try:
        compiled = compile_step(made, request, devices, 2**34)
    except CompilerRefused as error:
        return [explain_refusal(error.__cause__, error.jaxpr)]
    return find_hazards(compiled, batch, slice_.generation.matrix_unit)


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps([name, [[hazard.kind, hazard.sentence, hazard.place] for hazard in found(*case)]]))
