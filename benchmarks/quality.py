"""Measure the cost of a swarm's rules at equal tokens: validation loss, one factor at a time, over paired seeds.

A GPT-2 of 0.1 M parameters trains on the characters of a text, on one CPU core. Every arm sees the same rows: a step of
all members divides the same batch among them. A seed gives all arms the same first parameters. Members are an axis of
one computation on one device (simulated_quality.py).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, stdev
from typing import Any

import jax

from benchmarks.report import Settings, Skipped, Table
from benchmarks.simulated_quality import Arm, held_out_loss, simulate
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.arithmetic.outer import OuterRule
from tpuswarm.swarm.core.values import Form
from tpuswarm.train.recipe import Options, default_precision


@dataclass(frozen=True)
class Size:
    """batch: rows of a step of all members; steps: mean steps of a member; held_out: rows of validation, at most."""

    model: Mapping[str, Any]
    batch: int
    steps: int
    seeds: int
    held_out: int


SMALL = Size({"layers": 2, "width": 64, "heads": 2, "context": 32, "lr": 6e-3}, 16, 1_200, 3, 4_096)
QUICK = Size({"layers": 1, "width": 16, "heads": 1, "context": 8, "lr": 6e-3}, 8, 300, 2, 64)

PLAIN = Arm((30,), OuterRule("average"))
"""The single run: synchronous data-parallel training on whole batches."""
NESTEROV, AVERAGE = OuterRule("nesterov"), OuterRule("average")
INT8 = OuterRule("nesterov", downlink="int8")
FORMS: dict[int, Form] = {8: "int8", 4: "int4"}
RATE_OF_4 = NESTEROV.rate_for(4)
"""For arms whose contributions are merged one at a time, so that they differ in nothing else."""


class Runs:
    """Losses of arms, each trained once for each seed."""

    def __init__(self, size: Size, data: str):
        self.size = size
        self._recipes = [GPT2(data=data, seed=seed, **size.model) for seed in range(size.seeds)]
        self._losses: dict[Arm, list[float]] = {}

    @cached_property
    def program(self) -> Any:
        """One program for all seeds, which differ in the order of rows and in the key."""
        platform = jax.default_backend()
        wanted = {name: self._recipes[0].defaults[name] for name in ("clip", "decay")}
        return self._recipes[0].program(Options(default_precision(platform), platform=platform, **wanted))

    def losses(self, arm: Arm) -> list[float]:
        """Return the loss on the held-out rows for each seed."""
        if arm not in self._losses:
            self._losses[arm] = [self._loss(arm, seed) for seed in range(self.size.seeds)]
        return self._losses[arm]

    def _loss(self, arm: Arm, seed: int) -> float:
        size, source = self.size, self._recipes[seed].data("train")
        state = simulate(self.program, source, arm, batch=size.batch, steps=size.steps, seed=seed)
        held_out: Any = self._recipes[0].data("validation")
        return held_out_loss(self.program, state, held_out, size.batch, size.held_out)

    def table(
        self, title: str, arms: Sequence[tuple[str, Arm, str]], against: Arm, name: str, notes: Sequence[str]
    ) -> Table:
        """Compare each arm with the arm `against`, called `name`, by paired differences."""
        base = self.losses(against)
        rows = []
        for label, arm, published in arms:
            losses = self.losses(arm)
            differences = [here - there for here, there in zip(losses, base, strict=True)]
            shown = "" if arm == against else difference(differences, mean(base))
            rows.append((label, f"{mean(losses):.4f}", shown, published))
        columns = ("", "validation loss", f"over {name}: mean ± standard error", "published")
        return Table(f"Quality, {title}", columns, rows, notes)


def difference(values: Sequence[float], base: float) -> str:
    """Mean ± standard error of paired differences and their share of `base`; no claim below two standard errors."""
    if not all(map(math.isfinite, values)):
        return "diverged"
    middle, error = mean(values), stdev(values) / math.sqrt(len(values))
    figures = f"{middle:+.4f} ± {error:.4f}"
    return f"{figures} ({middle / base:+.1%})" if abs(middle) >= 2 * error else f"{figures}: no claim"


def run(settings: Settings) -> Iterator[Table]:
    if not settings.data.is_file():
        raise Skipped(f"there is no {settings.data}; give a text, tinyshakespeare's for example, with --data")
    runs = Runs(QUICK if settings.quick else SMALL, str(settings.data))
    for make_table in (members, cycles, speeds, rules, bits, overlap):
        yield make_table(runs)


def members(runs: Runs) -> Table:
    published = {1: "−0.1%", 2: "+0.7%", 4: "+2.0%", 8: "+3.9%"}
    arms = [("single run, synchronous data parallel", PLAIN, "")]
    arms += [(f"{m} × 30, nesterov", Arm((30,) * m), of) for m, of in published.items()]
    arms += [(f"{m} × 30, average", Arm((30,) * m, AVERAGE), "") for m in (2, 4, 8)]
    size = runs.size
    tokens = size.steps * size.batch * runs.program.tokens_per_row / 1e6
    params = jax.eval_shape(runs.program.init, jax.random.key(0)).params
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    notes = [
        f"{parameters / 1e6:.2f} M parameters, {size.seeds} seeds, {tokens:.2f} M tokens in every arm: {size.steps} "
        f"steps of {size.batch} rows, divided among the members",
        "published: Charles et al. 2025 (scaling laws of DiLoCo), 35 M parameters, cycle 30, 20 tokens a parameter; "
        "single run 3.485",
    ]
    return runs.table("number of members", arms, PLAIN, "the single run", notes)


def cycles(runs: Runs) -> Table:
    published = {1: "", 10: "", 30: "H = 25: +2.8%", 100: "H = 100: +6.3%", 300: "H = 200: +7.4%; 500: +9.4%"}
    arms = [(f"4 × {h}, nesterov", Arm((h,) * 4), of) for h, of in published.items()]
    arms += [(f"4 × {h}, average", Arm((h,) * 4, AVERAGE), "") for h in (1, 30, 100, 300)]
    notes = [
        "published: ft-diloco, 51 M parameters, 2 members, rate 0.7 not tuned, 1 seed; DiLoCo (Douillard et al. 2023) "
        "at 150 M: perplexity at H = 1000 is 2.9% above H = 50",
        f"{runs.size.steps // 300} commits in a run at H = 300",
    ]
    return runs.table("steps of a cycle", arms, PLAIN, "the single run", notes)


def rules(runs: Runs) -> Table:
    arms = [("nesterov 0.9, rate 0.6 (by number)", Arm(), "best for 2 and 4 members")]
    others = {0.4: "best for 1", 0.8: "best for 8"}
    arms += [
        (f"nesterov 0.9, rate {rate}", Arm(outer=OuterRule("nesterov", rate=rate)), of) for rate, of in others.items()
    ]
    arms += [
        (f"nesterov {momentum}, rate {rate}", Arm(outer=OuterRule("nesterov", momentum, rate)), "")
        for momentum, rate in ((0.8, 0.6), (0.5, 0.8))
    ]
    arms += [
        ("no momentum, rate 0.7", Arm(outer=OuterRule("nesterov", 0.0, 0.7)), ""),
        ("average", Arm(outer=AVERAGE), ""),
    ]
    notes = ["4 members, cycle 30; published: Charles et al. 2025, momentum 0.9, cycle 30"]
    return runs.table("outer rule", arms, Arm(), "rate 0.6", notes)


def bits(runs: Runs) -> Table:
    published = {8: "", 4: "without feedback +0.09%", 2: "without feedback +32%; with it below f32"}
    arms = [("32 bits", Arm(), "")]
    arms += [(f"{b} bits, with feedback", Arm(bits=b), of) for b, of in published.items()]
    arms += [(f"{b} bits, without", Arm(bits=b, feedback=False), "") for b in published]
    for b, form in FORMS.items():
        arms.append(
            (f"{b} bits on both links, with feedback", Arm(bits=b, outer=OuterRule("nesterov", downlink=form)), "")
        )
    notes = [
        "4 members, cycle 30, nesterov; published without feedback: Decoupled DiLoCo, with it: MuLoCo at 220 M",
    ]
    return runs.table("bits of a push", arms, Arm(), "32 bits", notes)


def speeds(runs: Runs) -> Table:
    """Members of different speeds, merged together or one at a time."""
    one_by_one = Arm(outer=OuterRule("nesterov", rate=RATE_OF_4), together=1)
    rules = {
        "ours": (Arm(), ("", "", "")),
        "delayed Nesterov": (one_by_one, ("41.27", "41.27 to 41.09", "41.13")),
        "Nesterov per arrival": (replace(one_by_one, quorum=1), ("44.27", "", "44.38")),
    }
    shapes = {"equal": (30,) * 4, "1 : 1 : 2 : 2": (20, 20, 40, 40), "1 : 1 : 2 : 8": (10, 10, 20, 80)}
    arms = [
        (f"{shape}, {rule}", replace(arm, cycle=cycle), published[place])
        for place, (shape, cycle) in enumerate(shapes.items())
        for rule, (arm, published) in rules.items()
    ]
    arms += [
        ("equal, two commits of two, momentum at each", Arm(together=2, quorum=2), ""),
        ("equal, two commits of two, momentum at the second", Arm(together=2), ""),
        ("equal, two commits of two, average", Arm(outer=AVERAGE, together=2), ""),
    ]
    notes = [
        "4 members, 30 steps a cycle on average, each in proportion to its speed",
        f"ours: one outer step on a sum weighted by tokens; the others apply each contribution on arrival at rate "
        f"{RATE_OF_4}: delayed Nesterov moves its momentum at every fourth, Nesterov per arrival at each (the control, "
        "which must be far worse)",
        "two commits of two: two members are a quorum, twice a cycle",
        "published: perplexity, Liu et al. 2024 at 20 M parameters, cycle 50; synchronous 41.35",
    ]
    return runs.table("unequal speeds", arms, Arm(), "equal, ours", notes)


def overlap(runs: Runs) -> Table:
    published = {0: "", 5: "", 10: "below +0.2%", 30: ""}
    arms = [(f"after {delay} steps, mixed", Arm(delay=delay), of) for delay, of in published.items()]
    arms += [(f"after {delay} steps, added", Arm(delay=delay, adopt="add"), "") for delay in (5, 10, 30)]
    arms += [(f"after {delay} steps, mixed in halves", Arm(delay=delay, adopt=0.5), "") for delay in (5, 10)]
    arms += [(f"average, after {delay} steps, mixed", Arm(delay=delay, outer=AVERAGE), "") for delay in (0, 10, 30)]
    arms += [
        (f"average, after {delay} steps, added", Arm(delay=delay, outer=AVERAGE, adopt="add"), "") for delay in (10, 30)
    ]
    arms += [
        ("8 bits on both links, after 10 steps, mixed", Arm(bits=8, delay=10, outer=INT8), ""),
        ("1 : 1 : 2 : 2, after 10 steps, mixed", Arm((20, 20, 40, 40), delay=10), ""),
    ]
    notes = [
        "4 members, cycle 30, nesterov; mixed: a share of the member's own values, and the rest from the commit; "
        "added: the member's own values plus the commit's change",
        "published: Streaming DiLoCo, which mixes halves",
    ]
    return runs.table("overlap", arms, Arm(), "0 steps", notes)
