"""StyleGAN2 on one GPU beside a torch implementation of ours in the same form. GPU only.

Each of the two is a process of its own that holds its own part of the GPU's memory; they take turns, in blocks of 16
steps, which hold every regulariser as often as training does. 256 x 256, random pixels, without augmentation. Aim on
an H100 or H200: 160 pictures/s.

It needs what `gpu` needs. `--quick` runs all of it in a tiny form, on a CPU too.
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

PICTURES_A_SECOND = 160
BATCH, ROUNDS, STEPS = 32, 8, 16
TINY = {"resolution": 16, "latent": 8, "mapping": 2, "channels": 4, "most_channels": 8, "group": 2}
OURS, TORCH = "tpuswarm", "torch, eager"


def run(settings: Settings) -> Table:
    """One table."""
    require_gpu(settings)
    options: dict[str, Any] = TINY if settings.quick else {"resolution": 256}
    batch, rounds = (4, 2) if settings.quick else (BATCH, ROUNDS)
    shape = vars(StyleGAN2(data="fake", **options).config) | {"batch": batch}
    workers = {OURS: ours({**options, "batch": batch, "adapt": False}), TORCH: torch(shape)}
    if broken := {name: worker.close() for name, worker in workers.items() if worker.ended}:
        raise Skipped("; ".join(f"{name} does not work here: {said}" for name, said in broken.items()))
    took = in_turns(workers, rounds, STEPS)
    for worker in workers.values():
        worker.close()
    rows = []
    for name, seconds in took.items():
        speed = median([batch / each for each in seconds])
        aim = verdict(speed.middle >= PICTURES_A_SECOND) if name == OURS else ""
        rows.append((name, speed.show(",.1f"), f"{workers[name].about['parameters']:,}", aim))
    ratio = median([theirs / mine for theirs, mine in zip(took[TORCH], took[OURS], strict=True)])
    rows.append(("tpuswarm over torch", ratio.show(".2f"), "", ""))
    about = workers[OURS].about
    return Table(
        f"stylegan2-{shape['resolution']} beside torch on {about['device']}",
        ("", "pictures/s: median (95% interval)", "parameters", f"aim: {PICTURES_A_SECOND} pictures/s"),
        rows,
        [f"batch {batch}, {rounds} rounds of {STEPS} steps; ready in {about['ready_s']:.0f} s"],
    )


def ours(options: dict[str, Any]) -> Worker:
    """In less than half of the GPU's memory."""
    command = [sys.executable, "-m", "benchmarks.stylegan2_step", json.dumps(options)]
    return Worker(command, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45"})


def torch(shape: dict[str, Any]) -> Worker:
    """The same networks."""
    device = "cuda" if has_gpu() else "cpu"
    script = Path(__file__).with_name("torch_stylegan2.py")
    return Worker([torch_python(device), script, device, json.dumps(shape)])
