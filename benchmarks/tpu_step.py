"""Compile one training step for a described TPU slice, as a worker of `peers.py`: ours or MaxText's.

python tpu_step.py maxtext|full|dots|none MODEL SLICE ROWS_PER_DEVICE CONTEXT

`full`, `dots` and `none` are ours with this recomputation of layers; MaxText's default is `full`. It prints a line of
JSON. MaxText's interpreter runs both, so that both meet one compiler. AdamW, float32 parameters, bfloat16 products;
parameters and moments are split over all devices.
"""

import json
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

COLLECTIVE = re.compile(
    r"= (?P<type>.+?) (?P<op>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\("
)
ARRAY = re.compile(r"([a-z]+\d+)\w*\[([\d,]*)\]")
CHANNEL = re.compile(r"channel_id=(\d+)")
LOOP = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
CALLED = re.compile(r"(?:to_apply|calls)=%?([\w.\-]+)")
BOUND = re.compile(r"[su]32\[\]\S* constant\((\d+)\)")


def main(form: str, model: str, slice_name: str, rows: int, context: int) -> None:
    start = time.perf_counter()
    if form == "maxtext":
        compiled = _compile_maxtext(model, slice_name, rows, context)
    else:
        compiled = _compile_ours(form, model, slice_name, rows, context)
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    arguments = memory.argument_size_in_bytes
    devices = int(slice_name.partition("-")[2])
    report = {
        "seconds": seconds,
        "arguments": arguments,
        "temporaries": memory.peak_memory_in_bytes - arguments,
        "sent": bytes_sent(compiled.as_text(), devices),
    }
    print(json.dumps(report), flush=True)


def _compile_ours(remat: Any, model: str, slice_name: str, rows: int, context: int) -> Any:
    from jax.experimental import topologies

    from tpuswarm import catalog
    from tpuswarm.recipes.decoder.recipe import Decoder
    from tpuswarm.train.program import compiled
    from tpuswarm.train.program.mesh import make_mesh
    from tpuswarm.train.program.request import Choice, default_request

    accelerator = catalog.find(slice_name)
    compiler = accelerator.compiler
    devices = topologies.get_topology_desc(platform="tpu", topology_name=compiler.name, **compiler.options).devices
    recipe = Decoder(architecture=json.dumps(dict(catalog.public_models()[model].config)), data="fake", context=context)
    batch = rows * len(devices)
    request = default_request(recipe, batch=batch)
    options = request.options("tpu", accelerator.device_kind)
    traced = compiled.trace(recipe, options, Choice("fsdp", remat, 1, ""), batch, make_mesh(devices))
    done = compiled.compile_traced(traced)
    assert isinstance(done, compiled.Compiled), done
    return done.step


def _compile_maxtext(model: str, slice_name: str, rows: int, context: int) -> Any:
    import maxtext
    from maxtext.trainers.pre_train import train_compile

    compile_step, found = train_compile.jit_and_compile, list[Any]()

    def keep(*arguments: Any, **keywords: Any) -> Any:
        found.append(compile_step(*arguments, **keywords))
        return found[0]

    train_compile.jit_and_compile = keep
    settings = {
        "compile_topology": slice_name, "compile_topology_num_slices": 1, "model_name": model,
        "per_device_batch_size": rows, "max_target_length": context, "dataset_type": "synthetic",
        "enable_checkpointing": "false", "run_name": "peer", "base_output_directory": "/nonexistent",
    }  # fmt: skip
    base = Path(maxtext.__file__).with_name("configs") / "base.yml"
    train_compile.main(["train_compile", str(base), *(f"{name}={value}" for name, value in settings.items())])
    return found[0]


def bytes_sent(text: str, devices: int) -> float:
    """Return how many bytes a device sends in a step, each collective as a ring over all; text: optimized HLO.

    A loop counts as often as its bound says: half of it for those that pass parts of a matrix around while they
    multiply, which take two turns at once. Fusions name one collective several times; its channel counts once.
    """
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = computations["ENTRY" if head[1] else head[2]] = []
        else:
            lines.append(line)

    def bounds(name: str) -> list[int]:
        called = [bound for line in computations[name] for inner in CALLED.findall(line) for bound in bounds(inner)]
        return [int(bound) for line in computations[name] for bound in BOUND.findall(line)] + called

    def of(name: str, seen: set[str], is_scattered: bool = False) -> float:
        total = 0.0
        for line in computations.get(name, []):
            if match := COLLECTIVE.search(line):
                channel = CHANNEL.search(line)
                if not channel or channel[0] not in seen:
                    seen.add(channel[0] if channel else "")
                    total += _ring_bytes(match["op"], match["type"], devices, is_scattered)
            if loop := LOOP.search(line):
                turns = next(iter(bounds(loop[1])), 1) // (2 if "windowed_dot" in loop[2] else 1)
                total += turns * of(loop[2], set())
            else:
                for called in CALLED.findall(line):
                    total += of(called, seen, is_scattered or "all-reduce-scatter" in called)
        return total

    return of("ENTRY", set())


def _ring_bytes(operation: str, types: str, devices: int, is_scattered: bool) -> float:
    sizes = [
        math.prod(map(int, filter(None, shape.split(",")))) * int(re.sub(r"\D", "", dtype)) / 8
        for dtype, shape in ARRAY.findall(types)
    ]
    if operation == "collective-permute":  # its type also names the source
        return sizes[0]
    hops = devices - 1
    if operation == "reduce-scatter":
        return sum(sizes) * hops
    return sum(sizes) * hops / devices * (2 if operation == "all-reduce" and not is_scattered else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
