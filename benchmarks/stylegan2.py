"""stylegan2-32 on scikit-learn's digits: a single run beside a swarm of four at equal pictures, and one with a death a
minute.

Every run is `tpuswarm train` in processes of its own, of as many pictures: those of a swarm are its members' together.
A seed gives both the same first parameters and order of the data. Distances are those of `tpuswarm evaluate`. Runs lie
in `runs/benchmark-stylegan2` and go on where they were left, so that the whole can be done in pieces.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.chaos import Swarm, torment
from benchmarks.quality import difference
from benchmarks.report import Settings, Table, verdict

FOLDER = Path("runs/benchmark-stylegan2")
SEEDS, MEMBERS, STEPS, CYCLE = 3, 4, 750, 5
BATCH, RATE = 8, 0.008
"""Of a member: a quarter of the single run's pictures, at the root of 4 times its rate (docs/stylegan2.md)."""
DEATH_EVERY = 60.0
LIMIT = 0.15
"""Of the single run's distance, that a swarm's may lie above it."""
SHOWN = ("frechet_distance", "kernel_distance", "precision", "recall")
TINY = ("--channels", "4", "--most-channels", "4", "--latent", "4", "--mapping", "1")


def run(settings: Settings) -> Iterator[Table]:
    """The table of distances, then that of deaths."""
    seeds, steps = (2, 16) if settings.quick else (SEEDS, STEPS)
    folder = FOLDER.with_name("benchmark-stylegan2-quick") if settings.quick else FOLDER
    arms: dict[str, list[dict[str, Any]]] = {"single run": [], f"swarm of {MEMBERS}": []}
    for seed in range(seeds):
        for (name, found), members in zip(arms.items(), ((), swarm_of(steps, settings.quick)), strict=True):
            path = folder / f"{name.replace(' ', '-')}-{seed}-{steps}"
            found.append(_measured(path, [*_arguments(seed, steps, settings.quick), *members]))
    yield _beside(arms, steps)
    yield _with_deaths(
        folder / f"deaths-{steps}", [*_arguments(0, steps, settings.quick), *swarm_of(steps, settings.quick)]
    )


def swarm_of(steps: int, quick: bool) -> tuple[str, ...]:
    """Options of a swarm that sees as many pictures as a single run of so many steps."""
    members = ("--members", f"{MEMBERS}", "--cycle", f"{2 if quick else CYCLE}", "--overlap", "0")
    return *members, "--steps", f"{MEMBERS * steps}", "--batch", f"{BATCH}", "--lr", f"{RATE}"


def _arguments(seed: int, steps: int, quick: bool) -> list[str]:
    return ["stylegan2-32", "--data", "digits", "--seed", f"{seed}", "--steps", f"{steps}", *(TINY if quick else ())]


def _measured(path: Path, arguments: list[str]) -> dict[str, Any]:
    """The distances of a run, which is made, or gone on with, unless they are there."""
    kept = path.with_suffix(".json")
    if not kept.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _tpuswarm("train", *arguments, "--run", str(path))
        kept.write_text(_tpuswarm("evaluate", str(path), "--json"))
    return json.loads(kept.read_text())


def _tpuswarm(*arguments: str) -> str:
    """What a command prints; CalledProcessError where it fails, which has said why."""
    command = [sys.executable, "-m", "tpuswarm", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _beside(arms: dict[str, list[dict[str, Any]]], steps: int) -> Table:
    single, swarm = arms.values()
    rows = [(name, *(f"{mean(each[key] for each in found):.4f}" for key in SHOWN)) for name, found in arms.items()]
    over = {key: [b[key] - a[key] for a, b in zip(single, swarm, strict=True)] for key in SHOWN}
    bases = {key: mean(each[key] for each in single) for key in SHOWN}
    rows.append(("paired difference", *(difference(over[key], bases[key]) for key in SHOWN)))
    met = [verdict(mean(over[key]) <= LIMIT * bases[key]) for key in SHOWN[:2]]
    rows.append((f"at most {LIMIT:.0%} above", *met, "", ""))
    columns = ("", *(key.replace("_", " ") for key in SHOWN))
    notes = [f"{len(single)} seeds, {32 * steps:,} pictures in every arm; {BATCH} a member's step, cycles of {CYCLE}"]
    return Table("stylegan2-32 on digits, a swarm beside a single run", columns, rows, notes)


def _with_deaths(path: Path, arguments: list[str]) -> Table:
    """A swarm of which one member is killed every minute, to its end; deaths before it was left count as well."""
    counted = path.with_suffix(".deaths")
    deaths = int(counted.read_text()) if counted.exists() else 0
    if not path.with_suffix(".json").exists():
        swarm = Swarm(path, arguments)
        swarm.start()
        try:
            while swarm.process.poll() is None:
                with suppress(RuntimeError):  # it has come to its end meanwhile
                    deaths += len(torment(swarm, random.Random(deaths), DEATH_EVERY, lambda: DEATH_EVERY / 2, "m"))
                    counted.write_text(f"{deaths}")
        finally:
            swarm.end()
    found = _measured(path, arguments)
    says = json.loads(_tpuswarm("ledger", "verify", str(path), "--json"))
    ledger = "sound" if says["sound"] else f"{len(says['problems'])} problems"
    rows = [(f"{deaths}", ledger, *(f"{found[key]:.4f}" for key in SHOWN))]
    columns = ("members killed", "ledger verify", *(key.replace("_", " ") for key in SHOWN))
    return Table("stylegan2-32 on digits, a member killed every minute", columns, rows)
