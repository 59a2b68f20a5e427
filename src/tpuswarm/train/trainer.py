"""The trainer: what is asked of a training, on the devices of one process, or of several hosts' together."""

from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuswarm.config.units import Every, parse_every
from tpuswarm.errors import InputError
from tpuswarm.train import wandb_log
from tpuswarm.train.diagnose.watch import Watch
from tpuswarm.train.display import Display, auto_display
from tpuswarm.train.load import find_parent
from tpuswarm.train.loop import Loop, Result, Step
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.session import prepare
from tpuswarm.train.settings import FIXED, FREE
from tpuswarm.train.together import several


@dataclass(frozen=True)
class Trainer:
    """Trains recipes on this process's devices, or on those of several hosts.

    - devices: `all`, a number (8), or indices from 0 ([5]); shard: `auto`, `replicate` or `fsdp`.
    - precision: `bf16`, `f32`, `highest`; None is bf16 on TPU and GPU, f32 on CPU.
    - accumulate, clip, freeze, decay, ema: see train/recipe.py Options; None leaves them to the recipe.
    - save_every, eval_every: steps (500) or time (`5m`); keep: checkpoints that stay.
    - notice: seconds from SIGTERM to the end of the machine.
    - deterministic: GPU kernels that repeat bit for bit (CPU and TPU do without being asked).
    - profile: trace a few steps for xprof and TensorBoard; wandb: project of Weights & Biases that gets every row.
    - display: where progress goes; None chooses by the terminal.
    - hosts, host, hosts_at: how many processes make this call to train together, which of them this is, from 0, and
      HOST:PORT where host 0 listens for the others (docs/hosts.md). Once in a process, before anything else uses JAX.
    """

    devices: str | int | list[int] = "all"
    shard: str = "auto"
    precision: str | None = None
    accumulate: int | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None
    seed: int | None = None
    save_every: str | int = "5m"
    eval_every: str | int | None = None
    keep: int = 3
    notice: float = 10.0
    deterministic: bool | None = None
    profile: bool = False
    wandb: str | None = None
    display: Display | None = None
    hosts: int | None = None
    host: int | None = None
    hosts_at: str | None = None

    def settings(
        self, steps: int | None = None, batch: int | None = None, init_from: str | Path | None = None
    ) -> dict[str, Any]:
        """What was asked, by the names of train/settings.py; None for what was not."""
        named = {name: getattr(self, name) for name in (*FIXED, *FREE) if name in self.__dataclass_fields__}
        parent = find_parent(init_from) if init_from else None
        return named | {"steps": steps, "batch": batch, "init_from": parent}

    def fit(self, recipe: Recipe, **options: Any) -> Result:
        """Train to the end, or until asked to stop; takes what `steps` takes.

        Raises InputError for what cannot be done as asked and RunFailed for a run that broke; the last good
        checkpoint stands then.
        """
        loop = self.steps(recipe, **options)
        while True:
            try:
                next(loop)
            except StopIteration as end:
                return end.value

    def steps(
        self,
        recipe: Recipe,
        *,
        steps: int | None = None,
        tokens: int | None = None,
        epochs: float | None = None,
        batch: int | None = None,
        run: str | Path | None = None,
        init_from: str | Path | None = None,
    ) -> Generator[Step, None, Result]:
        """The loop itself, for those who want it: yields a Step for every row, returns a Result.

        The same run directory resumes; without one a new one is made in ./runs. batch: rows of one whole step, over
        all devices. Closing the loop (`contextlib.closing`, or leaving a function that holds it) before its end saves
        and ends the run like Ctrl-C; one that a script's last line leaves open goes on from its last checkpoint.
        """
        asked = self.settings(steps, batch, init_from)
        save_every = parse_every(self.save_every, "save_every")
        eval_every = Every() if self.eval_every is None else parse_every(self.eval_every, "eval_every")
        if self.keep < 1:
            raise InputError(f"keep must be 1 or more, not {self.keep}")
        if self.wandb is not None:
            wandb_log.require()
        hosts = several(self.hosts, self.host, self.hosts_at)
        with Watch() as watch:
            session = prepare(recipe, asked, tokens, epochs, Path(run) if run else None, hosts)
            display = self.display or auto_display(quiet=not session.together.leads)
            loop = Loop(
                session, watch, display,
                save_every=save_every, eval_every=eval_every, profile=self.profile, wandb=self.wandb,
            )  # fmt: skip
            return (yield from watch.hand_out(loop.run()))
