"""The program `tpuswarm`: its commands, and how their errors reach a person."""

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from tpuswarm.cli import (
    catalog,
    control,
    export,
    learn,
    ledger,
    plan,
    profile,
    router,
    runs,
    simulate,
    swarm,
    train,
)
from tpuswarm.errors import TpuswarmError

app = typer.Typer(
    help="Train one model on all the Cloud TPUs you can get.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
UsageError: Any = typer.BadParameter.__base__
COMMANDS: dict[str, Any] = {
    "demo": learn.demo,
    "catalog": catalog.catalog,
    "plan": plan.plan,
    "simulate": simulate.simulate,
    "train": train.train,
    "join": swarm.join,
    "status": runs.status,
    "logs": control.logs,
    "stop": control.stop,
    "sample": runs.sample,
    "evaluate": runs.evaluate,
    "profile": profile.profile,
    "export": export.export,
}


@app.callback()
def options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Train one model on all the Cloud TPUs you can get."""
    if debug:
        os.environ["TPUSWARM_DEBUG"] = "1"


for name, command in COMMANDS.items():
    app.command(name, context_settings=getattr(command, "context_settings", None))(command)
app.add_typer(ledger.app, name="ledger")
app.add_typer(router.app, name="router")


def main() -> NoReturn:
    """Run a command; exit 2 for wrong input, 1 for a failed run, 130 for Ctrl-C, with one sentence."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    try:
        code = app(standalone_mode=False)
    except TpuswarmError as error:
        _say(error, error.exit_code)
    except OSError as error:  # a disk, a network, a permission: not a fault of the program
        _say(error, 1, f"{type(error).__name__}: {error}")
    except UsageError as error:
        _say(error, 2, f"{error.format_message().rstrip('.')}; see `tpuswarm --help`")
    except (KeyboardInterrupt, typer.Abort) as error:
        _say(error, 130, "interrupted")
    if code == 130:
        print("interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _say(error: BaseException, code: int, text: str | None = None) -> NoReturn:
    if os.environ.get("TPUSWARM_DEBUG"):
        raise error
    print(f"error: {text or error}", file=sys.stderr)
    sys.exit(code)
