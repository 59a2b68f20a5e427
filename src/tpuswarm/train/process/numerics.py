"""Global settings of JAX and XLA that change the numbers of a run: recorded with it, compared when it resumes."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

PRNG = "threefry2x32"
"""The implementation of every run's random keys, whatever JAX's default is: it does not depend on devices."""
SETTINGS = (
    "jax_default_prng_impl",  # of keys that a loss makes itself
    "jax_threefry_partitionable",
    "jax_enable_x64",
    "jax_default_dtype_bits",
    "jax_default_matmul_precision",
)
OURS = ("--xla_gpu_deterministic_ops", "--xla_dump", "--xla_force_host_platform_device_count")
"""Flags that are no difference: a setting of the run, what XLA writes, the number of devices."""


def run_key(seed: int) -> "jax.Array":
    """The typed random key of a seed."""
    import jax

    return jax.random.key(seed, impl=PRNG)


def numerics() -> dict[str, str]:
    """The settings of this process, as text."""
    import jax

    flags = sorted(flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(OURS))
    return {name: str(jax.config.values.get(name)) for name in SETTINGS} | {"XLA_FLAGS": " ".join(flags)}


def changed_numerics(recorded: Mapping[str, str]) -> list[str]:
    """A sentence for each setting that is not as it was recorded."""
    now = numerics()
    return [
        f"{name} was {recorded[name] or 'empty'} when this run began and is {now[name] or 'empty'}: its numbers may "
        "differ from here on"
        for name in recorded
        if name in now and recorded[name] != now[name]
    ]
