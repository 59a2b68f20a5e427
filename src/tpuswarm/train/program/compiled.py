"""Chooses how a program runs on given devices, and compiles it.

The trainer, a swarm member and the planner all call `compile_step`. It works on abstract weights, so the devices may
be those of a described topology that is not there.
"""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
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
from tpuswarm.train.optional import SavesMemory, SetsCompiler
from tpuswarm.train.process.numerics import run_key
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
from tpuswarm.train.recipe import (
    Batch,
    Clock,
    Metrics,
    Options,
    Program,
    Recipe,
    State,
)
from tpuswarm.train.settings import check_batch
from tpuswarm.train.user_code import blame


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, from the compiler."""

    arguments: int
    """The state, and every batch that is there at once while training (data/feed.py): a step takes one of them."""
    temporaries: int
    """At the moment when most is needed."""
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
    compiling: dict[str, Any] | None
    """The recipe's options of XLA's compiler on this platform."""

    @property
    def shardings(self) -> State:
        """The sharding of each leaf of the state."""
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    def init(self, key: jax.Array, shared: Any = None) -> State:
        """A fresh state, around `shared` or what the recipe holds, made on the devices in its shardings."""
        if shared is None and (weights := self.program.weights()) is not None:
            like = self.program.exchange().get(self.state)
            shared = jax.tree.map(lambda array, leaf: place_array(array, leaf.sharding), weights, like)
        return jax.jit(_seeing(self.mesh, self.program.init), out_shardings=self.shardings)(key, shared)

    @cached_property
    def evaluate(self) -> Callable[[State, Batch], Metrics]:
        """The compiled evaluation of one batch; compiled at its first use."""
        evaluate, everywhere = _seeing(self.mesh, self.program.evaluate), meshes.replicated(self.mesh)
        return jax.jit(evaluate, out_shardings=everywhere, compiler_options=self.compiling)

    def predict(self, function: Callable[..., Any]) -> Callable[[State, Batch], Any]:
        """A user's function of a state and a batch, to be compiled at its first use."""
        return jax.jit(
            _seeing(self.mesh, partial(self.program.predict, function)), out_shardings=meshes.replicated(self.mesh)
        )


@dataclass(frozen=True)
class Compiled(Placed):
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

    @property
    def scales_learning_rate(self) -> bool:
        """Whether a step looks at its clock's `lr_scale`, the last of its arguments."""
        jaxpr = self.jaxpr.jaxpr
        return dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1][-1]


def compile_step(
    recipe: Recipe,
    request: Request,
    devices: Sequence[Any],
    memory_bytes: int | None = None,
    refused: Callable[["TooLarge"], None] = lambda _: None,
) -> Compiled:
    """Compile one step of `recipe` for `devices`, in the first way of running it that their memory holds.

    memory_bytes: what one device has, where neither the device nor its compiler says; refused is told of each way that
    was compiled and does not fit. Raises InputError for a batch that the devices do not divide, an unknown choice, an
    option the recipe does not support, a metric that is not a scalar, and where nothing fits.
    """
    memory_bytes = memory_bytes or device_memory(mine(devices))
    platform, kind = devices[0].platform, devices[0].device_kind
    every = list(ways(recipe, request, platform, kind, len(devices), memory_bytes))
    rows = batch_spec(program_of(recipe, request.options(platform, kind)), recipe.name, request.batch)
    last: TooLarge | None = None
    if memory_bytes is not None and (alone := MAX_BATCHES_ON_DEVICES * _bytes(rows) // len(devices)) > memory_bytes:
        every, last = [], TooLarge(every[-1], alone, 0)  # whatever is compiled, a device holds its rows
    mesh = meshes.make_mesh(devices)
    for choice in every:
        if last and choice is not every[-1] and _hopeless(choice, last, memory_bytes):
            continue
        traced = trace(recipe, request.options(platform, kind), choice, request.batch, mesh)
        tried = compile_traced(traced, memory_bytes)
        if isinstance(tried, Compiled):
            return tried
        refused(tried)
        last = tried
    assert last is not None  # there is always one way
    raise DoesNotFit(recipe.name, request.batch, devices, last, memory_bytes)


def mine(devices: Sequence[Any]) -> Any:
    """A device of this host's, where it has any: those of others do not say what memory they have."""
    return next((each for each in devices if each.process_index == jax.process_index()), devices[0])


def ways(
    recipe: Recipe, request: Request, platform: str, kind: str, devices: int, memory_bytes: int | None
) -> Iterator[Choice]:
    """What `compile_step` tries for a request, best first. Raises InputError for what cannot be tried at all."""
    check_settings({"shard": request.shard})
    check_batch(request.batch, devices, request.accumulate or 1)
    with blame(f"init of {recipe.name} fails"):
        state_bytes = _bytes(abstract_state(program_of(recipe, request.options(platform, kind)), recipe.name))
    forms = recipe.forms if isinstance(recipe, SavesMemory) else ()
    return choices(request, forms, platform, kind, devices, state_bytes, memory_bytes)


class Traced(NamedTuple):
    """A program before it is compiled, in one way to run it."""

    recipe: Recipe
    placed: Placed
    step: Any
    """A `jax.stages.Traced`."""
    choice: Choice
    batch: int


class TooLarge(NamedTuple):
    """A way to run that one device's memory does not hold; `needed` bytes a device, 0 where the compiler is silent."""

    choice: Choice
    needed: int
    state: int
    """Bytes of the state that one device holds, of those needed."""


def compile_traced(traced: Traced, memory_bytes: int | None = None) -> Compiled | TooLarge:
    """The step compiled, or what is known of its size. Raises Refused."""
    recipe, placed, step, choice, batch = traced
    device, platform = placed.mesh.devices.flat[0], placed.options.platform
    needed = 0
    with blame(placed.program.failures[0].format(recipe.name)):
        try:
            executable = step.lower().compile(placed.compiling)
        except Exception as error:
            if not lacks_memory(str(error), platform):  # whatever an op or a kernel raises that has no form
                raise Refused(recipe.name, device.device_kind, error, step.jaxpr) from error
            needed = needed_bytes(str(error))
        else:
            waiting = (MAX_BATCHES_ON_DEVICES - 1) * _bytes(dict(placed.program.batch_spec(batch))) // placed.mesh.size
            memory = memory_of(executable, platform, waiting)
            if memory_bytes is None or memory.total <= memory_bytes:
                fields = placed.program, placed.options, placed.mesh, placed.state, placed.compiling
                return Compiled(*fields, choice, executable, memory, step.jaxpr)
            needed = memory.total
    return TooLarge(choice, needed, meshes.bytes_per_device(placed.state))


class DoesNotFit(InputError):
    """No way of running fits; `last` is the smallest, tried last."""

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


class Refused(RunFailed):
    """The compiler does not take the program, for another reason than its size; `jaxpr` is the program."""

    def __init__(self, name: str, kind: str, error: Exception, jaxpr: ClosedJaxpr):
        self.jaxpr = jaxpr
        first = " ".join(str(error).split())[:300] or "no message"
        super().__init__(f"the compiler refuses {name} for {kind}: {type(error).__name__}: {first}")


def place(recipe: Recipe, request: Request, devices: Sequence[Any], shard: str = "fsdp") -> Placed:
    """A program on `devices` without compiling its step, with `fsdp` its large leaves sharded: to be looked at."""
    with blame(f"init of {recipe.name} fails"):
        options = request.options(devices[0].platform, devices[0].device_kind)
        return _place(recipe, options, meshes.make_mesh(devices), shard)


def device_memory(device: Any) -> int | None:
    """Bytes that JAX may use on a device; None where it does not say (a described topology).

    CPU devices share three quarters of the machine's memory, whatever their number: what is free at the moment would
    make a resumed run choose another form.
    """
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 3 // (4 * len(jax.local_devices()))
    try:
        stats = device.memory_stats()
    except jax.errors.JaxRuntimeError:  # a described topology's device has no memory to ask about
        return None
    return stats.get("bytes_limit") if stats else None


def _hopeless(choice: Choice, tried: TooLarge, memory_bytes: int | None) -> bool:
    """Whether a way with more micro-batches needs too much even if all but the state shrinks with them."""
    same = (choice.shard, choice.remat) == (tried.choice.shard, tried.choice.remat)
    if not tried.needed or memory_bytes is None or not same:
        return False
    shrunk = (tried.needed - tried.state) * tried.choice.accumulate / choice.accumulate
    return choice.accumulate > tried.choice.accumulate and tried.state + shrunk > memory_bytes


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _seeing(mesh: Mesh, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` traced with the mesh visible (jax.sharding.get_abstract_mesh), for kernels that must be mapped."""

    def traced(*args: Any) -> Any:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return function(*args)

    return traced


def _place(recipe: Recipe, options: Options, mesh: Mesh, shard: str) -> Placed:
    program = program_of(recipe, options)
    state = abstract_state(program, recipe.name)
    state = with_sharding(state, meshes.state_shardings(state, mesh, shard))
    by_platform = recipe.compiling if isinstance(recipe, SetsCompiler) else {}
    return Placed(program, options, mesh, state, dict(by_platform.get(options.platform, {})) or None)


def trace(recipe: Recipe, options: Options, choice: Choice, batch: int, mesh: Mesh) -> Traced:
    """The program placed on `mesh` in the way `choice`, whose micro-batches win over the request's, and traced.

    Its evaluation is traced too, and thrown away: what is wrong with it is found before the first step, not after
    hours of them.
    """
    options = replace(options, shard=choice.shard, remat=choice.remat, accumulate=choice.accumulate)
    everywhere = meshes.replicated(mesh)
    clock = Clock(jax.eval_shape(lambda: run_key(0)), np.int32(0), np.float32(0), np.float32(1))
    with blame(f"init of {recipe.name} fails"):
        placed = _place(recipe, options, mesh, choice.shard)
    program = placed.program
    check_exchange(program, recipe.name, placed.state)
    rows = with_sharding(batch_spec(program, recipe.name, batch), meshes.batch_sharding(mesh))
    step_fails, evaluation_fails = program.failures
    with blame(step_fails.format(recipe.name)):
        step = jax.jit(
            _seeing(mesh, checked_step(program, recipe.name, placed.state)),
            in_shardings=(placed.shardings, meshes.batch_sharding(mesh), everywhere),
            out_shardings=(placed.shardings, everywhere),
            donate_argnums=0,
        )
        traced = step.trace(placed.state, rows, with_sharding(clock, everywhere))
    with blame(evaluation_fails.format(recipe.name)):
        jax.eval_shape(_seeing(mesh, checked_evaluate(program, recipe.name)), placed.state, rows)
    return Traced(recipe, placed, traced, choice, batch)


def memory_of(executable: Any, platform: str, waiting: int) -> Memory:
    """What a compiled program takes; waiting: bytes of batches that come next, which the compiler knows nothing of."""
    stats = executable.memory_analysis()
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    if platform == "tpu":  # there the temporaries have the donated arguments among them; its peak is of both together
        temporaries = max(0, stats.peak_memory_in_bytes - arguments)
    return Memory(arguments + waiting, temporaries, stats.generated_code_size_in_bytes)


def lacks_memory(refusal: str, platform: str) -> bool:
    """Whether a compiler lacks a device's main memory; a kernel on TPU may lack another, the chip's own (VMEM)."""
    return "RESOURCE_EXHAUSTED" in refusal and (platform != "tpu" or "hbm" in refusal.lower())


def needed_bytes(refusal: str) -> int:
    """Bytes a device in a compiler's words `(15.92G) exceeds available` or `Used 15.92G of 15.75G`; else 0."""
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available|Used ([\d.]+)([KMGT]) of", refusal)
    if not found:
        return 0
    amount, unit = (each for each in found.groups() if each)
    return int(float(amount) * {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}[unit])


def with_sharding(tree: Any, sharding: Any) -> Any:
    """Shapes and dtypes of `tree` with a sharding, or one for each leaf."""
    shardings = jax.tree.map(lambda _: sharding, tree) if isinstance(sharding, jax.sharding.Sharding) else sharding
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, shardings
    )
