"""What the diagnostics add to a step of gpt2-tiny. Limit: 0.5%. About a minute.

A tenth of a millisecond drowns in the noise of a step of 40, so their own time is measured: a loop that does of a
training loop's work only what the diagnostics touch (the hand-over to the user, the stopwatch, the reading of a step's
metrics, which lie ready) runs with them and without, in turns; and the step itself is timed beside it. Nothing here is
hidden behind the devices' work, as some of it is in a real run.
"""

import time
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
from jax.profiler import StepTraceAnnotation

from benchmarks.bare import Bare, usual
from benchmarks.report import Settings, Table, median, verdict
from tpuswarm import Step
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.diagnose import phases
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.process.platform import local_devices

PAIRS, TURNS, STEPS = 30, 2_000, 20
LIMIT = 0.005
METRICS = ("loss", "grad_norm", "lr")


def run(settings: Settings) -> Table:
    """Pairs of blocks of turns, with and without, and a block of steps beside each."""
    pairs, turns, steps = (3, 100, 3) if settings.quick else (PAIRS, TURNS, STEPS)
    recipe = GPT2(size="tiny")
    bare, batch = usual(recipe, local_devices()[:1]), int(recipe.defaults["batch"])
    rows = bare.put(recipe.data("train").rows(0, batch))
    metrics = {name: jnp.float32(number) for number, name in enumerate(METRICS)}
    took: dict[str, list[float]] = {"without": [], "with": [], "step": []}
    with Diagnostics() as diagnostics:
        start = time.perf_counter()
        diagnostics.at_start(bare.compiled, batch)
        once = time.perf_counter() - start
    _steps(bare, rows, steps)
    for pair in range(pairs):
        for name in ("with", "without") if pair % 2 else ("without", "with"):
            took[name].append(_with(metrics, turns) if name == "with" else _drain(_turns(metrics, turns, None)) / turns)
        took["step"].append(_steps(bare, rows, steps) / steps)
    extra = median([(ours - plain) * 1e6 for ours, plain in zip(took["with"], took["without"], strict=True)])
    ms = median([seconds * 1e3 for seconds in took["step"]])
    share = extra.middle / 1e6 / (ms.middle / 1e3)
    return Table(
        "Diagnostics in a step of gpt2-tiny",
        ("", "median (95% interval)", "limit", ""),
        [
            ("step, ms", ms.show(".2f"), "", ""),
            ("diagnostics, us per step", extra.show(".1f"), "", ""),
            ("diagnostics over step", f"{share:.3%}", f"at most {LIMIT:.1%}", verdict(share <= LIMIT)),
            ("once, before the first step, ms", f"{once * 1e3:.0f}", "", ""),
        ],
        [
            f"{pairs} pairs of {turns:,} turns with and without; {steps} steps beside each pair",
            f"a turn reads {len(METRICS)} metrics, as a step of gpt2-tiny does",
        ],
    )


def _turns(metrics: Any, turns: int, diagnostics: Diagnostics | None) -> Generator[Step, None, None]:
    """The parts of the trainer's loop that the diagnostics touch."""
    for step in range(1, turns + 1):
        if diagnostics is None:
            row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        else:
            with StepTraceAnnotation("train", step_num=step):
                pass
            diagnostics.after_step(step, 0.0)
            row = {name: float(value) for name, value in jax.device_get(metrics).items()}
        yield Step({"step": step, **row}, None)


def _with(metrics: Any, turns: int) -> float:
    """Seconds of one turn with all diagnostics."""
    with Diagnostics() as diagnostics, diagnostics.stopwatch.during(phases.STEPS):
        return _drain(diagnostics.watch_user_code(_turns(metrics, turns, diagnostics))) / turns


def _drain(loop: Generator[Step, None, Any]) -> float:
    start = time.perf_counter()
    for _ in loop:
        pass
    return time.perf_counter() - start


def _steps(bare: Bare, rows: Any, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(steps):
        bare.step(rows)
    jax.block_until_ready(bare.state)
    return time.perf_counter() - start
