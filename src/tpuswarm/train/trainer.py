"""The trainer: the settings of a run, on the devices of one process or of several hosts together."""

from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuswarm.config.limits import check
from tpuswarm.config.units import Every, parse_every
from tpuswarm.train import wandb_log
from tpuswarm.train.diagnose.watch import Watch
from tpuswarm.train.display import Display, auto_display
from tpuswarm.train.loop import Loop, Result, Step
from tpuswarm.train.parent import find_parent
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.session import prepare
from tpuswarm.train.settings import FIXED, FREE
from tpuswarm.train.several import several


@dataclass(frozen=True)
class Trainer:
    """Trains recipes on this process's devices, or on those of several hosts.

    None means: not set, so the run directory or the recipe decides.

    - devices: `all`, a number (8), or indices from 0 ([5]); shard: `auto`, `replicate` or `fsdp`.
    - precision: `bf16`, `f32`, `highest`; None is bf16 on TPU and GPU, f32 on CPU.
    - accumulate, clip, freeze, decay, ema: see train/recipe.py Options.
    - save_every, eval_every: steps (500) or time (`5m`); keep: how many checkpoints to keep.
    - grace: seconds from SIGTERM until the machine is gone.
    - deterministic: deterministic GPU kernels (CPU and TPU are deterministic anyway).
    - profile: trace a few steps for xprof and TensorBoard; wandb: the Weights & Biases project to log to.
    - display: where progress goes; None: a live view on a terminal, else lines.
    - hosts, host, hosts_at: how many hosts train together, the number of this one from 0, and the address HOST:PORT of
      host 0 (docs/hosts.md). Once per process, before anything else uses JAX.
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
    grace: float = 10.0
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
        """The settings as given, by the names of train/settings.py; None for those not set. InputError if out of "
        "range."""
        named = {name: getattr(self, name) for name in (*FIXED, *FREE) if name in self.__dataclass_fields__}
        parent = find_parent(init_from) if init_from else None
        asked = named | {"steps": steps, "batch": batch, "init_from": parent}
        check(asked)
        return asked

    def fit(self, recipe: Recipe, **options: Any) -> Result:
        """Train to the end, or until asked to stop; takes the same arguments as `steps`.

        Raises InputError for what cannot be done as asked, and RunFailed when a run fails; its last good checkpoint is
        safe.
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
        """The training loop as a generator: yields a Step for every row of metrics, returns a Result.

        run: the run directory; an existing one resumes, None creates one in ./runs. batch: rows of one whole step, over
        all devices. Closing the loop early (`contextlib.closing`, or leaving the function that holds it) saves and ends
        the run like Ctrl-C; a loop left open at the end of a script resumes from its last checkpoint.
        """
        asked = self.settings(steps, batch, init_from)
        save_every = parse_every(self.save_every, "save_every")
        eval_every = Every() if self.eval_every is None else parse_every(self.eval_every, "eval_every")
        if self.wandb is not None:
            wandb_log.require()
        hosts = several(self.hosts, self.host, self.hosts_at)
        with Watch() as watch, ExitStack() as ends:
            session = prepare(recipe, asked, tokens, epochs, Path(run) if run else None, ends, hosts)
            display = self.display or auto_display(quiet=not session.together.leads)
            loop = Loop(
                session, watch, display,
                save_every=save_every, eval_every=eval_every, profile=self.profile, wandb=self.wandb,
            )  # fmt: skip
            return (yield from watch.hand_out(loop.run()))
