"""Our GPT-2 124M step beside those of peers, by the TPU compiler: memory, traffic and FLOPs. No TPU is needed.

Each step is compiled in a process of its own, for described slices, in the same libtpu; 20 to 40 minutes on 2 calm
cores. Every one that is done is a line of benchmarks/compiled.jsonl, and the next start goes on with the rest; take a
line out to compile it again. nanodo's step is written anew in its published form (nanodo.py). Levanter and MaxText are
not in it: see docs/benchmarks.md.

    python -m benchmarks.compiled '{"on": "v5e-8", "batch": 64, "form": "ours"}'    # one step: what it starts itself
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.accessed import accessed
from benchmarks.collectives import sent
from benchmarks.report import Settings, Skipped, Table
from tpuswarm.catalog import find
from tpuswarm.config.units import GIB
from tpuswarm.plan.children import no_compiler
from tpuswarm.plan.order import described
from tpuswarm.train.program import flops

DONE = Path(__file__).with_suffix(".jsonl")
ROWS = 8
"""Of a batch, on each device."""
SLICES = ("v5e-8", "v6e-8", "v3-8", "v5e-64")
FORMS = {
    "ours": "tpuswarm, as it chooses",
    "ours, fsdp": "tpuswarm, `--shard fsdp`",
    "ours, 4 micro-batches": "tpuswarm, `--accumulate 4`",
    "nanodo": "nanodo",
    "nanodo, remat": "nanodo, `remat=True`",
}


def run(settings: Settings) -> Iterator[Table]:
    """A table for each slice."""
    if reason := no_compiler():
        raise Skipped(reason)
    for on in SLICES[:1] if settings.quick else SLICES:
        place = described(find(on))
        batch = ROWS * place.devices
        rows = []
        for form, name in FORMS.items():
            rows.append((name, *_cells(_known({"on": on, "batch": batch, "form": form}))))
        yield Table(
            f"GPT-2 124M by the TPU compiler: {on}, batch {batch}",
            (
                "",
                "GiB a device",
                "collectives a step",
                "MiB it sends",
                "GiB it moves in memory",
                "TFLOPs a step",
                "form",
            ),
            rows,
            [
                f"{place.hbm_bytes / GIB:.2f} GiB a device; context 1024; bfloat16 over float32 weights; AdamW",
                "collectives over all turns of all loops; what a ring makes of them: an all-reduce sends twice its "
                "array, an all-gather and a reduce-scatter once",
                "moved in HBM: what operations read and write there, a kernel each of its arrays once",
                "FLOPs of matrix products, with what is computed again; nanodo has no biases and no clipping",
            ],
        )


def _cells(found: dict[str, Any]) -> tuple[str, ...]:
    if "refused" in found:
        return (found["refused"], "", "", "", f"{found['tflops']:.1f}", "")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found["counts"].items()))
    figures = (f"{found['mib']:,.0f}", f"{found['accessed'] / GIB:.1f}", f"{found['tflops']:.1f}")
    return (f"{found['gib']:.2f}", kinds, *figures, found["why"])


def _known(asked: dict[str, Any]) -> dict[str, Any]:
    """What is in the file of what is asked, or is put there now."""
    for line in DONE.read_text().splitlines() if DONE.exists() else ():
        known: dict[str, Any] = json.loads(line)
        if asked.items() <= known.items():
            return known
    found = asked | start("benchmarks.compiled", asked)
    with DONE.open("a") as file:
        file.write(json.dumps(found) + "\n")
    return found


def start(module: str, asked: dict[str, Any]) -> dict[str, Any]:
    """What a benchmark prints as a process of its own, with the TPU compiler and no cache."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    command = [sys.executable, "-m", module, json.dumps(asked)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{asked} failed: {child.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def one(on: str, batch: int, form: str) -> dict[str, Any]:
    """One step: GiB of a device, what it sends, FLOPs; or the memory that the compiler asks for in vain."""
    import jax
    from jax.experimental import topologies

    from tpuswarm.train.program.compiled import memory_of, needed_bytes

    inside: Any = flops
    inside.RECOMPUTED = "nothing is left out"
    place = described(find(on))
    devices = topologies.get_topology_desc(place.compiler, "tpu", **place.compiler_options).devices
    traced, compiled, why = None, None, ""
    try:
        if form.startswith("ours"):
            compiled, jaxpr, why = _ours(list(devices), batch, form, place.hbm_bytes)
        else:
            from benchmarks import nanodo

            traced = nanodo.traced(list(devices), batch, "remat" in form)
            jaxpr = traced.jaxpr
            compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if traced is None or not (needed := needed_bytes(str(error))):
            raise
        return {
            "refused": f"{needed / GIB:.1f}: refused",
            "tflops": round(flops.model_flops(traced.jaxpr).total / 1e12, 2),
        }
    text = compiled.as_text()
    moved = sent(text, len(devices))
    return {
        "gib": round(memory_of(compiled, "tpu", 0).total / GIB, 3),
        "counts": dict(moved.counts),
        "mib": round(moved.bytes / 2**20, 1),
        "accessed": accessed(text),
        "tflops": round(flops.model_flops(jaxpr).total / 1e12, 2),
        "why": why,
    }


def _ours(devices: list[Any], batch: int, form: str, memory_bytes: int) -> tuple[Any, Any, str]:
    """The trainer's own step, the program of it and why it is so."""
    from tpuswarm.recipes.gpt2.recipe import GPT2
    from tpuswarm.train.program.compiled import compile_step
    from tpuswarm.train.program.request import usual_request

    recipe = GPT2(size="124m", data="fake")
    asked = {"shard": "fsdp" if "fsdp" in form else None, "accumulate": 4 if "micro" in form else None}
    compiled = compile_step(recipe, usual_request(recipe, batch=batch, **asked), devices, memory_bytes)
    return compiled.step, compiled.jaxpr, compiled.choice.why


if __name__ == "__main__":
    print(json.dumps(one(**json.loads(sys.argv[1]))))
