"""Global settings of JAX and XLA that change the numbers of a run: recorded with it, compared when it resumes."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

PRNG = "threefry2x32"
"""The implementation of every run's random keys, whatever JAX's default is: it does not depend on devices."""
SETTINGS = (
    "jax_default_dtype_bits",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",  # it and the next three: of keys that a loss makes itself
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_high_dynamic_range_gumbel",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_optimization_level",
    "jax_softmax_custom_jvp",
    "jax_use_direct_linearize",
)
VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")
IGNORED_FLAGS = ("--xla_gpu_deterministic_ops", "--xla_dump", "--xla_force_host_platform_device_count")
"""A setting of the run itself, what XLA writes, the number of devices."""


def run_key(seed: int) -> "jax.Array":
    """Return the typed random key of a seed below 2**32, whatever JAX's settings."""
    import jax
    import jax.numpy as jnp

    return jax.random.wrap_key_data(jnp.array([0, seed], jnp.uint32), impl=PRNG)  # jax.random.key adds an offset


def numerics() -> dict[str, str]:
    """Return the settings of this process, as text."""
    import jax

    found = {name: str(jax.config.values[name]) for name in SETTINGS if name in jax.config.values}
    for name in VARIABLES:
        flags = os.environ.get(name, "").split()
        found[name] = " ".join(sorted(flag for flag in flags if not flag.startswith(IGNORED_FLAGS)))
    return found


def changed_numerics(recorded: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting that is not as it was recorded."""
    now = numerics()
    return [
        f"{name} was {recorded[name] or 'empty'} when this run began and is {now[name] or 'empty'}: its numbers may "
        "differ from here on"
        for name in recorded
        if name in now and recorded[name] != now[name]
    ]
