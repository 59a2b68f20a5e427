"""Measure GPT-2 355M and 774M beside nanoGPT, and nanoGPT 124M at other batches, as gpu_all does. GPU only.

Aim on an H100: 1.1 times nanoGPT.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_all import TINY_GPT2, Part, measure, nanogpt_options
from benchmarks.report import Settings, Table

TOTAL_S, PART_S = 900, 150
BATCHES = {"355m": 32, "774m": 16}
OTHER_BATCHES = (32, 96)
"""Of nanoGPT 124M, which gpu_all measures at 64."""


def run(settings: Settings) -> Iterator[Table]:
    yield from measure(parts(settings.quick), TOTAL_S, settings)


def parts(quick: bool) -> list[Part]:
    counts: dict[str, Any] = {"rounds": 2, "steps": 2} if quick else {"rounds": 4, "steps": 8}
    options, found = counts | {"shape": TINY_GPT2 if quick else {}}, list[Part]()
    for size, batch in BATCHES.items():
        name, gpt2 = f"tpuswarm, GPT-2 {size}", options | {"size": size, "batch": 2 if quick else batch}
        found.append(Part(name, PART_S, "gpt2", gpt2))
        found.append(Part(f"nanoGPT {size}", PART_S, "nanogpt", nanogpt_options(gpt2), name))
    for batch in OTHER_BATCHES:
        theirs = nanogpt_options(options | {"size": "124m", "batch": 2 if quick else batch})
        found.append(Part(f"nanoGPT 124m, batch {batch}", PART_S, "nanogpt", theirs))
    return found
