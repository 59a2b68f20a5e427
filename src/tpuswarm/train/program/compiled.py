"""Choose how a program runs on given devices, and compile it.

The trainer, a swarm member and the planner all call `compile_step`. Its weights are abstract, so the devices may be a
described topology.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh

from tpuswarm.config.limits import check_settings
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.data.feed import MAX_BATCHES_ON_DEVICES
from tpuswarm.train.data.placing import place_array
from tpuswarm.train.process.numerics import run_key
from tpuswarm.train.process.nvidia import parse_capability
from tpuswarm.train.program import mesh as meshes
from tpuswarm.train.program.contract import (
    abstract_state,
    batch_spec,
    check_exchange,
    checked_evaluate,
    checked_step,
    program_of,
)
from tpuswarm.train.program.flops import Flops, model_flops
from tpuswarm.train.program.request import Choice, Request, choices
from tpuswarm.train.recipe import Batch, Capability, Clock, Metrics, Options, Program, Recipe, State
from tpuswarm.train.settings import check_batch
from tpuswarm.train.user_code import blame


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, from the compiler."""

    arguments: int
    """The state, and all batches that the feed holds at once while training (data/feed.py)."""
    temporaries: int
    """Peak."""
    code: int

    @property
    def total(self) -> int:
        """Sum; outputs share memory with the donated arguments."""
        return self.arguments + self.temporaries + self.code


@dataclass(frozen=True)
class Placed:
    """A program on a mesh, with a function for its state and one for its evaluation."""

    program: Program
    options: Options
    mesh: Mesh
    state: State
    """Abstract: shapes, dtypes and shardings."""
    compiling: dict[str, Any] | None
    """The recipe's XLA options for this platform."""

    @property
    def shardings(self) -> State:
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def init(self, key: jax.Array, shared: Any = None) -> State:
        """Make a fresh state on the devices in its shardings, with the parameters `shared` or the recipe's own.

        The state takes over the memory of `shared`, which may be most of a device's.
        """
        if shared is None and (weights := self.program.weights()) is not None:
            like = self.program.exchange().get(self.state)
            shared = jax.tree.map(lambda array, leaf: place_array(array, leaf.sharding), weights, like)
        make = jax.jit(_with_mesh(self.mesh, self.program.init), out_shardings=self.shardings, donate_argnums=1)
        return make(key, shared)

    @cached_property
    def evaluate(self) -> Callable[[State, Batch], Metrics]:
        """The evaluation of one batch, compiled at its first use."""
        evaluate, everywhere = _with_mesh(self.mesh, self.program.evaluate), meshes.replicated(self.mesh)
        return jax.jit(evaluate, out_shardings=everywhere, compiler_options=self.compiling)

    def predict(self, function: Callable[..., Any]) -> Callable[[State, Batch], Any]:
        """Return a user's function of a state and a batch, compiled at its first use."""
        return jax.jit(
            _with_mesh(self.mesh, partial(self.program.predict, function)), out_shardings=meshes.replicated(self.mesh)
        )


@dataclass(frozen=True)
class Compiled(Placed):
    """A compiled program and the choice behind it."""

    choice: Choice
    step: Callable[[State, Batch, Clock], tuple[State, Metrics]]
    """The update, a `jax.stages.Compiled`; its first argument is donated."""
    memory: Memory
    jaxpr: ClosedJaxpr
    """The traced step."""

    @cached_property
    def flops(self) -> Flops:
        """Model FLOPs of one step over all devices; counting takes milliseconds."""
        return model_flops(self.jaxpr)

    @property
    def scales_learning_rate(self) -> bool:
        """Whether a step uses its clock's `lr_scale`, its last argument."""
        jaxpr = self.jaxpr.jaxpr
        return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][-1]


def compile_step(
    recipe: Recipe,
    request: Request,
    devices: Sequence[Any],
    memory_bytes: int | None = None,
    on_too_large: Callable[["TooLarge"], None] = lambda _: None,
    while_compiling: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Compiled:
    """Compile one step of `recipe` for `devices` with the first choice that fits their memory.

    memory_bytes: memory of one device, if neither the device nor its compiler knows it; on_too_large is called with
    each choice that was compiled and does not fit; XLA compiles inside while_compiling(). Raises InputError for a batch
    that the devices do not divide, an unknown setting, an option that the recipe does not support, a metric that is not
    a scalar, and if nothing fits.
    """
    memory_bytes = memory_bytes or device_memory(local_device(devices))
    platform, kind, capability = devices[0].platform, devices[0].device_kind, lowest_capability(devices)
    candidates = list(possible_choices(recipe, request, platform, kind, len(devices), memory_bytes, capability))
    options = replace(request.options(platform, kind, capability), memory=memory_bytes)
    rows = batch_spec(program_of(recipe, options), recipe.name, request.batch)
    last: TooLarge | None = None
    if memory_bytes is not None and (row_bytes := MAX_BATCHES_ON_DEVICES * _bytes(rows) // len(devices)) > memory_bytes:
        candidates, last = [], TooLarge(candidates[-1], row_bytes, 0)  # a device holds its rows with any choice
    mesh = meshes.make_mesh(devices)
    for choice in candidates:
        if last and choice is not candidates[-1] and _cannot_fit(choice, last, memory_bytes):
            continue
        traced = trace(recipe, options, choice, request.batch, mesh)
        with while_compiling():
            tried = compile_traced(traced, memory_bytes)
        if isinstance(tried, Compiled):
            return tried
        on_too_large(tried)
        last = tried
    assert last is not None  # there is always a choice
    raise DoesNotFit(recipe.name, request.batch, devices, last, memory_bytes)


def local_device(devices: Sequence[Any]) -> Any:
    """Return a device of this host, if there is one: only these know their memory."""
    return next((device for device in devices if device.process_index == jax.process_index()), devices[0])


def lowest_capability(devices: Sequence[Any]) -> Capability | None:
    """Return the lowest compute capability of GPUs; None for other devices."""
    texts = [getattr(device, "compute_capability", "") for device in devices]
    return min(filter(None, map(parse_capability, texts)), default=None)


def possible_choices(
    recipe: Recipe,
    request: Request,
    platform: str,
    kind: str,
    devices: int,
    memory_bytes: int | None,
    capability: Capability | None = None,
) -> Iterator[Choice]:
    """Yield the choices that `compile_step` tries, best first. Raises InputError for an invalid request."""
    check_settings({"shard": request.shard})
    check_batch(request.batch, devices, request.accumulate or 1)
    with blame(f"init of {recipe.name} fails"):
        state_bytes = _bytes(
            abstract_state(program_of(recipe, request.options(platform, kind, capability)), recipe.name)
        )
    return choices(request, recipe.forms, platform, kind, devices, state_bytes, memory_bytes, capability)


class Traced(NamedTuple):
    """A program with one choice, before it is compiled."""

    recipe: Recipe
    placed: Placed
    step: Any
    """A `jax.stages.Traced`."""
    choice: Choice
    batch: int


class TooLarge(NamedTuple):
    """A choice that needs more memory than a device has."""

    choice: Choice
    needed: int
    """Bytes of one device; 0 if the compiler does not say."""
    state: int
    """Bytes of the state on one device, part of those needed."""


def compile_traced(traced: Traced, memory_bytes: int | None = None) -> Compiled | TooLarge:
    """Compile a step, or return its size if it is too large. Raises CompilerRefused."""
    recipe, placed, step, choice, batch = traced
    device, platform = placed.mesh.devices.flat[0], placed.options.platform
    needed = 0
    with blame(placed.program.failures[0].format(recipe.name)):
        try:
            executable = step.lower().compile(placed.compiling)
        except Exception as error:
            if not is_out_of_memory(str(error), platform):
                raise CompilerRefused(recipe.name, device.device_kind, error, step.jaxpr) from error
            needed = parse_needed_bytes(str(error))
        else:
            waiting_bytes = (
                (MAX_BATCHES_ON_DEVICES - 1) * _bytes(dict(placed.program.batch_spec(batch))) // placed.mesh.size
            )
            memory = measure_memory(executable, platform, waiting_bytes)
            if memory_bytes is None or memory.total <= memory_bytes:
                fields = placed.program, placed.options, placed.mesh, placed.state, placed.compiling
                return Compiled(*fields, choice, executable, memory, step.jaxpr)
            needed = memory.total
    return TooLarge(choice, needed, meshes.bytes_per_device(placed.state))


class DoesNotFit(InputError):
    """No choice fits; `last` is the smallest."""

    def __init__(self, name: str, batch: int, devices: Sequence[Any], last: TooLarge, memory_bytes: int | None):
        self.batch, self.last, self.memory_bytes = batch, last, memory_bytes
        need = f"needs {last.needed / 2**30:.2f} GiB per device" if last.needed else "is too large for the compiler"
        have = f", of {memory_bytes / 2**30:.2f} available" if memory_bytes else ""
        split = "micro-batches (--accumulate), " if last.choice.accumulate == 1 else ""
        super().__init__(
            f"{name} with batch {batch} does not fit on {len(devices)} x {devices[0].device_kind}: even its "
            f"smallest form ({last.choice.why}) {need}{have}; use a smaller batch, {split}a smaller model or more "
            "devices"
        )


class CompilerRefused(RunFailed):
    """The compiler fails for another reason than the program's size; `jaxpr` is the program."""

    def __init__(self, name: str, kind: str, error: Exception, jaxpr: ClosedJaxpr):
        self.jaxpr = jaxpr
        first = " ".join(str(error).split())[:300] or "no message"
        super().__init__(f"the compiler refuses {name} for {kind}: {type(error).__name__}: {first}")


def place_program(recipe: Recipe, request: Request, devices: Sequence[Any], shard: str = "fsdp") -> Placed:
    """Place a program on `devices` without compiling its step; by default its large leaves are sharded."""
    with blame(f"init of {recipe.name} fails"):
        options = request.options(devices[0].platform, devices[0].device_kind, lowest_capability(devices))
        options = replace(options, memory=device_memory(local_device(devices)))
        return _place_on_mesh(recipe, options, meshes.make_mesh(devices), shard)


def device_memory(device: Any) -> int | None:
    """Return the bytes that JAX may use on a device; None for a device of a described topology.

    CPU devices share three quarters of the machine's memory. The free memory of the moment would make a resumed run
    choose another form.
    """
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // (4 * len(jax.local_devices()))
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # a described topology
        return None
    return stats.get("bytes_limit") if stats else None


def _cannot_fit(choice: Choice, tried: TooLarge, memory_bytes: int | None) -> bool:
    """Return whether more micro-batches cannot help, even if all memory but the state shrinks with them."""
    is_same_form = (choice.shard, choice.remat) == (tried.choice.shard, tried.choice.remat)
    if not tried.needed or memory_bytes is None or not is_same_form:
        return False
    shrunk = (tried.needed - tried.state) * tried.choice.accumulate / choice.accumulate
    return choice.accumulate > tried.choice.accumulate and tried.state + shrunk > memory_bytes


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _with_mesh(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, traced with the mesh visible (jax.sharding.get_abstract_mesh) to kernels."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def _place_on_mesh(recipe: Recipe, options: Options, mesh: Mesh, shard: str) -> Placed:
    if jax.config.values["jax_disable_jit"]:
        raise InputError(
            "JAX_DISABLE_JIT is on, but programs are compiled here: turn it off; jax.debug.print shows values in a step"
        )
    program = program_of(recipe, options)
    state = abstract_state(program, recipe.name)
    state = with_sharding(state, meshes.state_shardings(state, mesh, shard))
    return Placed(program, options, mesh, state, dict(recipe.compiling.get(options.platform, {})) or None)


def trace(recipe: Recipe, options: Options, choice: Choice, batch: int, mesh: Mesh) -> Traced:
    """Place a program on `mesh` and trace its step with `choice`, which replaces the options' micro-batches.

    Also trace its evaluation, so that errors in it appear before the first step.
    """
    options = replace(options, shard=choice.shard, remat=choice.remat, accumulate=choice.accumulate)
    everywhere = meshes.replicated(mesh)
    clock = Clock(jax.eval_shape(lambda: run_key(0)), np.int32(0), np.float32(0), np.float32(1))
    with blame(f"init of {recipe.name} fails"):
        placed = _place_on_mesh(recipe, options, mesh, choice.shard)
    program = placed.program
    check_exchange(program, recipe.name, placed.state)
    rows = with_sharding(batch_spec(program, recipe.name, batch), meshes.batch_sharding(mesh))
    step_fails, evaluation_fails = program.failures
    with blame(step_fails.format(recipe.name)):
        step = jax.jit(
            _with_mesh(mesh, checked_step(program, recipe.name, placed.state)),
            in_shardings=(placed.shardings, meshes.batch_sharding(mesh), everywhere),
            out_shardings=(placed.shardings, everywhere),
            donate_argnums=0,
        )
        traced = step.trace(placed.state, rows, with_sharding(clock, everywhere))
    with blame(evaluation_fails.format(recipe.name)):
        jax.eval_shape(_with_mesh(mesh, checked_evaluate(program, recipe.name)), placed.state, rows)
    return Traced(recipe, placed, traced, choice, batch)


def measure_memory(executable: Any, platform: str, waiting_bytes: int) -> Memory:
    """Return the memory of a compiled program; waiting_bytes: of the next batches, unknown to the compiler."""
    stats = executable.memory_analysis()
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    if platform == "tpu":  # its temporaries include the donated arguments, and so does its peak
        temporaries = max(0, stats.peak_memory_in_bytes - arguments)
    return Memory(arguments + waiting_bytes, temporaries, stats.generated_code_size_in_bytes)


def is_out_of_memory(message: str, platform: str) -> bool:
    """Return whether a compiler lacks a device's main memory; a TPU kernel may instead lack VMEM."""
    return "RESOURCE_EXHAUSTED" in message and (platform != "tpu" or "hbm" in message.lower())


def parse_needed_bytes(message: str) -> int:
    """Return the bytes in a compiler's `(15.92G) exceeds available` or `Used 15.92G of 15.75G`; else 0."""
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available|Used ([\d.]+)([KMGT]) of", message)
    if not found:
        return 0
    amount, unit = filter(None, found.groups())
    return int(float(amount) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit])


def with_sharding(tree: Any, sharding: Any) -> Any:
    """Return the shapes and dtypes of `tree` with one sharding, or with a tree of shardings."""
    shardings = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, jax.sharding.Sharding) else sharding
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings
    )
