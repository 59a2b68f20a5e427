"""One line of a plan: a slice, the compiler's answer, and what follows from it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tpuswarm.catalog import Accelerator
from tpuswarm.config.formatting import token_unit
from tpuswarm.plan.advice import advice
from tpuswarm.plan.order import Asked, Found
from tpuswarm.plan.roofline import Cost, Range, Speed, cost, speed
from tpuswarm.plan.words import UNKNOWN

ESTIMATES = ("step_seconds", "tokens_per_s", "hours", "dollars")
"""What rests on a guess, or on one of these."""


@dataclass(frozen=True)
class Row:
    """A slice and what was found for it."""

    accelerator: Accelerator
    found: Found
    tokens: int | None = None
    """To train for; None: nobody asked."""
    free: bool = False
    """The slice costs nothing."""

    @property
    def speed(self) -> Speed | None:
        """Of one step; None where no program was found that fits, or may fit."""
        program = self.found.program
        if program is None:
            return None
        return speed(
            self.accelerator.generation,
            self.accelerator.devices,
            program.model_flops,
            program.least_flops,
            program.moved_bytes,
            program.batch * program.tokens_per_row,
            program.precision,
        )

    @property
    def cost(self) -> Cost | None:
        """Of the tokens asked for."""
        fast = self.speed
        if fast is None or self.tokens is None:
            return None
        return cost(fast.tokens_per_s, self.tokens, self.accelerator.price(), free=self.free)

    @property
    def unit(self) -> str:
        """What its tokens are: rows, where a row counts for one; tokens where nobody knows."""
        return token_unit(self.found.program.tokens_per_row) if self.found.program else "tokens"

    @property
    def verdict(self) -> str:
        """yes, no or unknown."""
        return {True: "yes", False: "no", None: UNKNOWN}[self.found.fits]

    @property
    def sentence(self) -> str:
        """The answer and its reasons in words."""
        found, program = self.found, self.found.program
        if found.fits is False:
            return f"does not fit: {advice(self.accelerator, found)}" if found.smallest else found.problem
        if program is None:
            return f"{UNKNOWN}: {found.problem}"
        rows = f"{program.micro_batch} rows per device"
        if program.micro_batches > 1:
            rows += f", {program.micro_batches} micro-batches"
        if found.too_large is not None:
            rows += f" ({found.too_large} do not fit)"
        return f"{'fits' if found.fits else UNKNOWN}: {rows}; {program.why}"

    @property
    def warnings(self) -> list[str]:
        """Each hazard in a sentence, with its place."""
        return [
            each["sentence"] + (f" ({each['file']}:{each['line']})" if each["file"] else "")
            for each in self.found.hazards or ()
        ]

    def document(self) -> dict[str, Any]:
        """For JSON; "unknown" where nobody can say."""
        found, program = self.found, self.found.program
        facts: dict[str, Any] = {
            "accelerator": self.accelerator.name,
            "devices": self.accelerator.devices,
            "fits": found.fits,
            "sentence": self.sentence,
            "hbm_used_bytes": found.used,
            "hbm_bytes": self.accelerator.generation.compiler_hbm_bytes,
            "memory": {"arguments": found.arguments, "temporaries": found.temporaries, "code": found.code},
            "micro_batch_too_large": found.too_large,
            "compilations": found.compilations,
            "compile_seconds": found.seconds,
            "hazards": None if found.hazards is None else [known(dict(each)) for each in found.hazards],
        }
        names = ("batch", "micro_batch", "micro_batches", "sharding", "remat", "why", "precision", "attention")
        for name in (*names, "tokens_per_row", "model_flops", "flops_unknown", "state_bytes"):
            facts[name] = getattr(program, name) if program else None
        facts |= self._money()
        if found.fits is not True:
            facts["problem"] = found.problem
        return known(facts)

    def _money(self) -> dict[str, Any]:
        fast, price = self.speed, self.cost
        spent = {name: span_object(getattr(price, name)) if price else None for name in ("on_demand", "spot")}
        return {
            "floor_seconds": fast.floor_seconds if fast else None,
            "floor_by": fast.bound if fast else None,
            "floor_tokens_per_s": fast.floor_tokens_per_s if fast else None,
            "step_seconds": span_object(fast.seconds if fast else None),
            "tokens_per_s": span_object(fast.tokens_per_s if fast else None),
            "tokens": self.tokens,
            "hours": span_object(price.hours if price else None),
            "dollars": {**spent, "region": price.region if price else None},
            "expected_from": fast.source if fast else None,
            "estimates": list(ESTIMATES),
        }


def span_object(each: Range | None) -> dict[str, float] | None:
    """A range for JSON."""
    return None if each is None else {"low": each.low, "high": each.high}


def document(recipe: str, asked: Asked, rows: Sequence[Row]) -> dict[str, Any]:
    """The whole plan for JSON."""
    return {"recipe": recipe, "asked": asdict(asked), "rows": [row.document() for row in rows]}


def known(value: Any) -> Any:
    """`value` with every None as the word."""
    if isinstance(value, dict):
        return {name: known(each) for name, each in value.items()}
    return UNKNOWN if value is None else value
