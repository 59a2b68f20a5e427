"""A step of GPT-2 355M with nothing, all but products, or all of a layer computed again, by the TPU compiler.

No TPU is needed. A minute or two for each line.

    python -m benchmarks.remat '{"on": "v5e-8", "batch": 64, "remat": "dots"}'    # one line: what it starts itself
"""

import json
import sys
from typing import Any

from benchmarks.compiled import start
from benchmarks.report import Settings, Skipped, Table
from tpuswarm.catalog import find
from tpuswarm.config.units import GIB
from tpuswarm.plan.children import no_compiler
from tpuswarm.plan.order import described
from tpuswarm.train.program import flops
from tpuswarm.train.program.request import REMATS, Choice, usual_request

ON, BATCH, SIZE = "v5e-8", 64, "355m"


def run(settings: Settings) -> Table:
    """A line for each."""
    if reason := no_compiler():
        raise Skipped(reason)
    have = described(find(ON)).hbm_bytes / GIB
    rows = []
    for remat in list(REMATS)[-1:] if settings.quick else REMATS:
        found = start("benchmarks.remat", {"on": ON, "batch": BATCH, "remat": remat})
        fits = "yes" if found["gib"] <= have else "no"
        rows.append((f"`{remat}`", f"{found['gib']:.2f}", fits, f"{found['tflops']:.1f}"))
    return Table(
        f"GPT-2 {SIZE.upper()} by the TPU compiler, what is computed again: {ON}, batch {BATCH}",
        ("remat", "GiB a device", f"of {have:.2f}", "TFLOPs a step"),
        rows,
        ["replicated; context 1024; bfloat16 over float32 weights; FLOPs of products, also of those done again"],
    )


def one(on: str, batch: int, remat: Any) -> dict[str, Any]:
    """GiB of a device and FLOPs of a step."""
    from jax.experimental import topologies

    from tpuswarm.recipes.gpt2.recipe import GPT2
    from tpuswarm.train.program.compiled import Compiled, compile_traced, trace
    from tpuswarm.train.program.mesh import make_mesh

    inside: Any = flops
    inside.RECOMPUTED = "nothing is left out"
    place = described(find(on))
    devices: list[Any] = list(topologies.get_topology_desc(place.compiler, "tpu", **place.compiler_options).devices)
    recipe = GPT2(size=SIZE, data="fake")
    options = usual_request(recipe, batch=batch).options("tpu", devices[0].device_kind)
    traced = trace(recipe, options, Choice("replicate", remat, 1, ""), batch, make_mesh(devices))
    made = compile_traced(traced)
    needed = made.memory.total if isinstance(made, Compiled) else made.needed
    return {"gib": round(needed / GIB, 3), "tflops": round(flops.model_flops(traced.step.jaxpr).total / 1e12, 2)}


if __name__ == "__main__":
    print(json.dumps(one(**json.loads(sys.argv[1]))))
