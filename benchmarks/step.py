"""Run a GPT-2 step, compiled as by the trainer except for named changes, as a worker of `turns.py`.

python -m benchmarks.step '{"size": "124m", "batch": 64, "attention": "xla", …}'
"""

import json
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bare import Bare
from tpuswarm.recipes.gpt2 import loss, program
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
    """Serve blocks of steps on one batch of random tokens. shape: options of the recipe."""
    device = local_devices()[0]
    kind = device.platform, device.device_kind, compiling.lowest_capability([device])
    default = request.attention_and_loop(*kind)
    # The trainer has no options for these: patch its modules.
    module: Any = request
    module.attention_and_loop = lambda *_: (attention or default[0], loop or default[1])
    if chunk_bytes is not None:
        module = program
        module.GPU_CHUNK_BYTES = loss.CHUNK_BYTES = chunk_bytes
    if bf16_logits:
        module = loss
        module.logits = _bf16_logits
    recipe = GPT2(size=size, data="fake", **shape)
    start = time.perf_counter()
    options = default_request(recipe, batch=batch).options(*kind)
    choice = Choice("replicate", remat, 1, "")
    compiled = compiling.compile_traced(compiling.trace(recipe, options, choice, batch, make_mesh([device])))
    if not isinstance(compiled, Compiled):
        sys.exit(f"it needs {compiled.needed / 2**30:.1f} GiB")
    bare = Bare(compiled, recipe)
    rows = bare.to_devices(recipe.data("train").rows(0, batch))
    first = float(bare.step(rows)["loss"])
    about = {
        "device": device.device_kind,
        "tokens": batch * recipe.config.context,
        "flops": compiled.flops.total,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(compiled.program.exchange().get(compiled.state))),
        "loss": first,
        "ready_s": time.perf_counter() - start,
        "temporaries": compiled.memory.temporaries,
        "attention": compiled.options.attention,
        "loop": compiled.options.loop,
    }
    print(json.dumps(about), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            bare.step(rows)
        jax.block_until_ready(bare.state)
        print(time.perf_counter() - start, flush=True)


def _bf16_logits(x_BxTxD: jax.Array, wte_VxD: jax.Array, vocab: int) -> jax.Array:
    logits_BxTxV = jnp.einsum("btd,vd->btv", x_BxTxD, wte_VxD, preferred_element_type=jnp.bfloat16)
    real_V = jnp.arange(wte_VxD.shape[0]) < vocab
    return jnp.where(real_V, logits_BxTxV, jnp.bfloat16(-1e30)).astype(jnp.float32)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
