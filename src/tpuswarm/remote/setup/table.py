"""[setup]: what every machine has before anything runs on it."""

from pathlib import Path
from typing import Annotated

from pydantic import Field, PositiveInt, model_validator

from tpuswarm.config.toml_file import Name, StrictTable, match_pattern

Variable = Annotated[str, match_pattern(r"[A-Za-z_]\w*", "the name of an environment variable")]
Folder = Annotated[str, match_pattern(r"/[\w./-]*\w", "a folder's whole path, of letters, digits and ./_-")]
Package = Annotated[str, match_pattern(r"[a-z0-9][a-z0-9.+:~=-]+", "the name of a Debian package")]


class SetupStep(StrictTable):
    """[[setup.run]]: a step of one's own."""

    name: Name
    do: str
    check: str | None = None
    """A command that succeeds where there is nothing to do."""


class Nfs(StrictTable):
    """[setup.nfs]: a folder of one machine on all."""

    server: Name
    """`head`, or the name of a [[vm]]."""
    path: Folder = "/srv/shared"
    mount: Folder = "/mnt/shared"


class Setup(StrictTable):
    """The table."""

    python: Annotated[str, match_pattern(r"3\.\d+(\.\d+)?", "a version of Python such as 3.12")] = "3.12"
    apt: tuple[Package, ...] = ()
    pip: tuple[str, ...] = ()
    requirements: Path | None = None
    env: dict[Variable, str] = Field(default_factory=dict)
    secrets: tuple[Variable, ...] = ()
    """Names; the values come from the caller's environment."""
    notebook: bool = False
    """Whether Jupyter is there, too."""
    timezone: Annotated[str, match_pattern(r"[A-Za-z0-9_+/-]+", "a time zone such as Asia/Tokyo")] | None = None
    run: tuple[SetupStep, ...] = ()
    swap_gb: Annotated[int, Field(strict=True, ge=0)] = 0
    nofile: PositiveInt | None = None
    nfs: Nfs | None = None
    data_disk: Folder | None = None
    """Where the first data disk is mounted."""

    @model_validator(mode="after")
    def _one_list(self) -> "Setup":
        if self.pip and self.requirements:
            raise ValueError("give its packages as one of pip and requirements")
        if self.requirements and not self.requirements.is_file():
            raise ValueError(f"there is no file {self.requirements} for requirements")
        names = [each.name for each in self.run]
        if twice := next((each for each in names if names.count(each) > 1), None):
            raise ValueError(f"there are two steps of the name {twice} in run: each has its own")
        return self

    def whole(self) -> "Setup":
        """Without files of this computer: what stood in `requirements` stands in `pip`."""
        if self.requirements is None:
            return self
        lines = tuple(self.requirements.read_text(encoding="utf-8").splitlines())
        return self.model_copy(update={"requirements": None, "pip": lines})
