"""GPT-2 on one GPU beside torch.compile with SDPA. GPU only.

Each of the two is a process of its own that holds its own part of the GPU's memory; they take turns, block by block, so
that only one works at a time. bfloat16, context 1024, one batch of random tokens; gradient, clipping, AdamW. Aims on
an H200 or H100: 550,000 tokens/s with the 124M model, and 1.2 times torch.

It needs a machine with an NVIDIA GPU, tpuswarm with its extra `cuda`, and beside it (or in `.venv-oracle`) a torch that
sees the GPU. Tables are printed as they are ready. `--quick` runs all of it with tiny models, on a CPU too.
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

SIZES = {"124m": 64, "355m": 32, "774m": 16}
"""Size → rows of a batch."""
TOKENS_A_SECOND, TIMES_TORCH = 550_000, 1.2
ROUNDS, STEPS = 10, 10
TINY = {"layers": 2, "heads": 2, "width": 64, "context": 128, "vocab": 500}
QUICK_BATCH = 2
OURS, TORCH = "tpuswarm", "torch.compile, SDPA"


def run(settings: Settings) -> Iterator[Table]:
    """A table for each size."""
    require_gpu(settings)
    for size in SIZES:
        yield _beside_torch(size, settings.quick)


def require_gpu(settings: Settings) -> None:
    """Skipped on a machine without one, unless it is only to be seen that everything runs."""
    if not settings.quick and not has_gpu():
        raise Skipped(
            "there is no NVIDIA GPU with JAX's CUDA plugin on this machine; it is ready to run on one with this very "
            "command, and with --quick it runs here in a tiny form"
        )


def options_of(size: str, quick: bool) -> dict[str, Any]:
    """What `benchmarks.step` is given for a size."""
    return {"size": size, "batch": QUICK_BATCH if quick else SIZES[size], "shape": TINY if quick else {}}


def ours(options: Mapping[str, Any], flags: str = "") -> Worker:
    """A step of ours, in less than half of the GPU's memory."""
    said = " ".join(filter(None, [os.environ.get("XLA_FLAGS", ""), flags]))
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.45", "XLA_FLAGS": said}
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
        with suppress(Ended):  # the others go on without it
            took = in_turns(working, *((2, 2) if quick else (ROUNDS, STEPS)))
    ends = {name: worker.close() for name, worker in workers.items()}
    for name in [each for each in workers if each not in took]:
        notes.append(f"{name} {'broke off' if workers[name].about else 'does not work here'}: {ends[name]}")
    about = workers[OURS].about
    if not about:
        raise Skipped(f"a step of {size} failed: {ends[OURS]}")
    rows = [_row(name, about, seconds) for name, seconds in took.items()]
    if len(took) == 2:
        ratio = median([theirs / mine for theirs, mine in zip(took[TORCH], took[OURS], strict=True)])
        rows.append(("tpuswarm over torch", ratio.show(".2f"), "", verdict(ratio.middle >= TIMES_TORCH)))
    if size == "124m" and OURS in took:
        speed = median([about["tokens"] / seconds for seconds in took[OURS]]).middle
        rows.append(("aim", f"{TOKENS_A_SECOND:,}", "", verdict(speed >= TOKENS_A_SECOND)))
    return Table(
        f"GPT-2 {size} beside torch on {about['device']}",
        ("", "tokens/s: median (95% interval)", "MFU", f"{TIMES_TORCH} times torch; aim"),
        rows,
        [
            f"{about['parameters']:,} parameters, batch {options['batch']}, "
            f"{about['flops'] / about['tokens'] / 1e6:,.0f} MFLOP per token",
            f"attention {about['attention']}, layers {about['loop']}; ready in {about['ready_s']:.0f} s",
            *notes,
        ],
    )


def _row(name: str, about: Mapping[str, Any], took: list[float]) -> tuple[str, ...]:
    """Both do the same work, so that ours says what a token takes."""
    speed = median([about["tokens"] / seconds for seconds in took])
    peak = peak_flops(about["device"], "bf16")
    mfu = f"{speed.middle * about['flops'] / about['tokens'] / peak:.1%}" if peak else "–"
    return name, speed.show(",.0f"), mfu, ""
