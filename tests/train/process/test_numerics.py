"""Settings of JAX that change numbers are recorded with a run."""

import re

import jax

from tpuswarm.train.process.numerics import JAX_SETTINGS, changed_numerics, numerics

NO_NUMBERS = re.compile(
    "address|cache|check|debug|default_device|disable_jit|distributed|dtype_promotion|dump|errors|execution|export|"
    "frames|guard|jax2tf|location|log|mesh|mock|mtls|pgle|pjrt_client|platform|pprint|preemption|profile|rank_promotion|"
    "recoverability|regex|serialization|share_binary|timeout|topology|traceback|tracing|transfer|url|visible|warn"
)
"""Parts of names: where JAX logs, caches, checks, refuses and sends. A refused program has no numbers."""
NO_NUMBERS_EITHER = {
    "jax_allow_f16_reductions", "jax_auto_pcast", "jax_backend_target", "jax_cpu_enable_async_dispatch",
    "jax_disable_vmap_shmap_error", "jax_embedded_constants_max_bytes", "jax_enable_custom_prng",
    "jax_legacy_prng_key", "jax_mosaic_allow_hlo", "jax_num_cpu_devices", "jax_pallas_auto_assign_collective_ids",
    "jax_pallas_auto_assign_collective_ids_limit", "jax_pallas_poison_buffers", "jax_raise_on_ppermute_sort_diff",
    "jax_refs_to_pins", "jax_sort_devices_by_process_index", "jax_threefry_gpu_kernel_lowering",
    "jax_use_cpp_shard_args", "jax_use_emit_pipeline_primitive", "jax_use_rgv3", "jax_use_simplified_jaxpr_constants",
    "jax_xla_backend",
}  # fmt: skip


def test_each_setting_of_jax_is_recorded_or_changes_no_number():
    """A new JAX may bring settings: decide about each."""
    unknown = {name for name in jax.config.values if name not in JAX_SETTINGS and not NO_NUMBERS.search(name)}
    assert unknown <= NO_NUMBERS_EITHER, unknown - NO_NUMBERS_EITHER


def test_flags_of_xla_are_compared_in_any_order_and_without_dumps(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_a=2 --xla_dump_to=x")
    recorded = numerics()
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=2 --xla_b=1")
    assert changed_numerics(recorded) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=2 --xla_b=1 --xla_gpu_deterministic_ops=true")
    [sentence] = changed_numerics(recorded)
    assert sentence.startswith("XLA_FLAGS was --xla_a=2 --xla_b=1 when this run began and is ")
