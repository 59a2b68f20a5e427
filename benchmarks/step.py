"""A GPT-2 step as the trainer compiles it, or with single things changed, as a worker of `turns.py`.

    python -m benchmarks.step '{"size": "124m", "batch": 64, "attention": "xla", …}'

What is not named is as the trainer has it.
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bare import Bare
from tpuswarm.recipes.gpt2 import loss
from tpuswarm.recipes.gpt2 import recipe as recipe_module
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program import request
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.request import Choice, default_request
from tpuswarm.train.recipe import Remat


def main(
    *,
    size: str,
    batch: int,
    shape: dict[str, Any],
    attention: str | None = None,
    loop: str | None = None,
    remat: Remat = "none",
    chunk_bytes: int | None = None,
    bf16_logits: bool = False,
) -> None:
    """Serve blocks of steps on one batch of random tokens; shape: options of the recipe in place of the size's."""
    device = local_devices()[0]
    usual = request.attention_and_loop(device.platform, device.device_kind)
    # The trainer has no options for these: whoever measures them reaches inside.
    inside: Any = request
    inside.attention_and_loop = lambda platform, kind: (attention or usual[0], loop or usual[1])
    if chunk_bytes is not None:
        inside = recipe_module
        inside.GPU_CHUNK_BYTES = loss.CHUNK_BYTES = chunk_bytes
    if bf16_logits:
        inside = loss
        inside.logits = _bf16_logits
    recipe = GPT2(size=size, data="fake", **shape)
    start = time.perf_counter()
    options = default_request(recipe, batch=batch).options(device.platform, device.device_kind)
    way = Choice("replicate", remat, 1, "")
    made = compiling.compile_traced(compiling.trace(recipe, options, way, batch, make_mesh([device])))
    if not isinstance(made, Compiled):
        sys.exit(f"it needs {made.needed / 2**30:.1f} GiB")
    bare = Bare(made, recipe)
    rows = bare.put(recipe.data("train").rows(0, batch))
    first = float(bare.step(rows)["loss"])
    about = {
        "device": device.device_kind,
        "tokens": batch * recipe.config.context,
        "flops": made.flops.total,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(made.program.exchange().get(made.state))),
        "loss": first,
        "ready_s": time.perf_counter() - start,
        "temporaries": made.memory.temporaries,
        "attention": made.options.attention,
        "loop": made.options.loop,
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            bare.step(rows)
        jax.block_until_ready(bare.state)
        print(time.perf_counter() - start, flush=True)


def _bf16_logits(x_BxTxD: jax.Array, wte_VxD: jax.Array, vocab: int) -> jax.Array:
    """Logits held in bfloat16, summed in float32."""
    made_BxTxV = jnp.einsum("btd,vd->btv", x_BxTxD, wte_VxD, preferred_element_type=jnp.bfloat16)
    real_V = jnp.arange(wte_VxD.shape[0]) < vocab
    return jnp.where(real_V, made_BxTxV, jnp.bfloat16(-1e30)).astype(jnp.float32)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
