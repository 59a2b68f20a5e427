"""Run a StyleGAN2 step, compiled as by the trainer, as a worker of `turns.py`.

python -m benchmarks.stylegan2_step '{"resolution": 256, "batch": 32, …}'
"""

import json
import sys
import time
from typing import Any

import jax

from benchmarks.bare import Bare
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import default_request


def main(*, batch: int, **options: Any) -> None:
    """Serve blocks of steps on one batch of random pixels."""
    device = local_devices()[0]
    recipe = StyleGAN2(data="fake", **options)
    start = time.perf_counter()
    bare = Bare(compile_step(recipe, default_request(recipe, batch=batch), [device]), recipe)
    rows = bare.to_devices(recipe.data("train").rows(0, batch))
    loss = float(bare.step(rows)["loss"])
    about = {
        "device": device.device_kind,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(bare.compiled.program.exchange().get(bare.state))),
        "loss": loss,
        "ready_s": time.perf_counter() - start,
    }
    print(json.dumps(about), flush=True)
    bare.steps_done = 0
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            bare.step(rows)
        jax.block_until_ready(bare.state)
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
