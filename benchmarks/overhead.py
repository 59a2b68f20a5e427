"""What the trainer costs over a bare jitted loop of the same step, on gpt2-tiny. Limit: 2%. About 8 minutes on 2 cores.

Both loops live in one process and take turns: a block of steps of the trainer's own generator, from one row of
metrics.jsonl to another, then a block of the bare loop (rows from the same source, `device_put`, the same compiled
step, no metrics read), each timed until its last state is there. The trainer does its normal work: metrics.jsonl,
TensorBoard events, feed thread, signal handlers. Opening, compilation, checkpoints and report are outside.
"""

import itertools
import tempfile
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import jax
from rich.console import Console

from benchmarks.bare import Bare, usual
from benchmarks.report import Settings, Table, median, verdict
from tpuswarm import Result, Source, Step, Trainer
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.look.display import Display
from tpuswarm.train.process.platform import local_devices

PAIRS, STEPS = 24, 200
LIMIT = 0.02


def run(settings: Settings) -> Table:
    """Interleaved pairs of blocks, the order turned in every second pair."""
    pairs, steps = (3, 20) if settings.quick else (PAIRS, STEPS)
    recipe = GPT2(size="tiny")
    bare, batch = usual(recipe, local_devices()[:1]), int(recipe.defaults["batch"])
    source = recipe.data("train")
    trainer = Trainer(devices=1, save_every=10**9, display=Display(Console(quiet=True)))
    took: dict[str, list[float]] = {"trainer": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        total = steps * (pairs + 2)  # one pair of blocks warms up, and the trainer never comes to its end
        with closing(trainer.steps(recipe, steps=total, run=Path(folder) / "run")) as loop:
            next(loop)
            for pair in range(-1, pairs):
                for name in ("trainer", "bare") if pair % 2 else ("bare", "trainer"):
                    start = time.perf_counter()
                    if name == "trainer":
                        _advance(loop, steps)
                    else:
                        _advance_bare(bare, source, batch, steps)
                    if pair >= 0:
                        took[name].append(time.perf_counter() - start)
    extra = median([ours / plain - 1 for ours, plain in zip(took["trainer"], took["bare"], strict=True)])
    ms = {name: median([seconds / steps * 1e3 for seconds in blocks]) for name, blocks in took.items()}
    return Table(
        "Trainer over a bare jitted loop, gpt2-tiny",
        ("", "median (95% interval)", "limit", ""),
        [
            ("bare loop, ms per step", ms["bare"].show(".3f"), "", ""),
            ("trainer, ms per step", ms["trainer"].show(".3f"), "", ""),
            ("trainer over bare loop", extra.show("+.2%"), f"at most {LIMIT:.0%}", verdict(extra.middle <= LIMIT)),
        ],
        [
            f"{pairs} interleaved pairs of {steps} steps; the third line is the median of the pairs' ratios",
            f"steps of {batch} rows of {recipe.config.context} tokens on 1 {bare.fitted.options.platform} device",
            "in the bare loop's time the trainer's threads may still prepare 2 batches and write 10 TensorBoard events",
        ],
    )


def _advance(loop: Generator[Step, None, Result], steps: int) -> None:
    last = list(itertools.islice(loop, steps))[-1]
    jax.block_until_ready(last.state)


def _advance_bare(bare: Bare, source: Source, batch: int, steps: int) -> None:
    for _ in range(steps):
        bare.step(bare.put(source.rows(bare.done * batch, batch)))
    jax.block_until_ready(bare.state)
