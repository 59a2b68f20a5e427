"""Measure a step of Qwen3 0.6B, whole and with adapters, beside transformers and peft, in six minutes. GPU only.

transformers and peft run in the Python that gpu_all's peers use, with torch.compile and PyTorch's attention.
"""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu_all import Part, measure
from benchmarks.report import Settings, Table
from tpuswarm.catalog import public_models

TOTAL_S, PART_S = 350, 85
MODEL, RANK = "qwen3-0.6b", 16
TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 300,
}  # fmt: skip


def run(settings: Settings) -> Iterator[Table]:
    yield from measure(parts(settings.quick), TOTAL_S, settings)


def parts(quick: bool) -> list[Part]:
    facts = dict(public_models()[MODEL].config) | (TINY if quick else {})
    counts = {"rounds": 2, "steps": 2} if quick else {"rounds": 4, "steps": 8}
    options: dict[str, Any] = {"facts": facts, "batch": 2 if quick else 8, "context": 64 if quick else 2048, **counts}
    found = list[Part]()
    for form, rank in {"all parameters": None, f"adapters of rank {RANK}": RANK}.items():
        name, given = f"tpuswarm, {MODEL}, {form}", options | {"rank": rank}
        found.append(Part(name, PART_S, "decoder", given))
        found.append(Part(f"transformers, {form}", PART_S, "transformers", given, name))
    return found
