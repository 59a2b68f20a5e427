"""Paths on a machine, relative to the user's home, and shell lines that run programs there."""

import shlex
from pathlib import Path

STATE_FOLDER = ".tpuswarm"
ENVIRONMENT = f"{STATE_FOLDER}/environment"
"""A shell file read before every command: set-up puts its Python on PATH there, and `env` and `secrets`."""
NOTEBOOK = f"{STATE_FOLDER}/notebook"
VENV = f"{STATE_FOLDER}/venv"
SERVICE_PREFIX = "."
"""Begins the name of a job that serves a person, such as a notebook; keepers leave it alone."""


def find_project_root(folder: Path) -> Path:
    """Return the folder that `sync` sends: the git repository around `folder`, else `folder`."""
    folder = folder.absolute()
    return next((parent for parent in (folder, *folder.parents) if (parent / ".git").exists()), folder)


def remote_folder(folder: Path) -> str:
    """Return the path on machines of a local folder after a `sync`."""
    root = find_project_root(folder)
    return str(root.name / folder.absolute().relative_to(root))


def command_line(words: list[str]) -> str:
    """Return a shell line: one word is a line already, several are a program and its arguments."""
    return words[0] if len(words) == 1 else shlex.join(words)


def in_environment(command: str, folder: str | None = None, exports: str = "") -> str:
    """Return a shell line that runs a command in the environment of set-up, and in `folder` if it exists.

    exports: shell code that runs in between, such as the machine's flags.
    """
    line = f"if [ -e ~/{ENVIRONMENT} ]; then . ~/{ENVIRONMENT}; fi; {exports}"
    if folder is not None:
        line += f"if [ -d ~/{shlex.quote(folder)} ]; then cd ~/{shlex.quote(folder)}; fi; "
    return line + command
