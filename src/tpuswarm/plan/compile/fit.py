"""Compile a step for one slice or GPU, and return whether and how it fits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.experimental import topologies

from tpuswarm.config.units import GIB
from tpuswarm.errors import InputError
from tpuswarm.plan.compile.hazards import Hazard, explain_refusal, find_hazards
from tpuswarm.plan.compile.kernels import least_time
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, Program, Target
from tpuswarm.train.data.feed import MAX_BATCHES_ON_DEVICES, MAX_READ_AHEAD
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program.batch_search import BatchSearch, CompiledBatch
from tpuswarm.train.program.compiled import DoesNotFit, Placed
from tpuswarm.train.program.exchanged import exchanged
from tpuswarm.train.program.flops import Flops, model_flops
from tpuswarm.train.program.mesh import batch_sharding, bytes_per_device, make_mesh
from tpuswarm.train.program.request import Choice, Request, default_request
from tpuswarm.train.recipe import Recipe
from tpuswarm.train.settings import check_batch
from tpuswarm.train.user_code import build_recipe, users_line

Report = Callable[[str], None]

MAX_GROWTH = 64
"""Largest micro-batch to try, in usual ones: small models have room for thousands."""
EVALUATION_BATCHES = 3
"""An evaluation holds three batches on the devices: two that wait and the next (train/loop/evaluate.py)."""
TOKEN_BYTES = 2
"""Tokens are stored as uint16."""
NO_CALLBACKS = (
    "the step calls the host (jax.debug.print), which compiles for a GPU only where there is one: leave it out to plan"
)


def check_fit(compile_request: CompileRequest, report: Report) -> CompileResult:
    """Carry out one request; raise InputError if it is invalid for every target."""
    options, target = compile_request.options, compile_request.target
    recipe = build_recipe(options.target, options.options)
    request = default_request(
        recipe,
        batch=options.batch,
        precision=options.precision,
        shard=options.shard,
        accumulate=options.accumulate,
        freeze=options.freeze,
        ema=options.ema,
    )
    if options.batch is not None:
        try:
            check_batch(options.batch, target.devices, request.accumulate or 1, can_use_fewer=False)
        except InputError as error:  # only here is the recipe's number of micro-batches known
            return CompileResult(None, problem=str(error))
    if compile_request.lower_only:
        return _lower(recipe, request, compile_request)
    try:
        topology = topologies.get_topology_desc(
            platform=target.platform, topology_name=target.topology_name, **target.compiler_options
        )
    except jax.errors.JaxRuntimeError as error:
        return CompileResult(None, problem=f"the compiler has no topology {target.topology_name}: {_first_line(error)}")
    sizes = BatchSearch(recipe, request, topology.devices, target.memory_bytes, report)
    try:
        sized, above = (sizes.compile_requested(), None) if options.batch else sizes.find_largest(MAX_GROWTH)
        return _describe(recipe, sizes, target, sized, above)
    except DoesNotFit as error:
        last = error.last
        return CompileResult(
            False, needed=last.needed or None, smallest_state=last.state, smallest=last.choice.why,
            is_sharded=last.choice.shard == "fsdp",
            rows=error.batch // target.devices // last.choice.accumulate, problem=str(error),
            compilations=sizes.compilations,
        )  # fmt: skip
    except compiling.CompilerRefused as error:
        assert error.__cause__ is not None
        if "no platforms that are instances of gpu" in str(error.__cause__):
            return CompileResult(None, problem=NO_CALLBACKS, compilations=sizes.compilations)
        hazard = explain_refusal(error.__cause__, error.jaxpr)
        return CompileResult(False, problem=f"{error}", hazards=_to_json([hazard]), compilations=sizes.compilations)


def _describe(
    recipe: Recipe, sizes: BatchSearch, target: Target, sized: CompiledBatch, above: int | None
) -> CompileResult:
    memory, compiled = sized.compiled.memory, sized.compiled
    program = _make_program(recipe, compiled, compiled.choice, sized.rows, compiled.flops)
    if target.platform == "cuda":
        hlo = compiled.step.as_text()  # type: ignore[attr-defined]
        time = least_time(hlo, target.flops_per_s, target.bytes_per_s)
        program = replace(program, compute_seconds=time.compute, memory_seconds=time.memory)
    hazards = [*_check_evaluation(sizes, target, sized), *find_hazards(compiled, program.batch, target.matrix_unit)]
    return CompileResult(
        True, program, memory.arguments, memory.temporaries, memory.code, above,
        hazards=_to_json(hazards), compilations=sizes.compilations,
    )  # fmt: skip


def _check_evaluation(sizes: BatchSearch, target: Target, sized: CompiledBatch) -> list[Hazard]:
    """Compile the evaluation at its batch while training: the rows of a micro-batch."""
    compiled = sized.compiled
    spec = dict(compiled.program.batch_spec(sized.rows * compiled.mesh.size))
    rows = compiling.with_sharding(spec, batch_sharding(compiled.mesh))
    traced = compiled.evaluate.trace(compiled.state, rows)  # type: ignore[attr-defined]
    sizes.compilations += 1
    try:
        memory = compiling.measure_memory(traced.lower().compile(), compiled.options.platform, 0)
    except Exception as error:  # noqa: BLE001  # ops and kernels without a form for this target raise anything
        if not compiling.is_out_of_memory(str(error), compiled.options.platform):
            refused = explain_refusal(error, traced.jaxpr)
            return [replace(refused, sentence=f"in its evaluation {refused.sentence}")]
        needed = compiling.parse_needed_bytes(str(error))
    else:
        state = bytes_per_device(compiled.state)
        training_batches = (compiled.memory.arguments - state) * MAX_READ_AHEAD // MAX_BATCHES_ON_DEVICES
        batches = training_batches + EVALUATION_BATCHES * (memory.arguments - state)
        needed = state + batches + memory.temporaries + compiled.memory.code + memory.code
        if target.memory_bytes is None or needed <= target.memory_bytes:
            return []
    need = f"needs {needed / GIB:.2f} GiB per device" if needed else "is too large for the compiler"
    have = f", of {target.memory_bytes / GIB:.2f} available" if target.memory_bytes else ""
    sentence = f"it trains, but its evaluation of {sized.rows} rows per device {need}{have}: use --eval-batch"
    return [Hazard("evaluation", sentence, None)]


def _lower(recipe: Recipe, request: Request, compile_request: CompileRequest) -> CompileResult:
    """Without a TPU compiler, check that the program lowers for TPU; return its state and FLOPs.

    It uses as many virtual CPU devices as the slice has, and chooses the form by the size of the state alone.
    """
    target, devices = compile_request.target, jax.devices()
    options = request.options("tpu", target.device_kind)
    if compile_request.options.batch is None:
        unit = len(devices) * (request.accumulate or 1)
        request = replace(request, batch=max(1, request.batch // unit) * unit)
    choice = next(
        compiling.possible_choices(recipe, request, "tpu", target.device_kind, len(devices), target.memory_bytes)
    )
    traced = compiling.trace(recipe, options, choice, request.batch, make_mesh(devices))
    try:
        traced.step.lower(lowering_platforms=("tpu",))
    except Exception as error:  # noqa: BLE001  # ops and kernels without a form for TPU raise anything
        return CompileResult(None, problem=f"the program cannot be lowered for TPU: {_first_line(error)}")
    rows = request.batch // len(devices) // choice.accumulate
    program = _make_program(recipe, traced.placed, choice, rows, model_flops(traced.step.jaxpr))
    return CompileResult(None, program, problem=compile_request.lower_only, compilations=0)


def _make_program(recipe: Recipe, placed: Placed, choice: Choice, rows: int, flops: Flops) -> Program:
    state = jax.tree.leaves(placed.state)
    shared = jax.tree.leaves(placed.program.exchange().get(placed.state))
    parameters = placed.program.parameters(placed.state)
    frozen = [leaf for leaf, parameter in zip(shared, parameters, strict=True) if parameter.frozen]
    exchange = exchanged(placed.program, placed.state)
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
        shared_elements=sum(leaf.size for leaf in jax.tree.leaves(exchange.get(placed.state))),
        outer=recipe.defaults.get("outer", "nesterov"),
        is_averaged=exchange.average is not None,
    )


def _row_bytes(placed: Placed) -> int:
    """Return the stored size of a row: of text by its tokens, else as the step takes it, which may be larger."""
    tokens = placed.program.tokens_per_row
    if tokens > 1:
        return TOKEN_BYTES * tokens
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(dict(placed.program.batch_spec(1))))


def _to_json(hazards: Sequence[Hazard]) -> tuple[dict[str, Any], ...]:
    found = []
    for hazard in hazards:
        file, line = users_line(hazard.place) or (None, None)
        found.append({"kind": hazard.kind, "sentence": hazard.sentence, "file": file, "line": line})
    return tuple(found)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
