"""A whole GPT-2 124M step on 8 virtual CPU devices, replicated and sharded, with equal losses. About 5 minutes.

Each form is compiled and run for 2 steps in a process of its own, one after the other: 8 replicas take about
21 GiB. Limit: losses within 1e-4 relative of each other. The runs use a short context, which changes no parameter but
the positions; the whole context of 1024 is compiled, not run. The caches of earlier compilations are not used.

    python -m benchmarks.compile_124m OPTIONS    # one form, options as JSON: what the benchmark starts itself
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.bare import Bare
from benchmarks.report import Settings, Skipped, Table, verdict
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program.compiled import Compiled, compile_step
from tpuswarm.train.program.request import default_request

DEVICES, BATCH, STEPS = 8, 8, 2
SHORT, WHOLE = 64, 1024
LIMIT = 1e-4
LACKING = 3
"""Exit status of a form for which this machine has not the memory."""
# Eight devices share a few cores: the last one comes to a collective long after the first.
FLAGS = (
    f"--xla_force_host_platform_device_count={DEVICES}",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=1200",
    "--xla_cpu_collective_timeout_seconds=1200",
)


def run(settings: Settings) -> Table:
    """Both forms at the short context, compiled and run; then both at the whole one, compiled."""
    layers = 1 if settings.quick else 12
    contexts = (SHORT,) if settings.quick else (SHORT, WHOLE)
    rows: list[tuple[str, ...]] = []
    losses: dict[str, list[float]] = {}
    for context in contexts:
        for shard in ("replicate", "fsdp"):
            found = _start({"shard": shard, "context": context, "layers": layers, "run": context == SHORT})
            losses[shard] = found["losses"] or losses[shard]
            rows.append(
                (
                    f"{shard} ({found['why']})",
                    str(context),
                    f"{found['compile_s']:.0f}",
                    *(f"{found[name] / 2**20:,.0f}" for name in ("arguments", "temporaries")),
                    f"{found['peak'] / 2**30:.1f}",
                    str(found["reshards"]),
                    ", ".join(f"{loss:.5f}" for loss in found["losses"]) or "compiled only",
                )
            )
    pairs = zip(losses["replicate"], losses["fsdp"], strict=True)
    apart = max(abs(one - other) / one for one, other in pairs)
    return Table(
        f"GPT-2 124M, {DEVICES} virtual CPU devices, batch {BATCH}",
        (
            "form",
            "context",
            "compile, s",
            "state per device, MiB",
            "temporaries, MiB",
            "peak of process, GiB",
            "reshards",
            "losses",
        ),
        rows,
        [
            f"losses apart by {apart:.1e} relative, limit {LIMIT:.0e}: {verdict(apart <= LIMIT)}",
            f"{layers} layers; random tokens of a vocabulary of {GPT2(size='124m', data='fake').config.vocab:,}; "
            "state and temporaries by the compiler; reshards: arrays it says it gathers whole for want of a better way",
        ],
    )


def _start(options: dict[str, Any]) -> dict[str, Any]:
    environment = os.environ | {
        "XLA_FLAGS": " ".join(FLAGS),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.compile_124m", json.dumps(options)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode == LACKING:
        raise Skipped(child.stderr.splitlines()[-1])
    if child.returncode:
        raise RuntimeError(f"{options} failed: {child.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(child.stdout)
    return found | {"reshards": child.stderr.count("Involuntary full rematerialization")}


def one_form(shard: str, context: int, layers: int, run: bool) -> dict[str, Any]:
    """Compile one form and, if asked, run its first steps: seconds, bytes and losses."""
    recipe = GPT2(size="124m", data="fake", context=context, layers=layers)
    request = default_request(recipe, batch=BATCH, shard=shard, accumulate=1)
    start = time.perf_counter()
    # What is only compiled needs no room on this machine; what is run must fit its share of the real memory.
    compiled = compile_step(recipe, request, local_devices(), memory_bytes=None if run else 2**40)
    found: dict[str, Any] = {
        "compile_s": time.perf_counter() - start,
        "why": compiled.choice.why,
        "arguments": compiled.memory.arguments,
        "temporaries": compiled.memory.temporaries,
        "losses": [],
    }
    if run:
        _check_room(compiled)
        bare, source = Bare(compiled, recipe), recipe.data("train")
        for step in range(STEPS):
            metrics = bare.step(bare.put(source.rows(step * BATCH, BATCH)))
            found["losses"].append(float(metrics["loss"]))
    found["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def _check_room(compiled: Compiled) -> None:
    """End this process where the machine has less memory free than all devices take: Linux would kill something."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    needed = compiled.memory.total * DEVICES
    if needed > free:
        shard = compiled.choice.shard
        print(f"{shard} takes {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free", file=sys.stderr)
        sys.exit(LACKING)


if __name__ == "__main__":
    print(json.dumps(one_form(**json.loads(sys.argv[1]))))
