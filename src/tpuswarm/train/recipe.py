"""Define the contract between a recipe and the trainer.

A recipe gives a program, which is pure functions over one pytree, and a source of rows. The program owns the numerics;
the trainer owns devices, sharding, feed and checkpoints.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError

if TYPE_CHECKING:  # recipes are made, and their options checked, before JAX is loaded
    import jax
    import numpy as np

State = Any
"""A pytree of arrays: everything that a run needs to continue, except its position in the data."""

Batch = Mapping[str, Any]
"""Arrays by name. The first axis of each is the rows."""


class Weighted(NamedTuple):
    """A mean over the batch as two scalars, so that any split of the batch gives the same mean.

    A masked loss is `Weighted(sum of the counted losses, number of counted losses)`. The weight of a loss must not
    depend on parameters.
    """

    sum: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """sum / weight; NaN if the weight is 0."""
        return self.sum / self.weight


Metrics = Mapping[str, Any]
"""Scalars by name, means over the batch, `loss` among them. Evaluations may give Weighted."""

RESERVED = (
    "step", "tokens", "loss", "lr", "grad_norm", "tokens_per_s", "wait_s", "wall_s", "member", "version", "rows",
)  # fmt: skip
"""Columns of metrics.jsonl that a loss's metrics must not use."""
EVALUATION_COLUMNS = ("eval_loss", "eval_rows", "eval_rows_total")

Precision = Literal["bf16", "f32", "highest"]

Remat = Literal["none", "dots", "full"]


Capability = tuple[int, int]
"""Compute capability of an NVIDIA GPU, such as (7, 5)."""

AMPERE: Capability = (8, 0)
"""First GPUs with units for bfloat16 and TF32, and with cuDNN's attention (docs.nvidia.com/cudnn: SM80 or newer)."""


def default_precision(platform: str, capability: Capability | None = None) -> Precision:
    """Return the precision of a run without `precision`: f32 on CPUs and on GPUs before Ampere, else bf16."""
    return "f32" if platform == "cpu" or (capability or AMPERE) < AMPERE else "bf16"


@dataclass(frozen=True)
class Options:
    """How a program computes. The user sets the first six; train/program/request.py lists the choices for the others.

    A program raises InputError for a user's option that it does not support, naming it.

    - precision: `bf16` computes in bfloat16 over float32 weights, `f32` in float32 with the hardware's usual matmul
      passes, `highest` in float32 with full-precision matmuls and convolutions.
    - accumulate: micro-batches per step.
    - clip: largest global norm of the gradient.
    - freeze, decay: regular expressions, searched in parameter paths such as `blocks/attn/qkv/w`.
    - ema: decay per step of the moving average of the parameters.
    - platform: `cpu`, `gpu` or `tpu`.
    - capability: lowest compute capability of the GPUs, if known.
    - memory: bytes of one device, if known.
    - attention: `xla`, `cudnn` or `splash`.
    - remat: the backward pass recomputes nothing of a layer (`none`), all but its products (`dots`), or all (`full`).
    - loop: over layers, `scan` or `unroll`.
    - shard: each device holds all parameters (`replicate`) or a part of them (`fsdp`).
    """

    precision: Precision = "f32"
    accumulate: int = 1
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None
    platform: str = "cpu"
    capability: Capability | None = None
    memory: int | None = None
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    remat: Remat = "none"
    loop: Literal["scan", "unroll"] = "scan"
    shard: Literal["replicate", "fsdp"] = "replicate"

    def require_only(self, *honoured: str, by: str) -> None:
        """Raise InputError if the user set an option that `by` does not support; honoured: the supported ones."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(self)}
        defaults["precision"] = default_precision(self.platform, self.capability)
        for name in ("precision", "accumulate", "clip", "freeze", "decay", "ema"):
            if name not in honoured and getattr(self, name) != defaults[name]:
                raise InputError(f"{by} does not support {name} ({getattr(self, name)}); leave it out")


class Clock(NamedTuple):
    """The position of a step in its run; the host passes it in.

    - key: a typed PRNG key, different at every step.
    - step: int32, updates before this one.
    - progress: float32, share of the run's tokens consumed before this step, 0 to 1.
    - lr_scale: float32, factor by which hooks have multiplied the learning rate.
    """

    key: "jax.Array"
    step: "jax.Array | np.int32"
    progress: "jax.Array | np.float32"
    lr_scale: "jax.Array | np.float32 | float" = 1.0


class Average(NamedTuple):
    """A moving average of the shared parameters in a program's state; a swarm averages the committed parameters.

    - put(state, average): the state with the average, a pytree in the form of `Exchange.get`.
    - half_life(rows): the half-life in rows, for a run with so many rows per step.
    - share: the half-life is at most this share of the rows so far.
    """

    put: Callable[[State, Any], State]
    half_life: Callable[[int], float]
    share: float = math.inf


class Exchange(NamedTuple):
    """The shared parameters of a state: `get(state)` and `put(state, shared) -> state`, and their moving average."""

    get: Callable[[State], Any]
    put: Callable[[State, Any], State]
    average: Average | None = None


class Parameter(NamedTuple):
    """Facts about one parameter leaf.

    - tied: the other use of the same leaf, for example `output head`; empty if there is none.
    - statistic: observed, not trained, such as the running variance of BatchNorm. A swarm averages it.
    - base: frozen, and from the recipe's `base_model`, so that a swarm does not exchange it.
    """

    path: str
    frozen: bool
    decayed: bool
    tied: str
    statistic: bool = False
    base: bool = False


class Program(ABC):
    """Pure functions over one state. JAX traces all of them."""

    tokens_per_row: int = 1
    """Tokens that one row counts for; 1 if rows are not text."""
    failures: tuple[str, str] = ("step of {} fails", "evaluate of {} fails")
    """Messages for an error in `step` and in `evaluate`; {} is the recipe's name."""

    @abstractmethod
    def init(self, key: "jax.Array", shared: Any = None) -> State:
        """Return a fresh state from a typed key, with the parameters `shared` (from `exchange().get`) if given.

        Traced under jit with the shardings of the run.
        """

    def weights(self) -> Any:
        """Return initial parameters as host arrays, in the form of `exchange().get`; None if `init` makes them.

        They go to the devices shard by shard; in `init` they would be part of the compiled program.
        """
        return None

    @abstractmethod
    def step(self, state: State, batch: Batch, clock: Clock) -> tuple[State, Metrics]:
        """Return the state after one update on one whole batch, and its metrics."""

    @abstractmethod
    def evaluate(self, state: State, batch: Batch) -> Metrics:
        """Return the metrics of one batch, without an update and without randomness."""

    def predict(self, function: Callable[..., Any], state: State, batch: Batch) -> Any:
        """Call a user's function for the rows of a batch: `function(state, batch)`."""
        return function(state, batch)

    @abstractmethod
    def batch_spec(self, size: int) -> "Mapping[str, jax.ShapeDtypeStruct]":
        """Return shapes and dtypes of a batch of `size` rows."""

    @abstractmethod
    def exchange(self) -> Exchange:
        """Return how to read and write the shared parameters."""

    @abstractmethod
    def parameters(self, state: State) -> list[Parameter]:
        """Return one entry for each leaf of `exchange().get(state)`, in order; `state` may be abstract."""


class Source(Protocol):
    """One infinite seeded order of rows.

    Optional attributes and methods:

    - rows_per_epoch: int; without it, `--epochs` and validation are refused.
    - digest: str, of the content; a run refuses to resume with another.
    - in_memory: bool; true if rows come quickly and need no thread.
    - seeded(seed): the same rows in the order of the run's seed.
    - row_numbers(start, count): int64[count], row numbers in the data; predictions are put into that order.
    - position(row), go_to(position): for a stream that cannot begin at any row. A checkpoint keeps the position.
    """

    def rows(self, start: int, count: int) -> "dict[str, np.ndarray]":
        """Return rows start to start + count of the order, as arrays whose first axis is `count`."""
        ...


class Recipe(ABC):
    """A model, its loss, its optimizer and its data.

    Other processes rebuild it from `module:name` and `options()`, never from a pickle. `program` and `data` are
    required. A recipe that defines `sample`, `grids`, `export` or another optional method can do more.
    """

    name: str = "recipe"
    target: str = ""
    """`module:name` that rebuilds it; empty if it was built in a program."""
    given: Mapping[str, Any] = MappingProxyType({})
    """Arguments of the call of `target`, with its plain defaults."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Run settings to use when the user sets none: `batch`, `steps`, `clip`, `decay`, …"""
    option_defaults: Mapping[str, Any] = MappingProxyType({})
    """Values of options that are None, for --help."""
    forms: tuple[str, ...] = ()
    """Ways to save memory that its programs support: `remat`, `accumulate`."""
    compiling: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """XLA compiler options: platform → option → value."""
    identity: tuple[str, ...] = ()
    """Options without which the parameters mean nothing, such as the tokenizer; `--init-from` copies them."""
    base_model: str | None = None
    """Published model with the parameters of kind `base`, which every process of a swarm reads by `load_shared`."""
    home: Path | None = None
    """Folder of the run that `keep` wrote to, of this recipe or of `--init-from`."""

    @abstractmethod
    def program(self, options: Options) -> Program:
        """Return the pure functions; raise InputError for an option that it does not support."""

    @abstractmethod
    def data(self, split: str) -> Source:
        """Return the rows of `train`, `validation`, `test` or `all`; raise NoSuchSplit if there is no such split."""

    def options(self) -> dict[str, Any]:
        """Return the arguments that rebuild this recipe, resolved: plain values that TOML can hold."""
        return dict(self.given)

    def describe(self) -> Mapping[str, str]:
        """Return words for the start of a run: any of `model` (its shape), `data` and `learning rate`."""
        return {}

    def preview(self, *, quick: bool = False) -> Sequence[Sequence[tuple[str, bool]]]:
        """Return the first row of each data set as text, in pieces with whether their loss counts; empty without text.

        quick: read only the beginning of the data.
        """
        return ()

    def require_data(self) -> None:  # noqa: B027
        """Raise InputError if the data is missing. Called before JAX is loaded, so it must be quick."""

    def share(self, folder: Path) -> dict[str, Any]:
        """Write data of this machine into `folder`, which goes to all members; return the options that read it."""
        return {}

    def keep(self, folder: Path) -> None:  # noqa: B027
        """Write what `options()` cannot hold into a run's folder, which is `home` when the recipe is rebuilt."""

    def hooks(self) -> Sequence[Any]:
        """Return hooks as for `Trainer(hooks=…)`. A swarm only calls hooks of evaluations."""
        return ()

    def loggers(self) -> Sequence[Any]:
        """Return loggers as for `Trainer(loggers=…)`. In a swarm, the process of the command writes to them."""
        return ()

    @classmethod
    def options_at(cls, place: str) -> dict[str, Any]:
        """Return the options that the published parameters at `place` need; raise InputError if it is unknown."""
        return {}

    def load_shared(self, place: str, like: Any) -> Any:
        """Return published parameters in the form of `exchange().get`, in the shardings of `like`."""
        raise NotImplementedError

    def shared_digest(self, place: str) -> str:
        """Return a digest of the parameters of `load_shared`; several hosts compare it."""
        raise NotImplementedError

    def sample(self, state: State, prompt: str, *, tokens: int, temperature: float, seed: int) -> str:
        """Return a continuation of `prompt`."""
        raise NotImplementedError

    def pictured(self, state: State) -> "np.ndarray | None":
        """Return a picture of the progress, uint8 (height, width, 3), at each evaluation; None if there is none yet."""
        return None

    def grids(
        self, state: State, rows: int, columns: int, *, truncation: float, seed: int, count: int = 1
    ) -> "Iterator[np.ndarray]":
        """Yield `count` grids of generated pictures, uint8 (height, width, 3), along a closed walk.

        truncation: largest distance from the mean picture, 0 to 1.
        """
        raise NotImplementedError

    def read_picture(self, path: Path) -> "np.ndarray":
        """Return a picture file in the form of the data, uint8 (side, side, 3)."""
        raise NotImplementedError

    def project(
        self, state: State, picture: "np.ndarray", steps: int, seed: int, report: Callable[[int, int], None]
    ) -> Any:
        """Return the code of a picture (recipes/stylegan2/samples.py); call report(done, total) as it goes."""
        raise NotImplementedError

    def measures(self, state: State, features: str | None, report: Callable[[int, int], None]) -> dict[str, Any]:
        """Return more measures for `evaluate`; call report(done, total) as it goes.

        features: `file.py:name` of a user's function to compare by.
        """
        raise NotImplementedError

    def export(self, state: State, folder: Path) -> None:
        """Write a trained model into `folder` in Hugging Face's form."""
        raise NotImplementedError

    def export_merged(self, state: State, folder: Path) -> None:
        """Write a model that was trained by adapters as a whole model."""
        raise NotImplementedError


DEFAULTS = ("steps", "batch", "accumulate", "clip", "freeze", "decay", "ema", "seed", "outer")
"""Run settings for which a recipe may set defaults."""


def supports(recipe: Recipe | type[Recipe], method: str) -> bool:
    """Return whether a recipe defines an optional method itself."""
    found = getattr(recipe, method)
    return found is not None and getattr(found, "__func__", found) is not Recipe.__dict__[method]


def is_lightning(value: Any) -> bool:
    """Return whether a value is a LightningModule, of any package."""
    return any(kind.__name__ == "LightningModule" for kind in type(value).__mro__)


def how_to_make_recipe(value: Any) -> str:
    """Return the end of a sentence about a value that is no recipe."""
    if is_lightning(value):
        return "make a recipe of it with tpuswarm.torch.recipe(module, data=…)"
    if any(kind.__module__ == "torch.nn.modules.module" for kind in type(value).__mro__):
        return "make a recipe of it with tpuswarm.torch.recipe(module, loss, data, optimizer)"
    return "give a recipe, such as one from `supervised(...)`"


def check_recipe(recipe: Any, options: Iterable[str] | None = None) -> None:
    """Raise InputError if this is no recipe or an attribute holds an unknown name; options: the recipe's own."""
    if not isinstance(recipe, Recipe):
        raise InputError(f"recipe is a {type(recipe).__name__}; {how_to_make_recipe(recipe)}")
    kind, compiling = type(recipe).__name__, recipe.compiling
    if not isinstance(recipe.name, str):
        raise InputError(f"{kind}.name is a {type(recipe.name).__name__}, not a text")
    check_defaults(recipe.defaults, f"{kind}.defaults")
    _check_names(recipe.forms, f"{kind}.forms", ("remat", "accumulate"))
    _check_names(recipe.identity, f"{kind}.identity, a tuple of options,", options)
    if not isinstance(compiling, Mapping):
        raise InputError(f"{kind}.compiling is a {type(compiling).__name__}, not a dict by platform")
    _check_names(compiling, f"{kind}.compiling, a dict by platform,", ("cpu", "gpu", "tpu"))
    for platform, flags in compiling.items():
        if not isinstance(flags, Mapping):
            raise InputError(f"{kind}.compiling has a {type(flags).__name__} for {platform}, not {{option: value}}")


def check_defaults(defaults: Any, name: str) -> None:
    """Raise InputError unless `defaults` are run settings by name."""
    if not isinstance(defaults, Mapping):
        raise InputError(f'{name} is a {type(defaults).__name__}, not a dict such as {{"steps": 400}}')
    _check_names(defaults, name, DEFAULTS)


def _check_names(names: Any, attribute: str, known: Iterable[str] | None) -> None:
    if isinstance(names, str) or not isinstance(names, Collection):
        raise InputError(f"{attribute} is a {type(names).__name__}, not a tuple of names")
    for name in names:
        if known is not None and name not in known:
            raise InputError(f"{attribute} takes no {name}; {did_you_mean(str(name), known)}")
