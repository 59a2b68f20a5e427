"""The command line: one file per command group; parse, call, render.

Modules here import nothing heavy at their top, so that `--help` is immediate; a command imports what it needs.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn


def main() -> "NoReturn":
    """The command `tpuswarm`: exit 2 for wrong input, 1 for a failed run, 128 + N for signal N, with one sentence."""
    try:
        from tpuswarm.train.stop import Interrupts
    except KeyboardInterrupt:  # nothing is there yet that would take it
        raise SystemExit(130) from None
    interrupts = Interrupts()
    code = None
    try:
        from tpuswarm.cli.app import run
        from tpuswarm.train.terminal import take_over

        take_over()
        code = run()
    except KeyboardInterrupt:
        pass
    interrupts.end(code)
