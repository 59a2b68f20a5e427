"""Three modules of PyTorch trained here and by torch, with the same data, on one CPU. About 3 minutes.

Losses after 200 steps, milliseconds a step of both in turns, and the operation that takes each most of its time. Runs
in `.venv-oracle`, where torch and transformers are (`make oracle` makes it).
"""

import json
import os
import subprocess

from benchmarks.report import Settings, Skipped, Table, median, verdict
from benchmarks.torch_speed import ORACLE, ROOT

STEPS, BLOCK = 200, 20
WITHIN = 0.01
NAMES = ("perceptron, 1.9 M", "ResNet of 2 blocks, 32 x 32", "GPT-2 of transformers, 0.8 M")


def run(settings: Settings) -> Table:
    """A row for each module."""
    steps, block = (10, 5) if settings.quick else (STEPS, BLOCK)
    rows, about = [], {}
    for name in NAMES:
        found = json.loads(in_oracle("benchmarks.torch_trained", name, str(steps), str(block)).splitlines()[-1])
        theirs, ours, itself = (found["losses"][each] for each in ("torch", "ours", "apart"))
        about, apart = found["about"], _apart(ours, theirs)
        ms = {each: median(found["ms"][each][1:]).show(".1f") for each in ("torch", "ours")}
        ratio = median([b / a for a, b in zip(found["ms"]["ours"][1:], found["ms"]["torch"][1:], strict=True)])
        rows.append(
            (
                name,
                f"{theirs[0]:.3f} → {theirs[-1]:.4f}",
                f"{ours[-1]:.4f}",
                f"{apart:.2%}",
                f"{_apart(itself, theirs):.2%}",
                verdict(apart <= WITHIN),
                ms["torch"],
                ms["ours"],
                ratio.show(".2f"),
                found["costliest"]["torch"],
                found["costliest"]["ours"],
            )
        )
    return Table(
        f"PyTorch modules beside torch, {steps} steps, one CPU, float32",
        (
            "", "loss, torch", "ours", "most apart, of all steps", "torch from itself", "1%",
            "torch, ms per step: median (95% interval)", "ours", "torch over ours",
            "costliest of torch", "costliest of ours",
        ),
        rows,
        [
            f"torch {about['torch']}, {about['threads']} threads; the same weights, rows and SGD with momentum",
            "torch from itself: most apart where its first weights differ by 1e-7 of themselves, as roundings do",
            f"in turn, blocks of {block} steps, the first not counted",
            "costliest: the operation with the most time of its own, by torch's and by JAX's profiler",
        ],
    )  # fmt: skip


def _apart(some: list[float], others: list[float]) -> float:
    """The most of all steps, of the other's loss."""
    return max(abs(a - b) / abs(b) for a, b in zip(some, others, strict=True))


def in_oracle(module: str, *words: str) -> str:
    """What a program prints where torch and transformers are; Skipped where they are not."""
    python = ORACLE / "bin" / "python"
    wanted = "import torch, transformers, jax"
    if not python.exists() or subprocess.run([python, "-c", wanted], capture_output=True).returncode:
        raise Skipped(f"no torch and transformers in {ORACLE.name}: make oracle puts them there")
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [python, "-m", module, *words], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout
