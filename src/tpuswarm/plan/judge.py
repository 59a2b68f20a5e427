"""Does it fit, and how: the answer for one described slice, from `train/program/compiled.py` and the TPU compiler."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import topologies

from tpuswarm.config.units import GIB
from tpuswarm.errors import InputError
from tpuswarm.plan.hlo import Hazard, hazards, refusal
from tpuswarm.plan.order import DescribedSlice, Found, Order, Program
from tpuswarm.train.data.feed import ALIVE, DEPTH
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program.compiled import DoesNotFit, Placed
from tpuswarm.train.program.flops import Flops, model_flops
from tpuswarm.train.program.largest_batch import Sized, Sizes
from tpuswarm.train.program.mesh import batch_sharding, bytes_per_device, make_mesh
from tpuswarm.train.program.request import Choice, Request, usual_request
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.settings import check_batch
from tpuswarm.train.user_code import build_recipe

Say = Callable[[str], None]

WAITING = 3
"""Batches of an evaluation on the devices at once (train/loop/evaluate.py): two that wait, and the next."""
TOKEN_BYTES = 2
"""Of a token as it is kept (uint16)."""


def judge(order: Order, say: Say) -> Found:
    """The answer to one order; InputError for what cannot be done as asked, on any slice."""
    asked, place = order.asked, order.place
    recipe = build_recipe(asked.target, asked.options)
    request = usual_request(
        recipe,
        batch=asked.batch,
        precision=asked.precision,
        shard=asked.shard,
        accumulate=asked.accumulate,
        freeze=asked.freeze,
        ema=asked.ema,
    )
    if asked.batch is not None:
        try:
            check_batch(asked.batch, place.devices, request.accumulate or 1, fewer=False)
        except InputError as error:  # the micro-batches are the recipe's: only here are they known
            return Found(None, problem=str(error))
    if order.lower_only:
        return _lowered(recipe, request, order)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=place.compiler, **place.compiler_options)
    except jax.errors.JaxRuntimeError as error:
        return Found(None, problem=f"the compiler has no topology {place.compiler}: {_first_line(error)}")
    sizes = Sizes(recipe, request, described.devices, place.hbm_bytes, say)
    try:
        sized, above = (sizes.asked(), None) if asked.batch else sizes.largest()
        return _found(recipe, sizes, place, sized, above)
    except DoesNotFit as error:
        last = error.last
        return Found(
            False, needed=last.needed or None, held=last.state, smallest=last.choice.why,
            spread=last.choice.shard == "fsdp",
            rows=error.batch // place.devices // last.choice.accumulate, problem=str(error),
            compilations=sizes.compilations,
        )  # fmt: skip
    except compiling.Refused as error:
        assert error.__cause__ is not None
        hazard = refusal(error.__cause__, error.jaxpr)
        return Found(False, problem=f"{error}", hazards=_plain([hazard]), compilations=sizes.compilations)


def _found(recipe: Recipe, sizes: Sizes, place: DescribedSlice, sized: Sized, above: int | None) -> Found:
    memory, compiled = sized.compiled.memory, sized.compiled
    program = _program(recipe, compiled, compiled.choice, sized.rows, compiled.flops)
    found = [*_evaluation(sizes, place, sized), *hazards(compiled, program.batch, place.matrix_unit)]
    return Found(
        True, program, memory.arguments, memory.temporaries, memory.code, above,
        hazards=_plain(found), compilations=sizes.compilations,
    )  # fmt: skip


def _evaluation(sizes: Sizes, place: DescribedSlice, sized: Sized) -> list[Hazard]:
    """What is wrong with evaluations at the batch that training gives them: the rows of a micro-batch."""
    compiled = sized.compiled
    spec = dict(compiled.program.batch_spec(sized.rows * compiled.mesh.size))
    rows = compiling.with_sharding(spec, batch_sharding(compiled.mesh))
    traced = compiled.evaluate.trace(compiled.state, rows)  # type: ignore[attr-defined]
    sizes.compilations += 1
    try:
        memory = compiling.memory_of(traced.lower().compile(), "tpu", 0)
    except Exception as error:  # noqa: BLE001  # whatever an op or a kernel raises that has no form here
        if not compiling.lacks_memory(str(error), "tpu"):
            refused = refusal(error, traced.jaxpr)
            return [replace(refused, sentence=f"in its evaluation {refused.sentence}")]
        needed = compiling.needed_bytes(str(error))
    else:
        state = bytes_per_device(compiled.state)
        ahead = (compiled.memory.arguments - state) * DEPTH // ALIVE  # of the training that goes on afterwards
        batches = ahead + WAITING * (memory.arguments - state)
        needed = state + batches + memory.temporaries + compiled.memory.code + memory.code
        if place.hbm_bytes is None or needed <= place.hbm_bytes:
            return []
    need = f"needs {needed / GIB:.2f} GiB per device" if needed else "is too large for the compiler"
    have = f", of {place.hbm_bytes / GIB:.2f} available" if place.hbm_bytes else ""
    sentence = f"it trains, but its evaluation of {sized.rows} rows per device {need}{have}: use --eval-batch"
    return [Hazard("evaluation", sentence, None)]


def _lowered(recipe: Recipe, request: Request, order: Order) -> Found:
    """What can be said without a TPU compiler: that the program lowers for TPU, its state and its FLOPs.

    It runs on as many virtual CPU devices as the slice has; what depends on memory is taken from the state alone.
    """
    place, devices = order.place, jax.devices()
    options = request.options("tpu", place.kind)
    if order.asked.batch is None:
        unit = len(devices) * (request.accumulate or 1)
        request = replace(request, batch=max(1, request.batch // unit) * unit)
    choice = next(compiling.ways(recipe, request, "tpu", place.kind, len(devices), place.hbm_bytes))
    traced = compiling.trace(recipe, options, choice, request.batch, make_mesh(devices))
    try:
        traced.step.lower(lowering_platforms=("tpu",))
    except Exception as error:  # noqa: BLE001  # whatever a kernel or an op raises when it has no form for TPU
        return Found(None, problem=f"the program cannot be lowered for TPU: {_first_line(error)}")
    rows = request.batch // len(devices) // choice.accumulate
    program = _program(recipe, traced.placed, choice, rows, model_flops(traced.step.jaxpr))
    return Found(None, program, problem=order.lower_only, compilations=0)


def _program(recipe: Recipe, placed: Placed, choice: Choice, rows: int, flops: Flops) -> Program:
    state = jax.tree.leaves(placed.state)
    shared = jax.tree.leaves(placed.program.exchange().get(placed.state))
    told = placed.program.parameters(placed.state)
    frozen = [leaf for leaf, each in zip(shared, told, strict=True) if each.frozen]
    return Program(
        batch=rows * choice.accumulate * placed.mesh.size,
        micro_batch=rows,
        micro_batches=choice.accumulate,
        sharding=choice.shard,
        remat=choice.remat,
        why=choice.why,
        precision=placed.options.precision,
        attention=placed.options.attention,
        tokens_per_row=placed.program.tokens_per_row,
        model_flops=flops.total,
        least_flops=flops.least,
        flops_unknown=flops.unknown,
        state_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in state),
        moved_bytes=2 * bytes_per_device(placed.state) - bytes_per_device(frozen),
        row_bytes=_row_bytes(placed),
        exchanged=sum(leaf.size for leaf in shared),
        outer=recipe.defaults.get("outer", "nesterov"),
        averaged=placed.program.exchange().average is not None,
    )


def _row_bytes(placed: Placed) -> int:
    """Of text by its tokens; of anything else as the step takes it, though it may be kept in a smaller form."""
    tokens = placed.program.tokens_per_row
    if tokens > 1:
        return TOKEN_BYTES * tokens
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(placed.program.batch_spec(1))))


def _plain(found: Sequence[Hazard]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "kind": each.kind,
            "sentence": each.sentence,
            "file": each.place.file if each.place else None,
            "line": each.place.line if each.place else None,
        }
        for each in found
    )


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
