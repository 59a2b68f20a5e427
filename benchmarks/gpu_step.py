"""Run one part of `gpu_all` with tpuswarm, and print a JSON object for each result.

python -m benchmarks.gpu_step gpt2|decoder|gradients|product|stylegan2|command '{"size": "355m", "batch": 32, …}'
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.bare import Bare
from benchmarks.report import median
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.gpt2 import model
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language import loss, program
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.look.profile import TRACE_PATTERN, start_trace, stop_trace
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.process.platform import local_devices
from tpuswarm.train.program import compiled as compiling
from tpuswarm.train.program import request
from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.mesh import make_mesh
from tpuswarm.train.program.request import Choice, default_request
from tpuswarm.train.recipe import Options, Recipe

TRACED_STEPS, SHOWN_KERNELS, SHOWN_LINES = 5, 20, 12
PRODUCTS, PRODUCT_ROUNDS = 20, 6


def gpt2(
    *, size: str, batch: int, shape: dict[str, Any], rounds: int, steps: int, attention: str | None = None,
    loop: str | None = None, chunk_bytes: int | None = None, bf16_logits: bool = False, trace: bool = False,
) -> None:  # fmt: skip
    """Time the step on random tokens. shape: options of the recipe."""
    default_form = request.attention_and_loop
    # The trainer has no options for these: patch its modules.
    module: Any = request
    module.attention_and_loop = lambda *kind: (attention or default_form(*kind)[0], loop or default_form(*kind)[1])
    if chunk_bytes is not None:
        module = program
        module._gpu_chunk_bytes = lambda memory: chunk_bytes
    if bf16_logits:
        module = loss
        module.logits = _bf16_logits
    recipe = GPT2(size=size, data="fake", **shape)
    _time(recipe, batch, batch * recipe.config.context, "tokens", rounds, steps, trace)


def decoder(*, facts: dict[str, Any], rank: int | None, batch: int, context: int, rounds: int, steps: int) -> None:
    """Time the step of a model of this config.json; rank: of its adapters, None to train all parameters."""
    recipe = Decoder(architecture=json.dumps(facts), data="fake", context=context, lora=rank)
    _time(recipe, batch, batch * context, "tokens", rounds, steps, False)


def stylegan2(*, batch: int, rounds: int, steps: int, **options: Any) -> None:
    """Time the step on random pixels, without augmentation."""
    _time(StyleGAN2(data="fake", adapt=False, **options), batch, batch, "pictures", rounds, steps, False)


def _time(recipe: Recipe, batch: int, items: int, unit: str, rounds: int, steps: int, trace: bool) -> None:
    device, start = local_devices()[0], time.perf_counter()
    options = default_request(recipe, batch=batch).options(
        device.platform, device.device_kind, compiling.lowest_capability([device])
    )
    choice = Choice("replicate", "none", 1, "")
    compiled = compiling.compile_traced(compiling.trace(recipe, options, choice, batch, make_mesh([device])))
    assert isinstance(compiled, Compiled)  # no memory was given
    bare = Bare(compiled, recipe)
    rows = bare.to_devices(recipe.data("train").rows(0, batch))
    jax.block_until_ready(bare.step(rows))
    ready_s, seconds = time.perf_counter() - start, []
    bare.steps_done = 0
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for _ in range(steps):
            bare.step(rows)
        jax.block_until_ready(bare.state)
        seconds.append((time.perf_counter() - start) / steps)
    _print(
        seconds=seconds[1:], items=items, unit=unit, flops=compiled.flops.total, device=device.device_kind,
        memory=compiled.memory.total, ready_s=ready_s,
        about=f"batch {batch}, {steps} steps a round" + (f", attention {options.attention}" if trace else ""),
    )  # fmt: skip
    if trace:
        with tempfile.TemporaryDirectory() as folder:
            if error := start_trace(Path(folder)):
                sys.exit(error)
            for _ in range(TRACED_STEPS):
                bare.step(rows)
            jax.block_until_ready(bare.state)
            if error := stop_trace(Path(folder)):
                sys.exit(error)
            _print_kernels(next(Path(folder).glob(TRACE_PATTERN)))


def _print_kernels(path: Path) -> None:
    """Print the time of each kernel, those that differ only by a number together."""
    took, count = Counter[str](), Counter[str]()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if plane.name.startswith("/device:") or jax.default_backend() == "cpu":
            for line in plane.lines:
                if line.name.startswith(("Stream", "tf_XLA")):
                    for event in line.events:
                        name = re.sub(r"[._\d]+$", "", event.name)
                        took[name] += event.duration_ns / 1e6 / TRACED_STEPS
                        count[name] += 1
    rows = [(name, f"{ms:.2f}", f"{count[name] / TRACED_STEPS:g}") for name, ms in took.most_common(SHOWN_KERNELS)]
    rows.append(("all", f"{took.total():.2f}", f"{count.total() / TRACED_STEPS:g}"))
    _print(title="kernels of a step of GPT-2 124M", columns=("kernel", "ms a step", "times a step"), rows=rows)


def gradients(*, rows: int, shape: dict[str, Any]) -> None:
    """Print the error of each gradient in bfloat16, with biases summed in float32 as in training, and in bfloat16."""
    recipe = GPT2(size="124m", data="fake", **shape)
    config, platform = recipe.config, local_devices()[0].platform
    params = model.init(jax.random.key(0), config)
    tokens = jnp.asarray(recipe.data("train").rows(0, rows)["tokens"])

    def gradient(precision: Any) -> Any:
        options = Options(precision=precision, platform=platform)

        def mean_loss(params: Any) -> jax.Array:
            x = model.hidden(params, tokens[:, :-1], config, options, None)
            return loss.mean_loss(x, params["wte"], tokens[:, 1:], config.vocab)

        with jax.default_matmul_precision("highest" if precision == "f32" else "default"):
            return jax.jit(jax.grad(mean_loss))(params)

    exact, wide = gradient("f32"), gradient("bf16")
    module: Any = model
    module.broadcast_then_round = lambda values, like: values.astype(like.dtype)
    narrow = gradient("bf16")

    def error(leaf: jax.Array, right: jax.Array) -> str:
        return f"{jnp.linalg.norm(leaf - right) / jnp.linalg.norm(right):.2%}"

    leaves = zip(leaf_paths(exact), *map(jax.tree.leaves, (exact, wide, narrow)), strict=True)
    _print(
        title=f"error of gradients in bfloat16, {tokens[:, 1:].size:,} tokens, over those in float32",
        columns=("gradient", "biases summed in float32", "in bfloat16"),
        rows=[(path, error(ours, right), error(other, right)) for path, right, ours, other in leaves],
    )


def product(*, size: int) -> None:
    """Print the rate of a product of two square matrices in bfloat16, what cards reach of their peak at best."""
    device = local_devices()[0]
    left = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    multiply = jax.jit(lambda left, right: (left @ right) * jnp.bfloat16(size**-0.5))  # values keep their size
    right, rates = multiply(left, left), []
    for _ in range(PRODUCT_ROUNDS):
        start = time.perf_counter()
        for _ in range(PRODUCTS):
            right = multiply(left, right)
        jax.block_until_ready(right)
        rates.append(2 * size**3 * PRODUCTS / (time.perf_counter() - start) / 1e12)
    _print(columns=("TFLOP/s: median (95% interval)",), rows=[(median(rates).show(",.1f"),)], notes=[
        f"{device.device_kind}, {size:,} x {size:,} in bfloat16, {PRODUCT_ROUNDS} rounds of {PRODUCTS} products"
    ])  # fmt: skip


def command(*, arguments: list[str]) -> None:
    """Run tpuswarm in an empty folder, and print its time and last lines."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tpuswarm", *arguments], cwd=folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode:
        sys.exit(lines[-1])
    took_s = time.perf_counter() - start
    _print(columns=(f"ended after {took_s:.0f} s; its last lines",), rows=[(line,) for line in lines[-SHOWN_LINES:]])


def _bf16_logits(x_BxTxD: jax.Array, wte_VxD: jax.Array, vocab: int, cap: float | None = None) -> jax.Array:
    assert cap is None
    logits_BxTxV = jnp.einsum("btd,vd->btv", *(each.astype(jnp.bfloat16) for each in (x_BxTxD, wte_VxD)))
    real_V = jnp.arange(wte_VxD.shape[0]) < vocab
    return jnp.where(real_V, logits_BxTxV, jnp.bfloat16(-1e30)).astype(jnp.float32)


def _print(**result: Any) -> None:
    print(json.dumps(result), flush=True)


PARTS: dict[str, Callable[..., None]] = {
    "gpt2": gpt2, "decoder": decoder, "gradients": gradients, "product": product, "stylegan2": stylegan2,
    "command": command,
}  # fmt: skip

if __name__ == "__main__":
    PARTS[sys.argv[1]](**json.loads(sys.argv[2]))
