"""Find the command that was typed, run it, and print its error."""

import importlib
import io
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_group

from tpuswarm.cli.help import Command, CommandGroup, format_top_help
from tpuswarm.config.nearest import nearest_name
from tpuswarm.config.validation_errors import rephrase_message
from tpuswarm.errors import TpuswarmError, first_line, message_of
from tpuswarm.train.process.terminal import echo

MAX_COLUMNS = 80
"""Of `--help`."""
GCLOUD_PACKAGES = ("google", "grpc")
"""What the extra gcloud installs."""
SERVICES = {
    "google": "Google Cloud", "grpc": "Google Cloud", "ray": "Ray", "wandb": "W&B", "httpx": "a web server",
    "aiohttp": "a web server", "asyncssh": "SSH",
}  # fmt: skip
"""By the package of an error's class."""
UsageError: Any = typer.BadParameter.__base__
COMMANDS: dict[str, dict[str, str]] = {
    "Learn": {
        "demo": "demo.demo:demo", "plan": "plan.plan:plan", "catalog": "plan.catalog:catalog",
        "simulate": "plan.simulate:simulate",
    },
    "Train": {
        "train": "train.train:train", "status": "train.status:status", "logs": "train.logs_and_stop:logs",
        "stop": "train.logs_and_stop:stop", "sample": "train.trained:sample",
        "chat": "train.chat:chat", "join": "train.join:join", "invite": "train.invite:invite",
        "evaluate": "train.trained:evaluate", "export": "train.trained:export", "project": "train.trained:project",
    },
    "Get TPUs": {
        "init": "fleet.init:init", "up": "fleet.up:up", "list": "fleet.view:list_", "down": "fleet.up:down",
        "describe": "fleet.view:describe", "pause": "fleet.up:pause", "resume": "fleet.up:resume",
        "keep": "fleet.up:keep", "cost": "fleet.view:cost", "rehearsal": "fleet.rehearsal:app",
        "router": "router:app",
    },
    "Machines": {
        "ssh": "machine.ssh:ssh", "exec": "machine.exec:exec_", "jobs": "machine.jobs:jobs",
        "copy": "machine.files:copy", "sync": "machine.files:sync", "setup": "machine.setup:setup",
        "flags": "machine.flags:app", "forward": "machine.ssh:forward", "ssh-config": "machine.ssh:ssh_config",
    },
    "Look": {
        "page": "look.page:page", "doctor": "look.doctor:doctor", "notebook": "look.notebook:notebook",
        "top": "look.top:top", "tensorboard": "look.tensorboard:tensorboard",
        "measure": "look.measure:measure", "profile": "train.profile:profile", "ledger": "train.ledger:app",
    },
}  # fmt: skip
"""All commands by group, in the order of `--help`, each with its module in this package and its name there."""
SUMMARIES = {
    "demo": "Train a small GPT-2 as a swarm of three",
    "plan": "Compile a training step for TPUs or GPUs you have not rented",
    "train": "Train a recipe",
    "status": "Show a run, or all runs in ./runs",
    "logs": "Show what happened in a run",
    "stop": "Stop a run as Ctrl-C does, or a job on all its machines",
    "init": "Prepare a project for a fleet",
    "up": "Create the machines of swarm.toml, or one TPU",
    "list": "List a fleet's machines in all zones",
    "down": "Delete a fleet, or one of its machines",
    "ssh": "Log in to a machine with your own OpenSSH",
    "page": "Show a run and its fleet on a live web page of this computer",
    "doctor": "Find what is wrong with machines or a run",
    "notebook": "Open Jupyter on a machine",
}
"""For `tpuswarm --help`, which imports no command."""


class _Commands(Mapping[str, Any]):
    """The commands by name. A command is imported when it is looked up."""

    def __init__(self) -> None:
        self._places = {name: (panel, place) for panel, places in COMMANDS.items() for name, place in places.items()}
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            self._imported[name] = _import_command(name, *self._places[name])
        return self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _import_command(name: str, panel: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    command = getattr(importlib.import_module(f"tpuswarm.cli.{module}"), attribute)
    app = typer.Typer(rich_markup_mode=None)
    if isinstance(command, typer.Typer):
        for info in command.registered_commands:
            info.cls = Command
        app.add_typer(command, name=name, cls=CommandGroup, rich_help_panel=panel)
    else:
        settings = getattr(command, "context_settings", None)
        app.command(name, cls=Command, rich_help_panel=panel, context_settings=settings)(command)
    return get_group(app).commands[name]


class _Top(CommandGroup):
    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the names of commands without importing them."""
        commands = self.commands
        self.commands = {name: TyperCommand(name, help=SUMMARIES.get(name)) for name in commands}
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.commands = commands

    def format_help(self, ctx: Any, formatter: Any) -> None:
        format_top_help(ctx.command_path, self.help or "", COMMANDS, SUMMARIES, formatter)


def make_app() -> typer.Typer:
    """Return the program with all commands."""
    app = typer.Typer(
        help="Train one model on all the Cloud TPUs you can get.",
        cls=_Top,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "terminal_width": min(shutil.get_terminal_size().columns or MAX_COLUMNS, MAX_COLUMNS) - 2,
        },
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        import platform
        from importlib import metadata

        versions = " · ".join(f"{name} {metadata.version(name)}" for name in ("tpuswarm", "jax", "ray"))
        echo(f"{versions} · Python {platform.python_version()}")
        raise typer.Exit


def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show versions and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["TPUSWARM_DEBUG"] = "1"


def run() -> int:
    """Run the command that was typed and return its exit code."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    if len(sys.argv) > 2 and sys.argv[1] in ("--install-completion", "--show-completion"):
        os.environ["_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION"] = "1"  # typer then takes the shell that is named
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that is not UTF-8
    try:
        try:
            code = make_app()(prog_name="tpuswarm", standalone_mode=False)
        except BaseException:
            from tpuswarm.train.user_code import blame

            with blame("the recipe fails"):
                raise
    except Exception as error:  # noqa: BLE001  # one sentence, and for a bug how to see more
        return _end(error)
    return code if isinstance(code, int) else 0


def _end(error: Exception) -> int:
    """Print an error and return the exit code of the command."""
    if os.environ.get("TPUSWARM_DEBUG") and not isinstance(error, typer.Abort):
        raise error
    while isinstance(error, ExceptionGroup):  # of parallel work
        error = next((it for it in error.exceptions if isinstance(it, TpuswarmError | OSError)), error.exceptions[0])
    if isinstance(error, TpuswarmError):
        return _print_error(message_of(error), error.exit_code)
    if isinstance(error, OSError):  # a disk, a network, a permission: not a bug
        return _print_error(": ".join(map(str, filter(None, (error.strerror or error, error.filename)))), 1)
    if isinstance(error, UsageError):
        return _print_error(_usage_error(error), 2)
    if isinstance(error, typer.Abort):  # typer's own, for Ctrl-C at a prompt, leaves the cursor on the prompt's line
        echo("nothing was done" if error.args else "\nnothing was done", err=True)
        return 1
    if reason := _outside_cause(error):
        return _print_error(reason, 1)
    text = " ".join(message_of(error).split())[:300]
    command = shlex.join(sys.argv[1:])
    hint = f"Traceback: `tpuswarm --debug {command}`"
    return _print_error(f"internal error: {type(error).__name__}: {text}. {hint}", 1)


def _outside_cause(error: Exception) -> str:
    """Return a sentence about an error that is no bug: of memory, an installation, devices, a service; else empty."""
    text = first_line(error)
    if isinstance(error, MemoryError):
        return "this computer has no memory left; use a smaller --batch, or a computer with more"
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] in GCLOUD_PACKAGES:
        return "the clients of Google Cloud are not installed; run `pip install 'tpuswarm[gcloud]'`"
    if isinstance(error, ImportError):
        return f"the installation is not whole ({text}); run `pip install --force-reinstall tpuswarm`"
    if isinstance(error, RuntimeError) and text == "can't start new thread":
        return "this computer starts no more threads; end other programs, or raise `ulimit -u`"
    jax_errors = sys.modules.get("jax.errors")
    if jax_errors and isinstance(error, jax_errors.JaxRuntimeError):
        advice = "use a smaller --batch or more devices" if "RESOURCE_EXHAUSTED" in text else "run it again"
        return f"the devices failed ({text}); {advice}"
    packages = (kind.__module__.partition(".")[0] for kind in type(error).__mro__)
    if service := next((SERVICES[package] for package in packages if package in SERVICES), ""):
        return f"{service} failed ({type(error).__name__}: {text}); run it again"
    return ""


def _usage_error(error: Any) -> str:
    """Reword click's error as one line that names the command's help."""
    if (wrong := getattr(error, "option_name", None)) and error.ctx and hasattr(error, "possibilities"):
        known = {name for parameter in error.ctx.command.params for name in parameter.opts if name.startswith("--")}
        if suggestion := nearest_name(wrong, known):
            return f"there is no option {wrong}; did you mean {suggestion}?"
    text = " ".join(error.format_message().split()).rstrip(".").replace("Missing", "missing")
    text = text.replace("No such option:", "there is no option").replace("No such", "there is no")
    text = text.replace("Value error, ", "")
    if wrong_type := re.fullmatch(r"Invalid value for '(.*?)': (Input should be .*)", text):
        text = f"{wrong_type[1]} {rephrase_message(wrong_type[2])}"
    command = error.ctx.command_path if error.ctx else "tpuswarm"
    return f"{text}{'' if text.endswith('?') else '.'} See `{command} --help`"


def _print_error(text: str, code: int) -> int:
    echo(f"error: {text}", err=True)
    return code
