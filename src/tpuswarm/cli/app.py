"""The program `tpuswarm`: its commands, and how their errors reach a person."""

import importlib
import os
import re
import shlex
import sys
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import typer

from tpuswarm.cli.help import Command, CommandGroup, Top
from tpuswarm.config.refused import must_be
from tpuswarm.errors import TpuswarmError
from tpuswarm.train.process.terminal import say

UsageError: Any = typer.BadParameter.__base__
GROUPS: dict[str, dict[str, str]] = {
    "Learn": {
        "demo": "learn:demo", "plan": "plan:plan", "catalog": "catalog:catalog", "simulate": "simulate:simulate",
    },
    "Train": {
        "train": "train:train", "status": "runs:status", "logs": "control:logs", "stop": "control:stop",
        "sample": "trained:sample", "join": "swarm:join", "evaluate": "trained:evaluate", "export": "export:export",
        "project": "trained:project", "profile": "profile:profile", "ledger": "ledger:app",
    },
    "Get TPUs": {
        "init": "init:init", "up": "up:up", "list": "fleet:list_", "down": "up:down", "describe": "fleet:describe",
        "pause": "up:pause", "resume": "up:resume", "keep": "up:keep", "cost": "fleet:cost",
        "rehearsal": "rehearsal:app",
    },
    "Touch": {
        "ssh": "touch:ssh", "exec": "touch:exec_", "jobs": "jobs:jobs", "copy": "files:copy", "sync": "files:sync",
        "setup": "setup:setup", "flags": "flags:app", "forward": "tunnels:forward", "ssh-config": "tunnels:ssh_config",
    },
    "Look": {
        "doctor": "doctor:doctor", "top": "top:top", "page": "page:page", "notebook": "notebook:notebook",
        "tensorboard": "tensorboard:tensorboard",
    },
    "Network": {"router": "router:app"},
}  # fmt: skip
"""All commands, in the order of `--help`, each with its file in this folder and its name there."""


class _Top(Top):
    first: ClassVar[Mapping[str, int]] = {"Learn": 2, "Train": 5, "Get TPUs": 4, "Touch": 1, "Look": 1, "Network": 1}


def make_app(only: str | None = None) -> typer.Typer:
    """All commands; only one of them, where it is known which: the files of the others take a tenth of a second."""
    app = typer.Typer(
        help="Train one model on all the Cloud TPUs you can get.",
        cls=_Top,
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(options)
    for panel, commands in GROUPS.items():
        for name, place in commands.items():
            if only in (None, name):
                _add(app, name, place, panel)
    return app


def _add(app: typer.Typer, name: str, place: str, panel: str) -> None:
    file, _, function = place.partition(":")
    command = getattr(importlib.import_module(f"tpuswarm.cli.{file}"), function)
    if isinstance(command, typer.Typer):
        for each in command.registered_commands:
            each.cls = Command
        app.add_typer(command, name=name, cls=CommandGroup, rich_help_panel=panel)
    else:
        settings = getattr(command, "context_settings", None)
        app.command(name, cls=Command, rich_help_panel=panel, context_settings=settings)(command)


def _version(asked: bool) -> None:
    if asked:
        import platform
        from importlib import metadata

        said = " · ".join(f"{name} {metadata.version(name)}" for name in ("tpuswarm", "jax", "ray"))
        say(f"{said} · Python {platform.python_version()}")
        raise typer.Exit


def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show versions and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Train one model on all the Cloud TPUs you can get."""
    if debug:
        os.environ["TPUSWARM_DEBUG"] = "1"


def run() -> int:
    """Run a command; the exit code."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    first = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    try:
        code = make_app(first if any(first in each for each in GROUPS.values()) else None)(
            prog_name="tpuswarm", standalone_mode=False
        )
    except TpuswarmError as error:
        return _say(error, error.exit_code)
    except OSError as error:  # a disk, a network, a permission: not a fault of the program
        return _say(error, 1, ": ".join(map(str, filter(None, (error.strerror or error, error.filename)))))
    except UsageError as error:
        return _say(error, 2, _usage(error))
    except (
        typer.Abort
    ) as no:  # where a person was asked; typer's own, for Ctrl-C and Ctrl-D, leaves the line without an end
        say("nothing was done" if no.args else "\nnothing was done", err=True)
        return 1
    except Exception as error:  # noqa: BLE001  # a fault of the program's: still one sentence, and the way to more
        words = " ".join(str(error).split())[:300]
        command = shlex.join(sys.argv[1:])
        return _say(
            error, 1, f"internal error: {type(error).__name__}: {words}; `tpuswarm --debug {command}` shows where"
        )
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> str:
    """What click says of wrong words, in one line, with the help of the very command."""
    if near := getattr(error, "possibilities", None):
        return f"there is no option {error.option_name}; did you mean {near[0]}?"
    said = " ".join(error.format_message().split()).rstrip(".")
    for theirs, ours in (
        ("Missing", "missing"),
        ("No such option:", "there is no option"),
        ("No such", "there is no"),
        ("Value error, ", ""),
    ):
        said = said.replace(theirs, ours)
    if typed := re.fullmatch(r"Invalid value for '(.*?)': (Input should be .*)", said):
        said = f"{typed[1]} {must_be(typed[2])}"
    help_of = error.ctx.command_path if error.ctx else "tpuswarm"
    return f"{said}{' See' if said.endswith('?') else '; see'} `{help_of} --help`"


def _say(error: BaseException, code: int, text: str | None = None) -> int:
    if os.environ.get("TPUSWARM_DEBUG"):
        raise error
    say(f"error: {text or error}", err=True)
    return code
