"""What a run was asked to be, before any process knows how its parameters look."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpuswarm.swarm.core.arithmetic.fragments import shards_for
from tpuswarm.swarm.core.arithmetic.outer import Average, Outer, usual_momentum
from tpuswarm.swarm.core.messages import Terms
from tpuswarm.swarm.core.values import Digests, Form, Rule
from tpuswarm.swarm.storage.founding import Founding

CYCLE = 50
"""Steps between two pushes, where nothing else is asked."""
HEAD = "coordinator"
"""Address of the coordinator's process."""
NEVER_CODE = ("data",)
"""Options of a recipe that say where something is, not what it is."""


@dataclass(frozen=True)
class Swarm:
    """The table [swarm] of config.toml."""

    run: str
    """A random name: contributions to another run are refused."""
    members: int
    """Started with the run; others may join."""
    cycle: int
    """Steps between two pushes of the fastest member."""
    outer: Rule
    outer_lr: float | None
    """None: by the number of contributors."""
    quantize: Form
    overlap: bool
    fragments: int
    expected: int = 0
    """How many others may join: what serves members is sized for them too."""

    @property
    def aggregators(self) -> int:
        """How many there are."""
        return min(self.fragments, shards_for(self.members + self.expected))


@dataclass(frozen=True)
class DataFile:
    """A file that every member has to have."""

    size: int
    """Bytes."""
    digest: str
    """SHA-256 of them."""


@dataclass(frozen=True)
class Plan:
    """All that a process of the swarm has to be told."""

    swarm: Swarm
    target: str
    options: dict[str, Any]
    """Of the recipe."""
    settings: dict[str, Any]
    """Of train/settings.py."""
    files: dict[str, DataFile]
    """Of the shared data, by name: what lies in the run's folder `data`."""
    shared: dict[str, Any]
    """Options of the recipe that read these files; the folder is written `{data}`."""
    tokens_per_row: int
    data: str
    """Digest of the training data."""
    code: str
    """As `code_digest` gives it where the run was started."""
    evaluate_every: int | None
    """Tokens between two evaluations."""
    statistics: tuple[str, ...] = ()
    """Paths of shared arrays that are observed and not trained: averaged, whatever the outer rule."""
    average: Average | None = None
    """A moving average of the committed parameters that the program wants."""

    @cached_property
    def config(self) -> str:
        """Digest of everything that makes the training what it is."""
        options = {name: value for name, value in self.options.items() if name not in NEVER_CODE}
        settings = {name: value for name, value in self.settings.items() if name not in NEVER_CODE}
        swarm = {**asdict(self.swarm), "members": 0, "expected": 0}
        return _sha256(json.dumps([options, settings, swarm], sort_keys=True))

    @property
    def outer(self) -> Outer:
        """The outer rule, but for what depends on the size of the model."""
        return Outer(self.swarm.outer, rate=self.swarm.outer_lr, downlink=self.swarm.quantize, average=self.average)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of those that the run is started with."""
        return tuple(member_name(number) for number in range(self.swarm.members))

    @property
    def horizon(self) -> int:
        """Rows of the whole run."""
        return int(self.settings["steps"]) * int(self.settings["batch"])

    def terms(self, founding: Founding) -> Terms:
        """The protocol's terms of this run."""
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
                momentum=usual_momentum(sum(founding.layout.sizes)),
                averaged=founding.layout.places(self.statistics),
            ),
        )


def member_name(number: int) -> str:
    """Of the members that a run is started with."""
    return f"m{number}"


def code_digest(target: str) -> str:
    """SHA-256 of this package's sources, of the file that a recipe comes from, and of the versions of JAX and NumPy."""
    import tpuswarm

    package = Path(tpuswarm.__file__).parent
    files = sorted(package.rglob("*.py"))
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        files.append(Path(place))
    found = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return _sha256(json.dumps([version("jax"), version("numpy"), found]))


def fill(options: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Options with the folder of the data in the place of `{data}`."""
    return {
        name: value.replace("{data}", str(folder)) if isinstance(value, str) else value
        for name, value in options.items()
    }


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
