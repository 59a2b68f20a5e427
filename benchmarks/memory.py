"""What keeping freed memory is worth on CPU: a bare loop of gpt2-tiny's step with and without it. About 2 minutes.

XLA allocates a step's temporaries at every step; without train/process/platform.py's setting glibc returns them to
the system each time and the kernel clears them again. Each measurement is a process of its own, the two kinds in turn.
"""

import json
import resource
import subprocess
import sys
import time
from unittest.mock import patch

import jax

from benchmarks.bare import usual
from benchmarks.report import Settings, Table, median
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.process import platform

ROUNDS, STEPS, WARM = 6, 150, 10


def run(settings: Settings) -> Table:
    """Processes of both kinds, the order turned in every second round."""
    rounds, steps = (1, 10) if settings.quick else (ROUNDS, STEPS)
    kinds = ("given back", "kept")
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for number in range(rounds):
        for kind in kinds if number % 2 else kinds[::-1]:
            command = [sys.executable, "-m", "benchmarks.memory", kind, str(steps)]
            done = subprocess.run(command, capture_output=True, check=True, text=True)
            found[kind].append(json.loads(done.stdout))

    def row(kind: str) -> tuple[str, ...]:
        shown = [median([each[name] for each in found[kind]]) for name in ("ms", "faults", "peak")]
        return f"freed memory {kind}", shown[0].show(".1f"), f"{shown[1].middle:,.0f}", f"{shown[2].middle:,.0f}"

    ratio = median([kept["ms"] / back["ms"] for back, kept in zip(found["given back"], found["kept"], strict=True)])
    return Table(
        "Memory on CPU, gpt2-tiny",
        ("", "ms per step: median (interval)", "page faults per step", "peak of process, MiB"),
        [*(row(kind) for kind in kinds), ("kept over given back", ratio.show(".2f"), "", "")],
        [f"{rounds} processes of each kind, {steps} steps after the first {WARM}"],
    )


def measure(steps: int) -> dict[str, float]:
    """Milliseconds and minor page faults per step of a bare loop in this process, and its peak of memory in MiB."""
    recipe = GPT2(size="tiny")
    bare, batch = usual(recipe, platform.local_devices()[:1]), int(recipe.defaults["batch"])
    source = recipe.data("train")

    def advance(count: int) -> None:
        for _ in range(count):
            bare.step(bare.put(source.rows(bare.done * batch, batch)))
        jax.block_until_ready(bare.state)

    advance(WARM)
    faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
    advance(steps)
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    return {"ms": seconds / steps * 1e3, "faults": (used.ru_minflt - faults) / steps, "peak": used.ru_maxrss / 1024}


if __name__ == "__main__":
    with patch.object(platform, "keep_freed_memory", platform.keep_freed_memory if sys.argv[1] == "kept" else int):
        print(json.dumps(measure(int(sys.argv[2]))))
