"""Compile a step of every published model for nine slices, and add each row to the table of docs/models.md.

Full and with adapters, context 2,048 and 8,192, 8 rows a step: 720 compilations, a day or two on 2 cores. Cells that
the table has are left as they are; a dash stands for one to compile. --quick compiles one and writes nothing.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan import cell
from benchmarks.report import Settings, Skipped, Table
from tpuswarm.catalog import public_models
from tpuswarm.plan.compile.pool import no_compiler

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SLICES = ("v2-8", "v3-8", "v4-8", "v5e-1", "v5e-4", "v5e-8", "v6e-1", "v6e-8", "v5p-8")
FORMS = {"LoRA 16": ["--lora", "16"], "full": []}
CONTEXTS = (2048, 8192)
UNKNOWN = "–"
"""A cell that is not compiled yet."""


def run(settings: Settings) -> Iterator[Table]:
    if reason := no_compiler():
        raise Skipped(reason)
    rows = []
    if settings.quick:
        rows.append(("smollm2-135m", *_compile("smollm2-135m", "LoRA 16", 2048, ["v5e-1"])))
    else:
        for context in CONTEXTS:
            for form in FORMS:
                rows += [_fill(name, form, context) for name in public_models()]
    yield Table("published models, 8 rows a step; 10 M tokens on spot TPUs", ("", *SLICES[: len(rows[0]) - 1]), rows)


def _fill(name: str, form: str, context: int) -> tuple[str, ...]:
    """Return a row of the page's table; compile the cells that it lacks, and write them."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    title = _title(name, form, context)
    found = next((number for number, line in enumerate(lines) if line.startswith(f"| {title} |")), None)
    if found is None:
        found = max(number for number, line in enumerate(lines) if line.startswith("| ")) + 1
        lines.insert(found, f"| {' | '.join([title, *[UNKNOWN] * len(SLICES)])} |")
    cells = lines[found].strip("| ").split(" | ")[1:]
    if missing := [place for place, known in zip(SLICES, cells, strict=True) if known == UNKNOWN]:
        compiled = iter(_compile(name, form, context, missing))
        cells = [next(compiled) if known == UNKNOWN else known for known in cells]
        lines[found] = f"| {' | '.join([title, *cells])} |"
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return title, *cells


def _title(name: str, form: str, context: int) -> str:
    return f"{name}, {form}, {context:,}"


def _compile(name: str, form: str, context: int, slices: list[str]) -> list[str]:
    on = [word for place in slices for word in ("--on", place)]
    words = [name, *FORMS[form], "--context", str(context), "--batch", "8", "--tokens", "10M", *on, "--json"]
    command = [str(Path(sys.executable).with_name("tpuswarm")), "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return [_describe(row) for row in json.loads(done.stdout)["rows"]]


def _describe(row: dict[str, Any]) -> str:
    if row["fits"] is not True:
        return cell(row)
    hours, dollars = row["hours"], row["dollars"]["spot"]
    price = "" if dollars == "unknown" else f", ${dollars['low']:.2g} to {dollars['high']:.2g}"
    return f"{cell(row)}; {hours['low']:.1g} to {hours['high']:.1g} h{price}"
