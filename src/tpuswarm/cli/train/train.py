"""`tpuswarm train`: one recipe on this machine's devices."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.console import option
from tpuswarm.cli.train import train_fleet
from tpuswarm.cli.train.train_options import FIT, Asked, ask
from tpuswarm.config.formatting import format_figure
from tpuswarm.fleet.spec.file import asks_for_machines
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.train.loop.result import Result

LENGTH, HOW, KEPT = "Data and length", "How it trains", "The run"
HOSTS, SWARM = "Several machines as one program", "A swarm"


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help="gpt2-tiny, gpt2-124m, …, file.py:Recipe, or a file.toml with [train].")
    ],
    data: Annotated[str | None, option("--data", "Text: a file, folder or URL, or `fake`.", LENGTH)] = None,
    steps: Annotated[str | None, option("--steps", "Length of the whole run, in steps.", LENGTH)] = None,
    tokens: Annotated[str | None, option("--tokens", "Length of the whole run, in tokens, e.g. 10M.", LENGTH)] = None,
    epochs: Annotated[float | None, option("--epochs", "Length of the run, in passes over the data.", LENGTH)] = None,
    batch: Annotated[
        str | None, option("--batch", "Rows per step of all devices; auto: as many as fit.", LENGTH)
    ] = None,
    init_from: Annotated[
        str | None, option("--init-from", "Start from these parameters: RUN, gpt2, hf:ORG/NAME or hf:DIR.", LENGTH)
    ] = None,
    init_only: Annotated[
        str | None, option("--init-only", "Take only parameters whose path matches this regex.", LENGTH)
    ] = None,
    seed: Annotated[
        int | None, option("--seed", "Random seed: parameters, data order, dropout. Default: 0.", LENGTH)
    ] = None,
    devices: Annotated[
        str | None, option("--devices", "all, a number (8) or indices ([5]). Default: all.", HOW)
    ] = None,
    precision: Annotated[
        str | None, option("--precision", "bf16, f32 or highest. Default: bf16, f32 on CPU.", HOW)
    ] = None,
    shard: Annotated[str | None, option("--shard", "auto, replicate or fsdp. Default: auto.", HOW)] = None,
    accumulate: Annotated[str | None, option("--accumulate", "Micro-batches per step.", HOW)] = None,
    clip: Annotated[float | None, option("--clip", "Clip the gradient to this norm.", HOW)] = None,
    freeze: Annotated[str | None, option("--freeze", "Freeze parameters whose path matches this regex.", HOW)] = None,
    decay: Annotated[
        str | None, option("--decay", "Decay parameters whose path matches this regex, by --weight-decay.", HOW)
    ] = None,
    ema: Annotated[float | None, option("--ema", "Keep a moving average of the parameters, e.g. 0.999.", HOW)] = None,
    deterministic: Annotated[bool | None, option("--deterministic", "Use deterministic GPU kernels.", HOW)] = None,
    run: Annotated[str | None, option("--run", "Run directory; an existing one is resumed.", KEPT)] = None,
    eval_every: Annotated[
        str | None, option("--eval-every", "Steps (500) or time (5m) between evaluations.", KEPT)
    ] = None,
    eval_batch: Annotated[
        str | None, option("--eval-batch", "Rows of a batch in evaluations. Default: as in a step.", KEPT)
    ] = None,
    save_every: Annotated[
        str | None, option("--save-every", "Steps (500) or time between checkpoints. Default: 5m.", KEPT)
    ] = None,
    keep: Annotated[int | None, option("--keep", "Checkpoints to keep. Default: 3.", KEPT)] = None,
    keep_best: Annotated[
        str | None,
        option("--keep-best", "Keep the checkpoint of the best evaluation too: eval_loss, eval_accuracy:max.", KEPT),
    ] = None,
    grace: Annotated[
        str | None,
        option("--grace", "Grace period: time from SIGTERM until the machine is gone. Default: 10s.", KEPT),
    ] = None,
    fast_dev_run: Annotated[
        bool | None, option("--fast-dev-run", "Two steps, an evaluation and a checkpoint; nothing is kept.", HOW)
    ] = None,
    overfit_batches: Annotated[
        int | None, option("--overfit-batches", "Train and evaluate on the first so many batches alone.", HOW)
    ] = None,
    profile: Annotated[bool | None, option("--profile", "Trace a few steps for xprof and TensorBoard.", KEPT)] = None,
    wandb: Annotated[str | None, option("--wandb", "Log every row to this Weights & Biases project.", KEPT)] = None,
    as_json: Annotated[bool, option("--json", "Print one JSON object at the end.", KEPT)] = False,
    detach: Annotated[
        bool, option("--detach", "Go on in the background, also when the terminal closes.", KEPT)
    ] = False,
    dry: Annotated[bool, option("--dry-run", "Show what would be trained, and where; change nothing.", KEPT)] = False,
    hosts: Annotated[
        int | None, option("--hosts", "Number of hosts that train together as one program.", HOSTS)
    ] = None,
    host: Annotated[
        int | None, option("--host", "Number of this host, from 0. Default: $TPU_WORKER_ID.", HOSTS)
    ] = None,
    hosts_at: Annotated[
        str | None,
        option(
            "--hosts-at", "Address of host 0, HOST:PORT. Default: the first of $TPU_WORKER_HOSTNAMES, port 8490.", HOSTS
        ),
    ] = None,
    members: Annotated[
        int | None, option("--members", "Train as a swarm of this many members; 0: only those that join.", SWARM)
    ] = None,
    devices_per_member: Annotated[
        int | None,
        option(
            "--devices-per-member",
            "Devices of each member; without a TPU or GPU, virtual ones. Default: an equal share.",
            SWARM,
        ),
    ] = None,
    cycle: Annotated[int | None, option("--cycle", "Steps of a member between two pushes. Default: 50.", SWARM)] = None,
    outer: Annotated[str | None, option("--outer", "Outer rule: average or nesterov (DiLoCo).", SWARM)] = None,
    outer_lr: Annotated[
        float | None, option("--outer-lr", "Learning rate of nesterov. Default: by the number of members.", SWARM)
    ] = None,
    quantize: Annotated[
        str | None, option("--quantize", "int8 or int4: send fewer bytes, in both directions.", SWARM)
    ] = None,
    overlap: Annotated[str | None, option("--overlap", "auto, or 0: wait while a push is in flight.", SWARM)] = None,
    ray_address: Annotated[str | None, option("--ray-address", "Use this existing Ray cluster.", SWARM)] = None,
    dashboard: Annotated[
        bool | None, option("--dashboard", "Serve Ray's own dashboard, to this machine alone.", SWARM)
    ] = None,
    token_file: Annotated[
        Path | None, option("--token-file", "File with the secret of all who join. Default: made for the run.", SWARM)
    ] = None,
    expect: Annotated[
        int | None, option("--expect", "Members that will join: what serves them is sized for them. Default: 0.", SWARM)
    ] = None,
    ports: Annotated[
        str | None, option("--ports", "TCP ports on which Ray listens, such as 20000-20999. Default: any.", SWARM)
    ] = None,
    paid: Annotated[bool, option("--paid", "With a fleet: pay for TPUs that no grant covers.", SWARM)] = False,
    yes: Annotated[bool, option("--yes", "With a fleet: rent its machines without asking.", SWARM)] = False,
    accept_code: Annotated[
        bool, option("--accept-code", "Resume although the code (in a swarm, also settings) changed.", KEPT)
    ] = False,
) -> None:
    """Train a recipe. Its own options work too: --lr 3e-4 --context 256.

    The same --run directory resumes. With --members it is a swarm: any member may die at any moment. A swarm.toml with
    machines trains on all of them.
    """
    if recipe.endswith(".toml") and asks_for_machines(Path(recipe)):
        train_fleet.train(context, Path(recipe), yes, paid, detach, dry, accept_code)
        return
    asked = ask(context)
    if dry:
        from tpuswarm.cli.train.dry_run import dry_run

        _show(dry_run(asked), as_json)
        return
    if detach:
        from tpuswarm.cli.train.detach import detach as start_detached

        start_detached(asked, hosts, as_json)
        return
    if asked.folder and hosts is None:  # of several hosts it is host 0's
        from tpuswarm.train.run.directory import require_free

        require_free(asked.folder)
    code = _swarm(asked, as_json) if asked.swarm is not None else _plain(asked, context.params)
    if code is not None:
        raise typer.Exit(128 + code)


train.context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}  # type: ignore[attr-defined]


def _show(plan: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(plan))
        return
    for name, text in plan.items():
        say(f"{name:12}{text}", hang=12)
    say("nothing was done")


def _trainer(asked: Asked, **options: Any) -> Any:
    from tpuswarm.train.process.platform import load_jax

    load_jax()
    with waiting("loading JAX's libraries", short=0.0):
        from tpuswarm.train.trainer import Trainer

    return Trainer(**{name: getattr(asked.table, name) for name in FIT}, **options)


def _plain(asked: Asked, words: dict[str, Any]) -> int | None:
    """Train in this process; the signal that stopped it."""
    trainer = _trainer(asked, **{name: words[name] for name in ("hosts", "host", "hosts_at", "accept_code")})
    if words["hosts"] is not None:
        _alone_on_stdout()
    recipe = asked.recipe
    init = {"init_from": asked.parent, "init_only": asked.table.init_only}
    if asked.with_lr is not None:
        found = float(f"{trainer.find_lr(recipe, batch=asked.table.batch, **init).lr:.1e}")
        say(f"learning rate {found:g}: there the loss falls fastest, of 1e-06 to 1 in 100 steps", err=True)
        recipe = asked.with_lr(found)
    length = {name: getattr(asked.table, name) for name in ("steps", "tokens", "epochs", "batch")}
    result = trainer.fit(recipe, run=asked.folder, **init, **length)
    print_result(result, words["as_json"])
    return result.signal


def _swarm(asked: Asked, as_json: bool) -> int | None:
    """Train in processes of their own; the signal that stopped it."""
    from tpuswarm.cli.train.join import print_result

    table = asked.table
    settings = _trainer(asked).settings(table.steps, table.batch, asked.parent, table.init_only)
    with waiting("loading Ray", short=0.0):
        from tpuswarm.swarm.supervision import decide, start
    swarm = decide.Asked(**asked.swarm or {})
    result = start.train(asked.recipe, swarm, settings, table.tokens, table.epochs, asked.folder)
    print_result(result, as_json)
    return result.ended.signal


def _alone_on_stdout() -> None:
    """What libraries print there, as JAX's connections of CPUs do, goes to stderr; our prints still come to stdout."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)


def print_result(result: "Result", as_json: bool) -> None:
    """The end of a run on stdout."""
    from tpuswarm.train.run.life import stopped_sentence
    from tpuswarm.train.storage.folders import shown as called

    if as_json:
        facts = {"run": called(result.run), "ended": result.ended, "step": result.step, "steps": result.steps}
        print(json.dumps({**facts, "message": result.message, "metrics": result.metrics}))
        return
    if not result.run.exists():
        through = "went through: two steps, an evaluation, a checkpoint"
        say(f"the fast dev run {through if result.ended == 'finished' else 'was stopped'}; nothing was kept")
        return
    if result.ended == "stopped":
        say(stopped_sentence(result.run, result.message))
        return
    shown = [
        f"{text} {format_figure(result.metrics[name])}"
        for name, text in (("loss", "loss"), ("eval_loss", "held-out loss"))
        if result.metrics.get(name) is not None
    ]
    end = f"{called(result.run)} finished at step {result.step} of {result.steps}"
    say(f"{end}: {', '.join(shown)}; {result.run / 'report.html'}")
