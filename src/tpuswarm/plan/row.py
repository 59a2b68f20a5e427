"""Combine a slice or GPU with the compiler's result: speed, cost, a sentence, JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpuswarm.catalog import Gpu, Hardware, accelerators, gpus
from tpuswarm.config.formatting import token_unit
from tpuswarm.config.units import GIB
from tpuswarm.plan.compile.request import CompileResult, PlanOptions
from tpuswarm.plan.format import UNKNOWN
from tpuswarm.plan.speed import Cost, Range, Speed, estimate_cost, estimate_gpu_speed, estimate_speed

ESTIMATES = ("step_seconds", "tokens_per_s", "hours", "dollars")


@dataclass(frozen=True)
class Row:
    """One slice or GPU of a plan."""

    accelerator: Hardware
    result: CompileResult
    tokens: int | None = None
    """To train on."""
    free: bool = False

    @property
    def speed(self) -> Speed | None:
        """Speed of a step; None without a program."""
        program = self.result.program
        if program is None:
            return None
        tokens = program.batch * program.tokens_per_row
        if isinstance(self.accelerator, Gpu):
            assert program.compute_seconds is not None and program.memory_seconds is not None
            return estimate_gpu_speed(program.compute_seconds, program.memory_seconds, tokens)
        return estimate_speed(
            self.accelerator.generation,
            self.accelerator.devices,
            program.model_flops,
            program.least_flops,
            program.moved_bytes,
            tokens,
            program.precision,
        )

    @property
    def cost(self) -> Cost | None:
        """Cost of the tokens, if given."""
        speed = self.speed
        if speed is None or self.tokens is None:
            return None
        return estimate_cost(speed.tokens_per_s, self.tokens, self.accelerator.price(), free=self.free)

    @property
    def unit(self) -> str:
        """`tokens` or `rows`."""
        return token_unit(self.result.program.tokens_per_row) if self.result.program else "tokens"

    @property
    def verdict(self) -> str:
        """`yes`, `no` or `unknown`."""
        return {True: "yes", False: "no", None: UNKNOWN}[self.result.fits]

    @property
    def sentence(self) -> str:
        """The result and its reasons."""
        result, program = self.result, self.result.program
        if result.fits is False:
            return f"does not fit: {explain_no_fit(self.accelerator, result)}" if result.smallest else result.problem
        if program is None:
            return f"{UNKNOWN}: {result.problem}"
        rows = f"{program.micro_batch} rows per device"
        if program.micro_batches > 1:
            rows += f", {program.micro_batches} micro-batches"
        if result.too_large is not None:
            rows += f" ({result.too_large} do not fit)"
        return f"{'fits' if result.fits else UNKNOWN}: {rows}; {program.why}"

    @property
    def warnings(self) -> list[str]:
        """Hazards with their lines of code."""
        return [
            hazard["sentence"] + (f" ({hazard['file']}:{hazard['line']})" if hazard["file"] else "")
            for hazard in self.result.hazards or ()
        ]

    def document(self) -> dict[str, Any]:
        """Return the row for JSON."""
        result, program = self.result, self.result.program
        facts: dict[str, Any] = {
            "accelerator": self.accelerator.name,
            "devices": self.accelerator.devices,
            "fits": result.fits,
            "sentence": self.sentence,
            "hbm_used_bytes": result.used,
            "hbm_bytes": self.accelerator.program_bytes,
            "memory": {"arguments": result.arguments, "temporaries": result.temporaries, "code": result.code},
            "micro_batch_too_large": result.too_large,
            "compilations": result.compilations,
            "compile_seconds": result.seconds,
            "hazards": None if result.hazards is None else [mark_unknown(dict(hazard)) for hazard in result.hazards],
        }
        names = ("batch", "micro_batch", "micro_batches", "sharding", "remat", "why", "precision", "attention")
        for name in (*names, "tokens_per_row", "model_flops", "flops_unknown", "state_bytes"):
            facts[name] = getattr(program, name) if program else None
        facts |= self._estimates()
        if result.fits is not True:
            facts["problem"] = result.problem
        return mark_unknown(facts)

    def _estimates(self) -> dict[str, Any]:
        speed, cost = self.speed, self.cost
        dollars = {name: range_object(getattr(cost, name)) if cost else None for name in ("on_demand", "spot")}
        return {
            "floor_seconds": speed.floor_seconds if speed else None,
            "floor_by": speed.bound if speed else None,
            "floor_tokens_per_s": speed.floor_tokens_per_s if speed else None,
            "step_seconds": range_object(speed.seconds if speed else None),
            "tokens_per_s": range_object(speed.tokens_per_s if speed else None),
            "tokens": self.tokens,
            "hours": range_object(cost.hours if cost else None),
            "dollars": {**dollars, "region": cost.region if cost else None},
            "expected_from": speed.source if speed else None,
            "estimates": list(ESTIMATES),
        }


def explain_no_fit(accelerator: Hardware, result: CompileResult) -> str:
    """Explain how much memory is missing and which changes would help; mark estimates."""
    available, state = accelerator.program_bytes, result.smallest_state or 0
    if not result.needed:
        return f"even its smallest form ({result.smallest}) does not fit; the compiler does not say by how much"
    options = []
    if not result.is_sharded and accelerator.devices > 1:
        options.append("splitting the state over the devices (drop --shard)")
    if result.rows > 1:
        options.append(
            f"fewer than {result.rows} rows per device at a time (a larger --accumulate or a smaller --batch)"
        )
    options.append(_larger_hardware(accelerator, result))
    if state < available:
        share = (available - state) / (result.needed - state)
        options.append(f"rows at most {share:.0%} as long, for example a smaller --context (estimate)")
    if "recomputed" not in result.smallest:
        options.append("recomputing layers, which this recipe does not support (forms)")
    return (
        f"even its smallest form ({result.smallest}) needs {result.needed / GIB:.2f} GiB per device, "
        f"{(result.needed - available) / GIB:.2f} more than the {available / GIB:.2f} available; "
        f"its state takes {state / GIB:.2f}; options: {'; '.join(options)}"
    )


def _larger_hardware(accelerator: Hardware, result: CompileResult) -> str:
    def is_enough(other: Hardware) -> bool:
        return _needed_bytes(result, accelerator.devices, other.devices) <= other.program_bytes

    if isinstance(accelerator, Gpu):
        if names := ", ".join(gpu.name for gpu in gpus() if is_enough(gpu)):
            return f"a GPU with more memory ({names}; estimate)"
        return "a smaller model or shorter rows: no GPU has enough (estimate)"
    same = [tpu for tpu in accelerators() if tpu.generation is accelerator.generation]
    for tpu in sorted(same, key=lambda tpu: tpu.chips):
        if tpu.chips > accelerator.chips and is_enough(tpu):
            return f"more chips, at least {tpu.name} (estimate; check with --on {tpu.name})"
    available = accelerator.program_bytes
    larger = [tpu for tpu in accelerators() if tpu.program_bytes > available and is_enough(tpu)]
    if generations := dict.fromkeys(tpu.generation.name for tpu in larger):
        names = ", ".join(generations)
        return f"chips with more memory ({names}; estimate): no {accelerator.generation.name} slice has enough"
    return "a smaller model or shorter rows: no TPU slice has enough (estimate)"


def _needed_bytes(result: CompileResult, devices: int, other_devices: int) -> float:
    """Estimate bytes per device on more devices: they split the state and the rows, but not a single row."""
    assert result.needed is not None and result.smallest_state is not None
    split = devices / other_devices if result.is_sharded or devices == 1 else 1
    rows = min(result.rows, max(1, result.rows * devices / other_devices))
    return result.smallest_state * split + (result.needed - result.smallest_state) * rows / result.rows


def range_object(values: Range | None) -> dict[str, float] | None:
    """Return a range for JSON."""
    return None if values is None else {"low": values.low, "high": values.high}


def plan_document(recipe: str, options: PlanOptions, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the whole plan for JSON."""
    return {"recipe": recipe, "asked": asdict(options), "rows": [row.document() for row in rows]}


def mark_unknown(value: Any) -> Any:
    """Replace each None by "unknown"."""
    if isinstance(value, dict):
        return {name: mark_unknown(inner) for name, inner in value.items()}
    return UNKNOWN if value is None else value
