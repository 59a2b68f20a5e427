"""The plan of a swarm run: what every process must know before the first parameters exist."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpuswarm.swarm.core.arithmetic.fragments import Layout, aggregators_for
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule, default_momentum
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Form, Rule
from tpuswarm.swarm.storage.founding import Founding
from tpuswarm.swarm.storage.retention import RETAINED_COMMITS

DEFAULT_CYCLE_STEPS = 50
"""Steps between two pushes."""
COORDINATOR = "coordinator"
"""Address of the coordinator's process."""
FILE_SERVER = "files"
"""Address of the process that serves the run's data files if no aggregator does."""
LOCATION_OPTIONS = ("data",)
"""Options of a recipe that name a location and do not change the training."""


@dataclass(frozen=True)
class Swarm:
    """The [swarm] table of config.toml."""

    run: str
    """A random name: contributions to another run are refused."""
    members: int
    """Members started with the run; others may join."""
    cycle: int
    """Steps between two pushes of the fastest member."""
    outer: Rule
    outer_lr: float | None
    """None chooses by the number of contributors."""
    quantize: Form
    overlap: bool
    fragments: int
    expected: int = 0
    """Members that may join later; the number of aggregators allows for them."""
    base: str | None = None
    """SHA-256 of the recipe's base model, which every member reads itself."""

    @property
    def aggregators(self) -> int:
        return min(self.fragments, aggregators_for(self.members + self.expected))


@dataclass(frozen=True)
class DataFile:
    """A file that every member needs."""

    size: int
    """In bytes."""
    digest: str
    """SHA-256 of its content."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that a process of the swarm needs to know."""

    swarm: Swarm
    target: str
    options: dict[str, Any]
    """Options of the recipe."""
    settings: dict[str, Any]
    """Settings of the run, as in train/settings.py."""
    files: dict[str, DataFile]
    """Files in the run's folder `data`, by name."""
    shared: dict[str, Any]
    """Options of the recipe that read these files; `{data}` stands for the folder."""
    tokens_per_row: int
    data: str
    """Digest of the training data."""
    code: str
    """`code_digest` where the run was started."""
    evaluate_every: int | None
    """Tokens between two evaluations."""
    statistics: tuple[str, ...] = ()
    """Paths of shared running statistics, which are averaged under every outer rule."""
    average: MovingAverage | None = None
    """The moving average of the committed parameters, if the program wants one."""
    layout: Layout | None = None
    """The layout of a run that goes on; None for a new run."""
    keep_payloads: int | None = RETAINED_COMMITS
    """Last commits whose payloads are kept; None for all."""

    @cached_property
    def config(self) -> str:
        """Digest of everything that determines the training."""
        options = {name: value for name, value in self.options.items() if name not in LOCATION_OPTIONS}
        settings = {name: value for name, value in self.settings.items() if name not in LOCATION_OPTIONS}
        swarm = {**asdict(self.swarm), "members": 0, "expected": 0}
        return _sha256(json.dumps([options, settings, swarm], sort_keys=True))

    @property
    def outer(self) -> OuterRule:
        """The outer rule, without the settings that depend on the size of the model."""
        return OuterRule(self.swarm.outer, rate=self.swarm.outer_lr, downlink=self.swarm.quantize, average=self.average)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members that the run is started with."""
        return tuple(member_name(number) for number in range(self.swarm.members))

    @property
    def horizon(self) -> int:
        """Rows of the whole run."""
        return int(self.settings["steps"]) * int(self.settings["batch"])

    def terms(self, founding: Founding) -> Terms:
        batch, swarm = int(self.settings["batch"]), self.swarm
        return Terms(
            run=swarm.run,
            digests=Digests(founding.layout.digest, self.config, self.data, self.code),
            batch=batch,
            tokens_per_row=self.tokens_per_row,
            horizon=self.horizon,
            cycle=swarm.cycle * batch,
            members=self.members,
            outer=replace(
                self.outer,
                momentum=default_momentum(sum(founding.layout.sizes)),
                averaged=founding.layout.find_slices(self.statistics),
            ),
        )


def member_name(number: int) -> str:
    """Return the name of a member that the run is started with."""
    return f"m{number}"


def code_digest(target: str = "") -> str:
    """Return the SHA-256 of this package, of a recipe's file, and of the versions of JAX and NumPy."""
    import tpuswarm

    package = Path(tpuswarm.__file__).parent
    files = sorted(package.rglob("*.py"))
    path = target.rpartition(":")[0]
    if path.endswith(".py"):
        files.append(Path(path))
    found = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return _sha256(json.dumps([version("jax"), version("numpy"), found]))


def fill(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Replace `{data}` in options by the data folder."""
    return {
        name: value.replace("{data}", str(folder)) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
