"""Compare StyleGAN2 on one GPU with our torch implementation of the same step. GPU only.

The two processes share the GPU's memory and take turns in blocks of 16 steps, which contain every regulariser.
256 x 256, random pixels, no augmentation. Aim on an H100 or H200: 160 pictures/s. It needs the same machine as `gpu`.
`--quick` runs tiny models, also on a CPU.
"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import require_gpu
from benchmarks.report import Settings, Skipped, Table, median, verdict
from benchmarks.torch_speed import torch_python
from benchmarks.turns import Worker, in_turns
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.process.platform import has_gpu

MIN_PICTURES_PER_S = 160
BATCH_SIZE, ROUND_COUNT, STEP_COUNT = 32, 8, 16
TINY_SHAPE = {"resolution": 16, "latent": 8, "mapping": 2, "channels": 4, "most_channels": 8, "group": 2}
OURS, TORCH = "tpuswarm", "torch, eager"


def run(settings: Settings) -> Table:
    require_gpu(settings)
    options: dict[str, Any] = TINY_SHAPE if settings.quick else {"resolution": 256}
    batch, rounds = (4, 2) if settings.quick else (BATCH_SIZE, ROUND_COUNT)
    shape = vars(StyleGAN2(data="fake", **options).config) | {"batch": batch}
    workers = {OURS: ours({**options, "batch": batch, "adapt": False}), TORCH: torch(shape)}
    if broken := {name: worker.close() for name, worker in workers.items() if worker.ended}:
        raise Skipped("; ".join(f"{name} does not work here: {reason}" for name, reason in broken.items()))
    took = in_turns(workers, rounds, STEP_COUNT)
    for worker in workers.values():
        worker.close()
    rows = []
    for name, seconds in took.items():
        speed = median([batch / step_s for step_s in seconds])
        aim = verdict(speed.middle >= MIN_PICTURES_PER_S) if name == OURS else ""
        rows.append((name, speed.show(",.1f"), f"{workers[name].about['parameters']:,}", aim))
    ratio = median([theirs / mine for theirs, mine in zip(took[TORCH], took[OURS], strict=True)])
    rows.append(("tpuswarm over torch", ratio.show(".2f"), "", ""))
    about = workers[OURS].about
    return Table(
        f"stylegan2-{shape['resolution']} beside torch on {about['device']}",
        ("", "pictures/s: median (95% interval)", "parameters", f"aim: {MIN_PICTURES_PER_S} pictures/s"),
        rows,
        [f"batch {batch}, {rounds} rounds of {STEP_COUNT} steps; ready in {about['ready_s']:.0f} s"],
    )


def ours(options: dict[str, Any]) -> Worker:
    """Start a worker with our step and less than half of the GPU's memory."""
    command = [sys.executable, "-m", "benchmarks.stylegan2_step", json.dumps(options)]
    return Worker(command, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"})


def torch(shape: dict[str, Any]) -> Worker:
    """Start a worker with torch's step."""
    device = "cuda" if has_gpu() else "cpu"
    script = Path(__file__).with_name("torch_stylegan2.py")
    return Worker([torch_python(device), script, device, json.dumps(shape)])
