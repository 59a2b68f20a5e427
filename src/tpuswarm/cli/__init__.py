"""The command line: one file per command group; parse, call, render.

Modules here import nothing heavy at their top, so that `--help` is immediate; a command imports what it needs.
"""

from tpuswarm.cli.app import main

__all__ = ["main"]
