"""Measure the trainer's overhead over a bare jitted loop of the same step. About 9 minutes on 2 cores.

Limits: 2% on gpt2-tiny; 100 microseconds a step on a tiny MLP, over a bare loop that reads every loss. Both loops take
turns in one process, block by block, each timed until its last state is ready. The trainer writes metrics.jsonl and
TensorBoard events and runs its feed thread. Start, compilation, checkpoints and report are not timed.
"""

import itertools
import tempfile
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from benchmarks.bare import Bare, compile_bare
from benchmarks.report import Settings, Table, median, verdict
from tpuswarm import Recipe, Result, Source, Step, Trainer, supervised
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.look.display import Display
from tpuswarm.train.process.platform import local_devices

PAIR_COUNT, STEP_COUNT = 24, 200
MAX_OVERHEAD_RATIO = 0.02
MLP_STEP_COUNT, MLP_BATCH_SIZE = 2_000, 32
MAX_MLP_OVERHEAD_US = 100


def run(settings: Settings) -> Iterator[Table]:
    yield _small(settings)
    yield _mlp(settings)


def _mlp(settings: Settings) -> Table:
    pairs, steps = (3, 20) if settings.quick else (PAIR_COUNT, MLP_STEP_COUNT)
    took, _ = _in_turn(mlp(), pairs, steps, reads=True)
    us = {name: [seconds / steps * 1e6 for seconds in blocks] for name, blocks in took.items()}
    extra = median([ours - plain for ours, plain in zip(us["trainer"], us["bare"], strict=True)])
    return Table(
        "Trainer over a plain loop that reads every loss, an MLP",
        ("", "median (95% interval)", "limit", ""),
        [
            ("plain loop, us per step", median(us["bare"]).show(".0f"), "", ""),
            ("trainer, us per step", median(us["trainer"]).show(".0f"), "", ""),
            (
                "more, us per step",
                extra.show("+.0f"),
                f"at most {MAX_MLP_OVERHEAD_US}",
                verdict(extra.middle <= MAX_MLP_OVERHEAD_US),
            ),
        ],
        [f"{pairs} interleaved pairs of {steps} steps of {MLP_BATCH_SIZE} rows; 16 inputs, 32 units, one output, Adam"],
    )


def mlp() -> Recipe:
    """Return a regression with 545 parameters."""
    random = np.random.default_rng(0)
    x = random.normal(size=(4096, 16)).astype(np.float32)

    def init(key: jax.Array) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        return {"first": jax.random.normal(first, (16, 32)) / 4, "second": jax.random.normal(second, (32, 1)) / 6}

    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
        prediction = jnp.tanh(batch["x"] @ params["first"]) @ params["second"]
        return jnp.mean(jnp.square(prediction - batch["y"]))

    def adam(rate: jax.Array, mask: object) -> optax.GradientTransformation:
        return optax.adam(rate)

    defaults = {"batch": MLP_BATCH_SIZE, "steps": 10**6}
    return supervised(init, loss, adam, {"x": x, "y": x[:, :1]}, lambda progress: 1e-3, defaults)


def _small(settings: Settings) -> Table:
    pairs, steps = (3, 20) if settings.quick else (PAIR_COUNT, STEP_COUNT)
    recipe = GPT2(size="tiny")
    batch = int(recipe.defaults["batch"])
    took, platform = _in_turn(recipe, pairs, steps, reads=False)
    extra = median([ours / plain - 1 for ours, plain in zip(took["trainer"], took["bare"], strict=True)])
    ms = {name: median([seconds / steps * 1e3 for seconds in blocks]) for name, blocks in took.items()}
    return Table(
        "Trainer over a bare jitted loop, gpt2-tiny",
        ("", "median (95% interval)", "limit", ""),
        [
            ("bare loop, ms per step", ms["bare"].show(".3f"), "", ""),
            ("trainer, ms per step", ms["trainer"].show(".3f"), "", ""),
            (
                "trainer over bare loop",
                extra.show("+.2%"),
                f"at most {MAX_OVERHEAD_RATIO:.0%}",
                verdict(extra.middle <= MAX_OVERHEAD_RATIO),
            ),
        ],
        [
            f"{pairs} interleaved pairs of {steps} steps; the third line is the median of the pairs' ratios",
            f"steps of {batch} rows of {recipe.config.context} tokens on 1 {platform} device",
            "in the bare loop's time the trainer's threads may still prepare 2 batches and write 10 TensorBoard events",
        ],
    )


def _in_turn(recipe: Recipe, pairs: int, steps: int, reads: bool) -> tuple[dict[str, list[float]], str]:
    """Return the seconds of each block of both loops, and the platform.

    reads: whether the bare loop reads every loss.
    """
    bare, batch = compile_bare(recipe, local_devices()[:1]), int(recipe.defaults["batch"])
    source = recipe.data("train")
    trainer = Trainer(devices=1, save_every=10**9, display=Display(Console(quiet=True)))
    took: dict[str, list[float]] = {"trainer": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        total = steps * (pairs + 2)  # one pair warms up, and the trainer never ends
        with closing(trainer.steps(recipe, steps=total, run=Path(folder) / "run")) as loop:
            next(loop)
            for pair in range(-1, pairs):
                for name in ("trainer", "bare") if pair % 2 else ("bare", "trainer"):
                    start = time.perf_counter()
                    if name == "trainer":
                        _advance(loop, steps)
                    else:
                        _advance_bare(bare, source, batch, steps, reads)
                    if pair >= 0:
                        took[name].append(time.perf_counter() - start)
    return took, bare.compiled.options.platform


def _advance(loop: Generator[Step, None, Result], steps: int) -> None:
    (last,) = deque(itertools.islice(loop, steps), maxlen=1)  # keeps only one row
    jax.block_until_ready(last.state)


def _advance_bare(bare: Bare, source: Source, batch: int, steps: int, reads: bool) -> None:
    for _ in range(steps):
        metrics = bare.step(bare.to_devices(source.rows(bare.steps_done * batch, batch)))
        if reads:
            float(metrics["loss"])
    jax.block_until_ready(bare.state)
