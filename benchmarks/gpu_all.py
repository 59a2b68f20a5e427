"""Measure one GPU in at most eight minutes, each part alone on it, in a process that ends before the next. GPU only.

A part prints its table as soon as it has a result, and is killed at its limit; parts for which no time is left are
skipped. nanoGPT, llm.c and stylegan3 are read from the folder --peers (docs/benchmarks.md); a missing one is skipped.
Aims on an H100: 1.2 times nanoGPT and stylegan3, StyleGAN2 ready in 45 s. `--quick` runs small parts, also on a CPU.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Settings, Skipped, Table, median
from benchmarks.torch_speed import torch_python
from tpuswarm.catalog import peak_flops
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.process.platform import has_gpu

TOTAL_S, QUICK_PART_S = 480, 600
MIN_PART_S = 15
GPT2_NAME, STYLEGAN2_NAME = "tpuswarm, GPT-2 124M", "tpuswarm, stylegan2-256"
TINY_GPT2: dict[str, Any] = {"layers": 2, "heads": 2, "width": 64, "context": 128, "vocab": 500}
TINY_STYLEGAN2: dict[str, Any] = {
    "resolution": 16,
    "latent": 8,
    "mapping": 2,
    "channels": 4,
    "most_channels": 8,
    "group": 2,
}
TUNED_LESS = (
    "--xla_gpu_enable_triton_gemm=false --xla_gpu_experimental_enable_fusion_autotuner=false --xla_gpu_autotune_level=2"
)
"""One candidate for each kernel but products and convolutions, whose results are not compared."""
COLUMNS = ("", "a second: median (95% interval)", "ms a step", "MFU", "memory, GiB", "ready, s", "speed over")
PEERS = {
    "nanogpt": "karpathy/nanoGPT", "llmc": "karpathy/llm.c", "stylegan3": "NVlabs/stylegan3", "transformers": ""
}  # fmt: skip
"""Their clones; transformers is an installed package."""


class Part(NamedTuple):
    """options: of the function `kind` in gpu_step.py, or in gpu_peers.py if it is a peer's; beside: an earlier part."""

    name: str
    limit_s: int
    kind: str
    options: dict[str, Any]
    beside: str = ""
    flags: str = ""
    estimate: str = ""


def parts(quick: bool) -> list[Part]:
    """Return all parts, the most important first."""
    counts = {"rounds": 2, "steps": 2} if quick else {"rounds": 6, "steps": 10}
    shape: dict[str, Any] = TINY_GPT2 if quick else {}
    gpt2 = {"size": "124m", "batch": 2 if quick else 64, "shape": shape, **counts}
    few = gpt2 if quick else gpt2 | {"rounds": 4, "steps": 8}
    pictures: dict[str, Any] = {"batch": 4, **TINY_STYLEGAN2} if quick else {"batch": 32, "resolution": 256}
    stylegan2 = pictures | counts | ({} if quick else {"rounds": 4, "steps": 16})  # 16 steps have every regulariser
    context = GPT2(size="124m", data="fake", **shape).config.context
    networks = vars(StyleGAN2(data="fake", **{k: v for k, v in pictures.items() if k != "batch"}).config)
    run = ["train", "gpt2-tiny", "--data", "fake", "--run", "run", "--steps", "20" if quick else "2000"]
    return [
        Part(GPT2_NAME, 70, "gpt2", gpt2 | {"trace": True}),
        Part("nanoGPT", 60, "nanogpt", nanogpt_options(gpt2), GPT2_NAME),
        Part("llm.c", 30, "llmc", {"batch": gpt2["batch"], "context": context}, GPT2_NAME),
        Part("matrix limit", 30, "product", {"size": 256 if quick else 8192}),
        Part("sums for biases", 50, "gradients", {"rows": 2 if quick else 16, "shape": shape}),
        Part(STYLEGAN2_NAME, 170, "stylegan2", stylegan2),
        Part("stylegan3, cfg stylegan2", 60, "stylegan3", {**networks, **stylegan2}, STYLEGAN2_NAME),
        Part("tpuswarm demo", 120, "command", {"arguments": ["demo"]}),
        Part("two members on one card", 60, "command", {"arguments": [*run, "--members", "2"]}),
        Part("no Triton products", 45, "gpt2", few, GPT2_NAME, "--xla_gpu_enable_triton_gemm=false", "1.05"),
        Part("stylegan2-256, kernels tuned less", 120, "stylegan2", stylegan2, STYLEGAN2_NAME, TUNED_LESS,
             "ready in half of the time"),
        Part("products by cublasLt", 45, "gpt2", few, GPT2_NAME, "--xla_gpu_enable_cublaslt=true", "1.0 or more"),
        Part("batch 128", 45, "gpt2", few | ({} if quick else {"batch": 128}), GPT2_NAME, "", "1.03"),
        Part("logits, 8 GiB at a time", 45, "gpt2", few | {"chunk_bytes": 2**33}, GPT2_NAME, "", "1.0"),
        Part("logits in bfloat16", 45, "gpt2", few | {"bf16_logits": True}, GPT2_NAME, "", "1.05"),
        Part("attention by XLA", 45, "gpt2", few | {"attention": "xla"}, GPT2_NAME, "", "0.6"),
        Part("layers in a loop", 45, "gpt2", few | {"loop": "scan"}, GPT2_NAME, "", "0.9"),
    ]  # fmt: skip


def nanogpt_options(gpt2: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `nanogpt` for those of `gpt2`."""
    config = GPT2(size=gpt2["size"], data="fake", **gpt2["shape"]).config
    same = {name: getattr(config, name) for name in ("layers", "heads", "width", "context")}
    return same | {"vocab": config.padded_vocab} | {name: gpt2[name] for name in ("batch", "rounds", "steps")}


def run(settings: Settings) -> Iterator[Table]:
    yield from measure(parts(settings.quick), TOTAL_S, settings)


def measure(parts: Sequence[Part], total_s: float, settings: Settings) -> Iterator[Table]:
    """Run parts one after another until their time is over; yield their tables."""
    if not settings.quick and not has_gpu():
        raise Skipped("there is no NVIDIA GPU with JAX's CUDA plugin on this machine; --quick runs small parts here")
    start, speeds = time.monotonic(), dict[str, dict[str, Any]]()
    for part in parts:
        left_s = QUICK_PART_S if settings.quick else min(part.limit_s, total_s - (time.monotonic() - start))
        if left_s < MIN_PART_S:
            yield Table(part.name, ("",), [("no time was left",)])
            continue
        if part.flags and not has_gpu():
            yield Table(part.name, ("",), [("only on a GPU",)])
            continue
        try:
            for result in _results(part, settings.peers, left_s):
                if "seconds" in result:
                    speeds[part.name] = result
                    result = _speed(part, result, speeds.get(part.beside))
                yield Table(**{"title": part.name} | result)
        except Skipped as reason:
            yield Table(part.name, ("",), [(f"failed: {reason}",)])


def _results(part: Part, peers: Path, limit_s: float) -> Iterator[dict[str, Any]]:
    """Run a part and yield what it prints. Raises Skipped if it cannot start, fails or passes its limit."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as empty_cache:
        environment = {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {part.flags}".strip(),
            "JAX_TRACEBACK_FILTERING": "off",  # else the last line is a note about it, not the error
            "JAX_COMPILATION_CACHE_DIR": empty_cache,
        }
        child = subprocess.Popen(
            _command(part, peers), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
            env=os.environ | environment,
        )  # fmt: skip
        assert child.stdout is not None
        start, timer = time.monotonic(), threading.Timer(limit_s, os.killpg, (child.pid, signal.SIGKILL))
        timer.start()
        try:
            yield from map(json.loads, child.stdout)
            status = child.wait()
        finally:
            timer.cancel()
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # after an interruption, and what it has left running
            child.wait()
        if status:
            errors.seek(0)
            lines = [line for line in errors.read().splitlines() if line.strip()]
            late = f"it was killed after {limit_s:.0f} s; " if time.monotonic() - start > limit_s else ""
            raise Skipped(late + (lines[-1] if lines else f"exit status {status}"))


def _command(part: Part, peers: Path) -> list[str]:
    options = json.dumps(part.options)
    if part.kind not in PEERS:
        return [sys.executable, "-m", "benchmarks.gpu_step", part.kind, options]
    clone = peers.absolute() / PEERS[part.kind].rpartition("/")[2]
    if PEERS[part.kind] and not clone.is_dir():
        raise Skipped(f"there is no {clone}: git clone https://github.com/{PEERS[part.kind]} {clone}")
    device = "cuda" if has_gpu() else "cpu"
    script = Path(__file__).with_name("gpu_peers.py")
    return [str(torch_python(device)), str(script), part.kind, str(clone), device, options]


def _speed(part: Part, result: dict[str, Any], beside: dict[str, Any] | None) -> dict[str, Any]:
    """Return the table of a part's speed, and of the part's beside which it is read."""
    speed = median([result["items"] / seconds for seconds in result["seconds"]])
    step_s = median(result["seconds"]).middle
    ours = result if "flops" in result else beside  # a peer does not count its FLOPs
    peak = peak_flops(ours["device"], "bf16") if ours else None
    mfu = f"{speed.middle * ours['flops'] / ours['items'] / peak:.1%}" if ours and peak else "–"
    over = "–"
    if beside:
        over = f"{speed.middle / median([beside['items'] / seconds for seconds in beside['seconds']]).middle:.3f}"
    row = (
        part.name,
        f"{speed.show(',.1f')} {result['unit']}",
        f"{step_s * 1e3:.1f}",
        mfu,
        f"{result['memory'] / 2**30:.1f}" if "memory" in result else "–",
        f"{result['ready_s']:.0f}" if "ready_s" in result else "–",
        over,
    )
    notes = [f"{len(result['seconds'])} rounds; {result['about']}"]
    if part.estimate:
        notes.append(f"estimated before it was measured: {part.estimate}")
    columns = (*COLUMNS[:-1], f"{COLUMNS[-1]} {part.beside}" if beside else "")
    return {"columns": columns, "rows": [row], "notes": notes}
