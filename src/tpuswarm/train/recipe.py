"""The contract between what is trained and what trains it.

A recipe is pure functions over one pytree (its program) and the place where its rows come from (its source). The
program owns the numerics; the trainer owns devices, sharding, feed and checkpoints.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from tpuswarm.errors import InputError

if TYPE_CHECKING:  # a recipe is made, and its options checked, before JAX is loaded
    import jax
    import numpy as np

State = Any
"""A pytree of arrays: everything a run needs to continue, except its position in the data."""

Batch = Mapping[str, Any]
"""Arrays by name; the first axis of each is the row."""


class Weighted(NamedTuple):
    """A mean over the batch as its two parts, both scalars: the mean of any split is then that of the whole.

    A masked loss is `Weighted(sum of the losses that count, how many count)`. The weight of a loss must not depend on
    parameters.
    """

    sum: Any
    weight: Any

    @property
    def mean(self) -> Any:
        """sum / weight; NaN where nothing counts, which divides 0 by 0."""
        return self.sum / self.weight


Metrics = Mapping[str, Any]
"""Scalars by name, means over the batch; `loss` is always among them. Those of an evaluation may be Weighted."""

Precision = Literal["bf16", "f32", "highest"]

Remat = Literal["none", "dots", "full"]


def default_precision(platform: str) -> Precision:
    """Precision when nobody names one: bf16 where matrix units are made for it, f32 on CPU."""
    return "f32" if platform == "cpu" else "bf16"


@dataclass(frozen=True)
class Options:
    """How a program should compute; the first six are set by the user, the last five are chosen by program/compiled.py.

    A program raises InputError for any of the first six that it does not support, naming it.

    - precision: `bf16` computes in bfloat16 over float32 weights, `f32` in float32 with the hardware's usual matmul
      passes, `highest` in float32 with full-precision matmuls and convolutions.
    - accumulate: micro-batches per step.
    - clip: largest global norm of the gradient.
    - freeze, decay: regular expressions, searched in parameter paths such as `blocks/attn/qkv/w`.
    - ema: decay per step of the moving average of the parameters.
    - attention: `xla`, `cudnn` or `splash`; remat: what the backward pass computes again of a layer: nothing, all but
      its products (`dots`) or all of it (`full`); loop: over layers; shard: whether each device holds all parameters
      (`replicate`) or parts of them (`fsdp`).
    """

    precision: Precision = "f32"
    accumulate: int = 1
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None
    platform: str = "cpu"
    attention: Literal["xla", "cudnn", "splash"] = "xla"
    remat: Remat = "none"
    loop: Literal["scan", "unroll"] = "scan"
    shard: Literal["replicate", "fsdp"] = "replicate"

    def require_only(self, *honoured: str, by: str) -> None:
        """Raise InputError for an option that the user set and `by` does not support."""
        usual: dict[str, Any] = {field.name: field.default for field in fields(self)}
        usual["precision"] = default_precision(self.platform)
        for name in ("precision", "accumulate", "clip", "freeze", "decay", "ema"):
            if name not in honoured and getattr(self, name) != usual[name]:
                raise InputError(f"{by} does not support {name} ({getattr(self, name)}); leave it out")


class Clock(NamedTuple):
    """The position of a step in its run, passed in by the host.

    key: a typed PRNG key, another at every step; step: int32, updates done before this one; progress: float32, the
    share of the run's tokens consumed before this step, 0 to 1; lr_scale: float32, by what the hooks of the run have
    multiplied the learning rate so far.
    """

    key: "jax.Array"
    step: "jax.Array | np.int32"
    progress: "jax.Array | np.float32"
    lr_scale: "jax.Array | np.float32 | float" = 1.0


class Average(NamedTuple):
    """A moving average of what is shared that a program keeps in its state.

    A swarm makes one of its committed parameters, never of its members' own: `put(state, average)` takes the average of
    all that is shared, in the form of `Exchange.get`, into a state.
    """

    put: Callable[[State, Any], State]
    half_life: Callable[[int], float]
    """In rows, for a run of so many rows a step."""
    share: float = math.inf
    """Of the rows so far, that the half-life is at most."""


class Exchange(NamedTuple):
    """The part of a state that the members of a swarm share: `get(state)` and `put(state, shared) -> state`."""

    get: Callable[[State], Any]
    put: Callable[[State, Any], State]
    average: Average | None = None


class Parameter(NamedTuple):
    """What a program knows about one parameter leaf."""

    path: str
    frozen: bool
    decayed: bool
    tied: str
    """The other use of the same leaf, for example `output head`; empty if there is none."""
    statistic: bool = False
    """Not trained but observed, as the running variance of BatchNorm is: members of a swarm average it."""


class Program(ABC):
    """Pure functions over one state; all of them are traced by JAX."""

    tokens_per_row: int = 1
    """Tokens that one row counts for; 1 where rows are not text."""
    failures: tuple[str, str] = ("step of {} fails", "evaluate of {} fails")
    """What is said, with the recipe's name, of a step and of an evaluation that raise an error."""

    @abstractmethod
    def init(self, key: "jax.Array", shared: Any = None) -> State:
        """A fresh state from a typed key, built around the parameters `shared` (from `exchange().get`) if given.

        Traced under jit with the shardings of the run.
        """

    def weights(self) -> Any:
        """Arrays of the host to begin with, in the form of `exchange().get`, where the recipe holds them; else None.

        They go to the devices shard by shard; in `init` they would be a part of the compiled program.
        """
        return None

    @abstractmethod
    def step(self, state: State, batch: Batch, clock: Clock) -> tuple[State, Metrics]:
        """One update on one whole batch."""

    @abstractmethod
    def evaluate(self, state: State, batch: Batch) -> Metrics:
        """The metrics of one batch without an update, without randomness."""

    def predict(self, function: Callable[..., Any], state: State, batch: Batch) -> Any:
        """What a user's function gives for the rows of a batch: `function(state, batch)`."""
        return function(state, batch)

    @abstractmethod
    def batch_spec(self, size: int) -> "Mapping[str, jax.ShapeDtypeStruct]":
        """Shapes and dtypes of a batch of `size` rows."""

    @abstractmethod
    def exchange(self) -> Exchange:
        """The parameters that a swarm shares."""

    @abstractmethod
    def parameters(self, state: State) -> list[Parameter]:
        """One entry for each leaf of `exchange().get(state)`, in order; shapes suffice."""


class Source(Protocol):
    """One infinite seeded order of rows.

    Optional: `rows_per_epoch` (int; without it `--epochs` and validation are refused), `digest` (str, of the content;
    a run refuses to resume with another), `in_memory` (bool; true: rows that come quickly need no thread),
    `seeded(seed)` (the same rows in the order of the run's seed), `row_numbers(start, count)` (int64[count], which rows
    of the data `rows` gives: predictions are put into that order), and, of a stream that cannot begin at any row,
    `position(row)` (what a checkpoint keeps) and `go_to(position)`.
    """

    def rows(self, start: int, count: int) -> "dict[str, np.ndarray]":
        """Rows start to start + count of the order, as arrays whose first axis is `count`."""
        ...


class Recipe(ABC):
    """What is trained. Rebuilt in other processes from `module:name` and `options()`, never from a pickle.

    What it may have and do besides, such as ways to save memory, is in optional.py.
    """

    name: str = "recipe"
    target: str = ""
    """`module:name` that rebuilds it; empty if it was built in a program."""
    given: Mapping[str, Any] = MappingProxyType({})
    """The arguments that `target` was called with, including its plain defaults."""
    defaults: Mapping[str, Any] = MappingProxyType({})
    """Run settings to use when the user sets none: `batch`, `steps`, `clip`, `decay`, …"""

    @abstractmethod
    def program(self, options: Options) -> Program:
        """The pure functions; raises InputError for an option it does not support."""

    @abstractmethod
    def data(self, split: str) -> Source:
        """The rows of `train`, `validation`, `test` or `all`; NoSuchSplit if there is none of that name."""

    def options(self) -> dict[str, Any]:
        """The arguments that rebuild this recipe, resolved: plain values that TOML can hold."""
        return dict(self.given)
