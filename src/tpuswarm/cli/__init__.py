"""The command line: one file per command group; parse, call, render.

Modules here import nothing heavy at their top, so that `--help` is immediate; a command imports what it needs.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

SLOW = (
    "copy", "cost", "demo", "describe", "down", "evaluate", "exec", "export", "forward", "jobs", "keep", "list", "logs",
    "plan", "project", "sample", "setup", "ssh", "ssh-config", "stop", "sync", "train", "up",
)  # fmt: skip
"""Commands that load JAX or ask a cloud: they have their first line before typer is there."""


def main() -> "NoReturn":
    """The command `tpuswarm`: exit 2 for wrong input, 1 for a failed run, 128 + N for signal N, with one sentence."""
    try:
        from tpuswarm.train.process.stop import Interrupts, unblock
    except KeyboardInterrupt:  # nothing is there yet that would take it
        raise SystemExit(130) from None
    interrupts = Interrupts()
    try:
        unblock()
        from tpuswarm.train.process.terminal import at_once, settle, take_over

        take_over()
        if sys.argv[1:2] and sys.argv[1] in SLOW:
            at_once("getting ready")
        from tpuswarm.cli.app import run

        code = run()
        settle()
        interrupts.end(code)
    except KeyboardInterrupt:
        interrupts.end(None)
