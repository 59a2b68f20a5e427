"""What StyleGAN2's gradients need on a TPU with rows folded and without, by the TPU compiler. No TPU is needed.

Each is compiled for one device of v5e in a process of its own, at the effort at which a step is compiled; a quarter of
an hour of a core.
"""

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.compiled import start
from benchmarks.report import Settings, Skipped, Table
from tpuswarm.catalog import find
from tpuswarm.config.units import GIB
from tpuswarm.plan.children import no_compiler
from tpuswarm.plan.order import described

PARTS = ("discriminator", "r1", "generator", "path")
PICTURES = {1024: 1, 256: 4}
"""Side → how many a device has."""


def run(settings: Settings) -> Iterator[Table]:
    """A row for each gradient, both forms side by side."""
    if reason := no_compiler():
        raise Skipped(reason)
    rows = []
    for side, count in {32: 4}.items() if settings.quick else PICTURES.items():
        for part in PARTS:
            cells = []
            for folds in (False, True):
                found = start("benchmarks.folds", {"side": side, "count": count, "part": part, "folds": folds})
                cells.append(f"{found['gib']:.2f}, {found['moved']:.1f}, {found['ms']:.0f} ms")
            rows.append((f"{part}, {count} of {side} x {side}", *cells))
    yield Table(
        "StyleGAN2's gradients on one device of v5e, by the TPU compiler",
        ("gradient of, pictures", "plain: GiB, GiB moved, time", "folded"),
        rows,
        ["GiB of temporaries, and what is read and written in a run; the time is the compiler's estimate"],
    )


def one(side: int, count: int, part: str, folds: bool) -> dict[str, float]:
    """One gradient, in bfloat16."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    from tpuswarm.recipes.stylegan2 import discriminator, generator, losses
    from tpuswarm.recipes.stylegan2.config import SIZES
    from tpuswarm.recipes.stylegan2.fold import Form
    from tpuswarm.recipes.stylegan2.recipe import StyleGAN2

    config, form = SIZES[side], Form(half=True, folds=folds)
    key = jax.eval_shape(lambda: jax.random.key(0))
    g, d = (jax.eval_shape(lambda key, of=of: of.init(key, config), key) for of in (generator, discriminator))
    x = jax.ShapeDtypeStruct((count, side, side, 3), jnp.float32)
    w = jax.ShapeDtypeStruct((count, config.layers, config.latent), jnp.float32)

    def score(params: Any, x: jax.Array) -> jax.Array:
        return discriminator.score(params, x, config, form)

    def make(params: Any, w: jax.Array, key: jax.Array) -> jax.Array:
        return generator.synthesize(params, w, key, config, form)

    def path(params: Any, w: jax.Array, key: jax.Array, x: jax.Array) -> jax.Array:
        return losses.path_lengths(lambda w: make(params, w, key), w, x).sum()

    of: dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]] = {
        "discriminator": (lambda params, x: score(params, x).sum(), (d, x)),
        "r1": (lambda params, x: losses.r1(lambda x: score(params, x), x), (d, x)),
        "generator": (lambda params, w, key, x: (make(params, w, key) * x).sum(), (g, w, key, x)),
        "path": (path, (g, w, key, x)),
    }
    loss, shapes = of[part]
    place = described(find("v5e-8"))
    devices = topologies.get_topology_desc(place.compiler, "tpu", **place.compiler_options).devices
    at = jax.sharding.SingleDeviceSharding(devices[0])
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=at), shapes)
    effort: dict[str, Any] = dict(StyleGAN2.compiling["tpu"])
    made = jax.jit(jax.grad(loss)).lower(*shapes).compile(effort)
    memory: Any = made.memory_analysis()
    costs: Any = made.cost_analysis()
    return {
        "gib": memory.temp_size_in_bytes / GIB,
        "moved": costs["bytes accessed"] / GIB,
        "ms": costs["optimal_seconds"] * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(one(**json.loads(sys.argv[1]))))
