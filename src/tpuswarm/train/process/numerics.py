"""Settings of JAX and XLA that change a run's numbers: recorded with the run, compared when it resumes."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

PRNG_IMPLEMENTATION = "threefry2x32"
"""Its numbers do not depend on the devices."""
JAX_SETTINGS = (
    "jax_default_dtype_bits",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",  # this and the next three concern keys that a loss makes itself
    "jax_random_seed_offset",
    "jax_threefry_partitionable",
    "jax_high_dynamic_range_gumbel",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_optimization_level",
    "jax_softmax_custom_jvp",
    "jax_accurate_erf_inv",
    "jax_custom_jvp3",
    "jax_use_direct_linearize",
    "eager_constant_folding",
    "jax_explicit_x64_dtypes",
    "jax_bcoo_cusparse_lowering",  # this and the next thirteen choose other kernels or compilers
    "jax_compiler_enable_remat_pass",
    "jax_cpu_collectives_implementation",
    "jax_custom_vjp3",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_pallas_use_mosaic_gpu",
    "jax_ragged_dot_use_gpu_pallas_triton_lowering",
    "jax_ragged_dot_use_ragged_dot_instruction",
    "jax_remat3",
    "jax_remat_barrier_no_cotangents",
    "jax_scan3",
    "jax_use_magma",
    "jax_use_shardy_partitioner",
)
ENVIRONMENT_VARIABLES = ("LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "XLA_FLAGS")
IGNORED_FLAGS = ("--xla_dump", "--xla_force_host_platform_device_count")
"""Without influence on the numbers."""


def run_key(seed: int) -> "jax.Array":
    """Return the typed random key of a seed below 2**32, whatever JAX's settings."""
    import jax
    import jax.numpy as jnp

    data = jnp.array([0, seed], jnp.uint32)  # jax.random.key adds an offset
    return jax.random.wrap_key_data(data, impl=PRNG_IMPLEMENTATION)


def numerics() -> dict[str, str]:
    """Return the current settings as text."""
    import jax

    values = jax.config.values
    settings = {name: str(values[name]) for name in JAX_SETTINGS if name in values}
    for name in ENVIRONMENT_VARIABLES:
        flags = os.environ.get(name, "").split()
        settings[name] = " ".join(sorted(flag for flag in flags if not flag.startswith(IGNORED_FLAGS)))
    return settings


def changed_numerics(recorded: Mapping[str, str]) -> list[str]:
    """Return a sentence for each setting that differs from the recorded one."""
    now = numerics()
    return [
        f"{name} was {recorded[name] or 'empty'} when this run began and is {now[name] or 'empty'}: its numbers may "
        "differ from here on"
        for name in recorded
        if name in now and recorded[name] != now[name]
    ]
