"""Where things lie on a machine, below the home of its user, and how what runs there begins."""

import shlex
from pathlib import Path

OURS = ".tpuswarm"
"""The folder of everything that is ours."""
ENVIRONMENT = f"{OURS}/environment"
"""Lines of a shell, read before every command: set-up puts its Python first on PATH, and `env` and `secrets` there."""

NOTEBOOK = f"{OURS}/notebook"
"""Jupyter, and what it needs."""
VENV = f"{OURS}/venv"
"""The Python of programs, from set-up."""
SERVICE = "."
"""How the name of a job begins that is no job of a fleet, but runs on a host for a person: keepers leave it alone."""


def root_of(folder: Path) -> Path:
    """The folder that `sync` sends: that of the git repository around `folder`, or `folder` itself."""
    folder = folder.absolute()
    return next((each for each in (folder, *folder.parents) if (each / ".git").exists()), folder)


def there(folder: Path) -> str:
    """Where a folder of this computer lies on machines after a `sync`, from the home."""
    root = root_of(folder)
    return str(root.name / folder.absolute().relative_to(root))


def as_set_up(command: str, folder: str | None = None, exports: str = "") -> str:
    """The command line of a shell that does `command` as set-up left the machine, in `folder` where it is there.

    exports: done by the shell in between, such as those of the machine's flags.
    """
    begin = f"if [ -e ~/{ENVIRONMENT} ]; then . ~/{ENVIRONMENT}; fi; {exports}"
    if folder is not None:
        begin += f"if [ -d ~/{shlex.quote(folder)} ]; then cd ~/{shlex.quote(folder)}; fi; "
    return begin + command
