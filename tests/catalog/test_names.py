"""Wrong names are answered with right ones."""

import pytest

from tpuswarm import catalog
from tpuswarm.errors import InputError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            "v5e-9",
            r"'v5e-9'.*did you mean v5e-8 \(also called v5litepod-8, .*tpu-v5-lite-podslice:2x4, ct5lp-hightpu-8t",
        ),
        ("v5litepd-16", "did you mean v5litepod-16 .*v5e-16, .*v5e:4x4"),
        ("ct6e-standard-2t", "did you mean ct6e-standard-[148]t .*v6e-"),
        ("v4:3x3x3", "no v4 with topology 3x3x3; it has 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4"),
        ("tpu-v6e-slice:3x3", "no tpu-v6e-slice with topology 3x3; it has 1x1, 2x2, 2x4, 4x4"),
        (
            "NVIDIA H100 80GB HBM3",
            "v5litepod-8 \\(TPU API\\), tpu-v5-lite-podslice:2x4 \\(GKE\\) or v5e:2x4 \\(compiler\\)",
        ),
        ("", "`tpuswarm catalog` lists them all"),
    ],
)
def test_an_unknown_name_gets_the_nearest_in_every_dialect(wrong: str, said: str):
    with pytest.raises(InputError, match=said) as caught:
        catalog.find(wrong)
    assert "\n" not in str(caught.value)


def test_devices_by_the_name_jax_gives_them():
    assert catalog.peak_flops("TPU v3", "bf16") == 61.5e12, "123 TFLOP/s a chip of two devices"
    assert catalog.peak_flops("TPU v4", "bf16") == 275e12, "the two cores of a chip are one device"
    assert catalog.peak_flops("TPU v5 lite", "bf16") == catalog.peak_flops("TPU v5e", "bf16") == 197e12
    assert catalog.peak_flops("NVIDIA H200", "bf16") == catalog.peak_flops("NVIDIA H100 80GB HBM3", "bf16") == 989.5e12
    assert catalog.peak_flops("NVIDIA H100 80GB HBM3", "f32") == 495e12 and catalog.peak_flops("TPU v3", "f32") is None
    assert catalog.peak_flops("cpu", "bf16") is None and catalog.peak_flops("NVIDIA H200", "highest") is None
    assert catalog.memory_bandwidth("TPU v2") == 350e9 and catalog.memory_bandwidth("NVIDIA H200") == 4.8e12
    kinds = [kind for each in (*catalog.generations(), *catalog.gpus()) for kind in each.device_kinds]
    assert len(kinds) == len(set(kinds))
