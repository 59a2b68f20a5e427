"""Environment variables of PyTorch/XLA and of older TPU runtimes that nothing here reads any more."""

from collections.abc import Mapping

from tpuswarm.train.diagnose.finding import Finding

XRT = "XRT, PyTorch/XLA's first runtime, is gone (pytorch/xla PR 5240); libtpu finds the chips itself: unset it"
HALF = "it belonged to PyTorch/XLA (deprecated in pytorch/xla PR 7150); use --precision bf16, the default on TPU"
MESH = "libtpu no longer reads it, and the hosts of a slice find each other through jax.distributed: unset it"
COLAB = "Colab's remote TPU nodes ended with JAX 0.4 (jax commit 85a84fd); a TPU VM needs no address: unset it"
DEAD = {
    "XLA_USE_BF16": HALF,
    "XLA_DOWNCAST_BF16": HALF,
    "XLA_USE_FP16": HALF,
    "XLA_DOWNCAST_FP16": HALF,
    "XLA_USE_32BIT_LONG": "it belonged to PyTorch/XLA; integers are 32-bit here unless JAX_ENABLE_X64=1: unset it",
    "XLA_IR_DEBUG": "it belonged to PyTorch/XLA; --profile shows what runs on the devices",
    "XLA_HLO_DEBUG": "it belonged to PyTorch/XLA; --profile shows what runs on the devices",
    "PJRT_DEVICE": "it belongs to PyTorch/XLA; JAX reads JAX_PLATFORMS=tpu",
    "TPU_NUM_DEVICES": "it belongs to PyTorch/XLA; use --devices 8, or TPU_VISIBLE_CHIPS to choose what a process sees",
    "TPU_MESH_CONTROLLER_ADDRESS": MESH,
    "TPU_MESH_CONTROLLER_PORT": MESH,
    "COLAB_TPU_ADDR": COLAB,
    "TPU_DRIVER_MODE": COLAB,
}
"""What none of jax, jaxlib and libtpu contains (a test looks), with what replaces it."""


def dead_variables(environ: Mapping[str, str]) -> list[Finding]:
    """One finding for each reason, naming the variables that are set to no effect."""
    reasons: dict[str, list[str]] = {}
    for name in sorted(environ):
        reason = XRT if name.startswith("XRT_") else DEAD.get(name)
        if reason:
            reasons.setdefault(reason, []).append(name)
    return [
        Finding("environment", f"{', '.join(names)} has no effect: {reason}", {"variables": names})
        for reason, names in reasons.items()
    ]
