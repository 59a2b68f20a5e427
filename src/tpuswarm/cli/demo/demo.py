"""`tpuswarm demo`: train a swarm that loses a member, in two minutes."""

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.process import platform
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting
from tpuswarm.train.run.directory import Run

if TYPE_CHECKING:
    from tpuswarm.swarm.supervision.supervisor import Supervisor
    from tpuswarm.swarm.views.screen import Screen

STEPS = 720
LEARNING_RATE = 3e-3
"""Higher than a long run needs: the demo trains for a minute and a half."""
MEMBERS, CYCLE = 3, 20
VICTIM = "m1"
PROMPT = '"""Return the '
FOLDER = Path("runs/demo")
LEDGER_LINES, TEXT_LINES = 3, 3
"""So few that the end of the run stays on a screen of 24 lines."""


def demo(
    cloud: Annotated[
        bool,
        typer.Option("--cloud", help="Over machines of a local cloud; leaves runs/demo-cloud/."),
    ] = False,
    anywhere: Annotated[
        bool,
        typer.Option("--anywhere", help="With members behind a NAT; needs root; leaves runs/demo-anywhere/."),
    ] = False,
) -> None:
    """Train a small GPT-2 as a swarm of three, and kill one of them, in two minutes; leaves runs/demo/.

    Its text is the source of Python itself.
    """
    if cloud and anywhere:
        raise InputError("--cloud and --anywhere exclude each other")
    if cloud:
        from tpuswarm.cli.demo.demo_cloud import demo_cloud

        demo_cloud()
        return
    if anywhere:
        from tpuswarm.cli.demo.demo_anywhere import demo_anywhere

        demo_anywhere()
        return
    _check_folder()
    echo(
        f"A swarm of {MEMBERS} trains a small GPT-2, about two minutes; halfway, {VICTIM} is killed and comes back.\n"
        "Goodput is the share of the trained tokens that counts; an incarnation is one life of a member.",
        err=True,
    )
    platform.load_jax()
    with waiting("loading Ray", delay_s=0.0):
        from tpuswarm.cli.train.train import print_swarm_result
        from tpuswarm.recipes.gpt2.recipe import GPT2
        from tpuswarm.swarm.storage.store import Store
        from tpuswarm.swarm.supervision.decide import SwarmOptions
        from tpuswarm.swarm.supervision.start import train
        from tpuswarm.swarm.views.report import replay_lines
        from tpuswarm.swarm.views.screen import auto_screen
        from tpuswarm.train.trainer import Trainer

    screen = auto_screen()
    swarm = SwarmOptions(members=MEMBERS, cycle=CYCLE, outer="average", demo=True)
    recipe = GPT2(size="tiny", lr=LEARNING_RATE)
    settings = Trainer(eval_every=STEPS // 3).settings(STEPS)
    _check_folder(remove=True)  # not earlier: an interrupt during loading keeps the last demo
    result = train(recipe, swarm, settings, None, None, FOLDER, screen, _Killer(screen).watch)
    if result.ended.how == "stopped":
        echo(
            f"{FOLDER}: {result.ended.message}. Resume: "
            f"`tpuswarm train gpt2-tiny --members {MEMBERS} --run {FOLDER}`; a new demo replaces it"
        )
    else:
        print_swarm_result(result, as_json=False)
    if result.ended.signal is not None:
        raise typer.Exit(128 + result.ended.signal)
    echo("\nthe ledger, replayed:")
    with waiting("replaying"):
        lines = list(replay_lines(Store(FOLDER)))
    echo(f"  … {len(lines) - LEDGER_LINES} more")
    for line in lines[-LEDGER_LINES:]:
        echo(f"  {line}", hang=4)
    text = "\n".join(_sample().splitlines()[:TEXT_LINES]).rstrip()
    echo("\na sample of its text:")
    print(text)
    echo('\nnext: `tpuswarm ledger verify runs/demo`, `tpuswarm sample runs/demo --prompt "import "`')


def _check_folder(remove: bool = False) -> None:
    """Check that the folder is free or an earlier demo's; remove that if wanted. Raises InputError for another run."""
    if not FOLDER.exists():
        return
    run = Run(FOLDER)  # raises, with the pid, while another process uses it
    try:
        config = run.config()
        if config is not None and not config.get("swarm", {}).get("demo"):
            raise InputError(
                f"{FOLDER} is a run of yours, which the demo would replace. Rename it (mv {FOLDER} runs/mine), or run "
                "the demo in another folder."
            )
        if remove:
            shutil.rmtree(FOLDER)
    finally:
        run.close()


class _Killer:
    """Kills a member once half of the tokens are counted."""

    def __init__(self, screen: "Screen"):
        self._screen, self._has_killed = screen, False

    def watch(self, supervisor: "Supervisor") -> None:
        status = supervisor.status
        if self._has_killed or status is None or status.tokens.applied < status.horizon // 2:
            return
        victim = next(member for member in status.members if member.id == VICTIM)
        if victim.state == "alive" and victim.pid:
            self._has_killed = True
            self._screen.note(f"kill -9 {victim.pid} ({VICTIM})")
            os.kill(victim.pid, signal.SIGKILL)


def _sample() -> str:
    from tpuswarm.swarm.storage.load import load_swarm

    with waiting("generating text"):
        loaded = load_swarm(FOLDER, platform.local_devices())
        return f"{PROMPT}{loaded.recipe.sample(loaded.state, PROMPT, tokens=200, temperature=0.5, seed=1)}"
