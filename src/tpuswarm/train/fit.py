"""Chooses how a program runs on given devices, and compiles it.

The trainer, a swarm member and the planner all call `fit`. It works on abstract weights, so the devices may be those
of a described topology that is not there.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError
from tpuswarm.train import mesh as meshes
from tpuswarm.train.flops import Flops, model_flops
from tpuswarm.train.recipe import (
    PRECISIONS,
    Batch,
    Clock,
    Metrics,
    Options,
    Program,
    Recipe,
    State,
    default_precision,
)
from tpuswarm.train.user_code import blame

SHARDS = ("auto", "replicate", "fsdp")
STATE_SHARE = 0.6
"""With `auto`, a replicated state may take this share of a device's memory; activations need the rest."""


@dataclass(frozen=True)
class Request:
    """What the user asks of a program; None leaves the choice to `fit` (accumulate) or the platform (precision)."""

    batch: int
    shard: str = "auto"
    precision: str | None = None
    accumulate: int | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None

    def options(self, devices: Sequence[Any]) -> Options:
        """The program's options on these devices, before any choice that depends on their memory."""
        platform = devices[0].platform
        precision = self.precision or default_precision(platform)
        if precision not in PRECISIONS:
            raise InputError(f"unknown precision {precision!r}; {did_you_mean(precision, PRECISIONS)}")
        attention, loop = forms(platform, devices[0].device_kind)
        return Options(
            precision=precision,
            clip=self.clip,
            freeze=self.freeze,
            decay=self.decay,
            ema=self.ema,
            platform=platform,
            attention=attention,
            loop=loop,
        )


@dataclass(frozen=True)
class Choice:
    """One way to run a program, with the reason for it in words."""

    shard: Literal["replicate", "fsdp"]
    remat: bool
    accumulate: int
    why: str


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, from the compiler."""

    arguments: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """All of it; outputs share their memory with the donated arguments."""
        return self.arguments + self.temporaries + self.code


@dataclass(frozen=True)
class Placed:
    """A program on a mesh: where its state lies, how to make and evaluate it."""

    program: Program
    options: Options
    mesh: Mesh
    state: State
    """Abstract: shapes, dtypes and shardings."""

    @property
    def shardings(self) -> State:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def init(self, key: jax.Array, shared: Any = None) -> State:
        """A fresh state, around `shared` where given, made on the devices in its shardings."""
        return jax.jit(_seeing(self.mesh, self.program.init), out_shardings=self.shardings)(key, shared)

    @cached_property
    def evaluate(self) -> Callable[[State, Batch], Metrics]:
        """The compiled evaluation of one batch; compiled at its first use."""
        return jax.jit(_seeing(self.mesh, self.program.evaluate), out_shardings=meshes.replicated(self.mesh))


@dataclass(frozen=True)
class Fitted(Placed):
    """A compiled program and the choice behind it."""

    choice: Choice
    step: Callable[[State, Batch, Clock], tuple[State, Metrics]]
    """The update, a `jax.stages.Compiled` (`as_text()`, `cost_analysis()`); its first argument is donated."""
    memory: Memory
    jaxpr: ClosedJaxpr
    """The step as it was traced."""

    @cached_property
    def flops(self) -> Flops:
        """Model FLOPs of one step over all devices; counting takes milliseconds."""
        return model_flops(self.jaxpr)


def fit(recipe: Recipe, request: Request, devices: Sequence[Any], memory_bytes: int | None = None) -> Fitted:
    """Compile one step of `recipe` for `devices`, in the first way of running it that their memory holds.

    memory_bytes: what one device has, where neither the device nor its compiler says. Raises InputError for a batch
    that the devices do not divide, an unknown choice, an option the recipe does not honour, a metric that is no scalar,
    and where nothing fits.
    """
    if request.shard not in SHARDS:
        raise InputError(f"unknown shard {request.shard!r}; {did_you_mean(request.shard, SHARDS)}")
    check_batch(request.batch, len(devices), request.accumulate or 1)
    options = request.options(devices)
    platform = options.platform
    memory_bytes = memory_bytes or device_memory(devices[0])
    mesh = meshes.make_mesh(devices)
    with blame(f"{recipe.name} does not trace"):
        needed = 0
        state_bytes = _state_bytes(recipe, options)
        for choice in choices(request, recipe.forms, platform, devices, state_bytes, memory_bytes):
            asked = replace(options, remat=choice.remat, accumulate=choice.accumulate)
            fitted = _compile(recipe, asked, choice, request.batch, mesh)
            if fitted is not None and (memory_bytes is None or fitted.memory.total <= memory_bytes):
                return fitted
            needed = fitted.memory.total if fitted else 0
    raise DoesNotFit(recipe.name, request.batch, devices, choice, needed, memory_bytes)


class DoesNotFit(InputError):
    """No way of running fits; `choice` was the last one tried, it needs `needed` bytes a device (0: unknown)."""

    def __init__(
        self, name: str, batch: int, devices: Sequence[Any], choice: Choice, needed: int, memory_bytes: int | None
    ):
        self.choice, self.needed, self.memory_bytes = choice, needed, memory_bytes
        need = f"needs {needed / 2**30:.2f} GiB a device" if needed else "is more than the compiler can place"
        have = f" of {memory_bytes / 2**30:.2f}" if memory_bytes else ""
        super().__init__(
            f"{name} with batch {batch} does not fit {len(devices)} x {devices[0].device_kind}: even its smallest form "
            f"({choice.why}) {need}{have}; use a smaller batch, a smaller model or more devices"
        )


def place(recipe: Recipe, request: Request, devices: Sequence[Any]) -> Placed:
    """A program on `devices` without compiling its step, its large leaves sharded; for evaluation and sampling."""
    with blame(f"{recipe.name} does not trace"):
        return _place(recipe, request.options(devices), meshes.make_mesh(devices), "fsdp")


def check_batch(batch: int, devices: int, accumulate: int) -> None:
    """Raise InputError, with two ways out, unless every device gets whole rows in every micro-batch."""
    for name, value in (("batch", batch), ("accumulate", accumulate)):
        if value < 1:
            raise InputError(f"{name} must be 1 or more, not {value}")
    unit = devices * accumulate
    if batch % unit == 0:
        return
    ways = ((d, a) for d in range(devices, 0, -1) for a in range(accumulate, 0, -1) if batch % (d * a) == 0)
    fewer, smaller = next(ways)
    other = " ".join(
        [f"--devices {fewer}"] * (fewer != devices) + [f"--accumulate {smaller}"] * (smaller != accumulate)
    )
    raise InputError(
        f"a batch of {batch} rows does not divide over devices ({devices}) x micro-batches ({accumulate}) = {unit}; "
        f"use --batch {math.ceil(batch / unit) * unit} or {other}"
    )


def forms(platform: str, kind: str) -> tuple[Literal["xla", "cudnn", "splash"], Literal["scan", "unroll"]]:
    """Attention and layer loop for a platform and its kind of device.

    cuDNN's kernel and an unrolled loop on GPU; on TPU a scanned loop and, from v4 on, the splash kernel (on v2 and v3
    its compiler refuses the kernel's matmuls); on CPU plain XLA.
    """
    if platform == "gpu":
        return "cudnn", "unroll"
    if platform == "tpu":
        return ("xla" if kind in ("TPU v2", "TPU v3") else "splash"), "scan"
    return "xla", "unroll"


def choices(
    request: Request,
    honoured: Sequence[str],
    platform: str,
    devices: Sequence[Any],
    state_bytes: int,
    memory_bytes: int | None,
) -> Iterator[Choice]:
    """Ways to run, best first: no recomputation before some, replicated before sharded, then smaller micro-batches.

    honoured: `Recipe.forms`; what a program does not do is not tried.
    """
    many = len(devices) > 1
    held = f"{state_bytes / 2**30:.2f} GiB of state"
    shards: list[tuple[Literal["replicate", "fsdp"], str]]
    if request.shard == "replicate" or not many:
        shards = [("replicate", "replicated" if many else "one device")]
    elif request.shard == "fsdp":
        shards = [("fsdp", "sharded, as asked")]
    elif memory_bytes is None or state_bytes <= STATE_SHARE * memory_bytes:
        shards = [("replicate", f"replicated: {held}"), ("fsdp", f"sharded: {held} and activations are too much")]
    else:
        shards = [("fsdp", f"sharded: {held} is over {STATE_SHARE:.0%} of {memory_bytes / 2**30:.2f} GiB")]
    if "remat" not in honoured:
        remats = [False]
    elif platform == "tpu" and devices[0].device_kind in ("TPU v2", "TPU v3"):
        remats = [True]
    else:
        remats = [False, True]
    accumulate = request.accumulate or 1
    for shard, why in shards:
        for remat in remats:
            yield Choice(shard, remat, accumulate, why + (", layers recomputed" if remat else ""))
    if request.accumulate is None and "accumulate" in honoured:
        recomputed = ", layers recomputed" if remats[-1] else ""
        rows = request.batch // len(devices)
        for count in range(2, rows + 1):
            if rows % count == 0:
                yield Choice(shard, remats[-1], count, f"{why}{recomputed}, {count} micro-batches")


def device_memory(device: Any) -> int | None:
    """Bytes that JAX may use on a device; None where it does not say (a described topology).

    CPU devices share the machine's memory, whatever their number.
    """
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # a described topology's device has no memory to ask about
        return None
    return stats.get("bytes_limit") if stats else None


def _state_bytes(recipe: Recipe, options: Options) -> int:
    state = _abstract_state(recipe.program(options))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def _abstract_state(program: Program) -> State:
    return jax.eval_shape(program.init, jax.eval_shape(lambda: jax.random.key(0)))


def _seeing(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced with the mesh visible (jax.sharding.get_abstract_mesh), for kernels that must be mapped."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def _place(recipe: Recipe, options: Options, mesh: Mesh, shard: str) -> Placed:
    program = recipe.program(options)
    state = _abstract_state(program)
    return Placed(program, options, mesh, _with_sharding(state, meshes.state_shardings(state, mesh, shard)))


def _compile(recipe: Recipe, options: Options, choice: Choice, batch: int, mesh: Mesh) -> Fitted | None:
    """The compiled step; None where the compiler says that it does not fit."""
    placed = _place(recipe, options, mesh, choice.shard)
    program, state, shardings = placed.program, placed.state, placed.shardings
    everywhere = meshes.replicated(mesh)
    rows = _with_sharding(dict(program.batch_spec(batch)), meshes.batch_sharding(mesh))
    clock = Clock(jax.eval_shape(lambda: jax.random.key(0)), np.int32(0), np.float32(0))
    step = jax.jit(
        _seeing(mesh, program.step),
        in_shardings=(shardings, meshes.batch_sharding(mesh), everywhere),
        out_shardings=(shardings, everywhere),
        donate_argnums=0,
    )
    traced = step.trace(state, rows, _with_sharding(clock, everywhere))
    _, metrics = traced.out_info
    for name, value in metrics.items():
        if value.shape:
            raise InputError(
                f"metric {name} of {recipe.name} has shape {value.shape}, it must be a scalar: give its mean"
            )
    try:
        compiled = traced.lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    stats = compiled.memory_analysis()
    memory = Memory(stats.argument_size_in_bytes, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes)
    return Fitted(program, options, mesh, state, choice, compiled, memory, traced.jaxpr)


def _with_sharding(tree: Any, sharding: Any) -> Any:
    """Shapes and dtypes of `tree` with a sharding, or one for each leaf."""
    shardings = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, jax.sharding.Sharding) else sharding
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings
    )
