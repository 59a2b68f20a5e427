"""The table [setup] of swarm.toml, and the values of its secrets."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from tpuswarm.config.toml_file import Name, StrictTable, match_pattern
from tpuswarm.errors import InputError
from tpuswarm.train.process.atomic import write_atomically

ALL = "all"
Variable = Annotated[str, match_pattern(r"[A-Za-z_]\w*", "the name of an environment variable")]
Folder = Annotated[str, match_pattern(r"/[\w./-]*\w", "an absolute path of letters, digits and ./_-")]
Package = Annotated[str, match_pattern(r"[a-z0-9][a-z0-9.+:~=-]+", "the name of a Debian package")]


class SetupStep(StrictTable):
    """[[setup.run]]: a step of the user's own."""

    name: Name
    """What messages call the step."""
    do: str
    """The command; it may run again."""
    check: str | None = None
    """A command that succeeds if there is nothing to do."""


class PoolSetup(StrictTable):
    """[setup.on.NAME]: what a pool or VM gets in addition; packages are the same everywhere."""

    apt: tuple[Package, ...] = ()
    """Further Debian packages."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Further variables."""
    nofile: PositiveInt | None = None
    """Open files of one process."""
    run: tuple[SetupStep, ...] = ()
    """Further steps."""


class Nfs(StrictTable):
    """[setup.nfs]: a folder of one machine, mounted on all."""

    server: Name
    """`head`, or the name of a [[vm]]."""
    path: Folder = "/srv/shared"
    """The folder there."""
    mount: Folder = "/mnt/shared"
    """Where all machines see it."""


class Setup(StrictTable):
    """[setup]: what every machine gets before anything runs."""

    python: Annotated[str, match_pattern(r"3\.\d+(\.\d+)?", "a version of Python such as 3.12")] = "3.12"
    """The Python of set-up, programs and jobs."""
    apt: tuple[Package, ...] = ()
    """Debian packages."""
    pip: tuple[str, ...] = ()
    """Python packages, as `pip install` takes them."""
    requirements: Path | None = None
    """A requirements file of this computer, instead of `pip`."""
    env: dict[Variable, str] = Field(default_factory=dict)
    """Variables of programs and jobs."""
    secrets: tuple[Variable, ...] = ()
    """Names of secret variables; the values come from your environment."""
    notebook: bool = False
    """Whether to install Jupyter."""
    timezone: Annotated[str, match_pattern(r"[A-Za-z0-9_+/-]+", "a time zone such as Asia/Tokyo")] | None = None
    """The time zone of the machines."""
    run: tuple[SetupStep, ...] = ()
    """Steps of your own, in order."""
    swap_gb: Annotated[
        dict[str, Annotated[int, Field(strict=True, ge=0)]],
        BeforeValidator(lambda value: value if isinstance(value, dict) else {ALL: value}),
    ] = Field(default_factory=dict)
    """Gigabytes of swap: a number, or a table by pool or VM, with `all` for the others."""
    nofile: PositiveInt | None = None
    """Open files of one process."""
    nfs: Nfs | None = None
    """A shared folder."""
    data_disk: Folder | None = None
    """The mount point of the first data disk."""
    on: dict[str, PoolSetup] = Field(default_factory=dict)
    """What a pool or VM gets in addition, by name."""

    @model_validator(mode="after")
    def _check(self) -> "Setup":
        if self.pip and self.requirements:
            raise ValueError("use either pip or requirements")
        if self.requirements and not self.requirements.is_file():
            raise ValueError(f"requirements: there is no file {self.requirements}")
        for extra in ((), *(extra.run for extra in self.on.values())):
            names = [step.name for step in (*self.run, *extra)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"two steps in run have the name {twice}")
        return self

    def of(self, pool: str) -> "Setup":
        """Return the table of the machines of a pool, or of a VM."""
        if (extra := self.on.get(pool)) is None:
            return self
        update = {"apt": self.apt + extra.apt, "env": self.env | extra.env, "run": self.run + extra.run}
        return self.model_copy(update={**update, "nofile": extra.nofile or self.nofile})

    def swap_of(self, pool: str) -> int:
        """Return the gigabytes of swap on the machines of a pool, or on a VM."""
        return self.swap_gb.get(pool, self.swap_gb.get(ALL, 0))

    def without_files(self) -> "Setup":
        """Move the lines of `requirements`, a file of this computer, to `pip`."""
        if self.requirements is None:
            return self
        lines = tuple(self.requirements.read_text(encoding="utf-8").splitlines())
        return self.model_copy(update={"requirements": None, "pip": lines})


def gather_secrets(file: Path, names: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets' values from the environment, else from a file that only the user may read; update the file.

    Raise InputError for missing values. Machines that come back get the values of the file.
    """
    saved = {}
    with suppress(FileNotFoundError, ValueError):  # ValueError: a damaged file
        saved = json.loads(file.read_text(encoding="utf-8"))
    values = {name: environment.get(name) or saved.get(name, "") for name in names}
    if missing := [name for name, value in values.items() if not value]:
        is_are, it_them = ("is", "it") if len(missing) == 1 else ("are", "them")
        raise InputError(
            f"{', '.join(missing)} {is_are} not set in this shell, and [setup] names {it_them} under secrets: "
            f"`export {missing[0]}=…`, then give the same command again"
        )
    if not values:
        file.unlink(missing_ok=True)
    elif values != saved:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(values), 0o600, is_shared=True)
    return values
