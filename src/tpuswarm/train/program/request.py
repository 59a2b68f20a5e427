"""What is asked of a program, and the ways to run it on given devices, best first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpuswarm.config.limits import check_settings
from tpuswarm.train.recipe import Options, Recipe, Remat, default_precision

BATCH = 32
"""Rows of a step for a recipe that wants no number of its own."""

STATE_SHARE = 0.6
"""With `auto`, a replicated state may take this share of a device's memory; activations need the rest."""


REMATS: Mapping[Remat, str] = {
    "none": "",
    "dots": ", layers recomputed but for their products",
    "full": ", layers recomputed",
}
"""From the one that takes no time to the one that takes no memory, with the words for it."""


@dataclass(frozen=True)
class Request:
    """What the user asks of a program; None leaves accumulate to `compile_step`, and precision to the platform."""

    batch: int
    shard: str = "auto"
    precision: str | None = None
    accumulate: int | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None

    def options(self, platform: str, kind: str) -> Options:
        """The program's options on devices of this platform and kind, before any choice that depends on memory."""
        precision: Any = self.precision or default_precision(platform)
        check_settings({"precision": precision})
        attention, loop = attention_and_loop(platform, kind)
        return Options(
            precision=precision,
            clip=self.clip,
            freeze=self.freeze,
            decay=self.decay,
            ema=self.ema,
            platform=platform,
            attention=attention,
            loop=loop,
        )


def usual_request(recipe: Recipe, **asked: Any) -> Request:
    """What the trainer asks for: what is asked (None is not), and what the recipe wants where nothing is."""
    wanted = ("batch", "accumulate", "clip", "freeze", "decay", "ema")
    usual = {"batch": BATCH} | {name: recipe.defaults[name] for name in wanted if name in recipe.defaults}
    return Request(**usual | {name: value for name, value in asked.items() if value is not None})


def default_batch(recipe: Recipe, devices: int, accumulate: int | None) -> int:
    """The recipe's batch, or the next larger one that the devices and micro-batches (None: the recipe's) divide."""
    unit = devices * (accumulate or recipe.defaults.get("accumulate") or 1)
    return math.ceil(int(recipe.defaults.get("batch", BATCH)) / unit) * unit


@dataclass(frozen=True)
class Choice:
    """One way to run a program, with the reason for it in words."""

    shard: Literal["replicate", "fsdp"]
    remat: Remat
    accumulate: int
    why: str


def attention_and_loop(platform: str, kind: str) -> tuple[Literal["xla", "cudnn", "splash"], Literal["scan", "unroll"]]:
    """Attention and layer loop for a platform and its kind of device.

    cuDNN's kernel and an unrolled loop on GPU; on TPU a scanned loop and, from v4 on, the splash kernel (on v2 and v3
    its compiler refuses the kernel's matmuls); on CPU plain XLA.
    """
    if platform == "gpu":
        return "cudnn", "unroll"
    if platform == "tpu":
        return ("xla" if kind in ("TPU v2", "TPU v3") else "splash"), "scan"
    return "xla", "unroll"


def choices(
    request: Request,
    honoured: Sequence[str],
    platform: str,
    kind: str,
    devices: int,
    state_bytes: int,
    memory_bytes: int | None,
) -> Iterator[Choice]:
    """Ways to run, best first: no recomputation before some, replicated before sharded, then smaller micro-batches.

    honoured: `forms` of the recipe (optional.py); what is neither there nor asked is not tried.
    """
    many = devices > 1
    held = f"{state_bytes / 2**30:.2f} GiB of state"
    shards: list[tuple[Literal["replicate", "fsdp"], str]]
    if request.shard == "replicate" or not many:
        shards = [("replicate", "replicated" if many else "one device")]
    elif request.shard == "fsdp":
        shards = [("fsdp", "sharded, as asked")]
    elif memory_bytes is None or state_bytes <= STATE_SHARE * memory_bytes:
        shards = [("replicate", f"replicated: {held}"), ("fsdp", f"sharded: {held} plus activations is too much")]
    else:
        shards = [("fsdp", f"sharded: {held} is over {STATE_SHARE:.0%} of {memory_bytes / 2**30:.2f} GiB")]
    remats = list(REMATS)
    if "remat" not in honoured:
        remats = ["none"]
    elif platform == "tpu" and kind in ("TPU v2", "TPU v3"):  # without a kernel all scores of all layers would be kept
        remats.remove("none")
    accumulate = request.accumulate or 1
    for shard, why in shards:
        for remat in remats:
            yield Choice(shard, remat, accumulate, why + REMATS[remat])
    if request.accumulate is None and "accumulate" in honoured:
        rows = request.batch // devices
        small = [count for count in range(1, math.isqrt(rows) + 1) if rows % count == 0]
        for count in sorted({*small, *(rows // count for count in small)} - {1}):
            yield Choice(shard, remats[-1], count, f"{why}{REMATS[remats[-1]]}, {count} micro-batches")
