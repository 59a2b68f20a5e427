"""Options, consoles, questions and checks that several commands share."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuswarm.cli.completion import Complete, complete_runs
from tpuswarm.errors import InputError
from tpuswarm.train.process.terminal import echo

if TYPE_CHECKING:
    from rich.console import Console

    from tpuswarm.fleet.apply.preflight import Check

RUN_HELP = "A run's directory, its name in ./runs, gs://BUCKET/FOLDER, or `last`."
Run = Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=complete_runs)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Best = Annotated[bool, typer.Option("--best", help="The checkpoint that --keep-best kept, not the newest.")]
FleetOption = Annotated[str | None, typer.Option("--fleet", help="The fleet, by name or file. Default: ./swarm.toml.")]
Target = Annotated[str | None, typer.Argument(metavar="[FILE|FLEET]", help="swarm.toml, or a fleet's name.")]
Trust = Annotated[bool, typer.Option("--trust", help="Execute the run's own recipe, a file that you have read.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

PIPE_WIDTH_CHARS = 240
ANSWERS = {"y": True, "yes": True, "n": False, "no": False}


def option(text: str, panel: str | None = None, flag: str | None = None, values: Complete | None = None) -> Any:
    """Return a typer option whose help shows no default. A flag without a value needs its name.

    values: completes the value in a shell.
    """
    names = [flag] if flag else []
    return typer.Option(*names, help=text, show_default=False, rich_help_panel=panel, autocompletion=values)


def make_console() -> "Console":
    """Return a console on stdout that folds no line in a file or a pipe."""
    from tpuswarm.train.process.console import SafeConsole

    console = SafeConsole(highlight=False)
    return console if console.is_terminal else SafeConsole(highlight=False, width=PIPE_WIDTH_CHARS)


def confirm(yes: bool) -> None:
    """Ask whether to proceed. Raises InputError without a terminal, Abort for no."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise InputError("this needs a confirmation, and there is no terminal to ask on: add --yes")
    while (answer := typer.prompt("Proceed? [y/N]", default="n", show_default=False).strip().lower()) not in ANSWERS:
        echo("answer y or n", err=True)
    if not ANSWERS[answer]:
        raise typer.Abort("no")


def print_checks(checks: "list[Check]") -> None:
    """Print a line for each check, and how to fix a failed one."""
    for check in checks:
        verdict = "no" if not check.ok else "ok" if check.known else f"{check.id}"
        echo(f"{verdict}: {check.sentence}", hang=4)
        if not check.ok and check.mend:
            echo(f"    fix: {check.mend}")
