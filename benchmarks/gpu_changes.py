"""Measure single changes to the 124M step on one GPU beside their estimates. GPU only.

Each changed step takes turns with the unchanged one, as in `gpu.py`. Rows are also printed to stderr when ready.
"""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.gpu import QUICK_BATCH_SIZE, options_of, ours, require_gpu
from benchmarks.report import Settings, Skipped, Table, median
from benchmarks.turns import Ended, Worker, in_turns
from tpuswarm.train.process.platform import has_gpu

ROUND_COUNT, STEP_COUNT = 6, 10


class Change(NamedTuple):
    """expected: the estimate; options: for `benchmarks.step`; flags: for XLA_FLAGS."""

    name: str
    expected: str
    options: Mapping[str, Any]
    flags: str = ""


CHANGES = (
    Change("logits all at once", "1.1: nothing is computed twice; 13 GB are held", {"chunk_bytes": 2**40}),
    Change("logits, 8 GiB at a time", "1.0 or more", {"chunk_bytes": 2**33}),
    Change("logits in bfloat16", "1.05: half of the logits' traffic", {"bf16_logits": True}),
    Change("batch 128", "1.03: half of the optimizer's share", {"batch": 128}),
    Change("no Triton products", "1.0: cuBLAS is as good at these sizes", {}, "--xla_gpu_enable_triton_gemm=false"),
    Change("cuDNN's fused products", "1.0 or more: fewer passes over activations", {},
           "--xla_gpu_cudnn_gemm_fusion_level=2"),
    Change("latency-hiding scheduler", "1.0: there is nothing to hide on one GPU", {},
           "--xla_gpu_enable_latency_hiding_scheduler=true"),
    Change("attention by XLA", "0.6: it writes 64 x 12 x 1024 x 1024 scores a layer", {"attention": "xla"}),
    Change("layers in a loop", "0.9: activations are copied into and out of stacks", {"loop": "scan"}),
    Change("logits, 128 MiB at a time", "0.9: 128 turns with small products", {"chunk_bytes": 2**27}),
    Change("no CUDA graphs", "0.98: a step launches some hundred kernels", {}, "--xla_gpu_enable_command_buffer="),
    Change("batch 32", "0.97: twice the optimizer's share", {"batch": 32}),
    Change("layers recomputed", "0.78: a forward pass more", {"remat": "full"}),
)  # fmt: skip


def run(settings: Settings) -> Table:
    require_gpu(settings)
    options, rows, notes = options_of("124m", settings.quick), [], []
    unchanged = ours(options)
    if unchanged.ended:
        raise Skipped(f"the unchanged step failed: {unchanged.close()}")
    device = unchanged.about["device"]
    for change in CHANGES:
        if change.flags and not has_gpu():
            notes.append(f"{change.name}: only on a GPU")
            continue
        if unchanged.ended:
            unchanged = ours(options)
        changed = {**options, **change.options} | ({"batch": QUICK_BATCH_SIZE} if settings.quick else {})
        rows.append(
            _row(
                change, unchanged, ours(changed, change.flags), (2, 2) if settings.quick else (ROUND_COUNT, STEP_COUNT)
            )
        )
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    unchanged.close()
    return Table(
        f"Single changes to the step of GPT-2 124M on {device}",
        ("change", "should give, an estimate", "gave: its tokens/s over the step's (95% interval)", "temporaries, GiB"),
        rows,
        ["each in turns with the unchanged step; above 1 is faster", *notes],
    )


def _row(change: Change, unchanged: Worker, changed: Worker, counts: tuple[int, int]) -> tuple[str, ...]:
    about = changed.about
    if not about:
        return change.name, change.expected, f"does not run: {changed.close()}", ""
    try:
        took = in_turns({"unchanged": unchanged, "changed": changed}, *counts)
    except Ended as last:
        which = "the unchanged step broke off" if unchanged.ended else "broke off"
        return change.name, change.expected, f"{which}: {last}", ""
    finally:
        changed.close()
    scale = about["tokens"] / unchanged.about["tokens"]
    ratio = median([scale * one / other for one, other in zip(took["unchanged"], took["changed"], strict=True)])
    return change.name, change.expected, ratio.show(".3f"), f"{about['temporaries'] / 2**30:.1f}"
