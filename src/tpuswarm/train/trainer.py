"""Train, evaluate and predict with a recipe, on the devices of one process or of several hosts."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from tpuswarm.config.limits import check_settings
from tpuswarm.config.units import parse_every
from tpuswarm.errors import InputError
from tpuswarm.train.diagnose.diagnostics import Diagnostics
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.hosts.host_group import find_host_group
from tpuswarm.train.look import wandb_log
from tpuswarm.train.look.display import Display, auto_display
from tpuswarm.train.look.outputs import Logger, all_loggers, require_loggers
from tpuswarm.train.loop.evaluate import EVAL_BATCHES, evaluate_run, predict_run
from tpuswarm.train.loop.find_learning_rate import DEFAULT_STEPS, Rates, find_lr
from tpuswarm.train.loop.hooks import Every, Hooks, Step, recipe_hooks
from tpuswarm.train.loop.loop import Loop
from tpuswarm.train.loop.result import Result
from tpuswarm.train.loop.session import open_run, prepare
from tpuswarm.train.process import platform
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.program.mesh import select_devices
from tpuswarm.train.recipe import Recipe, check_recipe
from tpuswarm.train.run.directory import read_config
from tpuswarm.train.run.listing import find_run
from tpuswarm.train.run.loaded import LoadedRun, load_run
from tpuswarm.train.run.parent import find_parent
from tpuswarm.train.settings import CHANGEABLE_SETTINGS, FIXED_SETTINGS
from tpuswarm.train.storage.copy import download_run, refreshed_folder
from tpuswarm.train.storage.folders import is_url, shown
from tpuswarm.train.user_code import blame, refuse_while_importing


@entry_point
@dataclass(frozen=True)
class Trainer:
    """Trains recipes on the devices of this process or of several hosts.

    None means not set: the run directory or the recipe decides.

    - devices: `all`, a number (8), or indices from 0 ([5]).
    - shard: `auto`, `replicate` or `fsdp`.
    - precision: `bf16`, `f32` or `highest`; the default is f32 on CPU, else bf16.
    - accumulate, clip, freeze, decay, ema: see tpuswarm.Options.
    - seed: of the parameters, the randomness of steps and the order of the data.
    - save_every, eval_every: steps (500) or time (`5m`, the default of save_every).
    - eval_batch: rows of a batch in evaluations; the default is the rows of a step or of a micro-batch.
    - keep: number of checkpoints to keep, by default 3.
    - grace: seconds from SIGTERM until the machine is gone.
    - deterministic: use deterministic GPU kernels; CPU and TPU are always deterministic.
    - overfit_batches: train and evaluate on the first so many batches only; a sound model learns them by heart.
    - fast_dev_run: run two steps, one batch of evaluation and a checkpoint in a temporary run, not in `run`.
    - accept_code: resume a run with another loss, optimizer or schedule than it began with, and record that.
    - profile: trace a few steps for xprof and TensorBoard.
    - wandb: the Weights & Biases project to log to.
    - hooks: functions to call between steps: `hooks=[Every(100, look)]`.
    - loggers: objects that get every row of metrics.jsonl, see tpuswarm.Logger.
    - keep_best: `eval_loss`, or `eval_accuracy:max`: also keep the checkpoint of the best evaluation.
    - display: where progress goes; the default is a live view on a terminal, else lines.
    - hosts, host, hosts_at: number of hosts that train together, number of this host from 0, and address HOST:PORT of
      host 0 (docs/hosts.md). Only once per process, before anything else uses JAX. The workers of a slice find each
      other by themselves; hosts=1 trains on this one alone.

    Raises InputError for unknown arguments.
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
    save_every: str | int | None = None
    eval_every: str | int | None = None
    eval_batch: int | None = None
    keep: int | None = None
    grace: float = 10.0
    deterministic: bool | None = None
    overfit_batches: int | None = None
    fast_dev_run: bool = False
    accept_code: bool = False
    profile: bool = False
    wandb: str | None = None
    hooks: Sequence[Every] = ()
    loggers: Sequence[Logger] = ()
    keep_best: str | None = None
    display: Display | None = None
    hosts: int | None = None
    host: int | None = None
    hosts_at: str | None = None

    def settings(
        self,
        steps: int | None = None,
        batch: int | Literal["auto"] | None = None,
        init_from: str | Path | None = None,
        init_only: str | None = None,
    ) -> dict[str, Any]:
        """Return all settings of a run by name, None if not set; raise InputError for one out of range."""
        named = {
            name: getattr(self, name)
            for name in (*FIXED_SETTINGS, *CHANGEABLE_SETTINGS)
            if name in self.__dataclass_fields__
        }
        parent = find_parent(init_from) if init_from else None
        if init_only is not None and not isinstance(init_only, str):
            raise InputError(f"init_only is a {type(init_only).__name__}: give a regular expression")
        if init_only is not None and parent is None:
            raise InputError(f"init_only {init_only!r} says which parameters of init_from are taken: give that too")
        settings = named | {"steps": steps, "batch": batch, "init_from": parent, "init_only": init_only}
        check_settings(settings)
        return settings

    @entry_point
    def fit(
        self,
        recipe: Recipe,
        *,
        steps: int | None = None,
        tokens: int | None = None,
        epochs: float | None = None,
        batch: int | Literal["auto"] | None = None,
        run: str | Path | None = None,
        init_from: str | Path | None = None,
        init_only: str | None = None,
    ) -> Result:
        """Train to the end, or until a signal or a hook stops the run. Takes the arguments of `steps`.

        Raises InputError for an invalid request and RunFailed when the run fails; its last good checkpoint is safe.
        """
        loop = self.steps(
            recipe, steps=steps, tokens=tokens, epochs=epochs, batch=batch, run=run, init_from=init_from,
            init_only=init_only,
        )  # fmt: skip
        while True:
            try:
                next(loop)
            except StopIteration as end:
                return end.value

    @entry_point
    def evaluate(
        self,
        recipe: Recipe,
        *,
        run: str | Path,
        split: str = "validation",
        batch: int | None = None,
        best: bool = False,
    ) -> dict[str, float]:
        """Return the metrics of a run's newest checkpoint over all rows of a split, on one host.

        - split: `validation`, `test`, `train` or `all`.
        - batch: rows at once, by default as in the run's evaluations.
        - best: use the checkpoint that `keep_best` kept.

        Raises InputError if `run` is no run of this recipe, and NoSuchSplit.
        """
        return evaluate_run(self._load(recipe, run, best), split, self._rows_at_once(batch))[0]

    @entry_point
    def predict(
        self,
        recipe: Recipe,
        function: Callable[..., Any],
        *,
        run: str | Path,
        split: str = "test",
        batch: int | None = None,
        best: bool = False,
    ) -> Any:
        """Return the results of `function` for each row of a split, with a run's newest checkpoint, on one host.

        function: returns a pytree of arrays whose first axis is the rows of the batch. It takes `(params, batch)` for a
        recipe of `supervised`, `(params, extra, batch)` if its loss has mutable state, else `(state, batch)`. It is
        compiled. The parameters are those of evaluations, in their own dtypes.

        Returns the same pytree of NumPy arrays with all rows: in the order of the data for arrays, an ArraySource and
        an IndexedSource, else in the source's order. The other arguments and errors are those of `evaluate`.
        """
        return predict_run(self._load(recipe, run, best), function, split, self._rows_at_once(batch))

    def _rows_at_once(self, batch: int | None) -> int | None:
        rows = self.eval_batch if batch is None else batch
        check_settings({"eval_batch": rows})
        return rows

    def _load(self, recipe: Recipe, run: str | Path, best: bool) -> LoadedRun:
        check_recipe(recipe)
        if self.hosts not in (None, 1):
            raise InputError("a run is evaluated on one host: leave out hosts")
        platform.configure_jax(bool(self.deterministic))
        folder = download_run(str(run), whole=True) if is_url(str(run)) else find_run(str(run))
        if "swarm" in read_config(folder):
            raise InputError(
                f"{folder} is the run of a swarm: `tpuswarm evaluate {folder}` evaluates it, and load(run) gives its "
                "parameters"
            )
        loaded = load_run(folder, select_devices(self.devices, platform.local_devices()), best=best, recipe=recipe)
        for note in loaded.notes:
            echo(note, err=True)
        return loaded

    @entry_point
    def find_lr(
        self,
        recipe: Recipe,
        *,
        batch: int | None = None,
        steps: int = DEFAULT_STEPS,
        init_from: str | Path | None = None,
        init_only: str | None = None,
    ) -> Rates:
        """Return the learning rate at which the loss falls fastest, as it grows from 1e-6 to 1 in `steps` steps.

        For a recipe of `supervised` with a schedule, on one host; writes nothing. Raises InputError if the loss never
        falls.
        """
        check_recipe(recipe)
        asked = self.settings(steps, batch, init_from, init_only)
        if self.hosts not in (None, 1) or asked["batch"] == "auto":
            raise InputError("find_lr runs on one host, with a batch in rows: leave out hosts and batch='auto'")
        platform.configure_jax(bool(self.deterministic))
        devices = select_devices(self.devices, platform.local_devices())
        platform.require_free_memory(devices)
        with waiting(f"looking for the learning rate of {recipe.name}", delay_s=0.0) as show_progress:
            return find_lr(recipe, asked, devices, steps, show_progress)

    @entry_point
    def steps(
        self,
        recipe: Recipe,
        *,
        steps: int | None = None,
        tokens: int | None = None,
        epochs: float | None = None,
        batch: int | Literal["auto"] | None = None,
        run: str | Path | None = None,
        init_from: str | Path | None = None,
        init_only: str | None = None,
    ) -> Generator[Step, None, Result]:
        """Train as a generator: yield a Step for every row of metrics, return a Result.

        - steps, tokens, epochs: length of the whole run; give one.
        - batch: rows of one whole step, over all devices; `auto` takes as many as fit.
        - run: the run directory, or gs://BUCKET/FOLDER; an existing one resumes, None creates one in ./runs.
        - init_from: a run, or a published model that the recipe reads, whose parameters to begin with.
        - init_only: a regular expression, searched in parameter paths. Only matches come from `init_from`; the recipe
          makes the others, such as a new head of another shape.

        Closing the loop early (`contextlib.closing`, or leaving the function that holds it) saves and ends the run like
        Ctrl-C; a loop left open at the end of a script resumes from its last checkpoint. Errors are those of `fit`.
        """
        refuse_while_importing()
        check_recipe(recipe)
        asked = self.settings(steps, batch, init_from, init_only)
        for name in ("save_every", "eval_every"):
            if asked[name] is not None:
                parse_every(asked[name], name)
        if run is not None and not isinstance(run, (str, Path)):
            raise InputError(f"run is a {type(run).__name__}: give the path of a folder, or gs://BUCKET/FOLDER")
        hooks = Hooks(self.hooks, recipe_hooks(recipe))
        require_loggers(self.loggers)
        if self.wandb is not None:
            wandb_log.require_wandb()
        hosts = find_host_group(
            self.hosts, self.host, self.hosts_at, run=run, devices=self.devices, is_dev_run=self.fast_dev_run
        )
        with blame(f"{recipe.name} fails"), Diagnostics() as diagnostics, ExitStack() as ends:
            if self.fast_dev_run:
                if hosts:
                    raise InputError("a fast dev run is of one host: its folder is not shared; leave --hosts out")
                run = Path(ends.enter_context(TemporaryDirectory(prefix="tpuswarm-"))) / "fast-dev-run"
                asked["steps"], tokens, epochs = 2, None, None
            folder = refreshed_folder(str(run)) if run else None
            with open_run(recipe, asked, folder, hosts, ends) as (directory, agreement):
                session = prepare(directory, agreement, recipe, asked, tokens, epochs, self.accept_code)
            display = self.display or auto_display(quiet=not agreement.is_leader)
            with agreement:
                if isinstance(session, Result):
                    display.note(f"{shown(session.run)} is finished; nothing left to do")
                    return session
                loop = Loop(
                    session, diagnostics, display, hooks=hooks, profile=self.profile,
                    wandb=None if self.fast_dev_run else self.wandb, loggers=partial(all_loggers, recipe, self.loggers),
                    eval_batches=1 if self.fast_dev_run else EVAL_BATCHES,
                )  # fmt: skip
                return (yield from diagnostics.watch_user_code(loop.run()))
