"""`tpuswarm plan` without a recipe: which published models can be trained on a slice."""

import json
from dataclasses import replace

from tpuswarm import catalog, recipes
from tpuswarm.cli.console import make_console
from tpuswarm.config.units import GIB, parse_count
from tpuswarm.errors import InputError
from tpuswarm.plan.compile.cache import PlanCache
from tpuswarm.plan.compile.pool import CompilePool, no_compiler, no_gpu_compiler
from tpuswarm.plan.compile.request import CompileRequest, CompileResult, PlanOptions, describe_target
from tpuswarm.plan.format import UNKNOWN, format_gib, format_hours, format_range, make_table
from tpuswarm.plan.row import Row
from tpuswarm.train.process.platform import cache_folder
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.user_code import build_recipe

BASE_BYTES = {"bf16": 2, "f32": 4, "int8": 1}
FULL_BYTES = 12
"""Of a trained parameter: itself and AdamW's two moments, in float32."""


def list_models(
    on: list[str], words: dict[str, str], batch: str, options: PlanOptions, tokens: int | None, is_free: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Compile a step of every published model for each slice, and print which fit.

    words: options of the model, such as lora; batch: `auto` means one row for each device.
    """
    rows: dict[tuple[str, str], Row] = {}
    requests: dict[int, tuple[str, catalog.Hardware, CompileRequest]] = {}
    for hardware in {found.name: found for found in map(catalog.find_hardware, on)}.values():
        if reason := no_gpu_compiler(hardware) if isinstance(hardware, catalog.Gpu) else no_compiler():
            raise InputError(f"--on {hardware.name}: {reason}")
        for model in catalog.public_models().values():
            target, preset = recipes.find(model.name)
            asked = replace(
                options,
                target=target,
                options=preset | words,
                batch=hardware.devices if batch == "auto" else parse_count(batch, "batch"),
            )
            build_recipe(target, asked.options)
            if problem := _too_large(model, hardware, words, options):
                rows[hardware.name, model.name] = Row(hardware, CompileResult(False, problem=problem), tokens, is_free)
                continue
            request = CompileRequest(asked, describe_target(hardware))
            requests[id(request)] = model.name, hardware, request
    pool = CompilePool(PlanCache(cache_folder("plan")), lambda request, state: None)
    for request, result in pool.results([request for _, _, request in requests.values()]):
        name, hardware, _ = requests[id(request)]
        row = rows[hardware.name, name] = Row(hardware, result, tokens, is_free)
        echo(f"{name} on {hardware.name}: {row.sentence}", err=True)
    order = {name: number for number, name in enumerate(catalog.public_models())}
    found = sorted(rows.items(), key=lambda item: (item[0][0], order[item[0][1]]))
    if as_json:
        print(json.dumps({"rows": [{"model": name} | row.document() for (_, name), row in found]}))
        return
    for place in dict.fromkeys(place for (place, _), _ in found):
        table = make_table(
            f"published models on {place}",
            (
                "model",
                "fits",
                "sharding",
                "remat",
                "GiB",
                "of",
                "tokens/s expected",
                *(("time", "$ spot") if tokens else ()),
            ),
            [(name, *_cells(row)) for (at, name), row in found if at == place],
            left=("fits", "sharding", "remat"),
        )
        make_console().print("", table)


def _too_large(
    model: catalog.PublicModel, hardware: catalog.Hardware, words: dict[str, str], options: PlanOptions
) -> str:
    """Return why a model cannot fit even if all devices share its state evenly; empty if it may."""
    size = BASE_BYTES.get(words.get("base", "bf16"), 1) if "lora" in words else FULL_BYTES if not options.freeze else 1
    shares = 1 if options.shard == "replicate" else hardware.devices
    state = model.parameters * size / shares
    if "optimizer" in words or "moments" in words or state <= hardware.program_bytes:
        return ""
    return (
        f"does not fit: its state alone takes {state / GIB:.1f} GiB of a device, which has "
        f"{hardware.program_bytes / GIB:.1f}"
    )


def _cells(row: Row) -> tuple[str, ...]:
    result, program = row.result, row.result.program
    available = format_gib(row.accelerator.program_bytes)
    if program is None or result.fits is not True:
        return row.verdict, "", "", "" if result.needed is None else format_gib(result.needed), available
    speed, cost = row.speed, row.cost
    cells = ["yes", program.sharding, program.remat, format_gib(result.used), available]
    cells.append(format_range(speed.tokens_per_s) if speed else UNKNOWN)
    return (*cells, *((format_hours(cost.hours), format_range(cost.spot)) if cost else ()))
