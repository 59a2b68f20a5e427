"""`tpuswarm demo`: a swarm that loses a member and does not care, in two minutes."""

import os
import shutil
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import say
from tpuswarm.train.process.waiting import waiting

if TYPE_CHECKING:
    from tpuswarm.swarm.supervision.supervisor import Supervisor
    from tpuswarm.swarm.views.screen import Screen

STEPS = 720
LR = 3e-3
"""Higher than a long run wants: the demo has a minute and a half."""
MEMBERS, CYCLE = 3, 20
VICTIM = "m1"
PROMPT = '"""Return the '
FOLDER = Path("runs/demo")
REPLAYED = 3
"""Newest lines of the ledger on the screen."""
WRITTEN = 3
"""Lines of the model's text: how the run ended stays on a screen of 24."""


def demo(
    cloud: Annotated[
        bool, typer.Option("--cloud", help="Over machines of a local cloud, in four minutes; leaves runs/demo-cloud/.")
    ] = False,
) -> None:
    """Train a small GPT-2 as a swarm of three, and kill one of them, in two minutes; leaves runs/demo/.

    Its text is the source of Python itself.
    """
    if cloud:
        from tpuswarm.cli.demo.demo_cloud import demo_cloud

        demo_cloud()
        return
    _look_for_room()
    say(
        f"A swarm of {MEMBERS} trains a small GPT-2, about two minutes; halfway, {VICTIM} is killed and comes back.\n"
        "Goodput is the share of the trained tokens that counts; an incarnation is one life of a member.",
        err=True,
    )
    from tpuswarm.train.process.platform import load_jax

    load_jax()
    with waiting("loading Ray", short=0.0):
        from tpuswarm.cli.train.join import print_result
        from tpuswarm.recipes.gpt2.recipe import GPT2
        from tpuswarm.swarm.storage.store import Store
        from tpuswarm.swarm.supervision.decide import Asked
        from tpuswarm.swarm.supervision.start import train
        from tpuswarm.swarm.views.report import replay_lines
        from tpuswarm.swarm.views.screen import auto_screen
        from tpuswarm.train.trainer import Trainer

    screen = auto_screen()
    swarm = Asked(members=MEMBERS, cycle=CYCLE, outer="average", demo=True)
    recipe = GPT2(size="tiny", lr=LR)
    settings = Trainer(eval_every=STEPS // 3).settings(STEPS)
    _look_for_room(make=True)  # not before: who interrupts what is loaded keeps the earlier one
    result = train(recipe, swarm, settings, None, None, FOLDER, screen, _Killer(screen).watch)
    if result.ended.how == "stopped":
        say(
            f"{FOLDER}: {result.ended.message}; `tpuswarm train gpt2-tiny --members {MEMBERS} --run {FOLDER}` resumes "
            "it, a new demo replaces it"
        )
    else:
        print_result(result, as_json=False)
    if result.ended.signal is not None:
        raise typer.Exit(128 + result.ended.signal)
    say("\nthe ledger, replayed:")
    with waiting("replaying"):
        lines = list(replay_lines(Store(FOLDER)))
    say(f"  … {len(lines) - REPLAYED} more")
    for line in lines[-REPLAYED:]:
        say(f"  {line}", hang=4)
    written = "\n".join(_sample().splitlines()[:WRITTEN]).rstrip()
    say("\nwhat the model writes now:")
    print(written)
    say('\nnext: `tpuswarm ledger verify runs/demo`, `tpuswarm sample runs/demo --prompt "import "`')


def _look_for_room(make: bool = False) -> None:
    """Find nothing, or what an earlier demo left; make: remove that.

    Raises InputError for a run of the user's, and for one that is in use.
    """
    from tpuswarm.train.run.directory import Run

    if not FOLDER.exists():
        return
    held = Run(FOLDER)  # raises, naming the pid, while a living process uses it
    try:
        config = held.config()
        if config is not None and not config.get("swarm", {}).get("demo"):
            raise InputError(
                f"{FOLDER} is a run of yours, which the demo would replace: rename it (mv {FOLDER} runs/mine), or run "
                "the demo in another folder"
            )
        if make:
            shutil.rmtree(FOLDER)
    finally:
        held.close()


class _Killer:
    """Kills a member when half of the tokens are counted."""

    def __init__(self, screen: "Screen"):
        self._screen, self._done = screen, False

    def watch(self, supervisor: "Supervisor") -> None:
        """Look at how the run stands."""
        status = supervisor.status
        if self._done or status is None or status.tokens.applied < status.horizon // 2:
            return
        victim = next(each for each in status.members if each.id == VICTIM)
        if victim.state == "alive" and victim.pid:
            self._done = True
            self._screen.note(f"kill -9 {victim.pid} ({VICTIM})")
            os.kill(victim.pid, signal.SIGKILL)


def _sample() -> str:
    from tpuswarm.swarm.storage.load import load_swarm
    from tpuswarm.train.optional import WritesText
    from tpuswarm.train.process import platform

    with waiting("generating text"):
        loaded = load_swarm(FOLDER, platform.local_devices())
        assert isinstance(loaded.recipe, WritesText)  # a GPT-2
        return f"{PROMPT}{loaded.recipe.sample(loaded.state, PROMPT, tokens=200, temperature=0.5, seed=1)}"
