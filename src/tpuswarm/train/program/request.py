"""Describe a requested program, and list choices of how to run it, best first."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tpuswarm.config.limits import check_settings
from tpuswarm.train.recipe import AMPERE, Capability, Options, Recipe, Remat, default_precision

DEFAULT_BATCH = 32
"""Rows of a step for a recipe without a default."""

MAX_REPLICATED_STATE_SHARE = 0.6
"""With `auto`, a replicated state takes at most this share of a device's memory; activations need the rest."""

REMATS: Mapping[Remat, str] = {
    "none": "",
    "dots": ", layers recomputed but for their products",
    "full": ", layers recomputed",
}
"""Recomputation from fastest to smallest, with its description."""


@dataclass(frozen=True)
class Request:
    """The user's request; None leaves accumulate to `compile_step`, and precision to the platform."""

    batch: int
    shard: str = "auto"
    precision: str | None = None
    accumulate: int | None = None
    clip: float | None = None
    freeze: str | None = None
    decay: str | None = None
    ema: float | None = None

    def options(self, platform: str, kind: str, capability: Capability | None = None) -> Options:
        """Return the program's options on this platform and kind of device, before choices that depend on memory."""
        precision: Any = self.precision or default_precision(platform, capability)
        check_settings({"precision": precision})
        attention, loop = attention_and_loop(platform, kind, capability)
        return Options(
            precision=precision,
            clip=self.clip,
            freeze=self.freeze,
            decay=self.decay,
            ema=self.ema,
            platform=platform,
            capability=capability,
            attention=attention,
            loop=loop,
        )


def default_request(recipe: Recipe, **asked: Any) -> Request:
    """Return the user's request, with the recipe's defaults for settings that are None."""
    names = ("batch", "accumulate", "clip", "freeze", "decay", "ema")
    defaults = {"batch": DEFAULT_BATCH} | {name: recipe.defaults[name] for name in names if name in recipe.defaults}
    return Request(**defaults | {name: value for name, value in asked.items() if value is not None})


def default_batch(recipe: Recipe, devices: int, accumulate: int | None) -> int:
    """Return the recipe's batch, rounded up to a multiple of devices and micro-batches (default: the recipe's)."""
    unit = devices * (accumulate or recipe.defaults.get("accumulate") or 1)
    return math.ceil(int(recipe.defaults.get("batch", DEFAULT_BATCH)) / unit) * unit


@dataclass(frozen=True)
class Choice:
    """How to run a program, and why, in words."""

    shard: Literal["replicate", "fsdp"]
    remat: Remat
    accumulate: int
    why: str


def attention_and_loop(
    platform: str, kind: str, capability: Capability | None = None
) -> tuple[Literal["xla", "cudnn", "splash"], Literal["scan", "unroll"]]:
    """Return attention and layer loop for a platform and its kind of device.

    The compiler of TPU v2 and v3 refuses the matmuls of the splash kernel.
    """
    if platform == "gpu":
        return ("cudnn" if (capability or AMPERE) >= AMPERE else "xla"), "unroll"
    if platform == "tpu":
        return ("xla" if kind in ("TPU v2", "TPU v3") else "splash"), "scan"
    return "xla", "unroll"


def capability_note(capability: Capability | None) -> list[str]:
    """Return a sentence about what a GPU lacks; none for other devices and newer GPUs."""
    if capability is None or capability >= AMPERE:
        return []
    has, needs = (".".join(map(str, version)) for version in (capability, AMPERE))
    return [
        f"this GPU (compute capability {has}) has no bfloat16 units and no attention kernel, which need {needs}: by "
        "default it trains in f32"
    ]


def choices(
    request: Request,
    forms: Sequence[str],
    platform: str,
    kind: str,
    devices: int,
    state_bytes: int,
    memory_bytes: int | None,
    capability: Capability | None = None,
) -> Iterator[Choice]:
    """Yield choices, best first: no recomputation before some, replicated before sharded, then smaller micro-batches.

    forms: of the recipe (Recipe.forms); the only ones to try unless the request names others.
    """
    has_many = devices > 1
    held = f"{state_bytes / 2**30:.2f} GiB of state"
    shards: list[tuple[Literal["replicate", "fsdp"], str]]
    if request.shard == "replicate" or not has_many:
        shards = [("replicate", "replicated" if has_many else "one device")]
    elif request.shard == "fsdp":
        shards = [("fsdp", "sharded, as asked")]
    elif memory_bytes is None or state_bytes <= MAX_REPLICATED_STATE_SHARE * memory_bytes:
        shards = [("replicate", f"replicated: {held}"), ("fsdp", f"sharded: {held} plus activations is too much")]
    else:
        shards = [
            ("fsdp", f"sharded: {held} is over {MAX_REPLICATED_STATE_SHARE:.0%} of {memory_bytes / 2**30:.2f} GiB")
        ]
    remats = list(REMATS)
    if "remat" not in forms:
        remats = ["none"]
    elif platform != "cpu" and attention_and_loop(platform, kind, capability)[0] == "xla":
        # Without a kernel, all layers would keep their scores.
        remats.remove("none")
    accumulate = request.accumulate or 1
    for shard, why in shards:
        for remat in remats:
            yield Choice(shard, remat, accumulate, why + REMATS[remat])
    if request.accumulate is None and "accumulate" in forms:
        rows = request.batch // devices
        small = [count for count in range(1, math.isqrt(rows) + 1) if rows % count == 0]
        for count in sorted({*small, *(rows // count for count in small)} - {1}):
            yield Choice(shard, remats[-1], count, f"{why}{REMATS[remats[-1]]}, {count} micro-batches")
