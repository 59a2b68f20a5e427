"""What a swarm's rules cost in quality at equal tokens: validation loss, one factor at a time, over paired seeds.

Every arm sees the same rows: a step of all members together takes the same batch, divided among them, and a seed gives
all arms the same first parameters. Members are an axis of one computation on one device (simulated_quality.py).

`small` is a GPT-2 of 0.1 M parameters on the characters of a text, for one CPU core. `35m` is one of 35 M on the bytes
of at least 39 MB of text, members and cycles only, for one GPU.
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
    """How large everything is."""

    model: Mapping[str, Any]
    batch: int
    """Rows of a step of all members together."""
    steps: int
    """Of every member, in the mean."""
    seeds: int
    held_out: int
    """Rows of validation, at most."""


SIZES = {
    "small": Size(
        {"size": "tiny", "layers": 2, "width": 64, "heads": 2, "context": 32, "lr": 6e-3}, 16, 1_200, 3, 4_096
    ),
    "35m": Size(
        {"size": "124m", "layers": 11, "width": 512, "heads": 8, "context": 512, "vocab": 256, "lr": 1e-3}
        | {"tokenizer": "bytes"},
        *(64, 1_200, 3, 1_024),
    ),
}
QUICK = Size({"size": "tiny", "layers": 1, "width": 16, "heads": 1, "context": 8, "lr": 6e-3}, *(8, 300, 2, 64))

PLAIN = Arm((30,), OuterRule("average"))
"""Synchronous data-parallel training on whole batches: the single run."""
NESTEROV, AVERAGE = OuterRule("nesterov"), OuterRule("average")
INT8 = OuterRule("nesterov", downlink="int8")
FORMS: dict[int, Form] = {8: "int8", 4: "int4"}
RATE_OF_4 = NESTEROV.rate_for(4)
"""Given to arms whose contributions come one at a time, so that they differ in nothing else."""


class Runs:
    """The losses of arms, each trained once for a seed."""

    def __init__(self, size: Size, data: str):
        self.size = size
        self._recipes = [GPT2(data=data, seed=seed, **size.model) for seed in range(size.seeds)]
        self._losses: dict[Arm, list[float]] = {}

    @cached_property
    def program(self) -> Any:
        """One for all seeds: they differ in the order of rows and in the key."""
        platform = jax.default_backend()
        wanted = {name: self._recipes[0].defaults[name] for name in ("clip", "decay")}
        return self._recipes[0].program(Options(default_precision(platform), platform=platform, **wanted))

    def source(self, seed: int) -> Any:
        """The rows of training."""
        return self._recipes[seed].data("train")

    @property
    def source_held_out(self) -> Any:
        """The same rows for all seeds."""
        return self._recipes[0].data("validation")

    def losses(self, arm: Arm) -> list[float]:
        """On the held-out rows, one for each seed."""
        if arm not in self._losses:
            self._losses[arm] = [self._loss(arm, seed) for seed in range(self.size.seeds)]
        return self._losses[arm]

    def _loss(self, arm: Arm, seed: int) -> float:
        size = self.size
        state = simulate(self.program, self.source(seed), arm, batch=size.batch, steps=size.steps, seed=seed)
        return held_out_loss(self.program, state, self.source_held_out, size.batch, size.held_out)

    def table(
        self, title: str, arms: Sequence[tuple[str, Arm, str]], against: Arm, name: str, notes: Sequence[str]
    ) -> Table:
        """Each arm and its paired difference from the arm `against`, called `name`."""
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
    """Table by table, as each is done."""
    size = SIZES[settings.device_size]
    if settings.device_size == "35m" and jax.default_backend() == "cpu":
        raise Skipped("35m needs a GPU; on a CPU leave --device-size out")
    if not settings.data.is_file():
        raise Skipped(f"there is no {settings.data}; give a text, tinyshakespeare's for example, with --data")
    runs = Runs(QUICK if settings.quick else size, str(settings.data))
    have, need = runs.source(0).rows_per_epoch, runs.size.steps * runs.size.batch
    if settings.device_size == "35m" and have < need:
        raise Skipped(
            f"{settings.data} has {have:,} rows to train on and a run takes {need:,}; give a larger text with --data"
        )
    yield from (table(runs) for table in ((members, cycles) if settings.device_size == "35m" else TABLES))


def members(runs: Runs) -> Table:
    """1, 2, 4, 8 members."""
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
    """1, 10, 30, 100, 300 steps."""
    published = {1: "", 10: "", 30: "H = 25: +2.8%", 100: "H = 100: +6.3%", 300: "H = 200: +7.4%; 500: +9.4%"}
    arms = [(f"4 × {h}, nesterov", Arm((h,) * 4), of) for h, of in published.items()]
    arms += [(f"4 × {h}, average", Arm((h,) * 4, AVERAGE), "") for h in (1, 30, 100, 300)]
    notes = [
        "published: ft-diloco, 51 M parameters, 2 members, rate 0.7 not tuned, 1 seed; DiLoCo (Douillard et al. 2023) "
        "at 150 M: perplexity at H = 1000 2.9% over that at H = 50",
        f"{runs.size.steps // 300} commits in a run at H = 300",
    ]
    return runs.table("steps of a cycle", arms, PLAIN, "the single run", notes)


def rules(runs: Runs) -> Table:
    """OuterRule rule and rate."""
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
    """Quantized contributions."""
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
    """Members of different speeds, and what becomes of contributions that come one at a time."""
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
        "4 members that make 30 steps a cycle in the mean, each in proportion to its speed",
        f"ours: one step of the outer rule on a sum weighted by tokens; the others take each contribution as it comes, "
        f"at rate {RATE_OF_4}: delayed Nesterov with a step of the momentum at every fourth, Nesterov per arrival at "
        "each, which is the control that has to be far worse",
        "two commits of two: members out of step, so that half of them make a quorum twice a cycle",
        "published: perplexity, Liu et al. 2024 at 20 M parameters, cycle 50; synchronous 41.35",
    ]
    return runs.table("unequal speeds", arms, Arm(), "equal, ours", notes)


def overlap(runs: Runs) -> Table:
    """Training on while a contribution is under way."""
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
        "4 members, cycle 30, nesterov; mixed: the share of a member's steps since its base that the commit is "
        "without, of its own, and the rest of the commit; added: its own plus what the commit changed",
        "published: Streaming DiLoCo, which mixes halves",
    ]
    return runs.table("overlap", arms, Arm(), "0 steps", notes)


TABLES = (members, cycles, speeds, rules, bits, overlap)
