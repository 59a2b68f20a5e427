"""Compare GPT-2 on one GPU with torch.compile and SDPA. GPU only.

The two processes share the GPU's memory and take turns, block by block. bfloat16, context 1024, one batch of random
tokens; gradient, clipping, AdamW. Aims on an H200 or H100: 550,000 tokens/s with the 124M model, and 1.2 times torch.

It needs an NVIDIA GPU, tpuswarm with its extra `cuda`, and a torch that sees the GPU, here or in `.venv-oracle`.
`--quick` runs tiny models, also on a CPU.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from benchmarks.report import Settings, Skipped, Table, median, verdict
from benchmarks.torch_speed import torch_worker
from benchmarks.turns import Ended, Worker, in_turns
from tpuswarm.catalog import peak_flops
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.process.platform import has_gpu

BATCHES = {"124m": 64, "355m": 32, "774m": 16}
MIN_TOKENS_PER_S, MIN_TORCH_RATIO = 550_000, 1.2
ROUND_COUNT, STEP_COUNT = 10, 10
TINY_SHAPE = {"layers": 2, "heads": 2, "width": 64, "context": 128, "vocab": 500}
QUICK_BATCH_SIZE = 2
OURS, TORCH = "tpuswarm", "torch.compile, SDPA"


def run(settings: Settings) -> Iterator[Table]:
    require_gpu(settings)
    for size in BATCHES:
        yield _beside_torch(size, settings.quick)


def require_gpu(settings: Settings) -> None:
    """Raise Skipped on a machine without a GPU, except with --quick."""
    if not settings.quick and not has_gpu():
        raise Skipped("there is no NVIDIA GPU with JAX's CUDA plugin on this machine; --quick runs tiny models here")


def options_of(size: str, quick: bool) -> dict[str, Any]:
    """Return the options of `benchmarks.step` for a size."""
    return {"size": size, "batch": QUICK_BATCH_SIZE if quick else BATCHES[size], "shape": TINY_SHAPE if quick else {}}


def ours(options: Mapping[str, Any], flags: str = "") -> Worker:
    """Start a worker with our step and less than half of the GPU's memory."""
    xla_flags = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), flags]))
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45", "XLA_FLAGS": xla_flags}
    return Worker([sys.executable, "-m", "benchmarks.step", json.dumps(options)], environment)


def _beside_torch(size: str, quick: bool) -> Table:
    options = options_of(size, quick)
    config = GPT2(size=size, data="fake", **options["shape"]).config
    shape = {name: getattr(config, name) for name in ("layers", "heads", "width", "context")}
    shape |= {"vocab": config.padded_vocab, "batch": options["batch"]}
    notes = ["torch: bfloat16 autocast, its residual stream in float32 as nanoGPT's, TF32, fused AdamW"]
    workers = {OURS: ours(options)}
    try:
        workers[TORCH] = torch_worker("compile", shape, "cuda" if has_gpu() else "cpu")
    except Skipped as reason:
        notes.append(f"no torch: {reason}")
    took: dict[str, list[float]] = {}
    while not took and (working := {name: worker for name, worker in workers.items() if not worker.ended}):
        with suppress(Ended):  # the others continue
            took = in_turns(working, *((2, 2) if quick else (ROUND_COUNT, STEP_COUNT)))
    ends = {name: worker.close() for name, worker in workers.items()}
    for name in workers.keys() - took.keys():
        notes.append(f"{name} {'broke off' if workers[name].about else 'does not work here'}: {ends[name]}")
    about = workers[OURS].about
    if not about:
        raise Skipped(f"a step of {size} failed: {ends[OURS]}")
    rows = [_row(name, about, seconds) for name, seconds in took.items()]
    if len(took) == 2:
        ratio = median([theirs / mine for theirs, mine in zip(took[TORCH], took[OURS], strict=True)])
        rows.append(("tpuswarm over torch", ratio.show(".2f"), "", verdict(ratio.middle >= MIN_TORCH_RATIO)))
    if size == "124m" and OURS in took:
        speed = median([about["tokens"] / seconds for seconds in took[OURS]]).middle
        rows.append(("aim", f"{MIN_TOKENS_PER_S:,}", "", verdict(speed >= MIN_TOKENS_PER_S)))
    return Table(
        f"GPT-2 {size} beside torch on {about['device']}",
        ("", "tokens/s: median (95% interval)", "MFU", f"{MIN_TORCH_RATIO} times torch; aim"),
        rows,
        [
            f"{about['parameters']:,} parameters, batch {options['batch']}, "
            f"{about['flops'] / about['tokens'] / 1e6:,.0f} MFLOP per token",
            f"attention {about['attention']}, layers {about['loop']}; ready in {about['ready_s']:.0f} s",
            *notes,
        ],
    )


def _row(name: str, about: Mapping[str, Any], took: list[float]) -> tuple[str, ...]:
    speed = median([about["tokens"] / seconds for seconds in took])
    peak = peak_flops(about["device"], "bf16")
    mfu = f"{speed.middle * about['flops'] / about['tokens'] / peak:.1%}" if peak else "–"
    return name, speed.show(",.0f"), mfu, ""
