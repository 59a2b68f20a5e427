"""Measure how fast the feed reads tokens, and how long a run waits for it. About 1 minute.

Speed: `TokenSource.rows` on one core, for gpt2-tiny and gpt2-124m; limit 20 M tokens/s. nanoGPT's method is measured on
the same map: windows at random offsets, cut one by one and stacked. Wait: the share of a gpt2-tiny run in which the
training thread waits for the feed; limit 1%.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.report import Median, Settings, Table, median, verdict
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language.tokens import TokenSource, prepare_tokens
from tpuswarm.train.trainer import Trainer

MAP_SIZE = 2**27
"""Tokens; far more than the caches hold."""
BLOCK_COUNT, BLOCK_SIZE = 15, 2**24
WAIT_STEP_COUNT = 1_000
MIN_SPEED, MAX_WAIT = 20.0, 0.01


def run(settings: Settings) -> Table:
    blocks, tokens, steps = (3, 2**18, 50) if settings.quick else (BLOCK_COUNT, BLOCK_SIZE, WAIT_STEP_COUNT)
    core = min(os.sched_getaffinity(0))
    spawn = multiprocessing.get_context("spawn")
    rows = []
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=os.sched_setaffinity, initargs=(0, {core})) as child:
        for batch, context in ((12, 64), (64, 1024)):
            ours, peer = child.submit(speeds, batch, context, blocks, tokens).result()
            shape = f"M tokens/s, {batch} rows of {context}"
            limit = (f"at least {MIN_SPEED:.0f}", verdict(ours.middle >= MIN_SPEED))
            rows.append((shape, ours.show(".1f"), peer.show(".1f"), *limit))
    share = wait_share(steps)
    rows.append(("wait in a gpt2-tiny run", f"{share:.3%}", "", f"at most {MAX_WAIT:.0%}", verdict(share <= MAX_WAIT)))
    return Table(
        "Feed from the memory map",
        ("", "tpuswarm: median (95% interval)", "nanoGPT's way", "limit", ""),
        rows,
        [
            f"speed: one core, {blocks} interleaved blocks of {tokens:,} tokens, a warm map of {MAP_SIZE:,} tokens",
            f"wait: {steps} steps after the first 20, the feed and the loop as in the trainer",
        ],
    )


def speeds(batch: int, context: int, blocks: int, tokens: int) -> tuple[Median, Median]:
    """Return million tokens/s of our rows and of nanoGPT's, measured in turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        np.resize(prepare_tokens(None, "characters").array, MAP_SIZE).tofile(path)
        array = np.memmap(path, np.uint16, mode="r")
        source = TokenSource(array, context, 0, "", "the text")
        generator = np.random.default_rng(0)

        def peer(start: int, count: int) -> np.ndarray:
            offsets = generator.integers(len(array) - context, size=count)
            return np.stack([array[offset : offset + context + 1].astype(np.int32) for offset in offsets])

        calls = tokens // (batch * context)
        measured: dict[Callable[[int, int], object], list[float]] = {source.rows: [], peer: []}
        for block in range(-1, blocks):  # one block of each warms up
            for rows, speed in measured.items():
                start = time.perf_counter()
                for call in range(calls):
                    rows(call * batch, batch)
                if block >= 0:
                    speed.append(calls * batch * context / (time.perf_counter() - start) / 1e6)
        ours, theirs = (median(speed) for speed in measured.values())
        return ours, theirs


def wait_share(steps: int) -> float:
    """Return the share of a gpt2-tiny run's time that it waits for data."""
    warm = 20
    with tempfile.TemporaryDirectory() as folder:
        loop = Trainer(devices=1, save_every="1h").steps(GPT2(size="tiny"), steps=warm + steps, run=f"{folder}/run")
        rows = [row for row, _ in loop if "loss" in row]
    return sum(row["wait_s"] for row in rows[warm:]) / (rows[-1]["wall_s"] - rows[warm - 1]["wall_s"])
