"""The command line: parse, call, print. One room for each thing a user does, one file for each command or few."""

import sys
from typing import NoReturn

SLOW_COMMANDS = (
    "chat", "copy", "cost", "demo", "describe", "down", "evaluate", "exec", "export", "forward", "jobs", "keep", "list",
    "logs", "plan", "project", "sample", "setup", "ssh", "ssh-config", "stop", "sync", "train", "up",
)  # fmt: skip
"""Commands that load JAX or call a cloud: they print a first line before they are imported."""


def main() -> NoReturn:
    """Run `tpuswarm`. Exit codes: 2 for wrong input, 1 for a failed run, 128 + N for signal N."""
    try:
        from tpuswarm.train.process.stop import InterruptHandler, unblock_signals
    except KeyboardInterrupt:  # no handler is installed yet
        raise SystemExit(130) from None
    interrupts = InterruptHandler()
    try:
        unblock_signals()
        from tpuswarm.train.process.terminal import clear_temporary_line, print_temporary_line, wrap_standard_streams

        wrap_standard_streams()
        if sys.argv[1:2] and sys.argv[1] in SLOW_COMMANDS:
            print_temporary_line("getting ready")
        from tpuswarm.cli.app import run

        code = run()
        clear_temporary_line()
        interrupts.end(code)
    except KeyboardInterrupt:
        interrupts.end(None)
