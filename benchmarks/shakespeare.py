"""nanoGPT's published CPU set-up on tinyshakespeare: validation loss of 3 seeds. About 6 minutes on 2 cores.

4 layers, 4 heads, 128 wide, context 64, characters, batch 12, 2,000 steps: the defaults of gpt2-tiny. nanoGPT's README
(github.com/karpathy/nanoGPT, "I only have a macbook") gives a validation loss of 1.88, its mean over random batches;
ours is the mean over the whole held-out tenth, each window once. Limit: 1.88 in the mean.
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

SEEDS = 3
LIMIT = 1.88


def run(settings: Settings) -> Table:
    """One run of the trainer for each seed, of weights and of row order alike."""
    if not settings.data.is_file():
        raise Skipped(f"there is no {settings.data}; give tinyshakespeare's text with --data")
    steps = 50 if settings.quick else None
    rows, losses = [], []
    for seed in range(1 if settings.quick else SEEDS):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(seed=seed, devices=1, display=Display(Console(quiet=True)))
            recipe = GPT2(size="tiny", data=str(settings.data), seed=seed)
            result = trainer.fit(recipe, steps=steps, run=Path(folder) / "run")
        losses.append(result.metrics["eval_loss"])
        rows.append((f"seed {seed}", str(result.step), f"{losses[-1]:.4f}", f"{time.perf_counter() - start:.0f} s", ""))
    rows.append(("mean", "", f"{mean(losses):.4f}", "", verdict(mean(losses) <= LIMIT)))
    rows.append(("nanoGPT's README (limit)", "2000", f"{LIMIT}", "", ""))
    return Table("nanoGPT's CPU set-up on tinyshakespeare", ("", "steps", "validation loss", "time", ""), rows)
