"""Train nanoGPT's published CPU set-up on tinyshakespeare: validation loss of 3 seeds. About 6 minutes on 2 cores.

The set-up is gpt2-tiny's defaults. nanoGPT's README (github.com/karpathy/nanoGPT, "I only have a macbook") gives 1.88
over random batches; ours is the mean over the held-out tenth, each window once. Limit: a mean of 1.88.
"""

import tempfile
import time
from pathlib import Path
from statistics import mean

from rich.console import Console

from benchmarks.report import Settings, Skipped, Table, verdict
from tpuswarm import Trainer
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.look.display import Display

SEED_COUNT = 3
MAX_LOSS = 1.88


def run(settings: Settings) -> Table:
    if not settings.data.is_file():
        raise Skipped(f"there is no {settings.data}; give tinyshakespeare's text with --data")
    steps = 50 if settings.quick else None
    rows, losses = [], []
    for seed in range(1 if settings.quick else SEED_COUNT):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(seed=seed, devices=1, display=Display(Console(quiet=True)))
            recipe = GPT2(size="tiny", data=str(settings.data), seed=seed)
            result = trainer.fit(recipe, steps=steps, run=Path(folder) / "run")
        losses.append(result.metrics["eval_loss"])
        rows.append((f"seed {seed}", str(result.step), f"{losses[-1]:.4f}", f"{time.perf_counter() - start:.0f} s", ""))
    rows.append(("mean", "", f"{mean(losses):.4f}", "", verdict(mean(losses) <= MAX_LOSS)))
    rows.append(("nanoGPT's README (limit)", "2000", f"{MAX_LOSS}", "", ""))
    return Table("nanoGPT's CPU set-up on tinyshakespeare", ("", "steps", "validation loss", "time", ""), rows)
